"""Which sharding a model's parameters have, by patterns over their names."""

from collections.abc import Sequence
import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from attn_core.sharding import partition

Rules = Sequence[tuple[str, PartitionSpec]]


def check_rules(argument: str, rules: Rules) -> list[tuple[re.Pattern, PartitionSpec]]:
  """Rules with their patterns compiled.

  Args:
    argument: what an error calls them.
    rules: pairs (regular expression, spec).

  Raises:
    ValueError: no pairs, a pattern that is no regular expression, or a spec that is no
      `PartitionSpec`: a string would be taken for its letters.
  """
  try:
    compiled = [(re.compile(pattern), spec) for pattern, spec in rules]
  except (re.error, TypeError, ValueError) as error:
    raise ValueError(f"{argument}={rules!r}: expected pairs (regular expression, PartitionSpec); "
                     f"{error}") from error
  for pattern, spec in compiled:
    if not isinstance(spec, PartitionSpec):
      raise ValueError(f"{argument} has the spec {spec!r} for the pattern {pattern.pattern!r}: "
                       "expected a PartitionSpec, PartitionSpec() for not sharded")
  return compiled


class Matched(NamedTuple):
  """A spec for every parameter, and the mesh axes that shard nothing."""

  specs: Any  # a tree of PartitionSpec
  drops: tuple[partition.Drop, ...]


def match_partition_rules(
    rules: Rules, parameters: Any, mesh: Mesh | AbstractMesh | None = None) -> Matched:
  """The spec of the first rule whose pattern is found in a parameter's name.

  A name is the keys on the way to the parameter with "/" between: "model/layers/0/attn/q/kernel".

  Args:
    rules: pairs (regular expression, spec), the first that is found counts.
    parameters: a tree of arrays or `jax.ShapeDtypeStruct`. Those with at most one element are not
      sharded, whatever the rules say.
    mesh: where given, axes that it does not have or that do not divide a dimension are left out.

  Raises:
    ValueError: as `check_rules`, a parameter that no rule is for, or a spec with more dimensions
      than the parameter.
  """
  compiled = check_rules("rules", rules)
  drops = []

  def spec_of(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    shape = tuple(getattr(leaf, "shape", ()))
    if math.prod(shape) <= 1:
      return PartitionSpec()
    found = next((spec for pattern, spec in compiled if pattern.search(name)), None)
    if found is None:
      raise ValueError(f"rules: none of the patterns {[p.pattern for p, _ in compiled]} is in "
                       f"the parameter {name!r} of shape {shape}; end them with ('.*', "
                       "PartitionSpec()) for what is not to be sharded")
    fitted = partition.fit(found, shape, mesh, name)
    drops.extend(fitted.drops)
    return fitted.spec

  return Matched(jax.tree_util.tree_map_with_path(spec_of, parameters), tuple(drops))
