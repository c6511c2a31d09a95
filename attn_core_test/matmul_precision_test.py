# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of 32-bit operands are exact on every platform, unless `precision` asks for less.

Nor do other settings of JAX matter. Read from the jaxprs of values and derivatives of every row of
the table, kernels included.
"""

import functools
import math
from typing import Any, Callable, Iterator, NamedTuple
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
import jax.numpy as jnp
from jax.sharding import AxisType

from attn_core import (Heads, LatentOptions, OperationMetadata, PagesMetadata, PagesV1, PagesV2,
                       PagesV3, RingConfig, attention, caches, table)
from attn_core.caches import pages
from attn_core.mechanisms import flash, sdpa
from attn_core_test import sampling

jax.config.update("jax_num_cpu_devices", 8)

B, T, H, K, D = 2, 128, 4, 2, 64
PAGES = {"page_attention": PagesV1, "ragged_page_attention_v2": PagesV2,
         "ragged_page_attention_v3": PagesV3}
RINGS = {"ring": RingConfig(), "remote": RingConfig(transfer="remote"),
         "all_gather": RingConfig("all_gather"), "ulysses": RingConfig("ulysses"),
         "hybrid": RingConfig("hybrid", heads_axis_name="tp")}


# --- Products of a program. ----------------------------------------------------------------------


class Product(NamedTuple):
  """One dot_general."""

  dtypes: tuple[str, str]
  precision: Any
  is_row_sum: bool  # one operand has no rows of its own
  where: str

  @property
  def bits(self) -> tuple[int, ...]:
    """Number of bits of the operands; 0: integers."""
    floats = lambda x: jnp.issubdtype(x, jnp.floating)
    return tuple(8 * jnp.dtype(x).itemsize if floats(x) else 0 for x in self.dtypes)


def products_of(jaxpr: Any, platform: str, axes: tuple = ()) -> Iterator[Product]:
  """Yields every product of a program for one platform."""
  is_code = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
  branches = {}  # variable -> the index of the platform's branch
  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
      contract, batch = params["dimension_numbers"]
      used = [len(c) + len(b) for c, b in zip(contract, batch)]
      operands = [x.aval for x in equation.invars]
      yield Product(tuple(str(x.dtype) for x in operands), params["precision"],
                    any(n == x.ndim for n, x in zip(used, operands)), str(equation)[:300])
    elif name == "platform_index":
      known = [i for i, names in enumerate(params["platforms"]) if names and platform in names]
      default = [i for i, names in enumerate(params["platforms"]) if not names]
      branches[equation.outvars[0]] = (known or default)[0]
    elif name == "cond" and equation.invars[0] in branches:
      inner = params["branches"][branches[equation.invars[0]]]
      yield from products_of(inner.jaxpr, platform, axes)
    elif name.startswith(("attention_", "paged_attention_")):
      avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
      run = functools.partial(equation.primitive.impl, **params)
      inner = jax.make_jaxpr(lambda *args, run=run: run(*args), axis_env=axes)(*avals)
      yield from products_of(inner.jaxpr, platform, axes)
    else:
      inside = tuple(params["mesh"].shape.items()) if name == "shard_map" else axes
      for inner in jax.tree.leaves(list(params.values()), is_leaf=is_code):
        if is_code(inner):
          yield from products_of(getattr(inner, "jaxpr", inner), platform, inside)


# --- Calls of every row. -------------------------------------------------------------------------


class Call(NamedTuple):
  """A function of float arrays, and their shapes."""

  function: Callable
  operands: dict[str, Any]


def metadata_of(place: str, mesh: dict[str, int] | None = None, **fields) -> OperationMetadata:
  platform, _, capability = place.partition(" ")
  if mesh:
    fields["mesh"] = jax.make_mesh(
        tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh),
        devices=jax.devices()[:math.prod(mesh.values())])
  return OperationMetadata(platform=platform, compute_capability=capability or None, **fields)


def dense_call(mechanism: str, dtype: str, arguments: dict, **changes) -> Call:
  """A call of `attention` with keys and values, and with the floats that the row supports."""
  array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
  operands = {"query": array(B, T, H, D), "key": array(B, T, K, D), "value": array(B, T, K, D),
              **{name: array(*shape) for name, shape in changes.items()}}
  return Call(lambda arrays: attention(
      **arrays, mechanism=mechanism, **arguments).attention_outputs, operands)


def cached_call(mechanism: str, dtype: str, arguments: dict, tokens: int, held: str) -> Call:
  """A call with a dense cache; the cache is differentiable unless it is quantized."""
  cache = jax.eval_shape(lambda: caches.dense.init(B, T, (K, D), dtype=held))
  query = jax.ShapeDtypeStruct((B, tokens, H, D), dtype)
  floats = {"key": cache.key, "value": cache.value} if held == dtype else {}
  def function(arrays):
    whole = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), cache)
    whole = whole._replace(**{k: v for k, v in arrays.items() if k != "query"})
    return attention(arrays["query"], None, None, cache_view=whole, mechanism=mechanism,
                     mode="__autoregressive__", **arguments).attention_outputs
  return Call(function, {"query": query, **floats})


def latent_call(mechanism: str, dtype: str, arguments: dict, tokens: int, projected: bool) -> Call:
  """A call with latent rows, whose queries are absorbed, or those of heads."""
  latent, rope, nope = 32, 16, 8
  array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
  operands = {"query": array(B, tokens, H, (nope if projected else latent) + rope),
              "key": array(B, T, latent + rope)}
  if projected:
    operands |= {"key_up": array(latent, H, nope), "value_up": array(latent, H, D)}
  def function(arrays):
    up = {name: x for name, x in arrays.items() if name.endswith("_up")}
    options = LatentOptions(latent, rope, nope if projected else None, **up)
    return attention(arrays["query"], arrays["key"], None, latent_options=options,
                     mechanism=mechanism, softmax_scale=0.2, query_offset=T - tokens,
                     **arguments).attention_outputs
  return Call(function, operands)


def paged_call(mechanism: str, dtype: str, arguments: dict, tokens: int, held: str) -> Call:
  """A call over pages, which are differentiable unless they are quantized."""
  layout = PAGES[mechanism]
  tokens = 1 if layout is PagesV1 else tokens
  cache = jax.eval_shape(lambda: pages.init(layout, 8, 16, Heads(K, D, D), held,
                                            None if held == dtype else "token"))
  ints = lambda *shape: jnp.zeros(shape, jnp.int32)
  array = lambda heads: jax.ShapeDtypeStruct((2 * tokens, heads, D), dtype)
  operands = {"query": array(H), **({"cache": cache} if held == dtype else {})}
  if layout is PagesV3 and held == dtype:
    operands |= {"key": array(K), "value": array(K)}
  def function(arrays):
    whole = arrays.get("cache") or jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), cache)
    metadata = PagesMetadata(ints(2, 4), ints(2), None if layout is PagesV1 else ints(3))
    new = jnp.ones((2 * tokens, K, D), dtype) if layout is PagesV3 else None
    return attention(
        arrays["query"], arrays.get("key", new), arrays.get("value", new), cache_view=whole,
        cache_metadata=metadata, layout="thd", mechanism=mechanism, **arguments).attention_outputs
  return Call(function, operands)


def latent_pages_call(mechanism: str, dtype: str, arguments: dict,
                      kind: tuple[int, str, bool]) -> Call:
  """A call over pages of latent rows; kind: tokens of a request, their dtype, up-projections."""
  (tokens, held, projected), latent, rope, nope = kind, 32, 16, 8
  padded = arguments["metadata"].platform == "tpu" and held == dtype  # as the kernel reads them
  cache = jax.eval_shape(lambda: caches.latent_pages.init(
      8, 16, (latent, rope), dtype=held, padded=padded))
  array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
  operands = {"query": array(2 * tokens, H, (nope if projected else latent) + rope)}
  if projected:
    operands |= {"key_up": array(latent, H, nope), "value_up": array(latent, H, D)}
  if held == dtype:
    operands |= {"cache": cache, "key": array(2 * tokens, latent + rope)}
  def function(arrays):
    whole = arrays.get("cache") or jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), cache)
    rows = arrays.get("key", jnp.ones((2 * tokens, latent + rope), dtype))
    ints = lambda *shape: jnp.zeros(shape, jnp.int32)
    options = LatentOptions(latent, rope, nope, arrays.get("key_up"), arrays.get("value_up"))
    return attention(
        arrays["query"], rows, None, cache_view=whole, latent_options=options,
        cache_metadata=PagesMetadata(ints(2, 4), ints(2), ints(3)), layout="thd",
        mechanism=mechanism, **arguments).attention_outputs
  return Call(function, operands)


def calls_of(mechanism: str, place: str, dtype: str, **arguments: Any) -> dict[str, Call]:
  """Returns calls of a row that reach each of its kernels."""
  row = table.TABLE[mechanism, place]
  features = row.general.features
  arguments = dict(arguments, metadata=metadata_of(place))
  if {"pages", "latent"} <= features:
    return {f"{held}_{'projected' if projected else 'absorbed'}_{tokens}": latent_pages_call(
        mechanism, dtype, arguments, (tokens, held, projected))
            for held in (dtype, "int8") for projected in (False, True) for tokens in (1, 16)}
  if "pages" in features:
    return {f"{held}_{tokens}": paged_call(mechanism, dtype, arguments, tokens, held)
            for held in (dtype, "int8") for tokens in (1, 16)[:1 + (mechanism != "page_attention")]}
  if "latent" in features:
    return {f"{'projected' if projected else 'absorbed'}_{tokens}": latent_call(
        mechanism, dtype, arguments, tokens, projected)
            for projected in (False, True) for tokens in (4, T)}
  if row.shards_sequence:
    found = {}
    for name, ring in RINGS.items():
      if ring.transfer == "remote" and place != "tpu":
        continue  # refused by name
      mesh = {"sp": 2, "tp": 2} if name == "hybrid" else {"sp": 2}
      found[name] = dense_call(mechanism, dtype, dict(
          arguments, metadata=metadata_of(place, mesh, ring=ring)))
    return found
  if "quantized" in features:
    meshed = dict(arguments, metadata=metadata_of(place, {"sp": 2}))
    return {f"{held}_{tokens}{suffix}": cached_call(mechanism, dtype, given, tokens, held)
            for held in (dtype, "int8", *["int4"] * ("int4" in features)) for tokens in (1, 40)
            for suffix, given in (("", arguments), ("_sharded", meshed))
            if not (suffix and held != dtype)}
  floats = {"bias": (B, H, T, T)} if "bias" in features else {}
  if "sinks" in features:
    floats["softmax_aux"] = (H,)
  more = {"logits_soft_cap": 5.0} if "soft_cap" in features else {}
  if "dropout" in features:
    more |= dict(dropout_prob=0.1, dropout_rng=jnp.zeros(2, jnp.uint32), deterministic=False)
  return {"plain": dense_call(mechanism, dtype, arguments),
          "all": dense_call(mechanism, dtype, {**arguments, **more}, **floats)}


def gradient(function: Callable) -> Callable:
  return jax.grad(lambda arrays: jnp.sin(function(arrays).astype(jnp.float32)).sum())


def along(function: Callable) -> Callable:
  return lambda arrays: jax.jvp(function, (arrays,), (arrays,))[1]


MODES: dict[str, Callable[[Callable], Callable]] = {
    "forward": lambda f: f, "vjp": gradient, "jvp": along,
    "jvp_of_vjp": lambda f: along(gradient(f)), "jvp_of_jvp": lambda f: along(along(f)),
    "vjp_of_jvp": lambda f: gradient(along(f))}
# cuDNN's derivative has none; a derivative of pages in forward mode has none in reverse mode.
ONCE = ("forward", "vjp", "jvp")
OVER_PAGES = tuple(mode for mode in MODES if mode != "vjp_of_jvp")
CUDNN = (sdpa.cudnn,)
ONLY_16_BITS = (sdpa.cudnn, flash.gpu)


def _rows() -> Iterator[tuple[str, str]]:
  """Yields the rows of the table that differ in the functions, the pages or the place."""
  seen = set()
  for (mechanism, place), row in table.TABLE.items():
    parts: list[Any] = [place, PAGES.get(mechanism)]
    part: Any = row
    while part is not None:
      parts.append(part.run)
      part = part.fallback
    if tuple(parts) not in seen:
      seen.add(tuple(parts))
      yield mechanism, place


def _cases() -> Iterator[tuple[str, str, str, str]]:
  """Yields (mechanism, place, dtype, mode) of all that the table supports."""
  for mechanism, place in _rows():
    row = table.TABLE[mechanism, place]
    modes = ONCE if row.run in CUDNN and row.fallback is None else tuple(MODES)
    modes = OVER_PAGES if "pages" in row.general.features else modes
    for dtype in ("float32", "bfloat16"):
      if dtype == "bfloat16" or row.general.run not in ONLY_16_BITS:
        yield from ((mechanism, place, dtype, mode) for mode in modes)


CASES = tuple(_cases())
QUICK = tuple((mechanism, "tpu", "float32", mode) for mode, mechanisms in (
    ("jvp_of_vjp", ("vanilla", "sdpa", "blockwise", "flash_attn2", "page_attention")),
    ("vjp", ("ring", "autoregressive_decodeattn"))) for mechanism in mechanisms)
# On GPUs pages are read by XLA: for few rows one token with all its heads at a time.
QUICK += tuple((name, "gpu", "float32", "forward")
               for name in ("ragged_page_attention_v2", "page_attention"))


class PrecisionTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()  # JAX asks which cuDNN there is
    self.enterContext(mock.patch.object(jax_cudnn, "check_cudnn_version", lambda: 91400))
    self.enterContext(mock.patch.object(jax_cudnn, "check_compute_capability", lambda _: True))

  def products(self, case, configured, **arguments):
    """Yields (name of the call, product) of all calls of a case."""
    mechanism, place, dtype, mode = case
    platform = place.partition(" ")[0].replace("gpu", "cuda")
    for name, call in calls_of(mechanism, place, dtype, **arguments).items():
      with jax.default_matmul_precision(configured):
        program = jax.make_jaxpr(MODES[mode](call.function))(call.operands)
        products = list(products_of(program.jaxpr, platform))
      # Products of 16 bits on GPUs have primitives of their own, and a CPU's kernels multiply one
      # row of 32 bits element by element.
      one_row = (place, mode) == ("cpu", "forward") and "1" in name.split("_")
      if dtype == "float32" and not one_row:
        self.assertNotEmpty(products, name)
      yield from ((name, product) for product in products)

  @parameterized.parameters(*sampling.with_slow(QUICK, *(x for x in CASES if x not in QUICK)))
  def test_32_bits_are_exact(self, *case):
    """Whatever the configuration says."""
    exact = lax.Precision.HIGHEST
    for name, product in self.products(case, "bfloat16"):
      # A product of 16-bit operands has derivatives with one operand of 32 bits.
      if product.bits == (32, 32) or case[2] == "float32" and 32 in product.bits:
        self.assertEqual(product.precision, (exact, exact), f"{name}: {product.where}")

  @parameterized.parameters(*sampling.with_slow(
      (*QUICK[:3], *QUICK[-2:]), *(x for x in CASES if x not in QUICK)))
  def test_less_where_it_is_asked(self, *case):
    if "precision" not in table.TABLE[case[:2]].general.features:
      with self.assertRaisesRegex(NotImplementedError, "precision"):
        list(self.products(case, "highest", precision="default"))
      return
    for name, product in self.products(case, "highest", precision="default"):
      if not product.is_row_sum:
        self.assertNotIn(lax.Precision.HIGHEST, product.precision or (), f"{name}: {product.where}")

  @parameterized.parameters(*sampling.with_slow(
      [("vanilla", "cpu", "bfloat16", "vjp"), ("sdpa", "cpu", "bfloat16", "vjp"),
       ("autoregressive_decodeattn", "cpu", "bfloat16", "vjp"),
       ("page_attention", "cpu", "float32", "vjp"), ("ring", "tpu", "float32", "forward")],
      *(case for case in CASES if case[3] in ("forward", "vjp"))))
  def test_promotes_nothing_implicitly(self, *case):
    """Checks that a caller may forbid implicit promotion of dtypes and of ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
      self.assertIsNotNone(list(self.products(case, "default")))

  def test_every_row_is_read(self):
    """Except those of the same functions on the same platform."""
    runs = lambda rows: {(table.TABLE[row].run, row[1]) for row in rows}
    self.assertEqual(runs(case[:2] for case in CASES), runs(table.TABLE))

  def test_finds_what_is_not_exact(self):
    """In every kind of program that contains others."""
    def product(x):
      return lax.platform_dependent(x, cpu=lambda x: x, default=lambda x: x @ x)
    def program(x):
      return lax.fori_loop(0, 3, lambda i, x: jax.jit(jax.checkpoint(product))(x), x)
    text = jax.make_jaxpr(jax.jvp, static_argnums=0)(program, (jnp.ones((4, 4)),),
                                                     (jnp.ones((4, 4)),)).jaxpr
    self.assertEmpty(list(products_of(text, "cpu")))
    found = list(products_of(text, "tpu"))
    self.assertNotEmpty(found)
    for one in found:
      self.assertEqual((one.bits, one.precision, one.is_row_sum), ((32, 32), None, False))


if __name__ == "__main__":
  absltest.main()
