# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients in float64 by numpy on the host, which no TPU takes part in."""

from typing import Any, Sequence

import numpy as np


def attention(query: Any, key: Any, value: Any, seen: np.ndarray, soft_cap: float | None,
              cotangents: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, ...]:
  """Returns out, lse and the gradients of query, key and value.

  Args:
    query: [B, T, H, D].
    key: [B, S, K, D].
    value: [B, S, K, E].
    seen: bool [T, S].
    soft_cap: None: none.
    cotangents: of out [B, T, H, E], and of lse [B, H, T] where it is finite.
  """
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  (batch, tokens, heads, width), group = query.shape, query.shape[2] // key.shape[2]
  out, lse = np.zeros((*query.shape[:3], value.shape[3])), np.zeros((batch, heads, tokens))
  gradients = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
  for b, h in np.ndindex(batch, heads):
    q, k, v = query[b, :, h], key[b, :, h // group], value[b, :, h // group]
    logits = q @ k.T * width**-0.5
    logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
    weights = np.where(seen, np.exp(logits), 0)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
      lse[b, h] = np.log(total[:, 0])
    weights = weights / np.where(total == 0, 1, total)
    out[b, :, h] = weights @ v
    d_out, d_lse = cotangents[0][b, :, h], cotangents[1][b, h]
    d_weights = d_out @ v.T
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)
                          + d_lse[:, None])
    d_scores = d_logits if soft_cap is None else d_logits * (1 - (logits / soft_cap)**2)
    gradients[0][b, :, h] = d_scores @ k * width**-0.5
    gradients[1][b, :, h // group] += d_scores.T @ q * width**-0.5
    gradients[2][b, :, h // group] += weights.T @ d_out
  return out, lse, *gradients


def paged(query: Any, key: np.ndarray, value: np.ndarray, lengths: Sequence[int],
          queries: Sequence[int]) -> np.ndarray:
  """Returns causal attention of requests, [T, H, E].

  Args:
    query: [T, H, D], the requests' queries one after the other: their last tokens.
    key: [requests, S, K, D], of which a request has the first `lengths`.
    value: [requests, S, K, E].
    lengths: tokens of the requests.
    queries: how many of these are queries.
  """
  rows, first = [], 0
  for request, (length, number) in enumerate(zip(lengths, queries)):
    own = np.asarray(query[first:first + number], np.float64)[None]
    seen = np.arange(length)[None] <= np.arange(length - number, length)[:, None]
    zeros = np.zeros((1, number, own.shape[2], value.shape[3])), np.zeros((1, own.shape[2], number))
    rows.append(attention(own, key[request, None, :length], value[request, None, :length], seen,
                          None, zeros)[0][0])
    first += number
  return np.concatenate(rows)
