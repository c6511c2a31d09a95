"""One sequence over 8 virtual devices equals the same on one: every variant, every layout.

The truth is the oracle in float64, in the natural order, with masks written out as boolean arrays.

Letters: B batch, T query length, S key length, H query heads, K key heads, D and E widths.
"""

import functools
import itertools
import math
import re

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (BlockSizes, MaskInfo, OperationMetadata, RingConfig, attention, create_mesh, explain, from_layout, masks, ring_attention, to_layout)
from attn_core.masks import dropout
from attn_core.kernels.xla import cpu_math as xla_numbers
from attn_core.masks import block_map as blocks, position_range as reach
from attn_core.masks.materialize import to_dense
from attn_core.mechanisms.context_parallel import ring_step as hops
from attn_core.references import oracle
from attn_core.sharding import token_order as layouts, context_parallel as sequence
from attn_core.types import RING_VARIANTS, AttentionSpec, MaskOperands, Operands
from attn_core_test.sampling import EVERY

jax.config.update("jax_num_cpu_devices", 8)

N = 8
B, T, H, K, D, E = 2, 64, 8, 2, 4, 6
RNG = np.array([7, 11], np.uint32)
BLOCKS = BlockSizes(8, 8, 8, 8, 1)


def numbers(*shape, seed=0):
  return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@functools.cache
def mesh_of(variant, devices=N):
  """Devices in a row; 4 groups of 2 for the hybrid."""
  shape, names = ((4, 2), ("sp", "heads")) if variant == "hybrid" else ((devices,), ("sp",))
  return jax.make_mesh(shape, names, devices=jax.devices()[:devices],
                       axis_types=(AxisType.Auto,) * len(names))


def metadata_of(variant, layout="contiguous", mesh=None, **fields):
  config = RingConfig(variant, layout, "heads" if variant == "hybrid" else None)
  return OperationMetadata(mesh=mesh or mesh_of(variant), ring=config, **fields)


def close(got, want, tolerance=1e-5):
  """Relative to the largest number of each array; -inf and NaN in the same places."""
  def one(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
    x, y = (np.where(np.isfinite(y), z, 0) for z in (x, y))
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1, np.abs(y).max()))
  jax.tree.map(one, got, want)


class Case:
  """A call in natural order, and its meaning: what every query sees, as loops over numbers."""

  def __init__(self, sees, shape=(B, T, T, H, K, D, E), floats=("bias", "softmax_aux"), cap=None,
               drop=0.0, arguments=None, arrays=None):
    b, t, s, h, k, d, e = self.shape = shape
    self.seen = np.array([[[[sees(*at) for at in ((n, m, i, j) for j in range(s))]
                            for i in range(t)] for m in range(h)] for n in range(b)])
    self.drop, self.cap = drop, cap
    self.arguments = dict(arguments or {}, logits_soft_cap=cap)
    if drop:
      self.arguments.update(dropout_prob=drop, dropout_rng=RNG, deterministic=False)
    self.arrays = arrays or (lambda permuted: {})  # arguments that are permuted
    self.floats = {"query": numbers(b, t, h, d, seed=1), "key": numbers(b, s, k, d, seed=2),
                   "value": numbers(b, s, k, e, seed=3)}
    if "bias" in floats:
      self.floats["bias"] = numbers(1, h, t, s, seed=4)
    if "softmax_aux" in floats:
      self.floats["softmax_aux"] = numbers(h, 2, seed=5)
    self.moved = {name: numbers(*x.shape, seed=9) for name, x in self.floats.items()}

  def derived(self, run, forward_mode=True):
    """(out, lse), gradients of a weighted sum of both, and their derivative along `moved`."""
    found, along = jax.linearize(run, self.floats)
    weights = [jnp.asarray(numbers(*x.shape, seed=6), x.dtype) for x in found]
    weights[1] = jnp.where(jnp.isfinite(found[1]), weights[1], 0)
    gradients, = jax.linear_transpose(along, self.floats)(tuple(weights))
    if not forward_mode:
      return found, gradients
    out, lse = along(self.moved)
    return found, gradients, (out, jnp.where(jnp.isfinite(found[1]), lse, 0))

  @functools.cached_property
  def truth(self):
    with jax.enable_x64(True):
      dense, structure = jax.tree.flatten(masks.dense(self.seen))
      def run(arrays):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        sinks = wide.get("softmax_aux")
        operands = Operands(
            wide["query"], wide["key"], wide["value"], wide.get("bias"),
            MaskOperands(tuple(map(jnp.asarray, dense))),
            None if sinks is None else jax.nn.logsumexp(sinks, -1)[None],
            dropout.key_words(jnp.asarray(RNG)) if self.drop else None)
        found = oracle.attention(operands, AttentionSpec(
            structure, self.shape[5] ** -0.5, self.cap, self.drop))
        return found.attention_outputs, found.lse
      narrow, self.floats, self.moved = (self.floats, self.moved), *(
          {name: x.astype(np.float64) for name, x in values.items()}
          for values in (self.floats, self.moved))
      found = jax.tree.map(np.asarray, jax.jit(lambda: self.derived(run))())
      self.floats, self.moved = narrow
    return found

  def check(self, metadata, shards=N, forward_mode=True, tolerance=1e-5):
    """The same by ring, permuted into the metadata's layout and back, is the truth."""
    truth = self.truth if forward_mode else self.truth[:2]
    close(self.spread(metadata, shards, forward_mode), truth, tolerance)

  def spread(self, metadata, shards, forward_mode):
    return jax.jit(lambda: self.derived(self.run(metadata, shards), forward_mode))()

  def run(self, metadata, shards):
    """arrays -> (out, lse) by ring, permuted into the metadata's layout and back."""
    layout = metadata.ring.layout
    def permuted(x, *axes):
      for axis in axes:
        x = to_layout(x, layout, shards, axis)
      return x
    def run(arrays):
      arrays = {name: x if name == "softmax_aux" else permuted(x, 2, 3) if name == "bias"
                else permuted(x, 1) for name, x in arrays.items()}
      found = attention(**arrays, **self.arguments, **self.arrays(permuted), mechanism="ring",
                        metadata=metadata, return_lse=True, block_sizes=BLOCKS)
      return (from_layout(found.attention_outputs, layout, shards),
              from_layout(found.lse, layout, shards, 2))
    return run


