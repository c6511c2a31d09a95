# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs programs of JAX by NumPy, operation by operation, without a compiler.

Interpreted kernels are large programs that run once, made of hundreds of callbacks and of small
operations between them. XLA takes seconds to compile each; here they run in a fraction of that. An
operation without a rule is refused by name.
"""

import functools
import math
from typing import Any, Callable, Sequence

import jax
from jax.extend import core
import numpy as np

# A rule takes an equation of a jaxpr, and returns the function of its operands' values. It returns
# one value, or a sequence where the primitive has several results.
Rule = Callable[[Any], Callable[..., Any]]


class Program:
  """A jaxpr, whose equations are functions of NumPy arrays."""

  def __init__(self, jaxpr: Any, constants: Sequence[Any] | None = None):
    if constants is None:
      constants = getattr(jaxpr, "consts", ())
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    self._values: list[Any] = []
    self._places: dict[Any, int] = {}
    for variable, value in zip(jaxpr.constvars, constants, strict=True):
      self._values[self._place(variable)] = np.asarray(value)
    self._inputs = [self._place(variable) for variable in jaxpr.invars]
    self._steps = [self._step(equation) for equation in jaxpr.eqns]
    self._outputs = [self._place(atom) for atom in jaxpr.outvars]

  def _place(self, atom: Any) -> int:
    """Returns where the value of a variable or literal is kept."""
    literal = isinstance(atom, core.Literal)
    if literal or atom not in self._places:
      self._values.append(np.asarray(atom.val, atom.aval.dtype) if literal else None)
      if literal:
        return len(self._values) - 1
      self._places[atom] = len(self._values) - 1
    return self._places[atom]

  def _step(self, equation: Any) -> tuple:
    """Returns a function, the places of its operands and of its results; a single one is an int."""
    name = equation.primitive.name
    if name not in RULES:
      raise NotImplementedError(
          f"primitive {name!r}: numpy_programs.RULES has no rule for it; add one")
    outputs = [self._place(variable) for variable in equation.outvars]
    return (RULES[name](equation), tuple(map(self._place, equation.invars)),
            outputs if equation.primitive.multiple_results else outputs[0])

  def __call__(self, *arguments: Any) -> list:
    """Returns the results."""
    values = self._values.copy()
    for place, value in zip(self._inputs, arguments, strict=True):
      values[place] = value
    for function, inputs, outputs in self._steps:
      found = function(*[values[place] for place in inputs])
      if isinstance(outputs, int):
        values[outputs] = found
      else:
        for place, value in zip(outputs, found, strict=True):
          values[place] = value
    return [values[place] for place in self._outputs]


def program(function: Callable, *examples: Any) -> Program:
  """Returns the program of a function of arrays like the examples."""
  return Program(jax.make_jaxpr(function)(*examples))


@functools.lru_cache(maxsize=8)
def _thread_program(jaxpr: Any) -> Program:
  plain = getattr(jaxpr, "jaxpr", jaxpr)
  return Program(plain.replace(constvars=(), invars=[*plain.constvars, *plain.invars]), ())


def run_thread(jaxpr: Any, constants: Sequence[Any], *arguments: Any) -> None:
  """Runs one thread of a kernel, for which the interpreters of JAX have a compiler."""
  with np.errstate(all="ignore"):
    _thread_program(jaxpr)(*map(np.asarray, (*constants, *arguments)))


def plain(function: Callable) -> Rule:
  """Returns the rule of a primitive whose parameters do not matter."""
  return lambda equation: function


def unchanged(equation: Any) -> Callable:
  return (lambda *x: x) if equation.primitive.multiple_results else (lambda x: x)


def is_float(x: Any) -> bool:
  return jax.dtypes.issubdtype(x.dtype, np.floating)


def divided(x: Any, y: Any) -> Any:
  """Divides, integers toward zero."""
  if is_float(x):
    return np.true_divide(x, y)
  whole = np.floor_divide(x, y)
  return (whole + ((whole * y != x) & ((x < 0) != (y < 0)))).astype(x.dtype)


def shifted(x: Any, by: Any, left: bool = False, logical: bool = False) -> Any:
  """Shifts bits; by their number or more, all are gone."""
  x, bits = np.asarray(x), 8 * x.dtype.itemsize
  kind = np.dtype(f"{'u' if logical or left else 'i'}{x.dtype.itemsize}")
  by, gone = np.asarray(by).astype(kind), (by < 0) | (by >= bits)
  move = np.left_shift if left else np.right_shift
  moved = move(x.view(kind), np.where(gone, kind.type(bits - 1), by))
  if logical or left:
    moved = np.where(gone, 0, moved).astype(kind)
  return moved.view(x.dtype)


def convert(equation: Any) -> Callable:
  """Converts numbers; to integers what is out of range becomes the nearest, and NaN zero."""
  dtype = np.dtype(equation.params["new_dtype"])
  def converted(x):
    if not (np.issubdtype(dtype, np.integer) and is_float(x)):
      return x.astype(dtype)
    info, wide = np.iinfo(dtype), np.trunc(np.nan_to_num(np.asarray(x, np.float64), nan=0.0))
    inside = np.clip(wide, info.min, info.max)
    top = inside >= info.max  # which float64 rounds up for 64 bits
    return np.where(top, info.max, np.where(top, 0, inside).astype(dtype)).astype(dtype)
  return converted


def bits_as(equation: Any) -> Callable:
  """Reads bits as numbers of another dtype, whose width may differ."""
  dtype, shape = np.dtype(equation.params["new_dtype"]), equation.outvars[0].aval.shape
  return lambda x: np.frombuffer(np.ascontiguousarray(x).tobytes(), dtype).reshape(shape)


def broadcast(equation: Any) -> Callable:
  shape, dims = equation.outvars[0].aval.shape, equation.params["broadcast_dimensions"]
  def broadcasted(x, *unused):
    x = np.asarray(x)
    ones = [1] * len(shape)
    for dim, size in zip(dims, x.shape):
      ones[dim] = size
    return np.broadcast_to(x.reshape(ones), shape)
  return broadcasted


def select(which: Any, *cases: Any) -> Any:
  if which.ndim == 0:
    return cases[int(which)]
  if len(cases) == 2:
    return np.where(which, cases[1], cases[0]).astype(cases[0].dtype)
  return np.choose(which, cases)


def reduction(ufunc: np.ufunc) -> Rule:
  """Returns the rule of a reduction over axes, of which there may be none."""
  def rule(equation):
    axes = tuple(equation.params["axes"])
    return lambda x: ufunc.reduce(x, axis=axes, dtype=x.dtype) if axes else x
  return rule


def cumulative(ufunc: np.ufunc) -> Rule:
  def rule(equation):
    axis, reverse = equation.params["axis"], equation.params["reverse"]
    flip = (lambda x: np.flip(x, axis)) if reverse else lambda x: x
    return lambda x: flip(ufunc.accumulate(flip(x), axis=axis, dtype=x.dtype))
  return rule


def index_of(function: Callable) -> Rule:
  def rule(equation):
    axis, = equation.params["axes"]
    dtype = equation.params["index_dtype"]
    return lambda x: function(x, axis).astype(dtype)
  return rule


def iota(equation: Any) -> Callable:
  dim, aval = equation.params["dimension"], equation.outvars[0].aval
  ones = [-1 if i == dim else 1 for i in range(len(aval.shape))]
  made = np.broadcast_to(np.arange(aval.shape[dim], dtype=aval.dtype).reshape(ones), aval.shape)
  return lambda: made


def pad(equation: Any) -> Callable:
  config, shape = equation.params["padding_config"], equation.outvars[0].aval.shape
  def padded(x, value):
    out = np.full([max(size, 0) + max(-low, 0) + max(-high, 0)
                   for size, (low, high, _) in zip(shape, config)], value, x.dtype)
    inner = tuple(slice(max(low, 0), max(low, 0) + max((size - 1) * (gap + 1) + 1, 0), gap + 1)
                  for size, (low, _, gap) in zip(x.shape, config))
    out[inner] = x
    return out[tuple(slice(max(-low, 0), max(-low, 0) + size)
                     for size, (low, _, _) in zip(shape, config))]
  return padded


def sliced(equation: Any) -> Callable:
  p = equation.params
  steps = p["strides"] or (1,) * len(p["start_indices"])
  part = tuple(map(slice, p["start_indices"], p["limit_indices"], steps))
  return lambda x: x[part]


def part_at(shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Any]) -> tuple:
  """Returns slices of these sizes, moved into the array where they begin outside."""
  inside = (min(max(int(start), 0), whole - size)
            for start, whole, size in zip(starts, shape, sizes, strict=True))
  return tuple(slice(start, start + size) for start, size in zip(inside, sizes))


def dynamic_slice(equation: Any) -> Callable:
  sizes = equation.params["slice_sizes"]
  return lambda x, *starts: x[part_at(x.shape, sizes, starts)]


def updated(x: Any, update: Any, *starts: Any) -> Any:
  x = np.array(x)
  x[part_at(x.shape, update.shape, starts)] = update
  return x


def gather(equation: Any) -> Callable:
  """Gathers slices: the index of each dimension of the operand is an array as the result."""
  p, shape = equation.params, equation.outvars[0].aval.shape
  d, sizes, mode = p["dimension_numbers"], p["slice_sizes"], str(p["mode"])
  ahead = [i for i in range(len(shape)) if i not in d.offset_dims]  # dimensions of the indices
  gone = (*d.collapsed_slice_dims, *d.operand_batching_dims)
  def along(values, dims):
    return np.asarray(values).reshape([shape[i] if i in dims else 1 for i in range(len(shape))])
  def gathered(x, indices):
    offsets, index, inside = iter(d.offset_dims), [], np.ones((), bool)
    for dim, (whole, size) in enumerate(zip(x.shape, sizes)):
      place = np.zeros((), np.int64)
      if dim in d.start_index_map:
        start = along(indices[..., d.start_index_map.index(dim)].astype(np.int64), ahead)
        inside = inside & (start >= 0) & (start <= whole - size)
        place = np.clip(start, 0, whole - size)
      if dim in d.operand_batching_dims:
        by = ahead[d.start_indices_batching_dims[d.operand_batching_dims.index(dim)]]
        place = along(np.arange(shape[by]), [by])
      if dim not in gone:
        by = next(offsets)
        place = place + along(np.arange(shape[by]), [by])
      index.append(place)
    found = np.broadcast_to(x[tuple(index)] if index else x, shape)
    if "FILL" not in mode.upper() or np.all(inside):
      return found
    fill = p["fill_value"]
    if fill is None:
      fill = np.nan if is_float(x) else np.iinfo(x.dtype).min if x.dtype.kind == "i" else (
          np.iinfo(x.dtype).max if x.dtype.kind == "u" else True)
    return np.where(inside, found, np.asarray(fill, x.dtype))
  return gathered


def dot(equation: Any) -> Callable:
  """Multiplies; narrow floats as float32, which holds their products exactly."""
  (over_x, over_y), (batch_x, batch_y) = equation.params["dimension_numbers"]
  aval = equation.outvars[0].aval
  def rows(x, over, batch):
    rest = [i for i in range(x.ndim) if i not in over and i not in batch]
    x = x.transpose(*batch, *rest, *over)
    return x.reshape(*x.shape[:len(batch)], math.prod(x.shape[len(batch):len(batch) + len(rest)]),
                     math.prod(x.shape[len(batch) + len(rest):]))
  def product(x, y, *unused):
    if is_float(x) or is_float(y):
      kind = np.float64 if np.float64 in (x.dtype, y.dtype) else np.float32
    else:
      kind = aval.dtype
    left, right = rows(x, over_x, batch_x), rows(y, over_y, batch_y)
    found = np.matmul(left.astype(kind), right.astype(kind).swapaxes(-1, -2))
    return found.reshape(aval.shape).astype(aval.dtype)
  return product


def call(equation: Any) -> Callable:
  """Runs a jaxpr among the parameters."""
  return Program(next(equation.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr")
                      if name in equation.params))


def cond(equation: Any) -> Callable:
  branches = [Program(branch) for branch in equation.params["branches"]]
  return lambda index, *rest: branches[min(max(int(index), 0), len(branches) - 1)](*rest)


def while_loop(equation: Any) -> Callable:
  p = equation.params
  test, body = Program(p["cond_jaxpr"]), Program(p["body_jaxpr"])
  ahead, first = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
  def run(*values):
    of_test, of_body, state = values[:ahead], values[ahead:first], list(values[first:])
    while test(*of_test, *state)[0]:
      state = body(*of_body, *state)
    return state
  return run


def scan(equation: Any) -> Callable:
  p, body = equation.params, Program(equation.params["jaxpr"])
  def unpack(values):
    if "ft_in" in p:
      return [list(x) for x in p["ft_in"].update(values).unpack()]
    first, last = p["num_consts"], p["num_consts"] + p["num_carry"]
    return [list(values[:first]), list(values[first:last]), list(values[last:])]
  def run(*values):
    constants, carry, rows = unpack(list(values))
    order = range(p["length"])
    stacked: list[Any] = [None] * p["length"]
    for i in reversed(order) if p["reverse"] else order:
      found = body(*constants, *carry, *(x[i] for x in rows))
      carry, stacked[i] = found[:len(carry)], found[len(carry):]
    made = [np.stack(x) if x else np.zeros(v.aval.shape, v.aval.dtype) for x, v in zip(
        zip(*stacked) if stacked else [()] * (len(equation.outvars) - len(carry)),
        equation.outvars[len(carry):])]
    return [*carry, *made]
  return run


def callback(equation: Any) -> Callable:
  """Calls a function of the host; the results are copies, and are what was announced."""
  function = equation.params["callback"]
  avals = [v.aval for v in equation.outvars]
  def run(*values):
    found = [np.array(x) for x in function(*(np.asarray(x)[()] for x in values)) or ()]
    for x, aval in zip(found, avals, strict=True):
      if (x.shape, x.dtype) != (aval.shape, aval.dtype):
        raise RuntimeError(f"a callback returned {x.dtype}{x.shape}: expected {aval}")
    return found
  return run


def rolled(equation: Any) -> Callable:
  """Rolls; along `stride_axis` each row by `stride` places more than the one before."""
  p = equation.params
  def run(x, shift):
    if p["stride"] is None:
      return np.roll(x, int(shift), p["axis"])
    places = [1] * x.ndim, [1] * x.ndim
    for ones, axis in zip(places, (p["axis"], p["stride_axis"])):
      ones[axis] = x.shape[axis]
    along, rows = (np.arange(math.prod(ones)).reshape(ones) for ones in places)
    size = x.shape[p["axis"]]
    return np.take_along_axis(x, (along - int(shift) - p["stride"] * rows) % size, p["axis"])
  return run


def words_as(equation: Any) -> Callable:
  """Reads words as numbers of another width, which a TPU packs along the rows."""
  dtype, dim = equation.outvars[0].aval.dtype, equation.params.get("dim", -2)
  def run(x):
    x = np.ascontiguousarray(np.moveaxis(x, dim, -1))
    return np.moveaxis(x.view(dtype), -1, dim)
  return run


def each(function: Callable[[float], float]) -> Callable:
  """Returns a function of arrays, which computes each number alone."""
  return lambda x: np.vectorize(function, otypes=[float])(x).astype(x.dtype)


def rounded_away(x: Any) -> Any:
  """Rounds halves away from zero; without a sum of x and a half, which is rounded itself."""
  whole = np.trunc(x)
  return np.copysign(np.where(abs(x - whole) >= 0.5, abs(whole) + 1, whole), x).astype(x.dtype)


# By JAX's number of the method: halves go away from zero, or to even numbers.
ROUNDS = (rounded_away, np.rint)

# Functions of primitives whose parameters do not matter.
PLAIN: dict[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": divided,
    "max": np.maximum, "min": np.minimum, "rem": np.fmod,
    "pow": lambda x, y: np.power(x, y.astype(x.dtype)),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "neg": np.negative, "abs": np.abs,
    "sign": lambda x: np.where(x == 0, x, np.sign(x)).astype(x.dtype),
    "floor": np.floor, "ceil": np.ceil, "exp": np.exp, "exp2": np.exp2,
    "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "tanh": np.tanh, "sin": np.sin,
    "cos": np.cos, "sqrt": np.sqrt, "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "logistic": lambda x: (1 / (1 + np.exp(-x))).astype(x.dtype), "square": np.square,
    "one_minus_square": lambda x: (1 + x) * (1 - x), "cbrt": np.cbrt, "tan": np.tan,
    "atan": np.arctan, "atan2": np.arctan2, "sinh": np.sinh, "cosh": np.cosh,
    "erf": each(math.erf), "is_finite": np.isfinite,
    "select_n": select, "dynamic_update_slice": updated,
    "shift_left": functools.partial(shifted, left=True), "shift_right_arithmetic": shifted,
    "shift_right_logical": functools.partial(shifted, logical=True),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "copy": np.array, "copy_p": np.array}

RULES: dict[str, Rule] = {
    **{name: plain(function) for name, function in PLAIN.items()},
    # What only a compiler needs to know; of arrays of one device.
    **dict.fromkeys(("optimization_barrier", "remove_memory_space", "multiple_of", "pvary",
                     "reshard", "sharding_constraint"), unchanged),
    "round": lambda e: ROUNDS[int(e.params["rounding_method"])],
    "integer_pow": lambda e: lambda x: np.power(x, e.params["y"]).astype(x.dtype),
    "concatenate": lambda e: lambda *x: np.concatenate(x, e.params["dimension"]),
    "transpose": lambda e: lambda x: x.transpose(e.params["permutation"]),
    "reshape": lambda e: lambda x, *_: np.reshape(x, e.params["new_sizes"]),
    "squeeze": lambda e: lambda x: np.reshape(x, e.outvars[0].aval.shape),
    "expand_dims": lambda e: lambda x: np.reshape(x, e.outvars[0].aval.shape),
    "unstack": lambda e: lambda x: list(np.moveaxis(x, e.params["axis"], 0)),
    "stack": lambda e: lambda *x: np.stack(x, e.params["axis"]),
    "rev": lambda e: lambda x: np.flip(x, e.params["dimensions"]),
    "split": lambda e: lambda x: np.split(
        x, np.cumsum(e.params["sizes"])[:-1], e.params["axis"]),
    "convert_element_type": convert, "bitcast_convert_type": bits_as, "iota": iota, "pad": pad,
    "broadcast_in_dim": broadcast, "slice": sliced, "dynamic_slice": dynamic_slice,
    "gather": gather, "dot_general": dot,
    "reduce_sum": reduction(np.add), "reduce_max": reduction(np.maximum),
    "reduce_min": reduction(np.minimum), "reduce_prod": reduction(np.multiply),
    "reduce_or": reduction(np.bitwise_or), "reduce_and": reduction(np.bitwise_and),
    "cumsum": cumulative(np.add), "cummax": cumulative(np.maximum),
    "cummin": cumulative(np.minimum), "argmax": index_of(np.argmax), "argmin": index_of(np.argmin),
    "jit": call, "pjit": call, "closed_call": call, "core_call": call, "remat": call,
    "custom_jvp_call": call, "custom_vjp_call": call, "checkpoint": call,
    "cond": cond, "while": while_loop, "scan": scan,
    "io_callback": callback, "pure_callback": callback, "debug_callback": callback,
    "roll": rolled, "bitcast": words_as}
