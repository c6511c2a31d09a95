# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays of a benchmark as tensors of PyTorch."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.benchmark import cases
from attn_core.benchmark.cases import Case
from attn_core.masks import materialize

Tensor = Any  # a torch.Tensor; torch is optional


def device(torch: ModuleType) -> str:
  """The device of torch: of the same kind as JAX's."""
  platform = jax.devices()[0].platform
  if platform == "cpu":
    return "cpu"
  if platform == "gpu" and torch.cuda.is_available():
    return "cuda"
  raise NotImplementedError(f"this torch does not compute on JAX's platform {platform!r}")


def from_jax(torch: ModuleType, x: jax.Array) -> Tensor:
  """Converts an array to a tensor on the host."""
  host = np.array(x)
  if host.dtype == jnp.bfloat16:  # numpy lacks bfloat16, so torch takes the bits
    return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
  return torch.from_numpy(host)


def bias(torch: ModuleType, case: Case, added: jax.Array | None) -> Tensor:
  """The mask as bool [1, 1, T, S], the same for every batch row, or as a bias with what is added.

  Args:
    torch: the module.
    case: any case.
    added: float32 [1, H, T, S], what a score mod adds, or None.
  """
  one = case._replace(batch=1)
  seen = np.array(materialize.to_dense(cases.mask(one), (1, 1, case.queries, case.keys)))
  return torch.from_numpy(seen if added is None else np.where(seen, np.asarray(added), -np.inf))