SEGMENTS = np.sort(np.random.default_rng(0).integers(-1, 3, (B, T)), -1).astype(np.int32)


@functools.cache
def everything():
  """Documents across shards, some padding, a window, all that changes logits or weights."""
  return Case(
      lambda b, h, t, s: s <= t and t - s <= 40 and SEGMENTS[b, t] == SEGMENTS[b, s] >= 0,
      cap=3.0, drop=0.3, arguments=dict(sliding_window=(40, 0)),
      arrays=lambda permuted: dict(mask_info=MaskInfo.from_segments(permuted(SEGMENTS, 1))))


Q_POSITIONS = np.random.default_rng(1).integers(0, T, (B, T)).astype(np.int32)
K_POSITIONS = np.random.default_rng(2).integers(0, T, (1, T)).astype(np.int32)
DENSE = np.random.default_rng(3).random((B, H, T, T)) < 0.6
DENSE[:, :, 5:20] = False  # queries that see nothing


def _predicate(batch, head, query, key):
  return (batch * 5 + head * 3 + query + key) % 4 != 0


@functools.cache
def positions():
  """Positions that the caller gives, a mask for every pair, a predicate of row and head."""
  def sees(b, h, t, s):
    q, k = Q_POSITIONS[b, t], K_POSITIONS[0, s]
    return q // 24 == k // 24 and DENSE[b, h, t, s] and _predicate(b, h, q, k)
  return Case(sees, floats=(), arguments=dict(causal=False, chunk_size=24), arrays=lambda permuted:
              dict(mask=masks.custom(_predicate) & masks.dense(permuted(DENSE, 2, 3)),
                   mask_info=MaskInfo(q_positions=permuted(Q_POSITIONS, 1),
                                      kv_positions=permuted(K_POSITIONS, 1))))


@functools.cache
def padded():
  """Lengths that 8 shards do not divide, T != S, one number for rows, columns and both."""
  lengths = np.array([30, 37], np.int32)
  def sees(b, h, t, s):
    return (s <= t - 7 or s < 9) and s < lengths[b]
  return Case(sees, (B, 61, 37, H, 8, D, D), arguments=dict(
      causal=False, query_offset=-7,
      mask=(masks.causal() | masks.prefix(9)) & masks.lengths(None, lengths)))


