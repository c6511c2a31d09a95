# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""tokamax's FlexAttention, an experimental operation, as a contender of the benchmark."""

import importlib

import jax
import jax.numpy as jnp

from attn_core import score_mods
from attn_core.benchmark import cases
from attn_core.benchmark.cases import Case

_MODULE = "tokamax._src.ops.experimental.flex_attention.base"


def attend(case: Case, arrays: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
  """Computes a case with a score mod, which tokamax gets as a function of all scores.

  Args:
    case: a causal case with a score mod and as many queries as keys.
    arrays: query, key and value, in layout bthd.

  Returns:
    output [B, T, H, E].

  Raises:
    NotImplementedError: the case is another one.
  """
  mod = cases.score_mod(case)
  if mod is None or not case.causal or case.queries != case.keys:
    raise NotImplementedError("tokamax flex is measured on causal cases with a score mod only")

  def sees(shape: tuple[int, ...]) -> jax.Array:
    del shape
    return jnp.tril(jnp.ones((case.queries, case.keys), bool))

  operation = importlib.import_module(_MODULE).FlexAttention()
  return operation(*arrays, mask_mod=sees, score_mod=lambda scores: score_mods.apply(
      mod, scores * jnp.asarray(case.width**-0.5, scores.dtype)))
