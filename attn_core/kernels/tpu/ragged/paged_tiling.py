# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Block sizes of the ragged kernel over pages, and the calls that a TPU's memory suffices for."""

import math
from typing import Sequence

import jax
import jax.numpy as jnp

from attn_core.caches.paged import layouts
from attn_core.caches.paged.latent_layout import PagesLatent
from attn_core.caches.paged.layouts import Pages
from attn_core.kernels.common import paged_operands, query_block_queue
from attn_core.kernels.tpu.ragged import common, mod_lines, row_writes
from attn_core.kernels.tpu.ragged.kv_layout import LANES, KVLayout, is_heads_major, whole_tile
from attn_core.score_mods import tables
from attn_core.types import NO_SCORE_MOD, BlockSizes, PagedOperands, cdiv

BLOCK_ROWS = 2048  # most rows of a step where requests have more than one query
BLOCK_KV = 512  # tokens of a key block where rows are many
FEW_ROWS_BLOCK_KV = 1024  # where they are few
# Most rows of all blocks for each row of a query: where requests may have few queries each, and
# where some have many.
MOST_PADDING = (4, 32)
FEW_QUERIES = 8  # of a request, on average
MOST_PAGES = 128  # of a key block: a transfer each
DTYPES = ("float32", "bfloat16")