class LayoutsTest(parameterized.TestCase):

  @parameterized.product(layout=layouts.LAYOUTS, shards=(1, 2, 5, 8))
  def test_there_and_back(self, layout, shards):
    tokens = numbers(2, 6 * shards, 3)
    tree = {"tokens": tokens, "labels": np.arange(12 * shards, dtype=np.int32).reshape(2, -1)}
    there = to_layout(tree, layout, shards)
    jax.tree.map(np.testing.assert_array_equal, from_layout(there, layout, shards), tree)
    order = layouts.order(layout, 6 * shards, shards)
    np.testing.assert_array_equal(there["tokens"], tokens[:, order])
    for shard in range(shards):
      tokens, = jax.jit(lambda n: layouts.tokens_of(layout, 6 * shards, shards, n))(
          jnp.array([shard]))
      np.testing.assert_array_equal(tokens, order[6 * shard:6 * (shard + 1)])

  def test_by_hand(self):
    self.assertEqual(layouts.order("contiguous", 8, 2).tolist(), [0, 1, 2, 3, 4, 5, 6, 7])
    self.assertEqual(layouts.order("zigzag", 8, 2).tolist(), [0, 1, 6, 7, 2, 3, 4, 5])
    self.assertEqual(layouts.order("striped", 8, 2).tolist(), [0, 2, 4, 6, 1, 3, 5, 7])
    self.assertEqual(to_layout(np.arange(4), "zigzag", 2, axis=0).tolist(), [0, 3, 1, 2])

  @parameterized.parameters(
      ("zigzag", 24, 8, "length=24: expected a multiple of 16.*nearest are 16 or 32"),
      ("striped", 7, 8, "length=7: expected a multiple of 8.*nearest are 8:"),
      ("stripes", 8, 2, "layout='stripes': expected one of 'contiguous', 'zigzag', 'striped'"),
      ("zigzag", 8, 0, "shards=0: expected at least 1"))
  def test_refuses(self, layout, length, shards, message):
    with self.assertRaisesRegex(ValueError, message):
      to_layout(np.zeros((1, length)), layout, shards)

  @parameterized.parameters(
      (np.zeros((1, 4)), 2, 5, r"axis: got 5 with x float64\[1, 4\]; expected .*-2 to 2 - 1"),
      (np.zeros((1, 4)), 2, -3, "axis: got -3 with x"),
      (np.zeros((1, 4)), 2, "a", "axis: got 'a'; expected an int"),
      (np.zeros((1, 4)), 2, None, "axis: got None; expected an int"),
      ({"labels": 3.0}, 2, 1, "x: got float; expected a jax or numpy array, with tokens along axi"),
      (np.zeros((1, 4)), "a", 1, "shards='a': expected at least 1"),
      (np.zeros((1, 4)), 2.0, 1, "shards=2.0: expected at least 1, an int"))
  def test_bad_axes_and_shards(self, x, shards, axis, message):
    for layout in layouts.LAYOUTS:
      for function in (to_layout, from_layout):
        with self.assertRaisesRegex(ValueError, message):
          function(x, layout, shards, axis)

  def test_causal_balance(self):
    """Visited blocks of 16 x 16, the most that a shard has over the mean."""
    length, block = 2048, 16
    def imbalance(layout):
      spread = sequence.Sequence(layout, False, ("sp",), (), N, 1, True, length, length)
      def visited(member, source):
        mask = masks.algebra.placed(masks.causal(), spread.rows(np.int32(member))[None],
                                    spread.columns(np.int32(source))[None], spread.size)
        kinds = blocks.host_kinds(mask, blocks.Sizes(length // N, length // N, block, block))
        return (kinds != blocks.EMPTY).sum()
      each = [sum(visited(m, s) for s in range(N)) for m in range(N)]
      return max(each) / np.mean(each)
    self.assertBetween(imbalance("contiguous"), 1.8, 1.95)
    self.assertLessEqual(imbalance("zigzag"), 1.02)
    self.assertLessEqual(imbalance("striped"), 1.02)


class EqualTest(parameterized.TestCase):

  @parameterized.product(variant=RING_VARIANTS, layout=layouts.LAYOUTS)
  def test_everything(self, variant, layout):
    # The layout has no part in what is left out.
    everything().check(metadata_of(variant, layout), forward_mode=layout == "zigzag")

  @parameterized.parameters(("ring", "contiguous"), ("all_gather", "zigzag"),
                            ("ulysses", "contiguous"), ("hybrid", "striped"))
  def test_positions_and_dense_masks(self, variant, layout):
    positions().check(metadata_of(variant, layout), forward_mode=False)

  def test_unrolled(self):
    positions().check(metadata_of("ring", "zigzag", mesh_of("ring", 4), scan_ring_attention=False),
                      shards=4)

  @parameterized.parameters("ring", "all_gather", "ulysses")
  def test_padded_inside(self, variant):
    padded().check(metadata_of(variant), forward_mode=False)

  @parameterized.parameters(("contiguous", 9, 9), ("zigzag", 3, 0))
  def test_hops_that_are_left_out(self, layout, left, right):
    """A window that is known on the host; members on both sides, which are not evenly far."""
    case = Case(lambda b, h, t, s: -left <= s - t <= right, (1, T, T, 2, 1, D, D), floats=(),
                arguments=dict(causal=False, sliding_window=(left, right)))
    case.check(metadata_of("ring", layout))

  def test_padding_does_not_see_what_is_not_a_number(self):
    q, k, v = numbers(1, 61, 2, D), numbers(1, 64, 2, D, seed=1), numbers(1, 64, 2, D, seed=2)
    k[:, 62] = np.nan  # queries 62 and 63 would see it
    def gradient(mechanism, metadata):
      return jax.jit(jax.grad(lambda *x: attention(
          *x, mechanism=mechanism, metadata=metadata, query_offset=0).attention_outputs.sum(),
                              (0, 1, 2)))(q, k, v)
    close(gradient("ring", metadata_of("ring")), gradient("vanilla", None))

  @parameterized.parameters("ring", "ulysses")
  def test_one_query_and_two_keys(self, variant):
    """Fewer tokens than shards."""
    q, k = numbers(1, 1, 8, D), numbers(1, 2, 8, D)
    arguments = dict(query_offset=1, sliding_window=(0, 0), mask_info=MaskInfo(
        q_segment_ids=np.array([[3]], np.int32), kv_segment_ids=np.array([[4, 3]], np.int32)))
    out = ring_attention(q, k, k, **arguments, metadata=metadata_of(variant)).attention_outputs
    np.testing.assert_allclose(out, k[:, 1:], rtol=1e-6)

  @parameterized.parameters(*zip(RING_VARIANTS, itertools.cycle(("zigzag", "striped"))))
  def test_dropout_is_bit_identical(self, variant, layout):
    """Values that are the identity show the weights themselves."""
    x, value = numbers(1, T, H, D), np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None],
                                                    (1, T, H, T))
    arguments = dict(dropout_prob=0.5, deterministic=False, dropout_rng=RNG, causal=False)
    q, k, v = to_layout((x, x, value), layout, N)
    @jax.jit
    def kept(q, k, v):
      out = ring_attention(q, k, v, **arguments, metadata=metadata_of(variant, layout))
      return from_layout(out.attention_outputs, layout, N)
    want = attention(x, x, value, **arguments, mechanism="vanilla").attention_outputs
    np.testing.assert_array_equal(kept(q, k, v) == 0, want == 0)
    self.assertBetween(np.mean(want == 0), 0.45, 0.55)

  @parameterized.parameters(*RING_VARIANTS)
  def test_bfloat16(self, variant):
    x = [jnp.asarray(numbers(B, T, h, D, seed=h), jnp.bfloat16) for h in (H, K, K)]
    def run(mechanism, dtype):
      def loss(*arrays):
        arrays = to_layout(arrays, "zigzag", N) if mechanism == "ring" else arrays
        metadata = metadata_of(variant, "zigzag") if mechanism == "ring" else None
        out = attention(*arrays, mechanism=mechanism, metadata=metadata,
                        softmax_aux=jnp.ones(H)).attention_outputs
        out = from_layout(out, "zigzag", N) if mechanism == "ring" else out
        return jnp.sum(out.astype(jnp.float32)**2), out
      arrays = [array.astype(dtype) for array in x]
      return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    got, want = run("ring", jnp.bfloat16), run("vanilla", jnp.float32)
    self.assertTrue(all(array.dtype == jnp.bfloat16 for array in jax.tree.leaves(got)))
    close(got, want, 2e-2)

  def test_bfloat16_is_rounded_once(self):
    """Output and lse are as near to the truth as on one device; gradients a little less.

    What hops give is added up in float32 and then rounded, as the blocks of one device are. Their
    gradients have been rounded before: 8 roundings of parts instead of one of the sum.
    """
    x = [jnp.asarray(numbers(1, 128, h, 32, seed=h), jnp.bfloat16) for h in (4, 2, 2)]
    weights = numbers(1, 128, 4, 32, seed=9)
    def run(mechanism, metadata, dtype):
      def loss(*arrays):
        found = attention(*arrays, mechanism=mechanism, metadata=metadata, return_lse=True)
        return (found.attention_outputs.astype(jnp.float32) * weights).sum(), found
      arrays = [array.astype(dtype) for array in x]
      gradients, found = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
      return found.attention_outputs, found.lse, *gradients
    truth = run("vanilla", None, jnp.float32)
    def errors(*arguments):
      return [np.sqrt(np.mean((np.asarray(a, np.float64) - b)**2))
              for a, b in zip(run(*arguments, jnp.bfloat16), truth)]
    one, ring = errors("flash_attn2", None), errors("ring", metadata_of("ring"))
    for name, most, a, b in zip(("out", "lse", "query", "key", "value"), (1.05, 1.05, 2, 2, 2), one,
                                ring, strict=True):
      self.assertLess(b, most * a + 1e-9, name)

  @parameterized.parameters(2, 8, *[4] * EVERY)
  def test_second_derivatives_and_vmap(self, members):
    """A Hessian times a vector, for three sets of arrays at once."""
    x = [numbers(3, 1, 16, h, D, seed=h) for h in (2, 1, 1)]
    def product(metadata, mechanism):
      def loss(*arrays):
        out = attention(*arrays, mechanism=mechanism, metadata=metadata, return_lse=True)
        return jnp.sum(jnp.sin(out.attention_outputs)) + jnp.sum(out.lse**2)
      gradient = jax.grad(loss, (0, 1, 2))
      return jax.jit(jax.vmap(lambda *x: jax.jvp(gradient, x, x)[1]))(*x)
    close(product(metadata_of("ring", mesh=mesh_of("ring", members)), "ring"),
          product(None, "vanilla"))

  def test_not_a_number_reaches_those_who_see_it(self):
    x = [numbers(1, T, 2, D, seed=n) for n in range(3)]
    x[1][0, 20], x[2][0, 60] = np.nan, np.inf
    lse = ring_attention(*x, metadata=metadata_of("ring"), return_lse=True).lse
    np.testing.assert_array_equal(np.isnan(lse[0, 0]), np.arange(T) >= 20)


