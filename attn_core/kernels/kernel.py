"""What every kernel offers: the contract between kernels, derivatives and mechanisms."""

from typing import Any, Callable, NamedTuple


class Residuals(NamedTuple):
  """What a forward leaves for the derivatives, beside its operands."""

  out: Any  # [B, T, H, E], query's dtype or `AttentionSpec.out_dtype`; see `Kernel`
  lse: Any  # float32 (float64 for float64 operands) [B, H, T], natural logarithm


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
