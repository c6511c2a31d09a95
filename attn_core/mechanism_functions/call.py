# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The call of `attention` that every function of a mechanism makes."""

from typing import Any

from jax.typing import ArrayLike

from attn_core.arguments import other_keywords, paged_options
from attn_core.arguments.arguments import AttentionOptions, Cache
from attn_core.arguments.paged_options import PagedOptions
from attn_core.attention import attention
from attn_core.caches.paged.layouts import PagesMetadata
from attn_core.types import AttentionMechanism, AttentionOutput

BY_KEYWORD: Any = None  # the pages' metadata is given as `cache_metadata=`, or `metadata=`


def attend(mechanism: AttentionMechanism, query: ArrayLike, key: ArrayLike | None,
           value: ArrayLike | None, options: AttentionOptions) -> AttentionOutput:
  """Runs `attention` by a mechanism; TypeError for keywords that it does not take."""
  unknown = sorted(options.keys() - AttentionOptions.__annotations__.keys())
  if unknown:
    cure = (f"this function always runs {mechanism.value!r}; call attention(..., mechanism=...) to "
            "choose one" if unknown[0] == "mechanism" else other_keywords.cure(unknown[0]) or
            f"the keywords are {', '.join(AttentionOptions.__annotations__)}")
    raise TypeError(f"mechanism {mechanism.value!r}: got an unexpected keyword argument "
                    f"{unknown[0]!r}; {cure}")
  return attention(query, key, value, mechanism=mechanism.value, **options)


def attend_to_pages(
    mechanism: str, arrays: tuple[ArrayLike, ArrayLike | None, ArrayLike | None], cache: Cache,
    pages_metadata: PagesMetadata | None, options: PagedOptions | None, keywords: AttentionOptions,
) -> AttentionOutput:
  """Runs `attention` by a mechanism that reads pages; see `paged_options.keywords_of`."""
  given = paged_options.keywords_of(mechanism, pages_metadata, options, keywords)
  return attend(AttentionMechanism(mechanism), *arrays, {"cache_view": cache, **given})
