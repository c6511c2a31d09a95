# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Maps the meanings of a tensor's dimensions to the mesh axes that shard them.

A tensor's dimensions are named by meaning (BATCH, QUERY_LENGTH, HEAD, ...), a `PartitionAxis` says
which mesh axes shard each meaning, and `resolve` makes a `jax.sharding.PartitionSpec` of the two.
Mesh axes that had to be left out of a spec are returned as data, one `DroppedAxis` each.
"""

from collections.abc import Iterable, Sequence
import math
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from attn_core.array_axes import axes_of
from attn_core.types import DECODE_MODES, MODES

AxisNames = str | tuple[str, ...] | None  # mesh axes that shard one dimension; None: not sharded

BATCH = "batch"
QUERY_LENGTH = "query_length"
KV_LENGTH = "kv_length"
LENGTH = "length"
BIAS_KV_SEQ = "bias_kv_seq"
HEAD = "head"
KV_HEAD = "kv_head"
BIAS_HEAD_SEQ = "bias_head_seq"
HEAD_DIM = "head_dim"
KV_HEAD_DIM = "kv_head_dim"
HIDDEN_STATE = "hidden_state"
MLP_INTERMEDIATE = "mlp_intermediate"
VOCAB = "vocab"
EXPERT = "expert"
EXPERT_GATE = "expert_gate"
DATA_PARALLEL = "data_parallel"
FULLY_SHARDED_DATA_PARALLEL = "fully_sharded_data_parallel"
TENSOR_PARALLEL = "tensor_parallel"
SEQUENCE_PARALLEL = "sequence_parallel"
EXPERT_PARALLEL = "expert_parallel"


class PartitionAxis(NamedTuple):
  """The mesh axes for every meaning a dimension can have.

  A field is the name of a mesh axis, a tuple of names (slowest first), or None: not sharded. The
  decode modes read the decode_* fields, where None means not sharded as well.
  """

  data_parallel_axis: AxisNames = "dp"
  fully_sharded_data_parallel_axis: AxisNames = "fsdp"
  tensor_parallel_axis: AxisNames = "tp"
  sequence_parallel_axis: AxisNames = "sp"
  expert_parallel_axis: AxisNames = "ep"
  batch_axis: AxisNames = ("fsdp", "dp")
  sequence_axis: AxisNames = "sp"
  query_sequence_axis: AxisNames = "sp"
  head_axis: AxisNames = "tp"
  kv_head_axis: AxisNames = "tp"
  key_sequence_axis: AxisNames = "sp"
  hidden_state_axis: AxisNames = "tp"
  mlp_intermediate_axis: AxisNames = "tp"
  vocab_axis: AxisNames = "tp"
  expert_axis: AxisNames = "ep"
  expert_gate_axis: AxisNames = None
  attention_dim_axis: AxisNames = None
  attention_kv_dim_axis: AxisNames = None
  bias_head_sequence_axis: AxisNames = None
  bias_key_sequence_axis: AxisNames = None
  decode_batch_axis: AxisNames = ("fsdp", "dp")
  decode_query_sequence_axis: AxisNames = None
  decode_head_axis: AxisNames = "tp"
  decode_kv_head_axis: AxisNames = "tp"
  decode_key_sequence_axis: AxisNames = "sp"
  decode_attention_dim_axis: AxisNames = None
  decode_attention_kv_dim_axis: AxisNames = None


class Fields(NamedTuple):
  """Names of the fields of a `PartitionAxis` that hold one meaning's mesh axes."""

  plain: str  # read in "__train__" and "__prefill__"
  decode: str  # read in "__autoregressive__" and "__insert__"


