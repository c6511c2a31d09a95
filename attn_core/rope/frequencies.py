# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Frequencies of rotary embeddings of every type, and `Rope`, the value that describes one.

`rotary_dim` is the number of rotated dimensions of a head: even, and at most the head's width D.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks


class Rope(NamedTuple):
  """A rotary embedding, static and hashable. None: not needed by the type, or its default."""

  rope_type: str = "default"  # one of ROPE_TYPES
  rope_theta: float = 10000.0  # > 1: the base of the powers that give the frequencies
  factor: float | None = None  # extension of the sequence length; None: see scale_of
  max_position_embeddings: int | None = None  # tokens
  original_max_position_embeddings: int | None = None  # tokens; None: max_position_embeddings
  # Fraction of a head that is rotated, its first part; proportional: of its frequencies.
  partial_rotary_factor: float = 1.0
  interleaved: bool = False  # pairs are (0, 1), (2, 3), ...; else (i, rotary_dim / 2 + i)
  attention_factor: float | None = None  # multiplies cosine and sine; None: see attention_factor
  beta_fast: float = 32.0  # yarn: unchanged above this number of turns over the original length
  beta_slow: float = 1.0  # yarn: interpolated below this number of turns
  mscale: float | None = None  # yarn: >= 0, see attention_factor
  mscale_all_dim: float | None = None  # yarn: >= 0, see attention_factor
  truncate: bool = True  # yarn: whether the bounds of its ramp are rounded to integers
  low_freq_factor: float | None = None  # llama3: interpolated below this number of turns
  high_freq_factor: float | None = None  # llama3: unchanged above this number of turns
  short_factor: tuple[float, ...] | None = None  # longrope: divisor of each frequency
  long_factor: tuple[float, ...] | None = None  # longrope: the same beyond the original length
  mrope_section: tuple[int, ...] | None = None  # frequencies for time, height and width
  mrope_interleaved: bool = False  # time, height, width, time, ...; else one section after another


jax.tree_util.register_static(Rope)

# Type -> its required fields. mrope has the default frequencies.
ROPE_TYPES = {
    "default": (),
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "deepseek_yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor",
               "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "mrope": ("mrope_section",),
    "proportional": (),
}
ALIASES = {"su": "longrope"}
# Types whose frequencies depend on the length of the sequence.
BY_LENGTH = ("dynamic", "longrope")


def rope_from_dict(
    parameters: Mapping[str, Any] | None, rope_theta: float = 10000.0,
    max_position_embeddings: int | None = None, interleaved: bool = False,
) -> tuple[Rope, dict[str, Any]]:
  """Reads a rotary embedding from a model hub's `rope_parameters` or older `rope_scaling`.

  Args:
    parameters: the fields of Rope by name; the type is `rope_type` or, in older files, `type`;
      None: the default embedding.
    rope_theta: the base, if `parameters` has none.
    max_position_embeddings: the model's length (tokens), if `parameters` has none.
    interleaved: whether pairs are neighbors, if `parameters` does not have it.

  Returns:
    The rotary embedding, and the parameters that are not fields of Rope.

  Raises:
    ValueError: `parameters` is neither a mapping nor None, or as `check_rope`.
  """
  checks.require(parameters is None or isinstance(parameters, Mapping), "rope parameters",
                 repr(parameters), "a mapping or None")
  given = {name: value for name, value in (parameters or {}).items() if value is not None}
  older = given.pop("type", "default")
  given.setdefault("rope_type", older)
  checks.one_of("rope_type", given["rope_type"], (*ROPE_TYPES, *ALIASES))
  given["rope_type"] = ALIASES.get(given["rope_type"], given["rope_type"])
  known = {name: _frozen(given.pop(name)) for name in Rope._fields if name in given}
  defaults = {"rope_theta": rope_theta, "max_position_embeddings": max_position_embeddings,
              "interleaved": interleaved}
  rope = Rope(**{**defaults, **known})
  check_rope(rope)
  return rope, given


