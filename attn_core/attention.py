"""The door: `attention` runs any mechanism, `explain` says which one and why not the others.

Letters: B batch, T query length, S key length, H query heads, K key heads (K divides H),
D query and key width, E value width.
"""

import collections
import functools
import inspect
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attn_core.arguments import normalize as arguments, normalize_paged as arguments_paged
from attn_core.config import metadata as metadata_lib, remat
from attn_core import table
from attn_core.sharding import context_parallel as sequence, shard_map as shard
from attn_core.types import AttentionOutput, BlockSizes


def attention(
    query, key, value, *, mechanism="auto", metadata=None, mode="__train__", layout="bthd",
    mask=None, mask_info=None, bias=None, init_bias=None, causal=True, query_offset=None,
    sliding_window=None, chunk_size=None, softmax_scale=None, logits_soft_cap=None,
    softmax_aux=None, dropout_prob=0.0, dropout_rng=None, deterministic=True, cum_seqlens_q=None,
    cum_seqlens_k=None, cache_view=None, cache_metadata=None, normalize_output=True,
    precision=None, compute_dtype=None, block_sizes=None, policy=None, prevent_cse=True,
    fused_backward=False, optimized=False, mask_value=None, vmem_limit_bytes=None,
    return_lse=False, return_weights=False) -> AttentionOutput:
  """Attention by any mechanism, with one set of meanings on every platform.

    logits  = soft_cap(softmax_scale * query . key) + bias,   soft_cap(x) = c * tanh(x / c)
    weights = softmax over the visible keys (and the sinks) of the logits
    output  = dropout(weights) . value

  Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762; block-wise by Dao,
  FlashAttention-2, https://arxiv.org/abs/2307.08691.

  A query that sees nothing has output 0, lse -inf and gradients 0. A key that is not finite, or
  whose value is not, makes NaN of the queries that see it and touches no other.

  Args:
    query: float [B, T, H, D] in layout bthd, [B, H, T, D] in bhtd, [total_q, H, D] in thd.
    key: float [B, S, K, D], with heads and time as in the query; the query's dtype.
    value: float [B, S, K, E]; the query's dtype.
    mechanism: a name of `AttentionMechanism`. A named mechanism is never replaced by another;
      "auto" takes the platform's first one that honours every argument.
    metadata: `OperationMetadata`: mesh, axes, platform, dtypes, defaults; None: the defaults.
    mode: "__train__", "__prefill__", "__autoregressive__" or "__insert__": which sharding rules.
    layout: "bthd", "bhtd" or "thd" (packed sequences, with `cum_seqlens_q`).
    mask: a `Mask` value, or bool [B or 1, H or 1, T or 1, S or 1]; True = visible.
    mask_info: `MaskInfo`: boolean mask, segment ids, positions. All masks given apply together.
    bias: float [B or 1, H or 1, T or 1, S or 1], added after the soft cap; differentiable.
    init_bias: a function without arguments that returns the bias; not together with `bias`.
    causal: whether keys after the query (by position) are hidden.
    query_offset: position of the first query among the keys (tokens): int or int32 [B]; required
      where T != S and anything depends on positions, unless `mask_info` holds positions.
    sliding_window: (left, right): visible when -left <= key position - query position <= right;
      an int w is (w, w); -1 or None on a side: unbounded (tokens).
    chunk_size: queries see keys of their own chunk of so many positions (tokens).
    softmax_scale: static number; None: the metadata's, else D**-0.5.
    logits_soft_cap: static number c > 0; None: no cap.
    softmax_aux: sinks: float [H] or [H, n], logits that join the softmax without a value.
    dropout_prob: probability in [0, 1) that a weight is dropped; 0: the metadata's.
    dropout_rng: a `jax.random` key. The same weights are dropped by every mechanism and sharding.
    deterministic: whether dropout is off.
    cum_seqlens_q: int32 [B + 1], offsets of the packed sequences, from 0 to total_q; layout thd.
    cum_seqlens_k: int32 [B + 1] of the keys; None: as the queries.
    cache_view: a `DenseCache` or `WindowCache`: key and value are the new tokens' (rotary applied):
      they are appended to every row, and the queries, which are those tokens', see all that the row
      holds then; in mode "__insert__" requests take the rows `cache_metadata.slots`. key=None and
      value=None: the queries are the rows' last tokens, which the cache has. Rows that overflow
      are an error, under jit a flag in the cache and NaN here. What a cache stores in 8 bits has no
      gradient, and to differentiate it is refused; the query has its own.
      Or pages, in layout thd: `PagesV1` for page_attention, `PagesV2` for ragged_page_attention_v2,
      `PagesV3` for v3. Keys and values are in it, so `key` and `value` are None, but for v3, which
      writes them first. Queries are the last tokens of their request.
    cache_metadata: `CacheMetadata`: how many new tokens of each row count, where rows start, slots;
      with pages `PagesMetadata`.
    normalize_output: False: the output is sum(exp(logits) * value), not divided by the softmax's
      denominator.
    precision: `jax.lax.PrecisionLike` of both products.
    compute_dtype: dtype that query, key and value are cast to; None: their own, or the metadata's
      runtime_dtype where that has 16 bits.
    block_sizes: `BlockSizes` (tokens); never changes the meaning.
    policy: remat policy, or its name: recompute in the backward what it does not save.
    prevent_cse: as in `jax.checkpoint`; matters with `policy` only.
    fused_backward: prefer one backward kernel for all gradients where there is a choice; the XLA
      kernel's backward is always one pass.
    optimized: only mechanisms with memory linear in the sequence length.
    mask_value: accepted where it hides (at most -1e9): masked keys have weight 0 in any case.
    vmem_limit_bytes: limit on vector memory of TPU kernels (bytes).
    return_lse: whether to return the logsumexp of the logits.
    return_weights: whether to return the weights (vanilla only).

  Returns:
    AttentionOutput: attention_outputs in the caller's layout and the query's dtype, [B, T, H, E];
    attention_weights [B, H, T, S] after dropout and lse float32 [B, H, T], where asked for (layout
    thd: without B); the updated cache_view, where there is one and it was written.

  Raises:
    ValueError: an argument is not what is said here; the message names it, what came and what was
      expected.
    NotImplementedError: the mechanism does not support an argument (or "auto" finds none that
      does); the message names both, and who would.
  """
  return _run(_Arguments(**locals()))


