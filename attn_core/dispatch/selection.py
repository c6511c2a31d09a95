# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Selection: which mechanism and which of its implementations run a call."""

from typing import Callable, Mapping, NamedTuple

from attn_core import checks
from attn_core.config.other_names import OTHER_MECHANISM_NAMES, OTHER_PLATFORM_NAMES
from attn_core.dispatch.capabilities import Implementation, Request
from attn_core.types import PLATFORMS, AttentionMechanism


class Rules(NamedTuple):
  """The literal rows that `attn_core.table` holds."""

  table: Mapping[tuple[str, str], Implementation]  # (mechanism, place)
  missing: Mapping[str, str]  # mechanism -> why a platform has no row
  auto: Mapping[str, tuple[str, ...]]  # platform -> the names that `auto` tries, in this order
  auto_one_query: Mapping[str, str]  # platform -> the name that goes before, for one query a row


class Target(NamedTuple):
  """The device that a call is compiled for."""

  platform: str
  capability: str | None = None  # compute capability of the GPU; None: not known, or not a GPU


class Question(NamedTuple):
  """A call for which an implementation is wanted."""

  target: Target
  one_query: bool  # whether each row has one query and several keys
  request_for: Callable[[Implementation], Request]  # the call as placed for an implementation


class Verdict(NamedTuple):
  """The answer of one mechanism to a question."""

  mechanism: str
  reasons: tuple[str, ...]  # why it refuses; empty: it supports the call
  implementation: Implementation | None = None  # the one that would run; None: it refuses
  why: str = ""  # why that implementation, where there are several
  error: Exception | None = None  # raised while the call was placed

  @property
  def kernel(self) -> str | None:
    """The name of the implementation."""
    return None if self.implementation is None else self.implementation.name

  def __str__(self) -> str:
    if self.reasons:
      return "; ".join(self.reasons)
    return f"can, by {self.kernel}{self.why and ', '}{self.why}"


def names() -> tuple[str, ...]:
  """Returns every mechanism's name."""
  return tuple(mechanism.value for mechanism in AttentionMechanism)


def find(rules: Rules, mechanism: str, target: Target) -> Implementation | None:
  """Returns the row of a mechanism; that of a compute capability goes before the platform's."""
  special = rules.table.get((mechanism, f"{target.platform} {target.capability}"))
  return rules.table.get((mechanism, target.platform)) if special is None else special


def ask(rules: Rules, mechanism: str, question: Question) -> Verdict:
  """Returns which implementation of a mechanism supports a call, or every reason why none does."""
  target = question.target
  row = find(rules, mechanism, target)
  if row is None:
    return Verdict(mechanism, (f"no implementation on platform {target.platform!r}: "
                               f"{rules.missing[mechanism]}",))
  passed_over: list[str] = []
  for candidate in row.chain:
    request = question.request_for(candidate)
    reasons = candidate.unsupported(request)
    if not reasons and candidate.fallback is not None and not candidate.is_linear(request):
      reasons = ("its memory would be quadratic",)
    if not reasons:
      why = _why(rules, mechanism, question, candidate, passed_over)
      if "stored_heads" in request.features:
        reads = f"which writes nothing here: {request.features['stored_heads']}"
        why = f"{why}; {reads}" if why else reads
      return Verdict(mechanism, (), candidate, why)
    passed_over += [f"{candidate.name}: {reason}" for reason in reasons]
  return Verdict(mechanism, reasons, error=request.placement_error)


def _why(rules: Rules, mechanism: str, question: Question, candidate: Implementation,
         passed_over: list[str]) -> str:
  """Returns why a candidate runs, where there are several."""
  platform, capability = question.target
  parts = []
  if question.one_query and mechanism == rules.auto_one_query.get(platform):
    parts.append(f"which auto tries first on {platform} for one query a row")
  if passed_over:
    parts.append(f"not by {'; '.join(passed_over)}")
  elif candidate.fallback is not None:
    parts.append(f"which goes before {candidate.fallback.name}")
  elif candidate is not rules.table.get((mechanism, platform)):
    parts.append(f"which is for compute capability {capability}")
  return "; ".join(parts)


def ask_all(rules: Rules, question: Question) -> tuple[Verdict, ...]:
  """Returns every mechanism's answer, in the order in which `auto` tries them, then the others."""
  order = _auto_order(rules, question)
  order += [name for name in names() if name not in order]
  return tuple(ask(rules, name, question) for name in order if name != "auto")


def _auto_order(rules: Rules, question: Question) -> list[str]:
  """Returns the names that `auto` tries, whatever their memory."""
  platform = question.target.platform
  first = rules.auto_one_query.get(platform) if question.one_query else None
  return sorted(rules.auto[platform], key=lambda name: name != first)


def choose(rules: Rules, mechanism: str, question: Question) -> Verdict:
  """Returns the verdict of the mechanism that runs.

  A mechanism asked for by name is never replaced. `auto` takes the first of `Rules.auto` that
  supports the call, and one of quadratic memory only if none of linear memory does.

  Raises:
    ValueError: an unknown mechanism or platform, or a call that cannot be placed.
    NotImplementedError: the mechanism refuses; the message has the reasons, and the mechanisms
      that support the call.
  """
  mechanism = mechanism.value if isinstance(mechanism, AttentionMechanism) else mechanism
  platform, capability = question.target
  for what, value, known, aliases in (("mechanism", mechanism, names(), OTHER_MECHANISM_NAMES),
                                      ("platform", platform, PLATFORMS, OTHER_PLATFORM_NAMES)):
    if value not in known:
      raise ValueError(f"{what}={value!r}: expected one of {', '.join(map(repr, known))}"
                       + checks.suggestion(value, known, aliases))
  order = _auto_order(rules, question) if mechanism == "auto" else [mechanism]
  able, verdicts = None, []
  for name in order:
    verdict = ask(rules, name, question)
    verdicts.append(verdict)
    if not verdict.reasons and _is_linear(verdict, question):
      return verdict
    able = able or (None if verdict.reasons else verdict)
  if able is not None:
    return able
  for verdict in verdicts:
    if isinstance(verdict.error, ValueError):
      raise verdict.error
  refusals = "; ".join(f"{v.mechanism}: {', '.join(v.reasons)}" for v in verdicts)
  others = [v.mechanism for v in ask_all(rules, question) if not v.reasons]
  cure = f"mechanism={' or '.join(map(repr, others))} can" if others else "no mechanism here can"
  where = "" if capability is None else f", compute capability {capability},"
  raise NotImplementedError(f"mechanism={mechanism!r} on platform {platform!r}{where} refuses. "
                            f"{refusals}. On this platform {cure}.")


def _is_linear(verdict: Verdict, question: Question) -> bool:
  """Whether the memory of the implementation that would run is linear."""
  implementation = verdict.implementation
  return implementation is not None and implementation.is_linear(
      question.request_for(implementation))
