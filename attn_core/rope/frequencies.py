"""How fast rotary embeddings turn: the frequencies of every type, and the value that describes one.

Letters: R rotated width (even, at most the head's width D), L length of a sequence (tokens).
"""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import checks


class Rope(NamedTuple):
  """A rotary embedding: static and hashable. None: the type does not need it, or has a default."""

  rope_type: str = "default"  # one of ROPE_TYPES
  rope_theta: float = 10000.0  # > 1: the base, from whose powers the frequencies come
  factor: float | None = None  # how much longer sequences are to become; None: see scale_of
  max_position_embeddings: int | None = None  # tokens
  original_max_position_embeddings: int | None = None  # tokens; None: max_position_embeddings
  partial_rotary_factor: float = 1.0  # share of a head that is rotated, its first part
  interleaved: bool = False  # pairs are (0, 1), (2, 3), ...; else (0, R / 2), (1, R / 2 + 1), ...
  attention_factor: float | None = None  # multiplies cosine and sine; None: see attention_factor
  beta_fast: float = 32.0  # yarn: from so many turns on over the original length, unchanged
  beta_slow: float = 1.0  # yarn: up to so many turns over the original length, interpolated
  mscale: float | None = None  # yarn: >= 0, see attention_factor
  mscale_all_dim: float | None = None  # yarn: >= 0, see attention_factor
  truncate: bool = True  # yarn: whether the bounds of its ramp are whole numbers
  low_freq_factor: float | None = None  # llama3: up to so many turns, interpolated
  high_freq_factor: float | None = None  # llama3: from so many turns on, unchanged
  short_factor: tuple[float, ...] | None = None  # longrope: R / 2 divisors of the frequencies
  long_factor: tuple[float, ...] | None = None  # longrope: those beyond the original length
  mrope_section: tuple[int, ...] | None = None  # frequencies for time, height and width
  mrope_interleaved: bool = False  # time, height, width, time, ...; else one section after another


jax.tree_util.register_static(Rope)

# Type -> the fields that it cannot do without. mrope has default frequencies.
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
}
ALIASES = {"su": "longrope"}
# The frequencies of these depend on the length of the sequence.
BY_LENGTH = ("dynamic", "longrope")


def rope_from_dict(
    parameters: Mapping[str, Any] | None, rope_theta: float = 10000.0,
    max_position_embeddings: int | None = None, interleaved: bool = False,
) -> tuple[Rope, dict[str, Any]]:
  """A rotary embedding as `rope_parameters`, or the older `rope_scaling`, describes it.

  Args:
    parameters: the fields of Rope by name; the type as `rope_type` or, older, `type`; None: the
      default one.
    rope_theta: the base, where `parameters` have none.
    max_position_embeddings: the model's length (tokens), where `parameters` have none.
    interleaved: which dimensions make a pair, where `parameters` do not say.

  Returns:
    The rotary embedding, and the parameters that no type knows.

  Raises:
    ValueError: `parameters` are no mapping, or `check_rope` refuses them.
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
  """Checks what can be checked without a width.

  Raises:
    ValueError: an unknown type, a field that the type needs and is None, or a value out of range.
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
    checks.require(rope.low_freq_factor <= rope.high_freq_factor, "rope.high_freq_factor",
                   rope.high_freq_factor, f"at least low_freq_factor={rope.low_freq_factor}")
  _check_sequences(rope)


def _check_optional(rope: Rope, names: tuple[str, ...], expected: str, good) -> None:
  """Checks of fields that are a number or None."""
  for name in names:
    if getattr(rope, name) is not None:
      checks.number(f"rope.{name}", getattr(rope, name), expected, good)


def _check_sequences(rope: Rope) -> None:
  """Checks of the fields that hold several numbers; how many is checked with the width."""
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
  checks.require(rope.rope_type != "longrope" or _original(rope) > 1,
                 "rope.original_max_position_embeddings", _original(rope), "more than 1 token, "
                 "since rope_type='longrope' divides by its logarithm")


def rotary_width(rope: Rope, head_dim: int) -> int:
  """R: how many dimensions of a head are rotated.

  Raises:
    ValueError: it is odd or 0, `head_dim` is no int >= 1, or `check_rope` refuses.
  """
  check_rope(rope)
  checks.integer("head_dim", head_dim, "an int >= 1", lambda x: x >= 1)
  width = int(head_dim * rope.partial_rotary_factor + 1e-6)  # 49 * (6 / 49) is less than 6
  checks.require(width >= 2 and width % 2 == 0, "head_dim", head_dim, "a width of which "
                 f"partial_rotary_factor={rope.partial_rotary_factor} leaves an even number >= 2")
  return width


def scale_of(rope: Rope) -> float | None:
  """`factor`, where absent the ratio of the two lengths, where they are not known None."""
  if rope.factor is not None:
    return rope.factor
  if rope.rope_type in ("yarn", "deepseek_yarn", "longrope") and (
      rope.max_position_embeddings and rope.original_max_position_embeddings):
    return rope.max_position_embeddings / rope.original_max_position_embeddings
  return None


