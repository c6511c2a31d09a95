# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Short texts of programs before any compiler: the operations of each kernel, loop and branch.

A program is read from its jaxpr. A scope is a kernel, the body of a loop or a branch; the text has
a line for each: how many operations it has, a hash of them with their operands, numbers and types,
and the count of every kind that is more than arithmetic. A changed operation changes the hash of
its own scope and of no other, so that the difference of two texts says where to look. Names of
variables, functions that JAX calls inside and what differs between versions of JAX do not count.
"""

import collections
import dataclasses
import enum
import functools
import hashlib
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import jax
from jax._src.core import extend_axis_env_nd
from jax.extend import core
import numpy as np

_INLINED = ("jit", "pjit", "closed_call", "core_call")
# Parameters that change no result, or that some versions of jax lack.
_IGNORED = frozenset((
    "name", "rule", "in_tree", "out_tree", "metadata", "cost_estimate", "debug", "interpret",
    "backend", "mesh", "meshes", "external_meshes", "effects", "jvp_jaxpr_fun", "jvp_jaxpr_thunk",
    "fwd_jaxpr_thunk", "bwd", "fwd", "out_trees", "source_info", "debug_info", "out_sharding",
    "sharding", "weak_type", "differentiated", "_split_transpose", "symbolic_zeros", "num_consts",
    "prevent_cse", "policy", "has_barrier", "has_user_predicate", "oob_mode", "ft_in", "ft_out",
    "num_carry", "name_and_src_info", "check_vma", "in_specs_thunk", "out_specs_thunk",
    "lowering_semantics", "insert_dummy_device", "is_wait_send"))
# Kinds of operations that a line does not name.
_ARITHMETIC = frozenset("""abs add and broadcast_in_dim concatenate convert_element_type copy cumsum
    div eq eq_to exp exp2 expand_dims gather ge gt iota is_finite le le_to log lt lt_to max min mul
    ne neg not or pad pow integer_pow reduce_and reduce_max reduce_min reduce_or reduce_sum rem
    reshape rev round select_n shift_left shift_right_arithmetic shift_right_logical sign slice sort
    sqrt square squeeze stop_gradient sub tanh transpose xor bitcast_convert_type""".split())


class Scope(NamedTuple):
  """The operations of a jaxpr, and the scopes inside them."""

  name: str
  lines: list[str]  # variables and operations, without what is inside these
  kinds: list[str]  # of the operations
  inside: list["Scope"]
  known: list[str]  # the hash of all of it, once it is asked for


def program(run: Callable[..., Any], arguments: tuple) -> Scope:
  """Returns the operations of a program, given its function and arguments or their shapes."""
  return _scope("program", jax.make_jaxpr(run)(*arguments))


def text(scope: Scope) -> list[str]:
  """Returns the lines of a scope and of those inside it; what was said before is not repeated."""
  return list(_text(scope, 0, {}))


def _text(scope: Scope, depth: int, said: dict[str, int]) -> Iterator[str]:
  lines = list(_own_lines(scope))
  digest = _hashed("\n".join(lines).encode())
  whole = _whole(scope)
  start = f"{'  ' * depth}{scope.name}: {len(scope.kinds)} #{digest}"
  if whole in said:
    yield f"{start}, as before"
    return
  said[whole] = len(said)
  counts = collections.Counter(kind for kind in scope.kinds if kind not in _ARITHMETIC)
  yield " ".join([start, *(f"{name}*{n}" if n > 1 else name for name, n in sorted(counts.items()))])
  for inner in scope.inside:
    if not _is_short(inner):
      yield from _text(inner, depth + 1, said)


def _is_short(scope: Scope) -> bool:
  """Returns whether a scope has no line of its own, but counts as a part of the one around it."""
  return len(scope.kinds) < 2 and not scope.inside


def _own_lines(scope: Scope) -> Iterator[str]:
  yield from scope.lines
  for inner in scope.inside:
    if _is_short(inner):
      yield from [inner.name, *inner.lines]


def _whole(scope: Scope) -> str:
  """Returns a hash of everything that the text of a scope depends on."""
  if not scope.known:
    scope.known.append(hashlib.sha256("\n".join(
        [scope.name, *scope.lines, *map(_whole, scope.inside)]).encode()).hexdigest())
  return scope.known[0]


def _scope(name: str, jaxpr: Any) -> Scope:
  """Returns the operations of a jaxpr, closed or not."""
  closed = isinstance(jaxpr, core.ClosedJaxpr)
  inner = jaxpr.jaxpr if closed else jaxpr
  found = Scope(name, [], [], [], [])
  writer = _Writer(found)
  for index, variable in enumerate(inner.constvars):
    known = closed and not isinstance(jaxpr.consts[index], jax.core.Tracer)
    writer.names[variable] = (
        _literal(jaxpr.consts[index]) if known else writer.fresh(variable))
  for variable in inner.invars:
    writer.names[variable] = writer.fresh(variable)
  writer.run(inner)
  found.lines.append(" ".join(["out", *map(writer.read, inner.outvars)]))
  return found


class _Writer:
  """Writes the operations of one scope, numbering variables in the order of their definition."""

  def __init__(self, scope: Scope):
    self.scope = scope
    self.names: dict[Any, str] = {}
    self.count = 0

  def fresh(self, variable: Any) -> str:
    name = f"%{self.count}"
    self.count += 1
    self.scope.lines.append(f"{name}:{_type(variable.aval)}")
    return name

  def read(self, atom: Any) -> str:
    if isinstance(atom, core.Literal):
      return f"{_literal(atom.val)}:{_type(atom.aval)}"
    return self.names[atom]

  def run(self, jaxpr: Any) -> None:
    """Writes the operations of a jaxpr whose variables are named."""
    for equation in jaxpr.eqns:
      name = equation.primitive.name.removesuffix("_p")
      if name in _INLINED:
        self._inline(equation)
      else:
        self._operation(name, equation)

  def _inline(self, equation: Any) -> None:
    inner = next(x for x in equation.params.values() if isinstance(x, core.ClosedJaxpr))
    self.names.update(zip(inner.jaxpr.invars, map(self.read, equation.invars)))
    self.names.update(zip(inner.jaxpr.constvars, map(_literal, inner.consts)))
    self.run(inner.jaxpr)
    self.names.update(zip(equation.outvars, map(self.read, inner.jaxpr.outvars)))

  def _operation(self, name: str, equation: Any) -> None:
    words, inside = [name, *map(self.read, equation.invars)], list[tuple[str, Any]]()
    parameters = dict(equation.params)
    if "n" in parameters:  # an operand in older versions of jax
      words.append(f"{parameters.pop('n')}:int32[]")
    if isinstance(call := parameters.get("call"), tuple):  # a primitive of the library
      del parameters["call"]
      shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
      inside.append(("", jax.make_jaxpr(
          lambda *x: equation.primitive.impl(*x, call=call))(*shapes)))
    for key, value in sorted(parameters.items()):
      if key not in _IGNORED and value is not None:
        found = _value(value, lambda x, key=key: inside.append((key, x)))
        words += [f"{key}={found}"] if found else []
    self.scope.kinds.append(name)
    self.scope.lines.append(" ".join(words))
    mesh = equation.params.get("mesh")
    axes = list(mesh.shape.items()) if name == "shard_map" else []
    with extend_axis_env_nd(axes):
      for number, (key, jaxpr) in enumerate(inside):
        label = str(number) if key == "branches" else key
        self.scope.inside.append(_scope(f"{name} {label}".rstrip(), jaxpr))
    for variable in equation.outvars:
      self.names[variable] = self.fresh(variable)


def _type(aval: Any) -> str:
  """Returns the type of a variable: its dtype, shape and memory."""
  inner = getattr(aval, "inner_aval", aval)
  space = getattr(aval, "memory_space", None)
  place = "" if inner is aval else f"{getattr(space, 'value', space)} "
  shape = list(getattr(inner, "shape", ()))
  dtype = _dtype(getattr(inner, "dtype", type(inner).__name__))
  # An array of one barrier is a barrier in newer versions of jax.
  return f"{place}{dtype}{[] if shape == [1] and 'num_arrivals' in dtype else shape}"


_dtype = functools.cache(lambda dtype: _value(dtype))  # there are few, and every operation has one


def _literal(value: Any) -> str:
  return _value(np.asarray(value) if hasattr(value, "dtype") else value)


def _value(value: Any, found: Callable[[Any], None] = lambda _: None) -> str:
  """Returns a parameter as text; calls `found` with each jaxpr in it.

  What has no text that is the same in every run is left out.
  """
  if type(value) in (int, bool):  # most are
    return str(value)
  if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
    found(value)
    return "scope"
  if isinstance(value, enum.Enum):
    return value.name
  if isinstance(value, (np.ndarray, np.generic)) and value.ndim:
    return f"{value.dtype.name}{list(value.shape)}#{_hashed(np.ascontiguousarray(value).tobytes())}"
  if hasattr(value, "items"):
    return _value(sorted(value.items(), key=str), found)
  if isinstance(value, (set, frozenset)):
    return _value(sorted(value, key=str), found)
  if isinstance(value, (tuple, list)):
    return f"({','.join(_value(x, found) for x in value)})"
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return "{" + ",".join(_fields(value, found)) + "}"
  written = value.__name__ if isinstance(value, type) else str(value)
  return "" if " at 0x" in written else written


def _fields(value: Any, found: Callable[[Any], None]) -> Iterator[str]:
  """Yields the fields of a dataclass that are not as by default."""
  for field in dataclasses.fields(value):
    part = getattr(value, field.name)
    default = not isinstance(part, np.ndarray) and part is field.default
    if field.name not in _IGNORED and part is not None and not default:
      if written := _value(part, found):
        yield f"{field.name}={written}"


def _hashed(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()[:6]


def details(scope: Scope, depth: int = 0) -> Sequence[str]:
  """Returns every operation, to compare two programs whose hashes differ."""
  inner = [line for x in scope.inside for line in details(x, depth + 1)]
  return [f"{'  ' * depth}{scope.name}", *(f"{'  ' * depth}  {x}" for x in scope.lines), *inner]


def equations(jaxpr: Any) -> Iterator[Any]:
  """Yields every equation of a program and of the programs nested in it."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(
        x, "eqns") or hasattr(x, "jaxpr")):
      if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
        yield from equations(inner if hasattr(inner, "eqns") else inner.jaxpr)
