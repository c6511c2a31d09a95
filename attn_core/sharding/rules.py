# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shardings of a model's parameters, by regular expressions over their names."""

from collections.abc import Sequence
import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from attn_core.sharding import partition

# Pairs (regular expression, spec).
Rules = Sequence[tuple[str, PartitionSpec]]


def check_rules(argument: str, rules: Rules) -> list[tuple[re.Pattern, PartitionSpec]]:
  """Checks rules and compiles their patterns.

  Args:
    argument: the name of the rules in errors.
    rules: pairs (regular expression, spec).

  Returns:
    Pairs (compiled pattern, spec).

  Raises:
    ValueError: `rules` are not pairs, a pattern is not a regular expression, or a spec is not a
      `PartitionSpec` (a string would be read as one axis for each of its letters).
  """
  try:
    compiled = [(re.compile(pattern), spec) for pattern, spec in rules]
  except (re.error, TypeError, ValueError) as error:
    raise ValueError(f"{argument}={rules!r}: expected pairs (regular expression, PartitionSpec); "
                     f"{error}") from error
  for pattern, spec in compiled:
    if not isinstance(spec, PartitionSpec):
      raise ValueError(f"{argument} has the spec {spec!r} for the pattern {pattern.pattern!r}: "
                       "expected a PartitionSpec; PartitionSpec() means not sharded")
  return compiled


class Matched(NamedTuple):
  """A spec for every parameter, and the mesh axes that were left out of the specs."""

  specs: Any  # a pytree of PartitionSpec
  drops: tuple[partition.DroppedAxis, ...]


def match_partition_rules(
    rules: Rules, parameters: Any, mesh: Mesh | AbstractMesh | None = None) -> Matched:
  """Finds the spec of every parameter: that of the first rule whose pattern is in its name.

  A parameter's name is its path in the pytree, joined by "/": "model/layers/0/attn/q/kernel".

  Args:
    rules: pairs (regular expression, spec); the first pattern found in a name decides.
    parameters: a pytree of arrays or `jax.ShapeDtypeStruct`. Those with at most one element are
      not sharded, whatever the rules say.
    mesh: if given, axes that it does not have or that do not divide a dimension are left out.

  Returns:
    The specs, in the structure of `parameters`, and the axes that were left out.

  Raises:
    ValueError: as `check_rules`, or a parameter matches none of the rules, or a spec has more
      dimensions than its parameter.
  """
  compiled = check_rules("rules", rules)
  drops: list[partition.DroppedAxis] = []

  def spec_of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    shape = tuple(getattr(leaf, "shape", ()))
    if math.prod(shape) <= 1:
      return PartitionSpec()
    found = next((spec for pattern, spec in compiled if pattern.search(name)), None)
    if found is None:
      raise ValueError(f"rules: none of the patterns {[p.pattern for p, _ in compiled]} is in "
                       f"the parameter {name!r} of shape {shape}; expected a rule for every "
                       "parameter: end the rules with ('.*', PartitionSpec()) for parameters that "
                       "are not sharded")
    fitted = partition.fit(found, shape, mesh, name)
    drops.extend(fitted.drops)
    return fitted.spec

  return Matched(jax.tree_util.tree_map_with_path(spec_of, parameters), tuple(drops))
