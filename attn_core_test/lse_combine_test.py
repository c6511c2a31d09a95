# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Partial results of devices that hold different keys, combined: those of all keys, in numpy."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from attn_core.sharding import lse_combine
from attn_core.sharding.mesh import create_mesh

jax.config.update("jax_num_cpu_devices", 4)

B, H, T, S, E = 2, 3, 5, 8, 4


def partial_results(logits, value, sinks):
  """Returns out [B, T, H, E] and lse [B, H, T] over some keys; 0 and -inf without a visible one."""
  total = logits if sinks is None else np.concatenate(
      [logits, np.broadcast_to(sinks[None, :, None, None], (B, H, T, 1))], -1)
  with np.errstate(divide="ignore"):
    lse = np.log(np.exp(total).sum(-1))
  weights = np.exp(logits - np.where(np.isfinite(lse), lse, 0)[..., None])
  return np.einsum("bhts,bshe->bthe", weights, value), lse


class CombineTest(parameterized.TestCase):

  @parameterized.parameters((False, "sp", "float32"), (True, ("dp", "sp"), "float32"),
                            (True, "sp", "bfloat16"))
  def test_equals_all_keys_at_once(self, sinks, axes, dtype):
    rng = np.random.default_rng(0)
    logits, value = rng.normal(size=(B, H, T, S)), rng.normal(size=(B, S, H, E))
    logits[:, :, 1] = -np.inf  # no visible key on any device
    logits[:, :, 2, 2:] = -np.inf  # on one device only
    logits[:, 1, 3] += 80.0  # far from the others
    extra = np.array([0.5, -3.0, 2.0]) if sinks else None
    mesh = create_mesh((2, 2), ("dp", "sp"))
    shards = 2 if axes == "sp" else 4

    def run():
      number = jax.lax.axis_index(axes)
      mine = lse_combine.sinks_on_first_device(
          None if extra is None else jnp.asarray(extra, jnp.float32), axes)
      parts = [partial_results(x, v, None) for x, v in zip(
          np.split(logits, shards, 3), np.split(value, shards, 1))]
      out, lse = (jnp.stack([jnp.asarray(part[i], jnp.float32) for part in parts])[number]
                  for i in range(2))
      if mine is not None:  # as a kernel counts the sinks it is given
        both = jnp.logaddexp(lse, mine[None, :, None])
        share = jnp.where(jnp.isfinite(lse), jnp.exp(lse - both), 0)
        out, lse = out * share.transpose(0, 2, 1)[..., None], both
      return lse_combine.combine(out.astype(dtype), lse, axes)

    out, lse = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=(P(), P()),
                                     check_vma=False))()
    want, want_lse = partial_results(logits, value, extra)
    self.assertEqual((out.dtype, lse.dtype), (dtype, jnp.float32))
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(out.astype(np.float32), want, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
  absltest.main()
