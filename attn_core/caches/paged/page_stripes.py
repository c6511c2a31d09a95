"""Stripes of requests' pages: dealt out in turn, so that several devices hold a request's keys.

Of W stripes, stripe w holds the pages w, W + w, 2W + w, ... of every request, so that requests of
any length fill all stripes alike. `groups` says how a `PagesMetadata` has stripes.

Positions, tokens and the fields of a stripe are ints, or int32 arrays of any shape.
"""

from typing import Any, NamedTuple


class Stripe(NamedTuple):
  """Which positions have their keys here: of every `of * unit` in turn, the `number`-th `unit`."""

  number: Any
  of: Any
  unit: Any  # tokens


def held(stripe: Stripe | None, position):
  """How many tokens of a request before a position the stripe holds; None: it holds all.

  With a request's length for the position: the request's tokens in the stripe, which is what an
  allocator of the stripe's pages is to be asked for.
  """
  if stripe is None:
    return position
  turn = stripe.of * stripe.unit
  rest = position % turn - stripe.number * stripe.unit
  within = rest * (rest > 0) - (rest - stripe.unit) * (rest > stripe.unit)  # from 0 to the unit
  return position // turn * stripe.unit + within


def position_of(stripe: Stripe | None, token):
  """Where a token of a request that the stripe holds stands, by its number among them."""
  if stripe is None:
    return token
  turn = token // stripe.unit * stripe.of + stripe.number
  return turn * stripe.unit + token % stripe.unit
