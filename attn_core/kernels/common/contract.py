"""What every kernel offers: the contract between kernels, derivatives and mechanisms."""

from typing import Any, Callable, NamedTuple


class Residuals(NamedTuple):
  """What a forward leaves for the derivatives, beside its operands."""

  out: Any  # [B, T, H, E], query's dtype or `AttentionSpec.out_dtype`; see `Kernel`
  lse: Any  # float32 (float64 for float64 operands) [B, H, T], natural logarithm


class Cargo(NamedTuple):
  """Arrays that go to another device while a kernel computes; a third one's come instead."""

  arrays: tuple  # [B, S, K, W], or [B or 1, S]; what comes has the same shapes
  axis: str
  axis_number: int  # among the mesh's; small
  members: int  # of the axis
  distance: int  # in members, on from this one; between 1 and members - 1
  cores: int = 1  # of a device, that share a kernel


class Carrying(NamedTuple):
  """Functions of a `Kernel` that send meanwhile: a last argument, and a second result, more.

    forward(o, s, b, cargo) -> (Residuals, what came instead of cargo.arrays)
    backward(o, s, b, residuals, cotangents, wrt, cargo) -> (cotangents, what came)

  wrt has one of query, key and value. Without a cargo (None) nothing comes: ().
  """

  forward: Callable
  backward: Callable


class Kernel(NamedTuple):
  """Plain functions that compute attention on one device; hashable.

  Written with o for `Operands`, s for `AttentionSpec`, b for `BlockSizes`:

    forward(o, s, b) -> Residuals
    backward(o, s, b, residuals, cotangents, wrt) -> tuple of cotangents, one per name in wrt
    tangent(o, s, b, residuals, tangents) -> Residuals of tangents

  Cotangents of `Residuals` come as `Residuals`; `tangents` is a dict from operand name to tangent.
  A backward needs of `residuals.out` only sum(cotangents.out * out): where that has been subtracted
  from `cotangents.lse`, it takes None.
  """

  name: str
  forward: Callable
  backward: Callable
  tangent: Callable
  # The kernel whose backward and tangent JAX itself can differentiate, for second derivatives;
  # None: this one.
  differentiable: "Kernel | None" = None
  # check(o, s, b) raises where forward or backward would; it runs before anything is lowered.
  check: Callable = lambda operands, spec, block_sizes: None
  # () -> JAX's effects of forward and backward where they are traced; some interpreters have some.
  effects: Callable = frozenset
  carrying: Carrying | None = None  # None: it cannot send
