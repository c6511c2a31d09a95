# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The contract between kernels, derivatives and mechanisms.

A kernel computes attention on one device by plain functions: a forward, its cotangents (backward)
and its tangents. Every function takes the arrays (`Operands`), what is computed (`AttentionSpec`)
and how the work is cut into blocks (`BlockSizes`); the last two are static.
"""

from collections.abc import Set
from typing import Callable, NamedTuple, Protocol

import jax

from attn_core.types import AttentionSpec, BlockSizes, Operands


class Residuals(NamedTuple):
  """Results of a forward, which the derivatives read besides its operands."""

  out: jax.Array  # [B, T, H, E], in the query's dtype or `AttentionSpec.out_dtype`
  lse: jax.Array  # float32 (float64 for float64 operands) [B, H, T], natural logarithm


class LseOnly(NamedTuple):
  """`Residuals` for a backward that does not need the output; see `BackwardFn`."""

  out: None
  lse: jax.Array  # as in `Residuals`


BackwardResiduals = Residuals | LseOnly


class RemoteCopy(NamedTuple):
  """Arrays that a kernel sends to another device of a mesh axis while it computes.

  Every device sends to the one `distance` further along the axis, and receives arrays of the same
  shapes from the one `distance` before it.
  """

  arrays: tuple[jax.Array, ...]  # [B, S, K, width], or [B or 1, S]
  coordinates: jax.Array  # int32 [mesh_axes], the index of this device along every axis
  mesh_axes: tuple[str, ...]
  axis_index: int  # of the axis along which arrays are sent among `mesh_axes`
  axis_size: int  # number of devices along that axis
  distance: int  # between 1 and axis_size - 1
  num_cores: int = 1  # cores of a device that share a kernel
  mesh_number: int = 0  # differs between meshes: devices of one may wait for devices of another


class ForwardFn(Protocol):
  """Computes attention.

  Returns:
    out [B, T, H, E] and lse [B, H, T].
  """

  def __call__(self, operands: Operands, spec: AttentionSpec,
               block_sizes: BlockSizes) -> Residuals:
    ...


class BackwardFn(Protocol):
  """Computes the cotangents of the operands named in `wrt`, in that order.

  Args:
    residuals: results of the forward. `residuals.out` is read only for
      sum(cotangents.out * residuals.out); `LseOnly` where `cotangents.lse` has that subtracted
      already.
    cotangents: of out [B, T, H, E] and of lse [B, H, T].
    wrt: names of fields of `Operands`.

  Returns:
    A tuple with one array for each name in `wrt`, in the shape and dtype of that operand.
  """

  def __call__(self, operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
               residuals: BackwardResiduals, cotangents: Residuals,
               wrt: tuple[str, ...]) -> tuple[jax.Array, ...]:
    ...


class TangentFn(Protocol):
  """Computes the tangents of out [B, T, H, E] and lse [B, H, T].

  Args:
    residuals: results of the forward.
    tangents: tangents by the name of the operand, in its shape and dtype; others are zero.
  """

  def __call__(self, operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
               residuals: Residuals, tangents: dict[str, jax.Array]) -> Residuals:
    ...


class CheckFn(Protocol):
  """Raises where forward or backward would; called before anything is lowered."""

  def __call__(self, operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> None:
    ...


class RemoteCopyForwardFn(Protocol):
  """`ForwardFn` that also runs a `RemoteCopy` (None: none), and returns the received arrays."""

  def __call__(self, operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
               transfer: RemoteCopy | None) -> tuple[Residuals, tuple[jax.Array, ...]]:
    ...


class RemoteCopyBackwardFn(Protocol):
  """`BackwardFn` that also runs a `RemoteCopy` (None: none), and returns the received arrays.

  `wrt` contains at least one of query, key and value.
  """

  def __call__(self, operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes,
               residuals: BackwardResiduals, cotangents: Residuals, wrt: tuple[str, ...],
               transfer: RemoteCopy | None
               ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    ...


class RemoteCopyFns(NamedTuple):
  """Functions of a `Kernel` that overlap a remote copy with their computation."""

  forward: RemoteCopyForwardFn
  backward: RemoteCopyBackwardFn


def _accept(operands: Operands, spec: AttentionSpec, block_sizes: BlockSizes) -> None:
  """Check of a kernel that computes every call."""
  del operands, spec, block_sizes


class Kernel(NamedTuple):
  """Functions that compute attention on one device; hashable."""

  name: str
  forward: ForwardFn
  backward: BackwardFn
  tangent: TangentFn
  # The kernel whose backward and tangent JAX can differentiate, for second derivatives; None:
  # this kernel itself.
  differentiable: "Kernel | None" = None
  check: CheckFn = _accept
  # Returns JAX's effects of forward and backward where they are traced: interpreters may have some.
  effects: Callable[[], Set] = frozenset
  remote_copy_fns: RemoteCopyFns | None = None  # None: the kernel cannot send arrays
