# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""The entry points: `attention` runs any mechanism, `explain` tells which one and why."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
from jax.typing import ArrayLike, DTypeLike
import numpy as np

from attn_core import table
from attn_core.arguments import (batch_dimensions, block_sizes as block_sizes_lib, latent,
                                 normalize as arguments, normalize_paged, other_keywords, outputs,
                                 question as question_lib)
from attn_core.arguments.arguments import (AnyCacheMetadata, AttentionArguments, Cache, InitBias,
                                           RematPolicy, Shaped)
from attn_core.config import remat
from attn_core.config.metadata import OperationMetadata
from attn_core.dispatch import selection
from attn_core.dispatch.capabilities import Implementation
from attn_core.dispatch.derivatives import Derivatives
from attn_core.masks.info import MaskInfo
from attn_core.masks.mask import Mask
from attn_core.score_mods.score_mod import ScoreMod
from attn_core.sharding import partition, shard_map
from attn_core.types import (MECHANISM_ALIASES, ArrayLayout, AttentionMechanism, AttentionOutput,
                             BlockSizes, Call, LatentOptions, Mode, Operands, PagedOperands,
                             SlidingWindow)


@other_keywords.explained
def attention(
    query: ArrayLike,
    key: ArrayLike | None,
    value: ArrayLike | None,
    *,
    mechanism: str = "auto",
    metadata: OperationMetadata | None = None,
    mode: Mode | None = None,
    layout: ArrayLayout = "bthd",
    mask: Mask | ArrayLike | None = None,
    mask_info: MaskInfo | None = None,
    bias: ArrayLike | None = None,
    init_bias: InitBias | None = None,
    score_mod: ScoreMod | None = None,
    causal: bool = True,
    query_offset: ArrayLike | None = None,
    sliding_window: SlidingWindow = None,
    chunk_size: int | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    dropout_prob: float = 0.0,
    dropout_rng: ArrayLike | None = None,
    deterministic: bool | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    cache_view: Cache | None = None,
    cache_metadata: AnyCacheMetadata | None = None,
    latent_options: LatentOptions | None = None,
    normalize_output: bool = True,
    precision: jax.lax.PrecisionLike = None,
    compute_dtype: DTypeLike | None = None,
    block_sizes: BlockSizes | None = None,
    policy: RematPolicy | str | None = None,
    prevent_cse: bool = True,
    fused_backward: bool = False,
    optimized: bool = False,
    mask_value: float | None = None,
    vmem_limit_bytes: int | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> AttentionOutput:
  """Computes attention by any mechanism, with the same meaning on every platform.

    logits  = score_mod(soft_cap(softmax_scale * query . key) + bias)
    weights = softmax over the visible keys (and the sinks) of the logits
    output  = dropout(weights) . value

  Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762; block-wise by Dao,
  FlashAttention-2, https://arxiv.org/abs/2307.08691.

  A query with no visible key has output 0, lse -inf and gradients 0. Non-finite keys or values
  yield NaN for every query that attends to them and affect no other query; a query that is not
  finite yields NaN for itself, unless it sees no key.

  >>> import jax.numpy as jnp
  >>> from attn_core import attention
  >>> query = jnp.ones((1, 4, 1, 8))  # all logits are equal
  >>> value = jnp.array([0., 2., 4., 6.]).reshape(1, 4, 1, 1)
  >>> attention(query, query, value).attention_outputs.reshape(4)  # causal: means of the past
  Array([0., 1., 2., 3.], dtype=float32)

  Args:
    query: float [B, T, H, D] in layout bthd, [B, H, T, D] in bhtd, [total_q, H, D] in thd. Except
      in thd there may be no or several dimensions in place of B, and then also in results, biases
      and arrays of masks; a `Mask` and a cache count their rows in row-major order. B, T and S may
      be 0: the output is empty, or 0 as no key is visible.
    key: float [B, S, K, D], with heads and time as in the query; of the query's dtype, unless
      `compute_dtype` is given.
    value: float [B, S, K, E]; likewise.
    mechanism: a name of `AttentionMechanism`. A named mechanism is never replaced by another;
      "auto" takes the platform's first one that supports every argument.
    metadata: `OperationMetadata`: mesh, axes, platform, dtypes, defaults; None: the defaults.
    mode: "__train__", "__prefill__", "__autoregressive__" or "__insert__": which sharding rules.
      None: "__train__" without a cache; with one "__insert__" where `cache_metadata` has slots,
      "__autoregressive__" where each row (with pages, each request) has one query, else
      "__prefill__".
    layout: "bthd", "bhtd" or "thd" (packed sequences, with `cum_seqlens_q`).
    mask: a `Mask`, or bool [B or 1, H or 1, T or 1, S or 1]; True = visible.
    mask_info: `MaskInfo`: boolean mask, segment ids, positions. All masks given apply together.
    bias: float [B or 1, H or 1, T or 1, S or 1], added after the soft cap; differentiable.
    init_bias: a function without arguments that returns the bias; not together with `bias`.
    score_mod: a `ScoreMod` of `score_mods`, which the scores go through last, after soft cap and
      bias; differentiable in its arrays. It reads the positions that `dropout_rng` does. Another
      order is written with it: score_mods.dense(bias) >> score_mods.soft_cap(c) caps biased scores.
    causal: whether keys after the query (by position) are hidden.
    query_offset: position of the first query among the keys (tokens): int or int32 [B]; required
      where T != S and anything depends on positions, unless `mask_info` holds positions.
    sliding_window: (left, right): visible when -left <= key position - query position <= right;
      an int w is (w, w); -1 or None on a side: unbounded (tokens).
    chunk_size: queries attend to keys of the same chunk of this many positions (tokens).
    softmax_scale: static number; None: the metadata's, else D**-0.5.
    logits_soft_cap: static number c > 0; None: no cap.
    softmax_aux: sinks: float [H] or [H, num_sinks], logits that join the softmax without a value.
    dropout_prob: probability in [0, 1) that a weight is dropped; 0: the metadata's.
    dropout_rng: a `jax.random` key. The same weights are dropped by every mechanism and sharding.
    deterministic: None: dropout is active where there are a probability and a key; True: dropout
      is off; False: dropout is active, and a probability without a key is an error.
    cum_seqlens_q: int32 [B + 1], offsets of the packed sequences, from 0 to total_q; layout thd.
    cum_seqlens_k: int32 [B + 1] of the keys; None: as the queries.
    cache_view: a `DenseCache` or `WindowCache`: key and value are those of the new tokens (rotary
      applied). They are appended to every row, and the queries, which belong to these tokens,
      attend to all tokens that the row holds afterwards; with `cache_metadata.slots` requests
      take these rows instead. key=None and value=None: the queries belong to the rows' last
      tokens, which the cache holds already. A row that overflows is an error, under jit a flag in
      the cache and NaN in the output. Differentiating with respect to the contents of an 8-bit
      cache is an error; the query has its gradient.
      Or pages, in layout thd: `PagesV1` for page_attention, `PagesV2` for ragged_page_attention_v2,
      `PagesV3` for v3. They hold the keys and values, so `key` and `value` are None, except for
      v3, which writes them first. Queries are the last tokens of their request. `PagesLatent`, for
      multi_latent_ragged_page_attention: `key` is the rows to write first, or None.
    cache_metadata: `CacheMetadata`: number of new tokens per row, first positions, slots; with
      pages `PagesMetadata`.
    latent_options: `LatentOptions`, for `multi_latent_attention`: `key` is one latent row
      [B, S, latent + rope] for each token (layout thd: [total, latent + rope]), value None; with a
      `LatentCache` or `PagesLatent` as cache_view, the rows of the new tokens. The softmax scale is
      (nope + rope)**-0.5 unless given, and an error where no width tells it.
    normalize_output: False: the output is sum(exp(logits) * value), not divided by the softmax's
      denominator.
    precision: `jax.lax.PrecisionLike` of both products; None: operands of 32 and 64 bits are
      multiplied as such on every platform, whatever `jax.default_matmul_precision` says.
    compute_dtype: dtype that query, key and value are cast to, and with it they, a cache and pages
      may differ in dtype; None: their own, or the metadata's runtime_dtype where that has 16 bits.
    block_sizes: `BlockSizes` (tokens); never changes the meaning.
    policy: remat policy, or its name: the backward recomputes what the policy does not save.
    prevent_cse: as in `jax.checkpoint`; matters with `policy` only.
    fused_backward: unused. Each kernel has one backward, which computes all gradients.
    optimized: True: only mechanisms with memory linear in the sequence length.
    mask_value: at most -1e9, and then without influence: the weight of a masked key is exactly 0.
    vmem_limit_bytes: limit on vector memory of TPU kernels (bytes).
    return_lse: whether to return the logsumexp of the logits.
    return_weights: whether to return the weights (vanilla only).

  Returns:
    AttentionOutput: attention_outputs in the caller's layout and the query's dtype, [B, T, H, E];
    where requested attention_weights [B, H, T, S] after dropout and lse float32 [B, H, T] (layout
    thd: without B); the updated cache_view, where a cache was given and written.

  Raises:
    TypeError: an unknown keyword.
    ValueError: an argument is not as documented here; the message names it, the value found and
      the value expected.
    NotImplementedError: the mechanism does not support an argument (or "auto" finds none that
      does); the message names both, and mechanisms that do.
  """
  return _run(AttentionArguments(
      query=query, key=key, value=value, mechanism=mechanism, metadata=metadata, mode=mode,
      layout=layout, mask=mask, mask_info=mask_info, bias=bias, init_bias=init_bias,
      score_mod=score_mod, causal=causal, query_offset=query_offset, sliding_window=sliding_window,
      chunk_size=chunk_size, softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap,
      softmax_aux=softmax_aux, dropout_prob=dropout_prob, dropout_rng=dropout_rng,
      deterministic=deterministic, cum_seqlens_q=cum_seqlens_q, cum_seqlens_k=cum_seqlens_k,
      cache_view=cache_view, cache_metadata=cache_metadata, latent_options=latent_options,
      normalize_output=normalize_output, precision=precision, compute_dtype=compute_dtype,
      block_sizes=block_sizes, policy=policy, prevent_cse=prevent_cse,
      fused_backward=fused_backward, optimized=optimized, mask_value=mask_value,
      vmem_limit_bytes=vmem_limit_bytes, return_lse=return_lse, return_weights=return_weights))


class Explanation(NamedTuple):
  """The mechanism that runs a call, and the answer of every other one; `print` it."""

  # None: no mechanism supports the call, or the requested one does not.
  chosen: str | None
  platform: str
  capability: str | None  # compute capability of the GPU; None: unknown, or not a GPU
  verdicts: tuple[selection.Verdict, ...]  # of every mechanism
  block_sizes: BlockSizes  # as requested; None fields are tuned by the kernel
  replicated: tuple[partition.DroppedAxis, ...]  # mesh axes that were requested and shard nothing
  spread: tuple[str, ...] = ()  # which dimensions are sharded over which mesh axes
  axes: tuple[str, ...] = ()  # the role of every mesh axis of several devices
  # Which implementations compute the derivatives of the call; None: no mechanism supports it.
  derivatives: Derivatives | None = None

  def __str__(self) -> str:
    where = f", compute capability {self.capability or 'unknown'}" if self.platform == "gpu" else ""
    lines = [f"{self.chosen or 'nothing'} runs on platform {self.platform!r}{where}"]
    for verdict in self.verdicts:
      mark = "*" if verdict.mechanism == self.chosen else " "
      lines.append(f"{mark} {verdict.mechanism:26} {verdict}")
    derivatives = () if self.derivatives is None else str(self.derivatives).split("\n")
    lines += [f"  {part}" for part in (*derivatives, *self.spread, *self.axes)]
    lines += [f"  axis {d.axis!r} does not shard dimension {d.dimension} of {d.tensor}: {d.reason}"
              for d in self.replicated]
    return "\n".join(lines)


@other_keywords.explained
def explain(
    query: Shaped,
    key: Shaped | None,
    value: Shaped | None,
    *,
    mechanism: str = "auto",
    metadata: OperationMetadata | None = None,
    mode: Mode | None = None,
    layout: ArrayLayout = "bthd",
    mask: Mask | ArrayLike | None = None,
    mask_info: MaskInfo | None = None,
    bias: Shaped | None = None,
    init_bias: InitBias | None = None,
    score_mod: ScoreMod | None = None,
    causal: bool = True,
    query_offset: ArrayLike | None = None,
    sliding_window: SlidingWindow = None,
    chunk_size: int | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Shaped | None = None,
    dropout_prob: float = 0.0,
    dropout_rng: ArrayLike | None = None,
    deterministic: bool | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    cache_view: Cache | None = None,
    cache_metadata: AnyCacheMetadata | None = None,
    latent_options: LatentOptions | None = None,
    normalize_output: bool = True,
    precision: jax.lax.PrecisionLike = None,
    compute_dtype: DTypeLike | None = None,
    block_sizes: BlockSizes | None = None,
    policy: RematPolicy | str | None = None,
    prevent_cse: bool = True,
    fused_backward: bool = False,
    optimized: bool = False,
    mask_value: float | None = None,
    vmem_limit_bytes: int | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Explanation:
  """Explains which mechanism `attention` would run with these arguments, and why no other one.

  >>> import jax
  >>> from attn_core import OperationMetadata, explain
  >>> x = jax.ShapeDtypeStruct((1, 8, 2, 16), "float32")
  >>> explanation = explain(x, x, x, softmax_aux=jax.ShapeDtypeStruct((2,), "float32"),
  ...                       metadata=OperationMetadata(platform="cpu"))
  >>> explanation.chosen
  'flash_attn2'
  >>> [str(verdict) for verdict in explanation.verdicts if verdict.mechanism == "sdpa"]
  ['softmax_aux (sinks, with their gradient) is not supported']

  Args:
    query: as in `attention`, and so are all other arguments; each array may be a
      `jax.ShapeDtypeStruct` instead.
    key: as in `attention`.
    value: as in `attention`.
    mechanism: as in `attention`.

  Returns:
    An Explanation; nothing is computed.

  Raises:
    ValueError: an argument is not as `attention` documents.
  """
  return _explain_shapes(AttentionArguments(
      query=query, key=key, value=value, mechanism=mechanism, metadata=metadata, mode=mode,
      layout=layout, mask=mask, mask_info=mask_info, bias=bias, init_bias=init_bias,
      score_mod=score_mod, causal=causal, query_offset=query_offset, sliding_window=sliding_window,
      chunk_size=chunk_size, softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap,
      softmax_aux=softmax_aux, dropout_prob=dropout_prob, dropout_rng=dropout_rng,
      deterministic=deterministic, cum_seqlens_q=cum_seqlens_q, cum_seqlens_k=cum_seqlens_k,
      cache_view=cache_view, cache_metadata=cache_metadata, latent_options=latent_options,
      normalize_output=normalize_output,
      precision=precision, compute_dtype=compute_dtype, block_sizes=block_sizes, policy=policy,
      prevent_cse=prevent_cse, fused_backward=fused_backward, optimized=optimized,
      mask_value=mask_value, vmem_limit_bytes=vmem_limit_bytes, return_lse=return_lse,
      return_weights=return_weights))


def _explain_shapes(a: AttentionArguments) -> Explanation:
  """Explains a call while it is traced, so that nothing is computed and shapes are enough."""
  leaves, structure = jax.tree.flatten(a)
  operands = len(jax.tree.leaves((a.query, a.key, a.value)))  # the first leaves
  arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)
            or i < operands and isinstance(x, (jax.Array, np.ndarray))}
  explanations: list[Explanation] = []
  jax.eval_shape(lambda traced: explanations.append(_explain(jax.tree.unflatten(
      structure, [traced.get(i, x) for i, x in enumerate(leaves)]))), arrays)
  return explanations[0]


