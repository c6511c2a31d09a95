# Copyright 2026 The attn_core Authors.
# SPDX-License-Identifier: Apache-2.0
"""Selection: which mechanism and which of its implementations run a call."""

from typing import Callable, Mapping, NamedTuple

from attn_core import checks
from attn_core.config.other_names import OTHER_MECHANISM_NAMES, OTHER_PLATFORM_NAMES
from attn_core.dispatch.capabilities import Implementation, Request
from attn_core.types import PLATFORMS, AttentionMechanism


class FewQueries(NamedTuple):
  """The mechanism that `auto` tries first where each row has few queries."""

  mechanism: str
  most_cached: int  # queries of a row over a dense cache; over other keys, one


class Rules(NamedTuple):
  """The literal rows that `attn_core.table` holds."""

  table: Mapping[tuple[str, str], Implementation]  # (mechanism, place)
  missing: Mapping[str, str]  # mechanism -> why a platform has no row
  auto: Mapping[str, tuple[str, ...]]  # platform -> the names that `auto` tries, in this order
  auto_few_queries: Mapping[str, FewQueries]  # place -> what goes before, if its row there runs


class Target(NamedTuple):
  """The device that a call is compiled for."""

  platform: str
  capability: str | None = None  # compute capability of the GPU; None: not known, or not a GPU


class Question(NamedTuple):
  """A call for which an implementation is wanted."""

  target: Target
  one_query: bool  # whether each row has one query and several keys
  cached_queries: int | None  # queries of a row over a dense cache; None: no cache, or not known
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
  special = rules.table.get((mechanism, _place(target)))
  return rules.table.get((mechanism, target.platform)) if special is None else special


def _place(target: Target) -> str:
  """Returns the name of GPUs of a compute capability, or of a platform."""
  return target.platform if target.capability is None else f"{target.platform} {target.capability}"


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
  if mechanism == _first_for_few(rules, question) and candidate is find(
      rules, mechanism, question.target):
    count = "one query" if question.one_query else "few queries"
    parts.append(f"which auto tries first on {platform} for {count} a row")
  if passed_over:
    parts.append(f"not by {'; '.join(passed_over)}")
  elif candidate.fallback is not None:
    parts.append(f"which goes before {candidate.fallback.name}")
  elif candidate is not rules.table.get((mechanism, platform)):
    parts.append(f"which is for compute capability {capability}")
  return "; ".join(parts)


def ask_all(rules: Rules, question: Question) -> tuple[Verdict, ...]:
  """Returns every mechanism's answer, in the order in which `auto` tries them, then the others."""
  order = [*rules.auto[question.target.platform]]
  order += [name for name in names() if name not in (*order, "auto")]
  first = _first_for_few(rules, question)
  verdicts = [ask(rules, name, question) for name in order]
  return tuple(sorted(verdicts, key=lambda verdict: verdict.mechanism != first
                      or not _is_own(rules, question, verdict)))


def _first_for_few(rules: Rules, question: Question) -> str | None:
  """Returns the name that `auto` tries first where each row has few queries, or None."""
  few = rules.auto_few_queries.get(_place(question.target))
  if few is None:
    return None
  cached = question.cached_queries
  is_few = question.one_query or cached is not None and cached <= few.most_cached
  return few.mechanism if is_few else None


def _is_own(rules: Rules, question: Question, verdict: Verdict) -> bool:
  """Returns whether a mechanism's row runs itself, not a fallback."""
  row = find(rules, verdict.mechanism, question.target)
  return row is not None and verdict.implementation is row


def choose(rules: Rules, mechanism: str, question: Question) -> Verdict:
  """Returns the verdict of the mechanism that runs.

  A mechanism asked for by name is never replaced. `auto` takes that of `Rules.auto_few_queries` if
  its row runs, else the first of `Rules.auto` that supports the call, and one of quadratic memory
  only if none of linear memory does.

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
  order = rules.auto[platform] if mechanism == "auto" else (mechanism,)
  asked: dict[str, Verdict] = {}
  first = _first_for_few(rules, question) if mechanism == "auto" else None
  if first is not None:
    asked[first] = verdict = ask(rules, first, question)
    if _is_own(rules, question, verdict) and _is_linear(verdict, question):
      return verdict
  able, verdicts = None, []
  for name in order:
    verdict = asked.get(name) or ask(rules, name, question)
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