# In order of priority: if several meanings request one mesh axis, the first gets it.
SEMANTIC_AXES = {
    BATCH: Fields("batch_axis", "decode_batch_axis"),
    QUERY_LENGTH: Fields("query_sequence_axis", "decode_query_sequence_axis"),
    KV_LENGTH: Fields("key_sequence_axis", "decode_key_sequence_axis"),
    LENGTH: Fields("sequence_axis", "sequence_axis"),
    BIAS_KV_SEQ: Fields("bias_key_sequence_axis", "bias_key_sequence_axis"),
    HEAD: Fields("head_axis", "decode_head_axis"),
    KV_HEAD: Fields("kv_head_axis", "decode_kv_head_axis"),
    BIAS_HEAD_SEQ: Fields("bias_head_sequence_axis", "bias_head_sequence_axis"),
    HEAD_DIM: Fields("attention_dim_axis", "decode_attention_dim_axis"),
    KV_HEAD_DIM: Fields("attention_kv_dim_axis", "decode_attention_kv_dim_axis"),
    HIDDEN_STATE: Fields("hidden_state_axis", "hidden_state_axis"),
    MLP_INTERMEDIATE: Fields("mlp_intermediate_axis", "mlp_intermediate_axis"),
    VOCAB: Fields("vocab_axis", "vocab_axis"),
    EXPERT: Fields("expert_axis", "expert_axis"),
    EXPERT_GATE: Fields("expert_gate_axis", "expert_gate_axis"),
    DATA_PARALLEL: Fields("data_parallel_axis", "data_parallel_axis"),
    FULLY_SHARDED_DATA_PARALLEL: Fields(
        "fully_sharded_data_parallel_axis", "fully_sharded_data_parallel_axis"),
    TENSOR_PARALLEL: Fields("tensor_parallel_axis", "tensor_parallel_axis"),
    SEQUENCE_PARALLEL: Fields("sequence_parallel_axis", "sequence_parallel_axis"),
    EXPERT_PARALLEL: Fields("expert_parallel_axis", "expert_parallel_axis"),
}


class DroppedAxis(NamedTuple):
  """A mesh axis that was requested for a spec and left out of it."""

  tensor: str  # as the caller named it
  dimension: int  # counted from 0
  axis: str  # the mesh axis
  reason: str


class Resolution(NamedTuple):
  """A spec with one entry per dimension, and the mesh axes that were left out of it."""

  spec: PartitionSpec
  drops: tuple[DroppedAxis, ...]


jax.tree_util.register_static(PartitionAxis)


def resolve(
    partition_axis: PartitionAxis,
    axes: Sequence[str | None],
    mode: str,
    shape: Sequence[int] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    tensor: str = "tensor",
) -> Resolution:
  """Resolves the spec of a tensor whose dimensions mean `axes`, fitted to its shape and a mesh.

  A mesh axis shards one dimension of a tensor. If several dimensions request it, the meaning that
  comes first in SEMANTIC_AXES gets it, whatever the order of the dimensions: every layout of a
  tensor is sharded alike, and all tensors of an attention agree on their batch and their lengths.

  Args:
    partition_axis: the mesh axes of every meaning.
    axes: one meaning per dimension, of SEMANTIC_AXES; None: not sharded.
    mode: one of MODES; those of DECODE_MODES read the decode_* fields.
    shape: the tensor's shape; None: sizes are not checked.
    mesh: the mesh; None: neither names nor sizes are checked.
    tensor: the tensor's name in `drops` and errors.

  Returns:
    The spec, with an entry for every dimension, and all axes that were left out.

  Raises:
    ValueError: `partition_axis` is not a PartitionAxis, or a field of it that is read is not None,
      a string or a tuple of strings; `axes` is not a tuple or list, or has an unknown meaning;
      `mode` is unknown; `shape` has more or fewer dimensions than `axes`; or `mesh` is neither a
      mesh nor None.
  """
  if mode not in MODES:
    raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
  if not isinstance(partition_axis, PartitionAxis):
    raise ValueError(f"partition_axis={partition_axis!r}: expected a PartitionAxis, such as "
                     "PartitionAxis()")
  if isinstance(axes, str) or not isinstance(axes, Sequence):
    raise ValueError(f"axes={axes!r} of {tensor}: expected a tuple of meanings, one for each "
                     "dimension; None means not sharded")
  axes = tuple(axes)
  for axis in axes:
    if axis is not None and not (isinstance(axis, str) and axis in SEMANTIC_AXES):
      raise ValueError(
          f"axes={axes!r} of {tensor}: {axis!r} is not a meaning; expected None or one of "
          f"{', '.join(map(repr, SEMANTIC_AXES))}")
  if shape is not None and len(shape) != len(axes):
    raise ValueError(f"{tensor} has shape {tuple(shape)} and {len(axes)} named dimensions {axes}: "
                     "expected a meaning, or None, for each of its dimensions")
  entries = [() if axis is None else mesh_axes(partition_axis, axis, mode) for axis in axes]
  priority = {axis: rank for rank, axis in enumerate(SEMANTIC_AXES)}
  named = {i: axis for i, axis in enumerate(axes) if axis}
  order = sorted(named, key=lambda i: priority[named[i]])
  entries, repeated = _without_repetitions(entries, order, tensor)
  fitted = fit(PartitionSpec(*entries), shape, mesh, tensor)
  return Resolution(fitted.spec, repeated + fitted.drops)