def choose_block_q(operands: PagedOperands, block_sizes: BlockSizes, layout: KVLayout,
                    group_size: int) -> int:
  """Returns the query tokens of a block: if they are not given, so many that the steps fit."""
  tokens, requests = operands.query.shape[0], operands.metadata.context_lens.shape[0]
  wanted = block_sizes.block_q
  if wanted is None:
    # As many as requests have on average; where there is one per request, blocks have one.
    average = 2 ** (tokens // requests).bit_length() // 2
    rows, mask = LANES, operands.metadata.draft_mask
    if mask is not None:  # see `paged`: a tree is one block
      rows, average = 1, 2 ** (mask.shape[1] - 1).bit_length()
    elif operands.metadata.distribution is not None:
      average = _block_q_of_many(tokens, requests)
    elif tokens <= FEW_QUERIES * requests and layout.key_heads <= common.FEW_HEADS:
      rows = common.FEW_ROWS
    wanted = max(1, min(BLOCK_ROWS // group_size, max(rows // group_size, average)))
    wanted = 1 if tokens <= requests else wanted
  block_q, _ = paged_operands.choose_block_sizes(operands, BlockSizes(wanted), group_size)
  if block_sizes.block_q is not None:
    return block_q
  def fits_vector_memory(block_q: int) -> bool:
    needed = _vector_bytes(operands, block_sizes, layout, (block_q, group_size))
    return needed <= common.vector_memory(block_sizes).chosen
  while block_q > 1 and not fits_vector_memory(block_q):
    block_q //= 2
  # With many query heads a key head, blocks of the rows above are too many.
  while (1 < block_q < tokens and fits_vector_memory(2 * block_q)
         and scalar_bytes(operands, block_q) > common.SCALAR_BYTES):
    block_q *= 2
  return block_q


def _vector_bytes(operands: PagedOperands, block_sizes: BlockSizes, layout: KVLayout,
                  rows: tuple[int, int]) -> int:
  """Estimates the vector memory of a kernel.

  Args:
    operands: only shapes and dtypes count.
    block_sizes: those given; None fields are chosen.
    layout: of the pages.
    rows: (query tokens of a block, query heads of a key head).
  """
  block_q, group_size = rows
  blocks = with_blocks(layout, operands, block_sizes, block_q * group_size)
  shape = common.StepShape(blocks, group_size, block_q, operands.metadata.page_tables.shape[1])
  return shape.vmem_bytes(operands.query.dtype)


def _block_q_of_many(tokens: int, requests: int) -> int:
  """Returns the query tokens of a block where requests of one query are computed separately.

  The other requests may have all other tokens; but where requests are many, large blocks would be
  mostly padding.
  """
  block_q = 2 ** max(0, tokens - requests - 1).bit_length()
  padding = MOST_PADDING[tokens > FEW_QUERIES * requests]
  while block_q > 1 and query_block_queue.capacity(tokens, requests, block_q) * block_q > (
      padding * tokens):
    block_q //= 2
  return block_q


def possible_tokens(operands: PagedOperands, block_q: int, chosen: int) -> int:
  """Returns how many tokens may be queries of the requests that have blocks of `block_q`.

  Where blocks are of another size than the chosen one, requests have one query each, and come
  before all others.
  """
  tokens, requests = operands.query.shape[0], operands.metadata.context_lens.shape[0]
  return tokens if block_q == chosen else min(tokens, requests)


def _num_steps(operands: PagedOperands, block_q: int, chosen: int) -> int:
  """Returns the number of steps of the requests that have blocks of `block_q`."""
  return query_block_queue.capacity(possible_tokens(operands, block_q, chosen),
                                    operands.metadata.context_lens.shape[0], block_q)


def scalar_bytes(operands: PagedOperands, chosen: int) -> int:
  """Returns the scalar memory for the requests and steps of a kernel.

  Args:
    operands: only shapes count.
    chosen: query tokens of a block.
  """
  requests, row_pages = operands.metadata.page_tables.shape
  mask = operands.metadata.draft_mask
  drafts = 0 if mask is None else 2 * requests * mask.shape[1]
  # Tables, lengths, starts and drafts; arrays are padded to whole lanes.
  words = sum(cdiv(n, LANES) for n in (requests * row_pages, requests, requests + 1, drafts))
  steps = max(_num_steps(operands, block_q, chosen) for block_q in {
      chosen, chosen if operands.metadata.distribution is None else 1})
  return 4 * LANES * (words + len(common.Steps._fields) * cdiv(steps, LANES))


def with_blocks(layout: KVLayout, operands: PagedOperands, block_sizes: BlockSizes,
                rows: int) -> KVLayout:
  """Sets the pages of a block and the number of blocks in vector memory.

  Args:
    layout: its other fields.
    operands: only shapes count.
    block_sizes: those given; None fields are chosen.
    rows: of a key head and a block of queries.
  """
  few_rows, memory = common.has_few_rows(layout, rows), common.vector_memory(block_sizes)
  layout = layout._replace(slots=common.FEW_ROWS_SLOTS if few_rows else 2)
  chosen = BLOCK_KV
  if few_rows:
    # Few heads are computed faster than a block's other work.
    chosen = FEW_ROWS_BLOCK_KV * min(2, max(1, 8 // max(1, layout.key_heads)))
    # Pieces of latents overlap within a block, where they are more than the memory's time hides.
    if rows > common.FEW_ROWS or layout.rest_dtype is not None:
      chosen *= 2
    if layout.latent:
      chosen = min(chosen, common.MOST_SCORES // (cdiv(rows, LANES) * LANES))
  wanted = cdiv(block_sizes.block_kv or chosen, layout.page_size)
  if block_sizes.block_kv is None:
    # Whole lanes of tokens, as many as the tables hold.
    held = operands.metadata.page_tables.shape[1] * layout.page_size
    wanted = min(wanted, cdiv(cdiv(held, LANES) * LANES, layout.page_size))
  most = max(1, wanted * memory.buffers // layout._replace(block_pages=wanted).vmem_bytes())
  block_pages = min(wanted, most, MOST_PAGES)
  least = _least_pages(layout)
  sized = lambda pages: layout._replace(block_pages=max(1, pages // least) * least)
  is_little = block_sizes.vmem_limit_bytes is not None
  if (layout.latent or is_little) and block_sizes.block_kv is None:
    fits = lambda pages: common.StepShape(sized(pages), rows, 1, 1).vmem_bytes(
        operands.query.dtype) <= memory.chosen
    while block_pages > least and not fits(block_pages):
      block_pages //= 2
  return sized(block_pages)


def _least_pages(layout: KVLayout) -> int:
  """Returns the pages of the smallest block: scales of tokens fill whole lanes."""
  return LANES // math.gcd(LANES, layout.page_size) if layout.scales == "token" else 1


def make_layout(cache: Pages, heads: layouts.Heads, block_pages: int) -> KVLayout:
  """Returns the layout of the pages of a cache, in blocks of `block_pages`."""
  is_v1, dtype = isinstance(cache, layouts.PagesV1), layouts.dtype_of(cache)
  if isinstance(cache, PagesLatent):
    width, value_width = cache.pages.shape[-1], cdiv(cache.widths.latent, LANES) * LANES
    rest = None if cache.rope is None else cache.rope.dtype
    width += 0 if cache.rope is None else cache.rope.shape[-1]
    return KVLayout(False, False, 1, (width, value_width), jnp.dtype(dtype),
                    layouts.page_size(cache), block_pages, latent=True, rest_dtype=rest,
                    scales=None if rest is None else "token")
  stored = layouts.heads_of(cache)
  # Heads that pad a layout are copied, although nothing reads them.
  padded = stored.key_heads if isinstance(cache, layouts.PagesV3) else 0
  scales = None
  if cache.key_scales is not None:
    scales = "token" if cache.key_scales.ndim else "tensor"
  # Keys and values in one array have the width of the wider ones.
  widths = ((stored.key_width, stored.value_width) if isinstance(cache, layouts.PagesV1) else
            (cache.pages.shape[-1],))
  heads_major = is_v1 or isinstance(cache, layouts.PagesV2) and is_heads_major(
      2 * heads.key_heads, dtype)
  return KVLayout(not is_v1, heads_major, heads.key_heads, widths, jnp.dtype(dtype),
                  layouts.page_size(cache), block_pages, scales=scales,
                  lane_parts=lane_parts(cache), stored_heads=padded)


def lane_parts(cache: Pages) -> int:
  """Returns `KVLayout.lane_parts`; 1 where XLA would copy the pages to split them."""
  if isinstance(cache, layouts.PagesV3) and layouts.dtype_of(cache).itemsize > 1:
    return cache.pages.shape[-1] // LANES
  return 1


# --- Limits. -------------------------------------------------------------------------------------


def unsupported_reason(query: jax.Array, cache: Pages, metadata: layouts.PagesMetadata,
                       heads: layouts.Heads, block_sizes: BlockSizes) -> str | None:
  """Returns why the kernel does not support a call, by shapes and dtypes, or None if it does.

  Args:
    query: [T, H, D].
    cache: pages in any layout.
    metadata: of the pages.
    heads: the heads in the pages, without their padding.
    block_sizes: those given; None fields are chosen.
  """
  stored, dtype = layouts.dtype_of(cache), query.dtype.name
  quantized = cache.key_scales is not None
  if dtype not in DTYPES or not quantized and stored != query.dtype or (
      quantized and stored.itemsize > 1):
    return (f"queries of {dtype} and pages of {stored.name}: the TPU kernel computes in "
            f"{' and '.join(DTYPES)}, from pages of these or of 8 bits")
  if isinstance(cache, PagesLatent):
    reason = _latent_reason(cache)
    if reason is not None:
      return reason
  layout = make_layout(cache, heads, 1)
  for width in layout.widths:
    if width > LANES and width % LANES:
      return (f"head_dim {width}: the TPU kernel needs a multiple of {LANES} above {LANES}, as XLA "
              "would copy all other pages at every call: layout v3 pads them; keys and queries may "
              "be padded with zeros")
  least, buffers = _least_pages(layout), common.vector_memory(block_sizes).buffers
  if layout._replace(block_pages=least).vmem_bytes() > buffers:
    pages = "one page" if least == 1 else f"{least} pages, whose scales fill whole lanes,"
    return (f"pages of {layout.page_size} tokens: keys and values of {pages} do not fit the "
            f"TPU kernel's {buffers} bytes")
  if layout.latent and row_writes.bytes_of_slot(layout) > row_writes.MOST_BYTES:
    return (f"pages of {layout.page_size} latent rows, which are not whole tiles of "
            f"{whole_tile(*layout.array_dtypes)}: the TPU kernel would write them through more "
            f"than {row_writes.MOST_BYTES} bytes of vector memory")
  mask = metadata.draft_mask
  if mask is not None and mask.shape[1] > common.MOST_DRAFTS:
    return (f"cache_metadata.draft_mask of {mask.shape[1]} tokens a request: the TPU kernel takes "
            f"trees of up to {common.MOST_DRAFTS}")
  operands, group_size = PagedOperands(query, cache, metadata), query.shape[1] // heads.key_heads
  block_q = choose_block_q(operands, block_sizes, layout, group_size)
  needed = scalar_bytes(operands, block_q)
  if needed > common.SCALAR_BYTES:
    steps = _num_steps(operands, block_q, block_q)
    cure = "a larger block_q or " if block_sizes.block_q is not None else ""
    return (f"page tables of {list(metadata.page_tables.shape)} and {steps} steps of {block_q} "
            f"queries need {needed} bytes of scalar memory, of which the TPU kernel has "
            f"{common.SCALAR_BYTES}: give {cure}narrower tables, larger pages or fewer requests")
  return _vector_reason(operands, block_sizes, layout, group_size)


def _vector_reason(operands: PagedOperands, block_sizes: BlockSizes, layout: KVLayout,
                   group_size: int) -> str | None:
  """Returns why blocks do not fit in vector memory, and which do, or None if they fit."""
  def needed(sizes: BlockSizes) -> int:
    block_q = choose_block_q(operands, sizes, layout, group_size)
    return _vector_bytes(operands, sizes, layout, (block_q, group_size))

  most = common.vector_memory(block_sizes).most
  if needed(block_sizes) <= most:
    return None
  fitting = []
  for name in ("block_q", "block_kv"):
    size = getattr(block_sizes, name)
    while size and needed(block_sizes._replace(**{name: size})) > most:
      size //= 2
    fitting += [f"{name} of at most {size}"] if size else []
  given = " and ".join(f"{name} {size}" for name in ("block_q", "block_kv")
                       if (size := getattr(block_sizes, name)))
  cure = " or ".join(fitting) or "fewer or narrower heads"
  return (f"{'blocks of ' + given if given else 'one query'} with {operands.query.shape[1]} query "
          f"heads: the TPU kernel would need {needed(block_sizes)} bytes of vector memory, of "
          f"which it has {most}: give {cure}")


def unsupported_mod(query: jax.Array, cache: Pages, metadata: layouts.PagesMetadata,
                    heads: layouts.Heads, block_sizes: BlockSizes,
                    structure: jax.tree_util.PyTreeDef,
                    arrays: Sequence[jax.ShapeDtypeStruct]) -> str | None:
  """Returns why the kernel does not compute a score mod, or None.

  Args:
    query, cache, metadata, heads, block_sizes: as in `unsupported_reason`.
    structure: of the score mod's term, or that of a call without one.
    arrays: of the term; only shapes are used.
  """
  if structure != NO_SCORE_MOD and metadata.draft_mask is not None:
    return "a score mod with cache_metadata.draft_mask, whose positions are those in the tree"
  if not (found := tables.find(structure)):
    return None
  operands, group_size = PagedOperands(query, cache, metadata), query.shape[1] // heads.key_heads
  layout = make_layout(cache, heads, 1)
  block_q = choose_block_q(operands, block_sizes, layout, group_size)
  name, rows = "score_mods.relative or by_distance", block_q * group_size
  if not common.has_few_rows(layout, rows):
    return (f"{name} with {rows} queries and heads a key head in a block: the TPU kernel looks "
            f"tables up for up to {common.FEW_ROWS}")
  shape = common.StepShape(with_blocks(layout, operands, block_sizes, rows), group_size, block_q)
  size = mod_lines.length([arrays[n].shape[2] for n in found], shape)
  needed = 4 * len(found) * size * shape.head_groups * shape.group_rows
  if needed > mod_lines.MOST_BYTES:
    return (f"{name} of {block_q} queries and {query.shape[1]} heads: lines of {size} "
            f"numbers need {needed} bytes of vector memory, of which the TPU kernel gives them "
            f"{mod_lines.MOST_BYTES}")
  return None


def _latent_reason(cache: PagesLatent) -> str | None:
  """Returns why the kernel does not read pages of latent rows, or None if it does."""
  widths = [cache.pages.shape[-1]]
  if cache.rope is not None:
    if widths[0] % LANES:
      return (f"latents of {widths[0]} numbers in {cache.pages.dtype.name}: the TPU kernel needs a "
              f"multiple of {LANES}")
    if cache.rope.dtype.name not in DTYPES:
      return (f"a rotary part in {cache.rope.dtype.name}: the TPU kernel reads "
              f"{' and '.join(DTYPES)}")
    widths.append(cache.rope.shape[-1])
  if widths[-1] % LANES:
    # XLA stores such pages with their numbers along the lanes, and would copy the pool.
    part = "latent rows" if cache.rope is None else "a rotary part"
    return (f"{part} of {widths[-1]} numbers: the TPU kernel reads rows that are padded to a "
            f"multiple of {LANES}, as by caches.latent_pages.init(padded=True)")
  return None