def _normalize(a: AttentionArguments) -> tuple[AttentionArguments, arguments.Normalized]:
  """The arguments, with "auto" replaced where the cache implies a mechanism, and the call."""
  paged = normalize_paged.mechanism_of(a.mechanism, a.cache_view)
  if paged is None:
    return a, arguments.normalize(a)
  normal = normalize_paged.normalize(a._replace(mechanism=paged))
  return a._replace(mechanism=paged) if a.mechanism == "auto" else a, normal


def _with_latent_rows(a: AttentionArguments) -> AttentionArguments:
  """Returns the arguments with latent rows, if any, as keys of one head, and no alias."""
  if a.mechanism in MECHANISM_ALIASES:
    a = a._replace(mechanism=AttentionMechanism(a.mechanism).value)
  return latent.expand(a, a.metadata.softmax_scale if isinstance(a.metadata, OperationMetadata)
                       else None)


def _explain(a: AttentionArguments) -> Explanation:
  """Explains a call whose arrays are traced."""
  a, normal = _normalize(batch_dimensions.fold(_with_latent_rows(a))[0])
  question = question_lib.question_of(normal)
  derivatives = None
  try:
    verdict = selection.choose(table.RULES, a.mechanism, question)
    chosen, call = verdict.mechanism, _static_call(normal, question, verdict)
    if any(call.call.block_sizes) and not outputs.is_empty(normal.call):
      # Only the kernel knows which sizes it takes; it raises.
      _execute(normal.call.operands, static=call)
    placement = call.call.placement
    derivatives = call.implementation.derivatives_of(
        question.request_for(call.implementation))
  except NotImplementedError:
    chosen, placement = None, question_lib.place(normal, None)
  sizes = block_sizes_lib.with_configured_blocks(
      normal.call.block_sizes, normal.metadata, chosen or "vanilla")
  spread, axes = ((placement.sharded_dimensions(), placement.roles_of_axes())
                  if chosen and placement is not None else ((), ()))
  return Explanation(
      chosen, *question.target, selection.ask_all(table.RULES, question), sizes,
      () if placement is None else placement.drops, spread, axes, derivatives)