def attention_factor(rope: Rope) -> float:
  """What cosine and sine are multiplied with, so that longer sequences stay as sharp.

    yarn      0.1 ln(factor) + 1, or a ratio of two such terms by mscale and mscale_all_dim
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
    return math.sqrt(1 + math.log(factor) / math.log(_original(rope)))
  if rope.rope_type == "deepseek_yarn":
    return (yarn_mscale(factor, 1.0 if rope.mscale is None else rope.mscale)
            / yarn_mscale(factor, rope.mscale_all_dim or 0.0))
  if rope.rope_type == "yarn":
    if rope.mscale and rope.mscale_all_dim:
      return yarn_mscale(factor, rope.mscale) / yarn_mscale(factor, rope.mscale_all_dim)
    return yarn_mscale(factor, 1.0)
  return 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
  """0.1 * mscale * ln(factor) + 1, for factors above 1."""
  return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: Rope, head_dim: int, length: Any = None):
  """How far each pair of dimensions turns from one position to the next, in radians.

    default   theta^(-2i / R), i = 0 .. R / 2 - 1
    linear    the same / factor
    dynamic   with theta * (factor * L / M - factor + 1)^(R / (R - 2)), M the model's length, L > M
    yarn      between the default and the linear ones, by turns over the original length
    llama3    the same, a straight line between low_freq_factor and high_freq_factor turns; a step
              where these are equal, as in Llama 4 Scout
    longrope  the default ones / (long_factor where L is more than the original length, else
              short_factor)

  Su et al., RoFormer, https://arxiv.org/abs/2104.09864; Peng et al., YaRN,
  https://arxiv.org/abs/2309.00071; Ding et al., LongRoPE, https://arxiv.org/abs/2402.13753;
  Grattafiori et al., The Llama 3 Herd of Models, https://arxiv.org/abs/2407.21783.

  Args:
    rope: which embedding.
    head_dim: D.
    length: L, for the types BY_LENGTH: an int >= 0 or an int32 scalar array (tokens); None: not
      more than the model's length.

  Returns:
    float32 [R / 2], of numpy unless `length` is an array; computed in float64 and rounded once. For
    rope_type "none" all are 0.

  Raises:
    ValueError: the type's fields do not fit the width, `length` is something else, or as
      `rotary_width`.
  """
  width = rotary_width(rope, head_dim)
  _check_length(length)
  default = rope.rope_theta ** (-np.arange(0, width, 2) / width)
  if rope.rope_type == "none":
    frequencies = np.zeros_like(default)
  elif rope.rope_type == "linear":
    frequencies = default / rope.factor
  elif rope.rope_type == "dynamic":
    return _dynamic(rope, default, length)
  elif rope.rope_type in ("yarn", "deepseek_yarn"):
    share = _yarn_share(rope, width)
    frequencies = default * share + default / scale_of(rope) * (1 - share)
  elif rope.rope_type == "llama3":
    share = _llama3_share(rope, default)
    frequencies = default * share + default / rope.factor * (1 - share)
  elif rope.rope_type == "longrope":
    return _longrope(rope, default, length)
  else:
    frequencies = default
  return frequencies.astype(np.float32)


def position_axes(rope: Rope, head_dim: int) -> np.ndarray | None:
  """Which of time (0), height (1) and width (2) turns each frequency; None: there is one position.

  Wang et al., Qwen2-VL, https://arxiv.org/abs/2409.12191.

  Returns:
    int [R / 2], or None where `mrope_section` is None.

  Raises:
    ValueError: the sections are not R / 2 frequencies together, or cannot be interleaved.
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
                 section, "height and width of which three times each fit the "
                 f"{half} frequencies, so that they can be interleaved")
  return axes


def _original(rope: Rope) -> int | None:
  return rope.original_max_position_embeddings or rope.max_position_embeddings


def _dynamic(rope, default, length):
  """The default ones times x^(-2i / (R - 2)): so the stretched base makes them."""
  checks.require(len(default) >= 2, "head_dim", 2 * len(default), "a rotated width of at least 4 "
                 "for rope_type='dynamic'")
  exponents = -2 * np.arange(len(default)) / (2 * len(default) - 2)
  most, factor = rope.max_position_embeddings, rope.factor
  if isinstance(length, jax.Array):
    stretch = factor * (jnp.maximum(length, most) / most) - (factor - 1)
    return jnp.asarray(default, jnp.float32) * stretch ** jnp.asarray(exponents, jnp.float32)
  stretch = factor * max(most if length is None else length, most) / most - (factor - 1)
  return (default * stretch ** exponents).astype(np.float32)


def _longrope(rope, default, length):
  """Two sets of frequencies, chosen by length."""
  for name in ("short_factor", "long_factor"):
    checks.require(len(getattr(rope, name)) == len(default), f"rope.{name}",
                   f"{len(getattr(rope, name))} numbers", f"{len(default)}, half the rotated width")
  short, long = ((default / np.asarray(factors)).astype(np.float32)
                 for factors in (rope.short_factor, rope.long_factor))
  if isinstance(length, jax.Array):
    return jnp.where(length > _original(rope), long, short)
  return long if length is not None and length > _original(rope) else short


def _check_length(length: Any) -> None:
  if isinstance(length, jax.Array):
    checks.require(length.ndim == 0 and jnp.issubdtype(length.dtype, jnp.integer), "length",
                   checks.describe(length), "an int32 scalar (tokens)")
  elif length is not None:
    checks.integer("length", length, "an int >= 0 (tokens), or an int32 scalar array",
                   lambda x: x >= 0)


def _llama3_share(rope, default):
  """How much of the default frequency each one keeps, by its turns over the original length."""
  turns = _original(rope) * default / (2 * np.pi)
  low, high = rope.low_freq_factor, rope.high_freq_factor
  if low == high:
    return np.where(turns >= low, 1.0, 0.0)
  return np.clip((turns - low) / (high - low), 0, 1)


def _yarn_share(rope, width: int):
  """How much of the default frequency each one keeps: 1 for fast ones, 0 for slow ones."""
  def dimension(turns):
    return (width * math.log(_original(rope) / (turns * 2 * math.pi))
            / (2 * math.log(rope.rope_theta)))
  low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, width - 1)
  high += 0.001 * (low == high)  # a step is a ramp of no width
  return 1 - np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)


def _frozen(value: Any) -> Any:
  return tuple(value) if isinstance(value, list) else value