_Arguments = collections.namedtuple("_Arguments", inspect.signature(attention).parameters)


class Explanation(NamedTuple):
  """Which mechanism runs a call, and what the others answered; `print` it."""

  chosen: str | None  # None: nobody can, or the one asked for refuses
  platform: str
  capability: str | None  # compute capability of the GPU; None: not known, or no GPU
  verdicts: tuple[table.Verdict, ...]  # of every mechanism
  block_sizes: BlockSizes  # as requested; None fields are tuned by the kernel
  replicated: tuple  # sharding.partition.Drop: mesh axes that were asked for and shard nothing
  spread: tuple[str, ...] = ()  # what is spread over which mesh axes

  def __str__(self):
    where = f", compute capability {self.capability or 'unknown'}" if self.platform == "gpu" else ""
    lines = [f"{self.chosen or 'nothing'} runs on platform {self.platform!r}{where}"]
    for verdict in self.verdicts:
      mark = "*" if verdict.mechanism == self.chosen else " "
      lines.append(f"{mark} {verdict.mechanism:26} {verdict}")
    lines += [f"  {part}" for part in self.spread]
    lines += [f"  axis {d.axis!r} does not shard dimension {d.dimension} of {d.tensor}: {d.reason}"
              for d in self.replicated]
    return "\n".join(lines)


def explain(*args, **kwargs) -> Explanation:
  """Which mechanism `attention` would run with these arguments, and why every other one would not.

  Args:
    *args, **kwargs: those of `attention`; query, key and value may be `jax.ShapeDtypeStruct`.

  Returns:
    An Explanation; nothing is computed.

  Raises:
    ValueError: an argument is not what `attention` documents.
  """
  bound = inspect.signature(attention).bind(*args, **kwargs)
  bound.apply_defaults()
  a, answers = _Arguments(**bound.arguments), []
  # Traced, so that nothing is computed and shapes without numbers will do.
  jax.eval_shape(lambda query, key, value: answers.append(
      _explain(a._replace(query=query, key=key, value=value))), a.query, a.key, a.value)
  return answers[0]


