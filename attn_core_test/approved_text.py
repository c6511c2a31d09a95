# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Values and errors as short text that is the same on every machine, Python and JAX.

All that differs between machines or versions is normalized here: addresses of objects, temporary
folders, the last digits of numbers, and the parts of messages that JAX or Python wrote.
"""

from collections.abc import Callable, Mapping
import dataclasses
import enum
import functools
import itertools
import re
import tempfile
import types
from typing import Any
import warnings

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
import jax.numpy as jnp
import numpy as np

from attn_core.masks.mask import Mask

jax.config.update("jax_num_cpu_devices", 8)  # before cases make their first array
# Whole tracebacks: hiding JAX's frames costs milliseconds an error, and `error` needs them.
jax.config.update("jax_traceback_filtering", "off")

MOST_SHOWN = 24  # numbers of an array; of longer ones there is a digest
OMITTED = ("drops",)  # fields that `explain` writes as sentences
NOT_OURS = ("Explicitly requested dtype", "Some donated buffers", "scatter inputs")  # warnings
REFUSALS = (Exception, SystemExit)  # whatever a wrong argument may raise
# (pattern, replacement): what machines, Pythons and versions of JAX write in different ways.
NORMALIZED = (
    (r" at 0x[0-9a-f]+", ""),
    (re.escape(tempfile.gettempdir()) + r"/[\w/.-]*?(?=[\w.-]*['\"\s;]|$)", "TMP/"),
    (r"<class '([\w.]+)'>", r"\1"),
    (r"(Out of range float values are not JSON compliant): \w+", r"\1"),
    (r"missing a required (keyword-only )?argument", "missing a required argument"),
    (r"(got|has) an unexpected keyword argument.*Did you mean.*", r"\1 an unexpected keyword"),
)


class Line(str):
  """A text that `text` writes as it is."""


def text(x: Any) -> str:
  """Returns a value as text; fields that have their defaults are left out."""
  if isinstance(x, enum.Enum):
    return text(x.value)
  if isinstance(x, Line):
    return str(x)
  if x is None or isinstance(x, (bool, np.bool_, str)):
    return repr(bool(x) if isinstance(x, np.bool_) else x)
  if isinstance(x, (int, np.integer)):
    return str(int(x))
  if isinstance(x, (float, np.floating)):
    return f"{float(x):.5g}"
  if isinstance(x, (np.dtype, type)):
    return x.name if isinstance(x, np.dtype) else x.__name__
  if isinstance(x, PartitionSpec):
    return f"P({', '.join(map(text, x))})"
  if isinstance(x, (Mesh, AbstractMesh)):
    return _mesh(x)
  if isinstance(x, NamedSharding):
    return f"sharding({text(x.spec)} on {text(x.mesh)})"
  if isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
    return array(x)
  if isinstance(x, jax.tree_util.PyTreeDef):
    return text(jax.tree.unflatten(x, [types.SimpleNamespace()] * x.num_leaves))
  return _structure(x)


def _structure(x: Any) -> str:
  """Returns a container, a record or a function as text."""
  if isinstance(x, types.SimpleNamespace):
    return "_"
  if hasattr(x, "_fields"):
    defaults = x._field_defaults
    return _record(type(x).__name__, {
        name: value for name, value in x._asdict().items() if name not in OMITTED
        and (name not in defaults or not _same(value, defaults[name]))})
  if dataclasses.is_dataclass(x):
    fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)
              if f.default is dataclasses.MISSING or not _same(getattr(x, f.name), f.default)}
    return _record(type(x).__name__, fields)
  if isinstance(x, Mapping):
    return "{" + ", ".join(f"{key}: {text(value)}" for key, value in x.items()) + "}"
  if isinstance(x, (tuple, list)):
    parts = [f"{n} x {one}" if (n := len(list(same))) > 3 else ", ".join([one] * n)
             for one, same in itertools.groupby(map(text, x))]
    return f"[{', '.join(parts)}]" if isinstance(x, list) else f"({', '.join(parts)})"
  if isinstance(x, (set, frozenset)):
    return "{" + ", ".join(sorted(map(text, x))) + "}"
  if isinstance(x, functools.partial):
    return f"partial({', '.join(map(text, (x.func, *x.args, x.keywords)))})"
  if callable(x):
    return f"<{getattr(x, '__qualname__', type(x).__name__)}>"
  return normalized(repr(x))


def _record(name: str, fields: Mapping[str, Any]) -> str:
  return f"{name}({', '.join(f'{field}={text(value)}' for field, value in fields.items())})"


def _same(x: Any, y: Any) -> bool:
  """Whether a field has its default; arrays never do."""
  return x is y or (type(x) is type(y) and not isinstance(x, (jax.Array, np.ndarray, Mask))
                    and x == y)


def _mesh(mesh: Any) -> str:
  sizes = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
  kinds = "".join(kind.name[0] for kind in mesh.axis_types)
  return f"mesh({sizes}{'' if set(kinds) <= {AxisType.Auto.name[0]} else f'; {kinds}'})"


def abstract_mesh(sizes: tuple[int, ...], names: tuple[str, ...],
                  kind: AxisType = AxisType.Auto) -> AbstractMesh:
  """Returns an abstract mesh with axes of one type, whose default differs between versions."""
  return AbstractMesh(sizes, names, axis_types=(kind,) * len(names))


def array(x: Any) -> str:
  """Returns dtype, shape and numbers of an array, or a digest of them where they are many."""
  shape = f"{x.dtype}[{','.join(map(str, x.shape))}]"
  if isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)):
    return shape
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  numbers = np.asarray(x)
  if numbers.dtype == bool:
    return f"{shape} {_picture(numbers)}"
  numbers = numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)
  if numbers.size <= MOST_SHOWN:
    return f"{shape} {' '.join(_number(n) for n in numbers.reshape(-1))}"
  return f"{shape} {digest(numbers)}"


def _number(x: Any) -> str:
  if isinstance(x, complex):
    return str(x.round(4))
  return str(int(x)) if abs(x) < 2**53 and x == int(x) else f"{x:.4g}"


def digest(numbers: np.ndarray) -> str:
  """Returns two sums that no permutation keeps, and how many numbers are not finite."""
  flat = np.asarray(numbers).reshape(-1)
  counts = "".join(f" {found}*{name}" for name, found in (
      ("nan", np.isnan(flat).sum()), ("inf", (flat == np.inf).sum()),
      ("-inf", (flat == -np.inf).sum())) if found)
  finite = np.where(np.isfinite(flat), flat, 0)
  weights = np.arange(flat.size) % 97 + 1
  return f"sum {_number(finite.sum())} weighted {_number(finite @ weights)}{counts}"


def _picture(visible: np.ndarray) -> str:
  """Returns booleans as rows of # and ., or a digest."""
  if visible.size > 8 * MOST_SHOWN:
    return digest(visible.astype(np.float64))
  rows = visible.reshape(-1, visible.shape[-1]) if visible.ndim > 1 else visible.reshape(1, -1)
  return " ".join("".join(".#"[int(cell)] for cell in row) for row in rows)