def check_rope(rope: Rope) -> None:
  """Checks the fields that can be checked without the width of a head.

  Raises:
    ValueError: `rope` is not a Rope, its type is unknown, a required field is None, or a value is
      out of range.
  """
  checks.require(isinstance(rope, Rope), "rope", repr(rope),
                 "a Rope; rope_from_dict makes one of a dictionary")
  checks.one_of("rope_type", rope.rope_type, tuple(ROPE_TYPES))
  resolved = rope._replace(factor=scale_of(rope), original_max_position_embeddings=_original(rope))
  for name in ROPE_TYPES[rope.rope_type]:
    checks.require(getattr(resolved, name) is not None, f"rope.{name}", "None",
                   f"a value, since rope_type={rope.rope_type!r} needs it")
  checks.number("rope.rope_theta", rope.rope_theta, "a number > 1", lambda x: 1 < x < math.inf)
  checks.number("rope.partial_rotary_factor", rope.partial_rotary_factor, "a number in (0, 1]",
                lambda x: 0 < x <= 1)
  _check_optional(rope, ("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor",
                         "high_freq_factor"), "a finite number > 0", lambda x: 0 < x < math.inf)
  _check_optional(rope, ("mscale", "mscale_all_dim"), "a finite number >= 0",
                  lambda x: 0 <= x < math.inf)
  for name in ("max_position_embeddings", "original_max_position_embeddings"):
    if getattr(rope, name) is not None:
      checks.integer(f"rope.{name}", getattr(rope, name), "an int >= 1 (tokens)", lambda x: x >= 1)
  for name in ("interleaved", "truncate", "mrope_interleaved"):
    checks.require(isinstance(getattr(rope, name), bool), f"rope.{name}",
                   repr(getattr(rope, name)), "True or False")
  if rope.rope_type == "llama3":
    low, high = rope.low_freq_factor or 0.0, rope.high_freq_factor or 0.0
    checks.require(low <= high, "rope.high_freq_factor", high, f"at least low_freq_factor={low}")
  _check_sequences(rope)


def _check_optional(
    rope: Rope, names: tuple[str, ...], expected: str, good: Callable[[float], bool]) -> None:
  """Checks fields that are a number or None."""
  for name in names:
    if getattr(rope, name) is not None:
      checks.number(f"rope.{name}", getattr(rope, name), expected, good)


def _check_sequences(rope: Rope) -> None:
  """Checks the fields that are tuples; their lengths are checked when the width is known."""
  for name in ("short_factor", "long_factor"):
    factors = getattr(rope, name)
    if factors is not None:
      checks.require(isinstance(factors, (tuple, list)), f"rope.{name}", repr(factors),
                     "a tuple of numbers > 0, one for each pair of dimensions")
      for factor in factors:
        checks.number(f"rope.{name}", factor, "finite numbers > 0", lambda x: 0 < x < math.inf)
  section = rope.mrope_section
  checks.require(
      section is None or (isinstance(section, (tuple, list)) and len(section) == 3 and all(
          type(n) is int and n >= 0 for n in section)),
      "rope.mrope_section", section, "three ints >= 0: frequencies of time, height and width")
  checks.require(rope.rope_type != "longrope" or (_original(rope) or 0) > 1,
                 "rope.original_max_position_embeddings", _original(rope), "more than 1 token, "
                 "since rope_type='longrope' divides by its logarithm")


def rotary_width(rope: Rope, head_dim: int) -> int:
  """The number of rotated dimensions of a head, `rotary_dim`.

  Raises:
    ValueError: `head_dim` is not an int >= 1, the number is odd or 0, or as `check_rope`.
  """
  check_rope(rope)
  checks.integer("head_dim", head_dim, "an int >= 1", lambda x: x >= 1)
  factor = 1.0 if rope.rope_type == "proportional" else rope.partial_rotary_factor
  width = int(head_dim * factor + 1e-6)  # 49 * (6 / 49) is less than 6
  checks.require(width >= 2 and width % 2 == 0, "head_dim", head_dim, "a width of which "
                 f"partial_rotary_factor={rope.partial_rotary_factor} leaves an even number >= 2")
  return width


def scale_of(rope: Rope) -> float | None:
  """`factor`, else the ratio of the two lengths, else None."""
  if rope.factor is not None:
    return rope.factor
  if rope.rope_type in ("yarn", "deepseek_yarn", "longrope") and (
      rope.max_position_embeddings and rope.original_max_position_embeddings):
    return rope.max_position_embeddings / rope.original_max_position_embeddings
  return None


