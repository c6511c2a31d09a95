# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Stripes of requests' pages, dealt out in turn, so that several devices hold a request's keys.

Stripe w of num_stripes holds the pages w, num_stripes + w, 2 * num_stripes + w, ... of every
request, so that requests of any length fill all stripes equally. `request_groups` describes the
axis of stripes in a `PagesMetadata`.

Positions, tokens and the fields of a stripe are ints, or int32 arrays of any shape.
"""

from typing import Any, NamedTuple

Integers = Any  # int, or an int32 array of numpy or jax


class Stripe(NamedTuple):
  """The positions whose keys a device holds: unit number `number` of every `of` units."""

  number: Integers
  of: Integers
  unit: Integers  # tokens


def held(stripe: Stripe | None, position: Integers) -> Integers:
  """The number of a request's tokens before a position that the stripe holds; None: it holds all.

  At the request's length, this is the number of its tokens in the stripe, for which the allocator
  of the stripe's pages allocates.
  """
  if stripe is None:
    return position
  turn = stripe.of * stripe.unit
  rest = position % turn - stripe.number * stripe.unit
  within = _at_least_0(rest) - _at_least_0(rest - stripe.unit)  # from 0 to the unit
  return position // turn * stripe.unit + within


def _at_least_0(x: Integers) -> Integers:
  """max(x, 0) of a number or an array of any kind."""
  return (x + abs(x)) // 2


def position_of(stripe: Stripe | None, token: Integers) -> Integers:
  """The position of a request's token, given its index among the tokens that the stripe holds."""
  if stripe is None:
    return token
  turn = token // stripe.unit * stripe.of + stripe.number
  return turn * stripe.unit + token % stripe.unit
