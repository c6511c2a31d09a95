"""One result of those of several devices, each of which attended to keys of its own.

  lse = log(sum over devices of exp(lse_i)),   out = sum over devices of out_i * exp(lse_i - lse)
"""

from jax import lax
import jax.numpy as jnp


def over_axes(out, lse, axes):
  """The whole out [B, T, H, E] and lse [B, H, T] of every device's part over mesh axes."""
  highest = lax.stop_gradient(lse)
  highest = lax.pmax(jnp.where(highest == -jnp.inf, jnp.finfo(lse.dtype).min, highest), axes)
  weight = jnp.exp(lse - highest)
  total = lax.psum(weight, axes)
  share = weight / jnp.where(total == 0, 1, total)
  merged = lax.psum(out * share.transpose(0, 2, 1)[..., None], axes)
  return merged.astype(out.dtype), jnp.where(
      total == 0, -jnp.inf, highest + jnp.log(jnp.where(total == 0, 1, total)))
