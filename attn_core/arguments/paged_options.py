# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The keywords of the functions over pages, and the metadata of the pages among them."""

from typing import Any, NamedTuple, cast

import jax
from jax.typing import ArrayLike

from attn_core import checks
from attn_core.arguments.arguments import AttentionOptions
from attn_core.caches.paged.layouts import PagesMetadata
from attn_core.config.metadata import OperationMetadata
from attn_core.score_mods.score_mod import ScoreMod
from attn_core.types import BlockSizes, SlidingWindow


class PagedOptions(NamedTuple):
  """Keywords of the functions over pages as one value, another way to write them.

  `page_attention(query, cache, pages_metadata, sliding_window=(9, 0))` is the same as
  `page_attention(query, cache, pages_metadata, PagedOptions(sliding_window=(9, 0)))`. Where
  `metadata` has a mesh, heads are sharded over its axes, and so are groups of requests, each with
  separate pages: see `caches.paged.request_groups`.
  """

  causal: bool = True
  sliding_window: SlidingWindow = None
  softmax_scale: float | None = None
  logits_soft_cap: float | None = None
  softmax_aux: ArrayLike | None = None
  precision: jax.lax.PrecisionLike = None
  block_sizes: BlockSizes | None = None
  return_lse: bool = False
  metadata: OperationMetadata | None = None
  score_mod: ScoreMod | None = None


def keywords_of(mechanism: str, pages_metadata: PagesMetadata | None, options: PagedOptions | None,
                keywords: AttentionOptions) -> AttentionOptions:
  """Returns the keywords of a call over pages, without the cache.

  Args:
    mechanism: its name, for errors.
    pages_metadata: as given by position.
    options: keywords as one value, or None.
    keywords: as given by name.

  Raises:
    TypeError: a keyword that the function gives itself.
    ValueError: options and keywords together; metadata twice or not at all.
  """
  given: dict[str, Any] = {**keywords}
  for name, where in (("cache_view", "the pages are `cache`"), ("mechanism", "it is fixed")):
    if name in given:
      raise TypeError(f"{mechanism}: got an unexpected keyword argument {name!r}; {where}")
  found = _pages_metadata(pages_metadata, given)
  checks.require(options is None or isinstance(options, PagedOptions), "options",
                 type(options).__name__, "a PagedOptions; an OperationMetadata goes to `metadata=`")
  checks.require(options is None or not given, "options", f"a PagedOptions and {', '.join(given)}=",
                 "one of the two: a PagedOptions, or keywords")
  merged: dict[str, Any] = {} if options is None else options._asdict()
  return cast(AttentionOptions, {"layout": "thd", "cache_metadata": found, **merged, **given})


def _pages_metadata(positional: PagesMetadata | None, keywords: dict[str, Any]) -> Any:
  """Returns the metadata of the pages, and removes it from the keywords.

  Raises:
    ValueError: it is given twice or not at all, or is an OperationMetadata.
  """
  given = {"pages_metadata": positional, "cache_metadata": keywords.pop("cache_metadata", None)}
  if isinstance(keywords.get("metadata"), PagesMetadata):  # the earlier name
    given["metadata"] = keywords.pop("metadata")
  found = {name: x for name, x in given.items() if x is not None}
  checks.require(len(found) < 2, " and ".join(found), "values for each",
                 "one of them: all name the PagesMetadata")
  for name, x in found.items():
    checks.require(not isinstance(x, OperationMetadata), name, "an OperationMetadata",
                   "a PagesMetadata; the OperationMetadata goes to `metadata=`")
    return x
  return None