def _normalise(a):
  """(the arguments, with "auto" replaced where the cache says which; what they mean)."""
  paged = arguments_paged.mechanism_of(a)
  if paged is None:
    return a, arguments.normalise(a)
  normal = arguments_paged.normalise(a._replace(mechanism=paged))
  return a._replace(mechanism=paged) if a.mechanism == "auto" else a, normal


def _explain(a) -> Explanation:
  a, normal = _normalise(a)
  platform = metadata_lib.resolved_platform(normal.metadata)
  try:
    chosen = table.choose(a.mechanism, platform, normal.request)
  except NotImplementedError:
    chosen = None
  placement = _place(normal, chosen and table.kernel(chosen, platform, normal.request))
  return Explanation(
      chosen, platform, normal.request.capability, table.ask_all(platform, normal.request),
      arguments.with_configured_blocks(normal.call.block_sizes, normal.metadata,
                                       chosen or "vanilla"),
      () if placement is None else placement.drops,
      placement.spread() if chosen and placement is not None else ())


explain.__signature__ = inspect.signature(attention).replace(return_annotation=Explanation)


def _run(a) -> AttentionOutput:
  a, normal = _normalise(a)
  platform = metadata_lib.resolved_platform(normal.metadata)
  mechanism = table.choose(a.mechanism, platform, normal.request)
  sizes = arguments.with_configured_blocks(normal.call.block_sizes, normal.metadata, mechanism)
  kernel = table.kernel(mechanism, platform, normal.request)
  static = _Static(kernel, normal.call._replace(
      operands=None, block_sizes=sizes, placement=_place(normal, kernel)))
  run = functools.partial(_execute, static=static)
  if a.policy is not None:
    policy = remat.checkpoint_policy(a.policy) if isinstance(a.policy, str) else a.policy
    run = jax.checkpoint(run, policy=policy, prevent_cse=a.prevent_cse)
  output = run(normal.call.operands)
  if normal.step is not None:
    output = _after_step(output, normal.step)
  return _to_layout(output, a.layout, normal.dtype)


def _after_step(output: AttentionOutput, step) -> AttentionOutput:
  """With the updated cache, and NaN for rows whose tokens it could not take."""
  spoil = lambda x: None if x is None else jnp.where(
      step.spoiled.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)
  return AttentionOutput(*map(spoil, output[:3]), cache_view=step.cache)


class _Static(NamedTuple):
  """Everything about a call but its arrays; hashable."""

  implementation: table.Implementation
  call: object  # a Call without operands


@functools.partial(jax.jit, static_argnames="static", inline=True)
def _execute(operands, *, static):
  return static.implementation.run(static.call._replace(operands=operands))


def _place(normal, implementation: table.Implementation | None):
  """Where a call runs; with the sequence, or the keys, spread if the implementation does so."""
  if normal.rules is None:  # pages have their own
    return normal.call.placement
  query, key, metadata = *normal.call.operands[:2], normal.metadata
  mesh, reserved = shard.mesh_in_force(metadata_lib.resolved_mesh(metadata)), ()
  ring = metadata.ring, metadata.sequence_axis_name
  spreads = implementation is not None and implementation.spreads_sequence and mesh is not None
  if spreads:
    sequence.require_axes(*ring, mesh)
    if sequence.shards_of(*ring, mesh) > 1:
      sequence.require_unchecked(*normal.call.operands[:3])
    reserved = sum(sequence.axes_of(*ring), ())
  placement = shard.place(
      normal.rules, mesh, query.shape, key.shape, reserved,
      shard_keys=implementation is not None and implementation.shards_keys)
  if placement is None or not spreads:
    return placement
  heads = query.shape[2] // math.prod(mesh.shape[axis] for axis in placement.heads)
  return placement._replace(sequence=sequence.spread(
      *ring, metadata.scan_ring_attention, mesh, (query.shape[1], key.shape[1], heads)))


def _to_layout(output: AttentionOutput, layout: str, dtype) -> AttentionOutput:
  """From layout bthd to the caller's."""
  out = output.attention_outputs.astype(dtype)
  if layout == "bhtd":
    out = out.transpose(0, 2, 1, 3)
  if layout != "thd":
    return output._replace(attention_outputs=out)
  first = lambda x: None if x is None else x[0]
  return output._replace(attention_outputs=out[0], lse=first(output.lse),
                         attention_weights=first(output.attention_weights))