def fit(
    spec: PartitionSpec,
    shape: Sequence[int] | None,
    mesh: Mesh | AbstractMesh | None,
    tensor: str = "tensor",
) -> Resolution:
  """Leaves out the mesh axes that cannot shard a tensor of this shape on this mesh.

  In each dimension these names are left out, in this order: names used by an earlier dimension,
  names that the mesh does not have or that are Manual there, and then names from the right until
  the product of the sizes of the remaining ones divides the dimension.

  Args:
    spec: at most one entry per dimension; dimensions without one are not sharded.
    shape: the tensor's shape; None: sizes are not checked.
    mesh: the mesh; None: neither names nor sizes are checked.
    tensor: the tensor's name in `drops` and errors.

  Returns:
    The spec, with an entry for every dimension, and all axes that were left out.

  Raises:
    ValueError: `spec` has more entries than `shape` has dimensions, or an entry that is not names;
      or `mesh` is neither a mesh nor None.
  """
  if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
    raise ValueError(f"mesh={mesh!r}: expected a jax.sharding.Mesh, as create_mesh gives, or None")
  entries = [axis_names(entry, f"the spec of {tensor}") for entry in spec]
  if shape is not None:
    if len(entries) > len(shape):
      raise ValueError(
          f"{tensor} has shape {tuple(shape)} and a spec of {len(entries)} dimensions {spec}: "
          "expected at most one for each dimension of the shape")
    entries += [()] * (len(shape) - len(entries))
  entries, repeated = _without_repetitions(entries, range(len(entries)), tensor)
  if mesh is None:
    return Resolution(to_spec(entries), repeated)

  sizes = dict(mesh.shape)
  drops = list(repeated)
  for i, names in enumerate(entries):
    kept = []
    for name in names:
      if name not in sizes:
        drops.append(DroppedAxis(tensor, i, name, f"the mesh has the axes {tuple(sizes)} only"))
      elif name in mesh.manual_axes:
        drops.append(DroppedAxis(
            tensor, i, name, "Manual: the caller has split the tensor over it"))
      else:
        kept.append(name)
    while kept and shape is not None and shape[i] % math.prod(sizes[name] for name in kept):
      reason = (f"{' * '.join(f'{name}={sizes[name]}' for name in kept)} does not divide the "
                f"dimension's size {shape[i]}")
      drops.append(DroppedAxis(tensor, i, kept.pop(), reason))
    entries[i] = tuple(kept)
  return Resolution(to_spec(entries), tuple(drops))


def mesh_axes(partition_axis: PartitionAxis, axis: str, mode: str) -> tuple[str, ...]:
  """The mesh axes of one meaning in one mode; () if it is not sharded.

  Args:
    partition_axis: the mesh axes of every meaning.
    axis: a meaning, of SEMANTIC_AXES.
    mode: one of MODES.

  Raises:
    ValueError: the meaning's field of `partition_axis` is not None, a string or a tuple of strings.
  """
  fields = SEMANTIC_AXES[axis]
  field = fields.decode if mode in DECODE_MODES else fields.plain
  return axis_names(getattr(partition_axis, field), f"partition_axis.{field}")


def axis_names(value: AxisNames, argument: str) -> tuple[str, ...]:
  """One dimension's mesh axes as a tuple.

  Args:
    value: None, a name, or a sequence of names.
    argument: the name of the value in errors.

  Raises:
    ValueError: `value` is not None, a string, or a tuple or list of strings, or a name is empty.
  """
  names = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
  if not all(isinstance(name, str) and name for name in names):
    raise ValueError(f"{argument}={value!r}: expected the name of a mesh axis, a tuple of names, "
                     "or None for not sharded")
  return axes_of(value)


def _without_repetitions(
    entries: Sequence[tuple[str, ...]], order: Iterable[int], tensor: str,
) -> tuple[list[tuple[str, ...]], tuple[DroppedAxis, ...]]:
  """(entries, drops): a repeated name stays in the first dimension that has it, in this order."""
  entries = list(entries)
  drops: list[DroppedAxis] = []
  owner: dict[str, int] = {}
  for i in order:
    kept = []
    for name in entries[i]:
      if name in owner:
        drops.append(DroppedAxis(tensor, i, name,
                                 f"shards dimension {owner[name]} of {tensor} already"))
      else:
        owner[name] = i
        kept.append(name)
    entries[i] = tuple(kept)
  return entries, tuple(drops)


def to_spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
  """Makes a spec, with single names as strings and empty entries as None."""
  return PartitionSpec(*[
      None if not names else names[0] if len(names) == 1 else names for names in entries])