# Those without sp are flash's, whose own meshes `mesh_test` goes through.
FACTORISATIONS = [sizes for sizes in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (
    1, 2, 4, 8) if EVERY else (2, 4, 8)) if math.prod(sizes) == N]


class MeshTest(parameterized.TestCase):

  def loss(self, metadata, mechanism, layout="contiguous", shards=1):
    """Value and gradients of all that rows, heads and tokens could be mixed up in."""
    arrays = {"query": numbers(4, 16, 4, D), "key": numbers(4, 16, 2, D, seed=1),
              "value": numbers(4, 16, 2, D, seed=2), "softmax_aux": numbers(4)}
    arguments = dict(mask=masks.custom(_predicate), dropout_prob=0.3, dropout_rng=RNG,
                     deterministic=False)
    def loss(arrays):
      arrays = {name: to_layout(x, layout, shards) if x.ndim == 4 else x
                for name, x in arrays.items()}
      out = attention(**arrays, **arguments, mechanism=mechanism,
                      metadata=metadata).attention_outputs
      return jnp.sum(jnp.sin(from_layout(out, layout, shards)))
    return jax.jit(jax.value_and_grad(loss))(arrays)

  @functools.cached_property
  def want(self):
    return self.loss(None, "vanilla")

  @parameterized.named_parameters(*[
      ("_".join(f"{name}{n}" for name, n in zip(("dp", "fsdp", "tp", "sp"), sizes)), n, *sizes)
      for n, sizes in enumerate(FACTORISATIONS)])
  def test_every_factorisation(self, number, dp, fsdp, tp, sp):
    mesh = create_mesh((dp, fsdp, 1, tp, sp))
    variant = "ulysses" if sp * tp <= 4 and number % 2 else "ring"
    layout = layouts.LAYOUTS[number % 3]
    metadata = metadata_of(variant, layout, mesh)
    close(self.loss(metadata, "ring", layout, sp), self.want)

  def test_explicit_axes_with_padding(self):
    mesh = jax.make_mesh((2, 2), ("dp", "sp"), axis_types=(AxisType.Explicit,) * 2,
                         devices=jax.devices()[:4])
    x = [numbers(2, 13, 2, D, seed=n) for n in range(3)]
    def gradients(mechanism):
      return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(attention(
          *x, mechanism=mechanism).attention_outputs)), (0, 1, 2)))(*x)
    with jax.set_mesh(mesh):
      got = gradients("ring")
    close(got, gradients("vanilla"))

  @parameterized.parameters("ring", "all_gather")
  def test_what_does_not_divide_is_replicated(self, variant):
    """One batch row over dp, three heads over tp; a bias and sinks that all devices share."""
    arrays = {"query": numbers(1, 16, 3, D), "key": numbers(1, 16, 3, D, seed=1),
              "value": numbers(1, 16, 3, D, seed=2), "softmax_aux": numbers(3),
              "bias": numbers(1, 1, 1, 16)}
    def gradients(mechanism, metadata):
      def loss(arrays):
        found = attention(**arrays, mechanism=mechanism, metadata=metadata, return_lse=True)
        return jnp.sum(jnp.sin(found.attention_outputs)) + jnp.sum(found.lse**2)
      return jax.jit(jax.grad(loss))(arrays)
    metadata = metadata_of(variant, mesh=create_mesh((2, 1, 1, 2, 2)))
    close(gradients("ring", metadata), gradients("vanilla", None))

  def test_remat_and_scan_inside_the_callers_shard_map(self):
    """Two layers, each recomputed in the backward, where the caller has split the batch."""
    mesh, x = create_mesh((4, 1, 1, 1, 2)), numbers(4, 16, 2, D)
    def model(x, **arguments):
      layer = lambda x, _: (attention(x, x, x, **arguments).attention_outputs, None)
      return jax.lax.scan(layer, x, None, length=2)[0]
    ring = functools.partial(model, mechanism="ring", metadata=OperationMetadata(mesh=mesh),
                             policy="nothing_saveable")
    inside = jax.shard_map(ring, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"),
                           axis_names={"dp"}, check_vma=False)
    want = jax.grad(lambda x: jnp.sum(model(x, mechanism="vanilla")))(x)
    for run in (ring, inside):
      close(jax.jit(jax.grad(lambda x, run=run: jnp.sum(run(x))))(x), want)

  def test_one_shard_is_flash(self):
    x = jnp.ones((2, 13, 2, D))
    run = lambda mechanism, metadata: jax.make_jaxpr(lambda x: attention(
        x, x, x, mechanism=mechanism, metadata=metadata).attention_outputs)(x)
    self.assertEqual(str(run("ring", None)), str(run("flash_attn2", None)))
    metadata = metadata_of("ring", "zigzag", create_mesh((8, 1, 1, 1, 1)))
    self.assertEqual(str(run("ring", metadata)), str(run("flash_attn2", metadata)))

  def test_the_sequence_goes_before_batch_and_heads(self):
    mesh = jax.make_mesh((4, 2), ("sp", "tp"), axis_types=(AxisType.Auto,) * 2)
    metadata = metadata_of("ring", mesh=mesh)
    metadata = metadata.replace(partition_axis=metadata.partition_axis._replace(
        batch_axis="sp", head_axis=("tp", "sp"), kv_head_axis="tp"))
    x = jnp.asarray(numbers(4, 16, 8, D))
    out = jax.jit(lambda x: ring_attention(x, x, x, metadata=metadata).attention_outputs)(x)
    self.assertEqual(tuple(out.sharding.spec)[:3], (None, "sp", "tp"))
    said = explain(x, x, x, mechanism="ring", metadata=metadata)
    self.assertEqual((said.chosen, said.replicated), ("ring", ()))
    self.assertIn("can, by ring.xla", str(said))


