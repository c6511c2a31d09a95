# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing by name: which values a backward pass stores and which it recomputes.

The library names the values of an attention (see NAMES); a model names its own by
`jax.ad_checkpoint.checkpoint_name`.
"""

from collections.abc import Callable, Sequence

import jax

from attn_core import checks

# Names of the values of every attention.
NAMES = ("attn_query", "attn_key", "attn_value", "attn_output", "attn_lse", "attn_weights")

# Targets that imply others. A backward pass can use a stored output only together with its lse.
IMPLIED = {
    "attn_output": ("attn_lse",),
    "attn_key_value": ("attn_key", "attn_value"),
    "attn_qkv": ("attn_query", "attn_key", "attn_value"),
}

# Name -> policy of JAX; the policies of TARGETED are made from targets.
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


def checkpoint_policy(name: str, targets: Sequence[str] | None = None, *,
                      arguments: tuple[str, str] = ("name", "targets")) -> Callable | None:
  """Looks up a policy for `jax.checkpoint`, or for `policy` of `attention`, by name.

  Args:
    name: a key of POLICIES or TARGETED, or one of NONE.
    targets: names of values, for a policy of TARGETED; "attn_output" includes its lse, without
      which a backward pass cannot use it, and "attn_key_value" and "attn_qkv" mean their parts.
    arguments: what errors call the name and the targets.

  Returns:
    The policy; None: no checkpointing.

  Raises:
    ValueError: `name` is unknown, or `targets` are missing for a policy of TARGETED or given for
      another one.
  """
  checks.one_of(arguments[0], name, (*NONE, *POLICIES, *TARGETED))
  if name not in TARGETED:
    checks.require(not targets, arguments[1], targets,
                   f"None with {arguments[0]}={name!r}, or one of {', '.join(TARGETED)}")
    return POLICIES.get(name)
  checks.require(targets and not isinstance(targets, str)
                 and all(isinstance(target, str) for target in targets),
                 arguments[1], targets, f"names of values for {name!r}, such as "
                 + ", ".join(NAMES))
  names = [part for target in targets or () for part in (target, *IMPLIED.get(target, ()))]
  return TARGETED[name](*dict.fromkeys(names))
