"""How a kernel comes to a TPU."""

import jax


def in_32_bits(call):
  """A `pl.pallas_call` in which Python's numbers have 32 bits, whatever jax_enable_x64 says.

  TPUs have no others; a place or an index of 64 bits does not compile.
  """
  def run(*operands):
    with jax.enable_x64(False):
      return call(*operands)

  return run