def _run(a: AttentionArguments) -> AttentionOutput:
  """Runs a call by the implementation that `_explain` names."""
  a, batch = batch_dimensions.fold(_with_latent_rows(a))
  a, normal = _normalize(a)
  question = question_lib.question_of(normal)
  static = _static_call(normal, question,
                        selection.choose(table.RULES, a.mechanism, question))
  run: Callable[[Operands | PagedOperands], AttentionOutput] = functools.partial(
      _execute, static=static)
  if a.policy is not None:
    policy = remat.checkpoint_policy(a.policy) if isinstance(a.policy, str) else a.policy
    run = jax.checkpoint(run, policy=policy, prevent_cse=a.prevent_cse)
  operands = outputs.with_rows(normal.call, normal.step, static.implementation, static.call)
  output = outputs.empty(normal.call) if outputs.is_empty(normal.call) else run(operands)
  if normal.step is not None:
    output = outputs.with_cache(output, normal.step, outputs.writes_nan(normal.call, operands))
  output = outputs.to_layout(output, a.layout, normal.dtype)
  return output if batch is None else batch.unfold(output)


class _Static(NamedTuple):
  """The static part of a call: everything but its arrays; hashable."""

  implementation: Implementation
  call: Call  # without operands


def _static_call(normal: arguments.Normalized, question: selection.Question,
                 verdict: selection.Verdict) -> _Static:
  """Returns the static part of a call that the verdict's implementation runs."""
  assert verdict.implementation is not None
  sizes = block_sizes_lib.with_configured_blocks(
      normal.call.block_sizes, normal.metadata, verdict.mechanism)
  sizes = block_sizes_lib.with_chip_memory(sizes, normal.request.tpu_version)
  return _Static(verdict.implementation, normal.call._replace(
      operands=None, block_sizes=sizes,
      placement=question.request_for(verdict.implementation).placement))


@functools.partial(jax.jit, static_argnames="static", inline=True)
def _execute(operands: Operands | PagedOperands, *, static: _Static) -> AttentionOutput:
  output = static.implementation.run(static.call._replace(operands=operands))
  return shard_map.as_query(output, static.call.placement)