def normalized(message: str) -> str:
  """Returns a message without addresses, folders and line breaks."""
  for pattern, replacement in NORMALIZED:
    message = re.sub(pattern, replacement, message)
  return re.sub(r"\s*\n\s*", " / ", message.strip())


def error(exception: BaseException) -> str:
  """Returns the type of an error, and its message if the library wrote it."""
  name = type(exception).__name__
  ours = f"{name}: {normalized(str(exception))}"
  return ours if is_ours(exception) else f"{name} of Python or JAX"


def is_ours(exception: BaseException) -> bool:
  """Whether a `raise` of the library raised an error."""
  frames = frames_of(exception)
  return bool(frames) and frames[-1][0].startswith("attn_core.") and (
      not frames[-1][0].startswith("attn_core_test"))


def frames_of(exception: BaseException) -> list[tuple[str, int]]:
  """Returns (module, line) of every frame of a traceback, outermost first."""
  frames, traceback = [], exception.__traceback__
  while traceback is not None:
    frames.append((traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_lineno))
    traceback = traceback.tb_next
  return frames


# (module, line) of the library's frames of every error that `attempt` has caught.
REACHED: set[tuple[str, int]] = set()


def attempt(function: Callable[[], Any]) -> str:
  """Returns the result of a function as text, or its error, and the library's warnings."""
  with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    try:
      said = text(function())
    except REFUSALS as exception:
      record(exception)
      said = error(exception)
  found = dict.fromkeys(normalized(str(one.message)) for one in warned
                        if not str(one.message).startswith(NOT_OURS))
  return "; ".join((said, *(f"warns: {message}" for message in found)))


def together(function: Callable[[], Any]) -> Callable[[], Any]:
  """Returns a function whose operations are compiled as one program, and not each by itself.

  Arrays of enclosing scopes become constants of the program.
  """
  return lambda: jax.jit(function)()


def record(exception: BaseException | None) -> None:
  """Remembers which lines of the library an error and its causes came through."""
  while exception is not None:
    REACHED.update(frames_of(exception))
    exception = exception.__cause__ or exception.__context__
