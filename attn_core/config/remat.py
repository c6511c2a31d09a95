"""Gradient checkpointing by name: which values a backward keeps, and which it makes anew.

The library names the values of an attention (see NAMES); a model names its own by
`jax.ad_checkpoint.checkpoint_name`.
"""

from collections.abc import Callable, Sequence

import jax

from attn_core import checks

# The values that every attention names.
NAMES = ("attn_query", "attn_key", "attn_value", "attn_output", "attn_lse", "attn_weights")

# A target that stands for others as well. An output is of use to a backward with its lse only.
IMPLIED = {
    "attn_output": ("attn_lse",),
    "attn_key_value": ("attn_key", "attn_value"),
    "attn_qkv": ("attn_query", "attn_key", "attn_value"),
}

# Names of gradient checkpointing -> the policy of JAX; those of TARGETED are made of targets.
POLICIES = {
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "checkpoint_dots": jax.checkpoint_policies.checkpoint_dots,
    "dots_with_no_batch_dims_saveable":
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "checkpoint_dots_with_no_batch_dims":
        jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
}
TARGETED = {
    "save_only_these_names": jax.checkpoint_policies.save_only_these_names,
    "save_any_names_but_these": jax.checkpoint_policies.save_any_names_but_these,
    "save_anything_except_these_names": jax.checkpoint_policies.save_anything_except_these_names,
}
NONE = ("", "none")  # no checkpointing


def checkpoint_policy(name: str, targets: Sequence[str] | None = None) -> Callable | None:
  """The policy for `jax.checkpoint`, or for `policy` of `attention`, that a name means.

  Args:
    name: a key of POLICIES or TARGETED, or one of NONE.
    targets: the names that a policy of TARGETED is about; "attn_output" means its lse as well,
      without which a backward cannot use it, "attn_key_value" and "attn_qkv" their parts.

  Returns:
    The policy; None: no checkpointing at all.

  Raises:
    ValueError: an unknown name, a policy of TARGETED without targets, or another one with some.
  """
  checks.one_of("gradient_checkpointing", name, (*NONE, *POLICIES, *TARGETED))
  if name not in TARGETED:
    checks.require(not targets, "gradient_checkpointing_targets", targets,
                   f"None with gradient_checkpointing={name!r}, or one of {', '.join(TARGETED)}")
    return POLICIES.get(name)
  checks.require(targets and not isinstance(targets, str)
                 and all(isinstance(target, str) for target in targets),
                 "gradient_checkpointing_targets", targets, f"names of values for {name!r}, "
                 f"such as {', '.join(NAMES)}")
  names = [part for target in targets for part in (target, *IMPLIED.get(target, ()))]
  return TARGETED[name](*dict.fromkeys(names))
