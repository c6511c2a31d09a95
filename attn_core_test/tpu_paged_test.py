"""The TPU kernel over pages: in interpret mode against plain XLA, and compiled for chips elsewhere.

Interpret mode starts from memory full of NaN and watches for races between transfers and
computation; it runs with transfers executed at once and as late as possible.
"""

import functools
import importlib.util
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np

from attn_core import (BlockSizes, Heads, OperationMetadata, PagedOptions, PagesMetadata, PagesV2,
                       explain, ragged_page_attention_v2)
from attn_core.benchmarks.static_profile import CHIPS, devices
from attn_core.caches import pages
from attn_core_test.paged_test import Case
from attn_core_test.tpu_test import interpreted

TPU = OperationMetadata(platform="tpu")
CASES = {
    "ragged": (Case((9, 0, 17, 33, 24, 5), (9, 0, 5, 1, 1, 2), page=8, D=128, unused=1, sinks=True),
               PagedOptions(sliding_window=(11, 0), logits_soft_cap=2.0)),
    "decode": (Case((9, 60, 1, 17), (1,) * 4, page=8, H=6, K=2, D=64, rest=0), PagedOptions()),
    "not_causal_wide": (Case((9, 20), (3, 5), page=8, H=2, K=1, D=256, rest=1),
                        PagedOptions(causal=False)),
}


class InterpretTest(parameterized.TestCase):

  @parameterized.parameters(("ragged", "float32"), ("ragged", "bfloat16"), ("decode", "float32"),
                            ("not_causal_wide", "bfloat16"))
  def test_equals_plain_xla(self, name, dtype):
    case, options = CASES[name]
    query, key, value, sinks = case._replace(dtype=dtype).arrays()  # NaN where nobody looks
    cache = pages.convert(pages.PagesV1(key, value), PagesV2)
    options = options._replace(softmax_aux=sinks, return_lse=True,
                               block_sizes=BlockSizes(block_q=None if name == "decode" else 4,
                                                      block_kv=16))
    metadata = jax.tree.map(jnp.asarray, case.metadata())
    def run(platform):
      output = jax.jit(functools.partial(ragged_page_attention_v2, options=options._replace(
          metadata=OperationMetadata(platform=platform))))(query, cache, metadata)
      return [np.asarray(x, np.float32) for x in (output.attention_outputs, output.lse)]
    expected = run("cpu")
    for transfers in ("on_wait", "eager"):
      with interpreted(transfers):
        found = run("tpu")
      for x, y, tolerance in zip(found, expected, (
          2e-2 if dtype == "bfloat16" else 2e-6, 5e-6), strict=True):
        np.testing.assert_array_equal(x == -np.inf, y == -np.inf)
        np.testing.assert_allclose(x, y, atol=tolerance)

  def test_a_nan_reaches_those_who_see_it_and_no_other(self):
    case = Case((8, 9), (8, 9), page=8, D=128, rest=0)
    query, key, value, _ = map(lambda x: None if x is None else jnp.nan_to_num(x), case.arrays())
    cache, metadata = pages.convert(pages.PagesV1(key, value), PagesV2), case.metadata()
    spoilt = cache._replace(pages=cache.pages.at[metadata.page_tables[0, 0], 5, 1].set(jnp.nan))
    options = PagedOptions(metadata=TPU, block_sizes=BlockSizes(4, 8))
    with interpreted():
      before, after = (np.asarray(ragged_page_attention_v2(
          query, x, metadata, options).attention_outputs) for x in (cache, spoilt))
    seen = np.zeros(before.shape, bool)
    seen[5:8, :2] = True
    self.assertTrue(np.isnan(after[seen]).all())
    np.testing.assert_array_equal(after[~seen], before[~seen])


class ChoiceTest(parameterized.TestCase):

  def kernel(self, heads, page, dtype, width=64, scales=None, **options):
    query = jax.ShapeDtypeStruct((4, heads.key_heads, heads.key_width),
                                 jnp.float32 if scales else dtype)
    cache = jax.eval_shape(lambda: pages.init(PagesV2, 8, page, heads, dtype, scales))
    metadata = PagesMetadata(jnp.zeros((4, width), jnp.int32), jnp.zeros(4, jnp.int32))
    arrays, structure = jax.tree.flatten(cache)
    said = []
    options = {"metadata": TPU, **options}
    jax.eval_shape(lambda *x: said.append(explain(
        x[0], None, None, layout="thd", cache_view=jax.tree.unflatten(structure, x[1:]),
        cache_metadata=metadata, **options)), query, *arrays)
    verdict, = (v for v in said[0].verdicts if v.mechanism == "ragged_page_attention_v2")
    return str(verdict)

  def test_goes_first_where_it_can(self):
    heads = Heads(2, 128, 128)
    self.assertIn("by paged.tpu", self.kernel(heads, 16, jnp.bfloat16))
    for arguments, words in (
        (dict(dtype=jnp.float16), "float16"), (dict(dtype=jnp.int8, scales="tensor"), "int8"),
        (dict(width=10**6), "page tables of .4, 1000000."), (dict(page=10**5), "100000 tokens"),
        (dict(heads=Heads(2, 192, 192)), "head_dim 192"), (dict(precision="highest"), "precision")):
      said = self.kernel(**{**dict(heads=heads, page=16, dtype=jnp.bfloat16), **arguments})
      self.assertRegex(said, f"by paged.xla, not by paged.tpu: .*{words}")


@unittest.skipUnless(importlib.util.find_spec("libtpu"),
                     "libtpu is not installed: pip install 'attn_core[tpu]'")
class CompileTest(parameterized.TestCase):

  def text(self, chip, shape, dtype, tokens, check_vma=False):
    """The program of forward and backward, inside the caller's shard_map."""
    key_heads, group, width, page = shape
    mesh = Mesh(np.array(devices(chip)[:1]), ("dp",))
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, P("dp")))
    query = array(dtype, tokens, key_heads * group, width)
    cache = PagesV2(array(dtype, 256, page, 2 * key_heads, width))
    metadata = PagesMetadata(*(array(jnp.int32, *x) for x in ((16, 64), (16,), (17,))))
    def gradient(query, cache, metadata):
      loss = lambda query, cache: ragged_page_attention_v2(query, cache, metadata, PagedOptions(
          sliding_window=(500, 0), metadata=TPU)).attention_outputs.astype(jnp.float32).sum()
      return jax.grad(loss, (0, 1))(query, cache)
    spread = jax.shard_map(gradient, mesh=mesh, in_specs=P("dp"),
                           out_specs=(P("dp"), PagesV2(P("dp"))), check_vma=check_vma)
    return jax.jit(spread).trace(query, cache, metadata).lower(
        lowering_platforms=("tpu",)).compile().as_text()

  @parameterized.named_parameters(
      ("v5e", "v5e", (8, 4, 128, 16), "bfloat16", 64),
      ("v6e", "v6e", (2, 8, 64, 32), "bfloat16", 16),
      ("v5p", "v5p", (4, 1, 256, 16), "float32", 64),
      ("tpu7x", "tpu7x", (1, 8, 128, 8), "bfloat16", 16))
  def test_compiles(self, chip, shape, dtype, tokens):
    self.assertIn(chip, CHIPS)
    text = self.text(chip, shape, dtype, tokens, check_vma=chip == "v5e")
    self.assertEqual(text.count('custom_call_target="tpu_custom_call"'), 1)


if __name__ == "__main__":
  absltest.main()
