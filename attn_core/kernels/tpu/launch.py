"""How a kernel comes to a TPU."""

import jax
from jax.experimental import pallas as pl


def launch(kernel, **settings):
  """`pl.pallas_call` in which Python's numbers have 32 bits, whatever jax_enable_x64 says.

  TPUs have no others; a place or an index of 64 bits does not compile.
  """
  call = pl.pallas_call(kernel, **settings)

  def run(*operands):
    with jax.enable_x64(False):
      return call(*operands)

  return run
