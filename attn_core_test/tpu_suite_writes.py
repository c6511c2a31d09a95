# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of tpu_suite about keys and values that kernels write to pages."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import Heads, OperationMetadata, PagesMetadata, PagesV3, attention
from attn_core.caches import pages as pages_lib
from attn_core_test.device_suite_parts import Found, Settings
from attn_core_test.tpu_suite_interpret import running

# (dtype, scales, key heads, D, page)
FORMS = (("bfloat16", None, 8, 128, 16), ("bfloat16", None, 1, 128, 64),
         ("bfloat16", None, 8, 256, 16), ("float32", None, 2, 128, 8),
         ("int8", "tensor", 8, 128, 32), ("float8_e4m3fn", "token", 8, 128, 32))
TINY = (("float32", None, 1, 128, 8), ("int8", "tensor", 2, 128, 8))


def writes(settings: Settings) -> Found:
  """Compares pages that the kernel has written with those of XLA, byte for byte, many times.

  Requests of one query and of many, of which one reads what another writes in the same call: a
  page that is read before all tokens have arrived changes the output.
  """
  end, results = time.monotonic() + settings.seconds, {}
  calls = 1 if settings.tiny else 500
  for form in TINY if settings.tiny else FORMS:
    name = " ".join(map(str, form))
    if time.monotonic() > end:
      results[name] = "no time left"
      continue
    print(name, flush=True)
    try:
      results[name] = _compared(form, calls, end)
    except Exception as error:  # an error in one form must not stop the others
      results[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
  wrong = [name for name, found in results.items() if not found.startswith("right")]
  return Found(not wrong and bool(results), [f"* {name}: {found}" for name, found in
                                             results.items()], {"results": results})


def _compared(form: tuple[Any, ...], calls: int, end: float) -> str:
  dtype, scales, key_heads, width, page = form
  rng, queries = np.random.default_rng(0), (1, 3 * page + 5, 1, page, 2)
  lengths = (2 * page, 4 * page + 3, 3 * page + 2, page, 2)
  tables = rng.permutation(32)[:5 * len(queries)].reshape(len(queries), 5).astype(np.int32)
  tables[2, :3] = tables[1, :3]  # what the second request writes, the third one reads
  metadata = PagesMetadata(*map(jnp.asarray, (
      tables, np.array(lengths, np.int32), np.cumsum([0, *queries]).astype(np.int32))))
  float_dtype = "float32" if dtype == "float32" or jax.default_backend() == "cpu" else "bfloat16"
  if scales is None and dtype != float_dtype:
    float_dtype = dtype
  query, key, value = (jnp.asarray(rng.normal(size=(sum(queries), heads, width)), float_dtype)
                       for heads in (2 * key_heads, key_heads, key_heads))
  empty = pages_lib.init(PagesV3, 32, page, Heads(key_heads, width, width), dtype, scales)
  if scales == "tensor":
    empty = empty._replace(key_scales=jnp.float32(0.02), value_scales=jnp.float32(0.03))

  def attend(cache: PagesV3, metadata: PagesMetadata) -> tuple[jax.Array, Any]:
    found = attention(query, key, value, mechanism="ragged_page_attention_v3", layout="thd",
                      cache_view=cache, cache_metadata=metadata,
                      metadata=OperationMetadata(platform="tpu"))
    return found.attention_outputs, found.cache_view

  bits = lambda tree: [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
  expected = bits(jax.jit(pages_lib.append)(empty, key, value, pages_lib.slots(
      metadata, page, sum(queries))))
  differ, count, first = 0, 0, None
  with running():
    run = jax.jit(attend)
    while count < calls and (count == 0 or time.monotonic() < end):
      out, cache = run(empty, metadata)
      found = bits(cache), bits(out)
      first = first or found[1]
      differ += found != (expected, first)
      count += 1
  finite = bool(np.isfinite(np.asarray(out, np.float32)).all())
  if differ or not finite:
    return f"WRONG: {differ} of {count} calls differ" + ("" if finite else ", not finite")
  return f"right, {count} calls"
