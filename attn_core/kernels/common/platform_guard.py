# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses to lower a kernel for another platform than its own.

`OperationMetadata.platform` may name a platform that this machine lacks: programs are lowered and
compiled ahead of time for it, by `jax.export` or `lower(lowering_platforms=...)`. Only lowering
tells where a program runs.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

# Names that JAX gives to the platforms of `OperationMetadata.platform`.
_JAX_NAMES = {"tpu": ("tpu",), "gpu": ("gpu", "cuda")}


def guarded(x: jax.Array, platform: str) -> jax.Array:
  """Returns an operand of a kernel; lowering it for another platform raises.

  Args:
    x: the operand.
    platform: the kernel's, "tpu" or "gpu".
  """
  return _guard_p.bind(x, platform=platform)


def _check(platform: str, names: tuple[str, ...]) -> None:
  """Raises NotImplementedError unless all names are JAX's of the platform."""
  others = [name for name in names if name not in _JAX_NAMES[platform]]
  if others:
    raise NotImplementedError(
        f"metadata.platform={platform!r}: got a program for {', '.join(others)}, where the kernels "
        f"for {platform} do not run; expected platform={others[0]!r} or None (the platform of the "
        "default backend), or a program for it: jax.jit(f).trace(...).lower(lowering_platforms="
        f"({_JAX_NAMES[platform][-1]!r},)), or jax.export.export(f, platforms=...)")


def _lower(ctx: Any, x: Any, *, platform: str) -> list[Any]:
  _check(platform, tuple(ctx.platforms or ctx.module_context.platforms))
  return [x]


def _run(x: jax.Array, *, platform: str) -> jax.Array:
  _check(platform, (jax.default_backend(),))  # under jax.disable_jit
  return x


_guard_p = Primitive("attn_core_platform_guard")
_guard_p.def_impl(_run)
_guard_p.def_abstract_eval(lambda x, *, platform: x)
batching.defvectorized(_guard_p)
mlir.register_lowering(_guard_p, _lower)