def attention_factor(rope: Rope) -> float:
  """The factor of cosine and sine that keeps attention as sharp on longer sequences.

    yarn      0.1 ln(factor) + 1, or the ratio of two such terms with mscale and mscale_all_dim
    longrope  sqrt(1 + ln(factor) / ln(original length))
    others    1

  Peng et al., YaRN, https://arxiv.org/abs/2309.00071; Ding et al., LongRoPE,
  https://arxiv.org/abs/2402.13753.

  Raises:
    ValueError: as `check_rope`.
  """
  check_rope(rope)
  if rope.attention_factor is not None:
    return float(rope.attention_factor)
  factor = scale_of(rope)
  if rope.rope_type == "longrope":
    if factor is None or factor <= 1:
      return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(_original(rope) or 1))
  factor = 1.0 if factor is None else factor
  if rope.rope_type == "deepseek_yarn":
    return (yarn_mscale(factor, 1.0 if rope.mscale is None else rope.mscale)
            / yarn_mscale(factor, rope.mscale_all_dim or 0.0))
  if rope.rope_type == "yarn":
    if rope.mscale and rope.mscale_all_dim:
      return yarn_mscale(factor, rope.mscale) / yarn_mscale(factor, rope.mscale_all_dim)
    return yarn_mscale(factor, 1.0)
  return 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
  """0.1 * mscale * ln(factor) + 1 for factors above 1, else 1."""
  return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(
    rope: Rope, head_dim: int, length: int | jax.Array | None = None) -> np.ndarray | jax.Array:
  """The rotation of each pair of dimensions from one position to the next, in radians.

    default   theta^(-2i / rotary_dim), i = 0 .. rotary_dim / 2 - 1
    linear    the default / factor
    dynamic   the default with the base theta * (factor * length / longest - factor + 1)^exponent,
              exponent = rotary_dim / (rotary_dim - 2), for lengths above `longest`, the model's
    yarn      interpolated between default and linear, by turns over the original length
    llama3    the same, linearly between low_freq_factor and high_freq_factor turns; a step if
              these are equal, as in Llama 4 Scout
    longrope  the default / long_factor if length is more than the original length, else the
              default / short_factor
    proportional  the default / factor for the first partial_rotary_factor of the pairs, else 0:
              a head is rotated whole, as in Gemma 4

  Su et al., RoFormer, https://arxiv.org/abs/2104.09864; Peng et al., YaRN,
  https://arxiv.org/abs/2309.00071; Ding et al., LongRoPE, https://arxiv.org/abs/2402.13753;
  Grattafiori et al., The Llama 3 Herd of Models, https://arxiv.org/abs/2407.21783.

  Args:
    rope: the rotary embedding.
    head_dim: D.
    length: length of the sequence for the types BY_LENGTH, an int >= 0 or an integer scalar array
      (tokens); None: at most the model's length.

  Returns:
    float32 [rotary_dim / 2], a numpy array unless `length` is an array; computed in float64 and
    rounded once. All are 0 for rope_type "none".

  Raises:
    ValueError: fields of the type do not fit the width, `length` is something else, or as
      `rotary_width`.
  """
  width = rotary_width(rope, head_dim)
  _check_length(length)
  default = rope.rope_theta ** (-np.arange(0, width, 2) / width)
  if rope.rope_type == "none":
    frequencies = np.zeros_like(default)
  elif rope.rope_type == "linear":
    frequencies = default / (rope.factor or 1.0)
  elif rope.rope_type == "proportional":
    turning = np.arange(len(default)) < int(rope.partial_rotary_factor * width // 2)
    frequencies = np.where(turning, default / (rope.factor or 1.0), 0.0)
  elif rope.rope_type == "dynamic":
    return _dynamic(rope, default, length)
  elif rope.rope_type in ("yarn", "deepseek_yarn"):
    weight = _yarn_weight(rope, width)
    frequencies = default * weight + default / (scale_of(rope) or 1.0) * (1 - weight)
  elif rope.rope_type == "llama3":
    weight = _llama3_weight(rope, default)
    frequencies = default * weight + default / (rope.factor or 1.0) * (1 - weight)
  elif rope.rope_type == "longrope":
    return _longrope(rope, default, length)
  else:
    frequencies = default
  return frequencies.astype(np.float32)


def position_axes(rope: Rope, head_dim: int) -> np.ndarray | None:
  """The axis of the position of each frequency: time (0), height (1) or width (2).

  Wang et al., Qwen2-VL, https://arxiv.org/abs/2409.12191.

  Returns:
    int [rotary_dim / 2], or None if `mrope_section` is None: a token has a single position.

  Raises:
    ValueError: the sum of the sections is not rotary_dim / 2, the sections cannot be interleaved,
      or as `rotary_width`.
  """
  half = rotary_width(rope, head_dim) // 2
  section = rope.mrope_section
  if section is None:
    return None
  checks.require(sum(section) == half, "rope.mrope_section", section,
                 f"a sum of {half}, half the rotated width")
  if not rope.mrope_interleaved:
    return np.repeat(np.arange(3), section)
  axes = np.zeros(half, int)
  for axis in (1, 2):
    axes[axis:3 * section[axis]:3] = axis
  checks.require(tuple(np.bincount(axes, minlength=3)) == tuple(section), "rope.mrope_section",
                 section, "height and width so small that three times each fits the "
                 f"{half} frequencies, so that they can be interleaved")
  return axes


def _original(rope: Rope) -> int | None:
  """The model's original length (tokens), None if unknown."""
  return rope.original_max_position_embeddings or rope.max_position_embeddings


def _dynamic(
    rope: Rope, default: np.ndarray, length: int | jax.Array | None) -> np.ndarray | jax.Array:
  """The default times stretch^(-2i / (rotary_dim - 2)), which equals a stretched base."""
  checks.require(len(default) >= 2, "head_dim", 2 * len(default), "a rotated width of at least 4 "
                 "for rope_type='dynamic'")
  exponents = -2 * np.arange(len(default)) / (2 * len(default) - 2)
  longest, factor = rope.max_position_embeddings or 1, rope.factor or 1.0
  if isinstance(length, jax.Array):
    traced = factor * (jnp.maximum(length, longest) / longest) - (factor - 1)
    return jnp.asarray(default, jnp.float32) * traced ** jnp.asarray(exponents, jnp.float32)
  stretch = factor * max(longest if length is None else length, longest) / longest - (factor - 1)
  return (default * stretch ** exponents).astype(np.float32)


def _longrope(
    rope: Rope, default: np.ndarray, length: int | jax.Array | None) -> np.ndarray | jax.Array:
  """One of two sets of frequencies, selected by length."""
  for name in ("short_factor", "long_factor"):
    checks.require(len(getattr(rope, name)) == len(default), f"rope.{name}",
                   f"{len(getattr(rope, name))} numbers", f"{len(default)}, half the rotated width")
  short, long = ((default / np.asarray(factors)).astype(np.float32)
                 for factors in (rope.short_factor, rope.long_factor))
  original = _original(rope) or 0
  if isinstance(length, jax.Array):
    return jnp.where(length > original, long, short)
  return long if length is not None and length > original else short


def _check_length(length: Any) -> None:
  """Checks the length of a sequence."""
  if isinstance(length, jax.Array):
    checks.require(length.ndim == 0 and jnp.issubdtype(length.dtype, jnp.integer), "length",
                   checks.describe(length), "an int32 scalar (tokens)")
  elif length is not None:
    checks.integer("length", length, "an int >= 0 (tokens), or an int32 scalar array",
                   lambda x: x >= 0)


def _llama3_weight(rope: Rope, default: np.ndarray) -> np.ndarray:
  """Weight of the default frequencies, by their turns over the original length."""
  turns = (_original(rope) or 1) * default / (2 * np.pi)
  low, high = rope.low_freq_factor or 0.0, rope.high_freq_factor or 0.0
  if low == high:
    return np.where(turns >= low, 1.0, 0.0)
  return np.clip((turns - low) / (high - low), 0, 1)


def _yarn_weight(rope: Rope, width: int) -> np.ndarray:
  """Weight of the default frequencies: 1 for fast ones, 0 for slow ones."""
  def dimension(turns: float) -> float:
    return (width * math.log((_original(rope) or 1) / (turns * 2 * math.pi))
            / (2 * math.log(rope.rope_theta)))

  low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, width - 1)
  high += 0.001 * (low == high)  # avoids division by 0 where the ramp is a step
  return 1 - np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)


def _frozen(value: Any) -> Any:
  """Converts a list to a tuple."""
  return tuple(value) if isinstance(value, list) else value