COLLECTIVE = re.compile(r"(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
                        r"(?:-start)?\(")


def compiled(run, metadata, shape=(1, 512, 8, 16), dtype=jnp.float32):
  spec = P(None, tuple(metadata.mesh.axis_names))
  x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(metadata.mesh, spec))
  platform = {"gpu": "cuda"}.get(metadata.platform, metadata.platform)
  lowered = jax.jit(run).trace(x, x, x).lower(
      **({} if platform is None else {"lowering_platforms": (platform,)}))
  return lowered.compile()


def gradients_of(run):
  return jax.grad(lambda *x: (run(*x).astype(jnp.float32)**2).sum(), (0, 1, 2))


BAD = (
    ("axis_not_in_the_mesh", dict(metadata=dict(sequence_axis_name="seq")), {},
     r"sequence_axis_name='seq': expected an axis of the mesh, which has \('sp',\)"),
    ("heads_axis_not_in_the_mesh", dict(ring=RingConfig("hybrid", heads_axis_name="x")), {},
     r"ring.heads_axis_name='x': expected an axis of the mesh, which has \('sp',\)"),
    ("heads_axis_is_the_ring", dict(ring=RingConfig("hybrid", heads_axis_name="sp")), {},
     "ring.heads_axis_name='sp': expected another mesh axis"),
    ("zigzag", dict(ring=RingConfig(layout="zigzag")), dict(length=24),
     "query length=24: expected a multiple of 16 for layout 'zigzag' over 8 shards; the nearest "
     "are 16 or 32.*'contiguous', which is padded inside"),
    ("striped", dict(ring=RingConfig(layout="striped")), dict(length=7),
     "query length=7: expected a multiple of 8 .* the nearest are 8:"),
    ("ulysses", dict(ring=RingConfig("ulysses")), dict(heads=4),
     "ring.variant='ulysses': got 4 query heads a device for the 8 devices of mesh axis 'sp'; "
     "expected a multiple of 8; variants 'ring' and 'all_gather' take any number, or 'hybrid' with "
     "a heads axis of size 2 or 4"),
    ("one_side", {}, dict(mask_info=MaskInfo(q_segment_ids=np.zeros((1, 16), np.int32))),
     "mask_info: q_segment_ids is given and kv_segment_ids is None; expected both or none"),
)


