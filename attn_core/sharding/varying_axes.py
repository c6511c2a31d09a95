"""Which manual mesh axes arrays vary over, inside `jax.shard_map(check_vma=True)`."""

import jax


def vary_alike(tree):
  """All arrays of a tree, varying over the axes that any of them varies over."""
  axes = frozenset().union(*(_varying(x) for x in jax.tree.leaves(tree)))
  def vary(x):
    missing = axes - _varying(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
  return jax.tree.map(vary, tree)


def start(like, tree):
  """What a loop starts from, varying as what it is computed from does: an array `like`."""
  return vary_alike((like, tree))[1]


def _varying(x) -> frozenset:
  return frozenset(jax.typeof(x).manual_axis_type.varying)
