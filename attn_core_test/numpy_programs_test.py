# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs run by NumPy against the same programs compiled by XLA, operation by operation."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax.experimental import io_callback, pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attn_core_test import numpy_programs, sampling, tpu_interpret

F = np.array([[0.3, -1.5, 2.0, -0.0], [7.25, np.nan, np.inf, -3e30], [1e-3, 5, -np.inf, 128.5]],
             np.float32)
G = np.roll(F, 5).reshape(3, 4) * np.float32(0.7)
I = np.array([[7, -7, 2**31 - 1], [-2**31, 0, 40]], np.int32)
J = np.array([[2, 2, -3], [7, 5, 33]], np.int32)
U = I.astype(np.uint32)
B = (F > 0.5)[:2, :3]
S = np.arange(60, dtype=np.float32).reshape(3, 4, 5) - 30
AT = np.array([[1], [9], [-2]], np.int32)  # indices, some of them outside

# What rounds once, or moves numbers: the bits are those of XLA.
EXACT = {
    "arithmetic": lambda: (F + G, F - G, F * G, F / G, -F, abs(F), lax.sign(F)),
    "integers": lambda: (I + J, I * J, lax.div(I, J), lax.rem(I, J), lax.div(U, jnp.uint32(3)),
                         -I, abs(I), lax.sign(I), lax.integer_pow(J, 3)),
    "bits": lambda: (I & J, I | J, I ^ J, ~I, B & B[::-1], ~B, lax.shift_left(I, abs(J)),
                     lax.shift_right_logical(I, abs(J)), lax.shift_right_arithmetic(I, abs(J)),
                     lax.shift_right_logical(U, U),
                     lax.shift_right_arithmetic(U, abs(J).astype(U.dtype)),
                     lax.bitcast_convert_type(F, jnp.int32),
                     lax.bitcast_convert_type(F, jnp.uint16)),
    "order": lambda: (F == G, F != G, F < G, F <= G, F > G, F >= G, lax.max(F, G), lax.min(F, G),
                      lax.clamp(-1.0, F, 2.0), jnp.isfinite(F), I < J, lax.max(I, J)),
    "rounding": lambda: (jnp.floor(F), jnp.ceil(F), jnp.sqrt(abs(F)), jnp.square(F),
                         lax.round(S / 2), jnp.round(S / 2),
                         lax.round(np.float32([0.49999997, -8388609]))),
    "dtypes": lambda: [F.astype(dtype) for dtype in (
        jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8, jnp.uint8, jnp.bool_)] + [
            I.astype(dtype) for dtype in (jnp.int8, jnp.uint16, jnp.float32, jnp.bool_)] + [
                B.astype(jnp.float32), jnp.nan_to_num(F).astype(jnp.float8_e4m3fn).astype(F.dtype)],
    "narrow": lambda: (F.astype(jnp.bfloat16) * G.astype(jnp.bfloat16),
                       lax.max(F.astype(jnp.bfloat16), G.astype(jnp.bfloat16))),
    "choices": lambda: (jnp.where(F > 0, F, G), lax.select_n(jnp.int32(2), I, J, I + J),
                        lax.select_n(J % 3, I, J, I + J)),
    "shapes": lambda: (S.T, S.reshape(4, 15), lax.broadcast_in_dim(F, (3, 2, 4), (0, 2)),
                       jnp.concatenate([F, G], 1), lax.rev(S, (0, 2)), S[1:, ::2, 4],
                       jnp.squeeze(S[:1], 0), jnp.stack([F, G], 1), *jnp.split(S, [1, 2], 1),
                       lax.broadcasted_iota(jnp.int32, (2, 3), 1),
                       lax.pad(F, 9.0, [(1, 2, 1), (-1, -1, 0)]),
                       lax.pad(F, 9.0, [(-1, 0, 2), (0, -6, 3)])),
    "places": lambda: (lax.dynamic_slice(S, (jnp.int32(2), jnp.int32(-1), jnp.int32(1)), (2, 2, 3)),
                       lax.dynamic_update_slice(F, G[:2, :2], (jnp.int32(2), jnp.int32(1))),
                       S.at[AT[:, 0], :, AT[:, 0] % 2].get(mode="clip"),
                       S.at[AT[:, 0]].get(mode="fill"), I.at[:, AT[:, 0]].get(mode="fill"),
                       jnp.take_along_axis(S, AT[None] % 4, 1)),
    "reductions": lambda: (lax.reduce_max(S, (0, 2)), lax.reduce_min(F, (1,)), I.sum(1), B.any(0),
                           B.all(), jnp.cumsum(I, 1), lax.cummax(S, 1, reverse=True),
                           jnp.argmax(S, 1), jnp.argmin(F, 1)),
    "loops": lambda: (lax.while_loop(lambda x: x[0] < 5, lambda x: (x[0] + 1, x[1] * 2), (0, F)),
                      lax.scan(lambda c, x: (c + x, c), jnp.zeros(4), F),
                      lax.scan(lambda c, x: (c + 1, x * c), 1, J, reverse=True),
                      lax.scan(lambda c, _: (c * 2, None), 1.0, length=3),
                      [lax.cond(x > 1, lambda y: y + 1, lambda y: y - 1, F) for x in (0, 2)],
                      [lax.switch(x, [lambda: 1, lambda: 2, lambda: 3]) for x in (-4, 1, 9)]),
    "kernels": lambda: (pltpu.roll(S, 2, 1), pltpu.roll(S, 3, 2, stride=2, stride_axis=0),
                        pltpu.bitcast(jnp.asarray(S[:2, :, :4]), jnp.uint16),
                        pltpu.bitcast(lax.bitcast_convert_type(S, jnp.uint16)[..., 0], jnp.int32)),
}
# Several roundings, or functions that libraries compute otherwise in the last bits.
CLOSE = {
    "functions": lambda: [f(jnp.nan_to_num(G, posinf=4, neginf=-9) % 11 - 4) for f in (
        jnp.exp, jnp.exp2, jnp.expm1, jnp.tanh, jnp.sin, jnp.cos, jax.nn.sigmoid, jnp.cbrt, jnp.tan,
        jnp.arctan, jnp.sinh, jnp.cosh, jax.scipy.special.erf,
        jax.grad(lambda x: jnp.tanh(x).sum()), lambda x: jnp.arctan2(x, x[::-1]))] + [
            f(abs(G) + 0.25) for f in (jnp.log, jnp.log1p, lax.rsqrt)] + [
                jnp.float32(3.5) ** G, lax.pow(abs(F[0]), J[0, 0])],
    "sums": lambda: (S.sum((0, 2)), jnp.cumsum(S, 1), jnp.prod(S[0] / 30, 1)),
    "products": lambda: (
        jnp.einsum("abc,adc->abd", S, S + 1), jnp.einsum("abc,dc->bad", S, S[0]),
        lax.dot_general(*[S.astype(jnp.bfloat16)] * 2, (((2,), (2,)), ((0,), (0,))),
                        preferred_element_type=jnp.float32),
        lax.dot_general(I.astype(jnp.int8), J.astype(jnp.int8), (((1,), (1,)), ((), ())),
                        preferred_element_type=jnp.int32)),
}