class BadInputTest(parameterized.TestCase):

  @parameterized.named_parameters(*BAD)
  def test_refused_before_anything_runs(self, fields, arguments, message):
    fields = {"mesh": mesh_of("ring"), **fields, **fields.get("metadata", {})}
    fields.pop("metadata", None)
    metadata = OperationMetadata(**fields)
    arguments = dict(arguments)
    x = jnp.zeros((1, arguments.pop("length", 16), arguments.pop("heads", 8), D))
    for function in (ring_attention, functools.partial(explain, mechanism="ring")):
      with self.assertRaisesRegex(ValueError, message):
        function(x, x, x, metadata=metadata, **arguments)

  @parameterized.parameters(
      (dict(ring=7), "ring=7: expected a RingConfig, or None"),
      (dict(ring=RingConfig("deepspeed")), "ring.variant='deepspeed': expected one of 'ring',"),
      (dict(ring=RingConfig(layout="zag")), "ring.layout='zag': expected one of 'contiguous'"),
      (dict(ring=RingConfig("hybrid")), "ring.heads_axis_name=None: expected the name of a mesh"),
      (dict(ring=RingConfig(heads_axis_name="x")), "ring.heads_axis_name='x': .* None with any"))
  def test_metadata(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      OperationMetadata(**fields)

  def test_inside_a_shard_map_over_the_sequence(self):
    metadata, x = metadata_of("ring"), jnp.zeros((1, 16, 8, D))
    run = jax.shard_map(lambda x: ring_attention(x, x, x, metadata=metadata).attention_outputs,
                        mesh=metadata.mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    with self.assertRaisesRegex(ValueError, "sequence_axis_name='sp': .* surrounding shard_map"):
      run(x)

  def test_inside_a_shard_map_that_checks_what_varies(self):
    metadata, x = OperationMetadata(mesh=create_mesh((2, 1, 1, 1, 4))), jnp.zeros((2, 16, 8, D))
    run = jax.shard_map(lambda x: ring_attention(x, x, x, metadata=metadata).attention_outputs,
                        mesh=metadata.mesh, in_specs=P("dp"), out_specs=P("dp"),
                        axis_names={"dp"})
    with self.assertRaisesRegex(NotImplementedError, "shard_map over 'dp' with check_vma=True.*"
                                "give that shard_map check_vma=False"):
      run(x)

  @parameterized.parameters("flash_attn2", "vanilla", "autoregressive_decodeattn")
  def test_others_do_not_know_the_order(self, mechanism):
    x, metadata = numbers(1, T, 2, D), metadata_of("ring", "zigzag")
    with self.assertRaisesRegex(NotImplementedError, "ring.layout='zigzag'"):
      attention(x, x, x, mechanism=mechanism, metadata=metadata)
    self.assertEqual(explain(x, x, x, metadata=metadata).chosen, "ring")
    with self.assertRaisesRegex(ValueError, "layout: got 'thd' with.*'zigzag'.*from_cu_seqlens"):
      attention(*[x[0]] * 3, layout="thd", cum_seqlens_q=np.array([0, 9, T], np.int32),
                mechanism="ring", metadata=metadata)

  def test_weights_are_refused(self):
    x = jnp.zeros((1, 16, 8, D))
    with self.assertRaisesRegex(NotImplementedError, "mechanism='ring' .* return_weights=True"):
      ring_attention(x, x, x, return_weights=True, metadata=metadata_of("ring"))


class CompiledTest(parameterized.TestCase):
  """What is sent, when, and what is kept."""

  def count(self, metadata, gradient=False, **arguments):
    run = lambda *x: ring_attention(*x, metadata=metadata, **arguments).attention_outputs
    text = compiled(gradients_of(run) if gradient else run, metadata).as_text()
    found = COLLECTIVE.findall(text)
    return {name: found.count(name) for name in set(found)}

  def test_a_window_shorter_than_a_shard_takes_one_hop(self):
    ring = metadata_of("ring", scan_ring_attention=False)
    window = dict(sliding_window=(63, 0))
    self.assertEqual(self.count(ring, **window), {"collective-permute": 2})
    # Forward 2; backward 2, and 2 for what is owed.
    self.assertEqual(self.count(ring, True, **window), {"collective-permute": 6})

  @parameterized.parameters(
      ("ring", dict(chunk_size=64), {}),
      ("ring", dict(sliding_window=(70, 65), causal=False), {"collective-permute": 8}),
      ("ring", {}, {"collective-permute": 14}),
      ("all_gather", {}, {"all-gather": 2}),
      ("ulysses", {}, {"all-to-all": 4}),
      ("hybrid", {}, {"all-to-all": 4, "collective-permute": 6}))
  def test_what_is_sent(self, variant, arguments, sent):
    self.assertEqual(self.count(metadata_of(variant, scan_ring_attention=False), **arguments), sent)

  def test_hops(self):
    def shifts(mask, layout="contiguous", length=512):
      spread = sequence.Sequence(layout, False, ("sp",), (), N, 1, True, length, length)
      return hops.shifts(spread, jax.tree.structure(mask))
    everyone = tuple(range(N))
    self.assertEqual(shifts(masks.causal()), everyone)
    self.assertEqual(shifts(masks.causal() & masks.window(64, 0)), (0, 1))
    self.assertEqual(shifts(masks.causal() & masks.window(65, 0)), (0, 1, 2))
    self.assertEqual(shifts(masks.window(3, 3)), (0, 1, 7))
    self.assertEqual(shifts(masks.offset(masks.window(0, 0), -256)), (0, 4))
    self.assertEqual(shifts(masks.chunk(64)), (0,))
    self.assertEqual(shifts(masks.chunk(64), length=509), (0,))
    self.assertEqual(shifts(masks.prefix(64)), everyone)
    self.assertEqual(shifts(masks.causal() & masks.window(31, 0), "zigzag"), (0, 1, 7))
    self.assertEqual(shifts(masks.causal() & masks.window(3, 0), "striped"), everyone)
    ids = masks.segments(np.zeros((1, 512), np.int32))
    self.assertEqual(shifts(ids), everyone)
    self.assertEqual(shifts(ids & masks.causal() & masks.window(64, 0)), (0, 1))
    self.assertEqual(shifts(masks.chunk(64) & ~ids), (0,))
    self.assertEqual(shifts(masks.chunk(64) | ids), everyone)
    self.assertEqual(shifts(~(ids | ~masks.chunk(64))), (0,))
    self.assertEqual(shifts(masks.offset(masks.window(0, 0) & ids, -256)), (0, 4))
    self.assertEqual(shifts(masks.positions(np.zeros((1, 512), np.int32), None, masks.window(3, 3))
                            ), everyone)

  def test_what_is_known_of_masks_with_arrays(self):
    """All that the mask shows, for every way to build one."""
    rng = np.random.default_rng(0)
    ids, places = (rng.integers(-1, 5, (1, 16)).astype(np.int32) for _ in range(2))
    leaves = (masks.segments(ids), masks.causal(), masks.window(3, 2), masks.chunk(4),
              masks.prefix(np.array([5])), masks.lengths(None, np.array([9])),
              masks.positions(places), masks.dense(rng.random((1, 1, 16, 16)) < 0.5),
              masks.offset(masks.chunk(4) & masks.segments(ids), 2),
              masks.offset(masks.causal(), np.array([3])))
    shown = lambda mask: to_dense(mask, (1, 1, 16, 16))
    told = 0
    for first, second in itertools.product(leaves, leaves):
      for mask in (first & second, first | second, ~first & second, ~(first | ~second)):
        known = reach.known(mask)
        self.assertEmpty(jax.tree.leaves(known))
        self.assertFalse((shown(mask) & ~shown(known)).any(), mask)
        told += not shown(known).all()
    self.assertGreater(told, 100)

  def test_memory_grows_with_a_shard(self):
    """A sequence of 131,072 tokens: what a device holds halves with every doubling of devices."""
    tokens = 131072
    def temporary(devices):
      metadata = metadata_of("ring", "zigzag", mesh_of("ring", devices))
      run = lambda *x: ring_attention(*x, metadata=metadata).attention_outputs
      return compiled(gradients_of(run), metadata, (1, tokens, 1, 64)).memory_analysis(
          ).temp_size_in_bytes
    eighth, quarter = temporary(8), temporary(4)
    self.assertLess(eighth, 0.55 * quarter)
    self.assertLess(eighth, 16 * tokens // 8 * 64 * 4)  # arrays as large as a shard of the keys

  def test_memory_beside_one_device(self):
    """The gradient of a layer over 65,536 tokens, and of its attention alone."""
    metadata, tokens = metadata_of("ring", "zigzag"), 65536
    def temporary(run, sharding, *shapes):
      arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes]
      return jax.jit(run).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    def layer(mechanism, metadata):
      def loss(x, weights):
        q, k, v = jnp.split(x @ weights[:, :640], (512, 576), -1)
        heads = lambda x: x.reshape(1, tokens, -1, 64)
        out = attention(heads(q), heads(k), heads(v), mechanism=mechanism, metadata=metadata)
        x = x + out.attention_outputs.reshape(1, tokens, 512) @ weights[:, 640:1152].T
        return (jax.nn.gelu(x @ weights[:, 1152:]) ** 2).mean()
      return jax.grad(loss, 1)
    def alone(mechanism, metadata):
      return gradients_of(lambda *x: attention(
          *x, mechanism=mechanism, metadata=metadata).attention_outputs)
    def ratio(run, *shapes):
      spread = NamedSharding(metadata.mesh, P(None, "sp"))
      return temporary(run("flash_attn2", None), None, *shapes) / temporary(
          run("ring", metadata), spread, *shapes)
    self.assertGreater(ratio(layer, (1, tokens, 256), (256, 2048)), 6)
    heads = lambda number: (1, tokens, number, 64)
    self.assertGreater(ratio(alone, heads(8), heads(1), heads(1)), 4.5)

  def test_order(self):
    """What waits is the same bit for bit."""
    bits = np.array([0, 1 << 31, 1, 0x7f800000, 0xff800000, 0x7fc12345], np.uint32)
    x = bits.view(np.float32), bits.view(np.int32)
    for done in (np.float32(-0.0), np.float32(np.nan), np.float32(-np.inf), np.float32(3)):
      got = jax.jit(xla_numbers.after)(x, [np.full((2, 3), done), done])
      self.assertEqual([np.asarray(y).tobytes() for y in got], [bits.tobytes()] * 2)
      zeros = jax.jit(lambda x: xla_numbers.zeros((2, 2), jnp.bfloat16, done=x))(done)
      self.assertFalse(np.asarray(zeros).view(np.uint16).any())


if __name__ == "__main__":
  absltest.main()
