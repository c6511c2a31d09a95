# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests, their page tables, and the pages of a pool, as the allocator assigns them."""

from attn_core.caches.paged import allocator
from docs.pictures.canvas import Canvas

PAGE_SIZE, PAGES = 4, 10
SLOT, ROW = 30, 34
COLORS = {"A": "c0", "B": "c1", "C": "c2"}


def requests() -> tuple[allocator.Allocator, tuple[tuple[int, int], ...]]:
  """Returns a pool with three requests, and the pages that were copied on a write."""
  pool = allocator.create(PAGES, PAGE_SIZE)
  pool, _ = allocator.extend(allocator.add(pool, "A"), "A", 10)
  pool, copies = allocator.extend(allocator.fork(pool, "A", "B", 6), "B", 5)
  pool, _ = allocator.extend(allocator.add(pool, "C"), "C", 5)
  return pool, copies


def draw() -> Canvas:
  """Draws the page tables at the left and the pool at the right."""
  pool, copies = requests()
  canvas = Canvas(500, "Pages and page tables")
  canvas.text(20, 30, "Requests, page tables and the pool of pages", bold=True, size=16)
  canvas.text(20, 52, f"{PAGE_SIZE} tokens a page; B shares the first 6 tokens of A",
              color="muted")
  canvas.text(40, 92, "page table of each request", color="muted", size=12)
  canvas.text(420, 92, "pool", color="muted", size=12)
  for page in range(PAGES):
    _page(canvas, pool, page)
  for row, (name, request) in enumerate(pool.requests.items()):
    _table(canvas, name, request, 120 + 100 * row)
  (page, copy), = copies
  canvas.text(40, 464, f"The next token of B belongs in page {page}, which A owns too: first the "
              "page is", size=12)
  canvas.text(40, 482, f"copied to page {copy} (copy on write). Full pages stay shared.", size=12)
  return canvas


def _table(canvas: Canvas, name: str, request: allocator.Request, y: float) -> None:
  """Draws the table of a request, with lines to its pages."""
  canvas.text(40, y + 6, f"{name}: {request.length} tokens", bold=True)
  for index, page in enumerate(request.pages):
    x = 40 + 40 * index
    canvas.rect(x, y + 16, 36, 28, "box", outline=COLORS[name], radius=3)
    canvas.text(x + 18, y + 35, str(page), anchor="middle")
  canvas.line([(40 + 40 * len(request.pages) + 6, y + 30), (330, y + 30)], COLORS[name])
  for page in request.pages:
    offset = 4 * list(COLORS).index(name) - 4  # so that lines of several owners stay apart
    canvas.line([(330, y + 30), (412, 116 + ROW * page + offset)], COLORS[name], arrow=True)


def _page(canvas: Canvas, pool: allocator.Allocator, page: int) -> None:
  """Draws the slots of a page and the tokens in them."""
  y = 100 + ROW * page
  owners = [name for name, request in pool.requests.items() if page in request.pages]
  canvas.text(416 + 14, y + 20, str(page), anchor="end", color="muted", size=12)
  for slot in range(PAGE_SIZE):
    x = 440 + SLOT * slot
    token = None
    for name in owners:
      index = pool.requests[name].pages.index(page) * PAGE_SIZE + slot
      if token is None and index < pool.requests[name].length:
        token = index
    canvas.rect(x, y, SLOT - 2, ROW - 8, "empty" if token is None else "box", radius=2)
    if token is not None:
      canvas.text(x + SLOT / 2 - 1, y + 18, str(token), anchor="middle", size=12)
  for index, name in enumerate(owners):
    canvas.rect(440 + SLOT * PAGE_SIZE + 8 + 22 * index, y + 4, 18, 18, COLORS[name], radius=9)
  words = f"shared by {len(owners)}" if len(owners) > 1 else "".join(owners) or "free"
  canvas.text(440 + SLOT * PAGE_SIZE + 58, y + 18, words, color="muted", size=12)