class RulesTest(absltest.TestCase):

  def test_results_are_those_of_a_compiler(self):
    cases = {**EXACT, **CLOSE}
    # Constants are arguments of the compiled program, which must not compute with them beforehand.
    names = [name for name, x in globals().items() if isinstance(x, np.ndarray)]
    every = {name: globals()[name] for name in names}
    def run(arrays):
      before = {name: globals()[name] for name in arrays}
      globals().update(arrays)
      try:
        return {name: tuple(jax.tree.leaves(case())) for name, case in cases.items()}
      finally:
        globals().update(before)
    expected = jax.jit(run, compiler_options=sampling.LEAST)(every)
    shape = jax.eval_shape(run, every)
    with np.errstate(all="ignore"):
      found = jax.tree.unflatten(jax.tree.structure(shape), numpy_programs.program(run, every)(
          *jax.tree.leaves(every)))
    for name in cases:
      for i, (x, y) in enumerate(zip(found[name], expected[name], strict=True)):
        with self.subTest(name, result=i):
          x, y = np.asarray(x), np.asarray(y)
          self.assertEqual((x.dtype, x.shape), (y.dtype, y.shape))
          if jnp.issubdtype(x.dtype, jnp.floating):
            x, y = x.astype(np.float64), y.astype(np.float64)
          if name in EXACT:
            np.testing.assert_array_equal(x, y)
            np.testing.assert_array_equal(np.signbit(x) & (x == x), np.signbit(y) & (y == y))
          else:
            np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)

  def test_callbacks_get_operands_and_give_what_was_announced(self):
    seen = []
    def count(x):
      seen.append(np.array(x))
      return np.float32(len(seen))
    def run(shape):
      def twice(x):
        first = io_callback(count, shape, x, ordered=True)
        return first, io_callback(count, shape, x + first, ordered=True)
      return numpy_programs.program(twice, jnp.float32(5))(np.float32(5))
    self.assertEqual(run(jax.ShapeDtypeStruct((), jnp.float32)), [1, 2])
    self.assertEqual(seen, [5, 6])
    with self.assertRaisesRegex(RuntimeError, r"float32\(\).*int32"):
      run(jax.ShapeDtypeStruct((), jnp.int32))

  def test_an_operation_without_a_rule_is_refused_by_name(self):
    with self.assertRaisesRegex(NotImplementedError, "'sort'.*RULES"):
      numpy_programs.program(jnp.sort, jnp.arange(3))


def copied(wait_first: bool):
  """Returns a kernel that reads what it copies after the copy has arrived, or before."""
  def kernel(x, out, buffer, arrived):
    copy = pltpu.make_async_copy(x, buffer, arrived)
    copy.start()
    if wait_first:
      copy.wait()
    out[...] = jnp.exp(buffer[...]) + pl.program_id(0)
    if not wait_first:
      copy.wait()
  return pl.pallas_call(
      kernel, jax.ShapeDtypeStruct((24, 128), jnp.float32), grid=(3,),
      in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
      out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
      scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)))


class KernelTest(parameterized.TestCase):

  def test_equals_a_compiled_interpreter(self):
    x = jnp.linspace(-2, 2, 1024).reshape(8, 128)
    with tpu_interpret.interpreted():
      found = jax.jit(copied(True))(x)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
      expected = jax.jit(copied(True))(x + 0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)

  @parameterized.parameters("eager", "on_wait")
  def test_fails_on_a_race(self, transfers):
    errors = AssertionError, RuntimeError  # jax before 0.11 only prints that there is a race
    with self.assertRaisesRegex(errors, "RACE"), tpu_interpret.interpreted(transfers):
      jax.block_until_ready(jax.jit(copied(False))(jnp.zeros((8, 128))))


if __name__ == "__main__":
  absltest.main()
