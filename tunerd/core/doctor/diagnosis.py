"""What a rule is, what it may say, and the diagnosis that all rules together give.

A rule finds something, passes, or cannot tell; the last is never taken for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tunerd.core.doctor.facts import Facts
from tunerd.core.result import Level

_T = TypeVar("_T")
_ORDER = (Level.ERROR, Level.WARNING, Level.NOTE)
_EXIT = {Level.ERROR: 7, Level.WARNING: 6, Level.NOTE: 0}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rule saw, how bad it is here, and what to do; `do` is a command where there is one."""

    severity: Level
    seen: str
    do: str


@dataclass(frozen=True, slots=True)
class Missing:
    """What a rule would have to know to tell, in words."""

    what: str


class CannotTell(Exception):  # never leaves `diagnose`
    """Ends a rule that lacks a fact."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def need(value: _T | None, what: str) -> _T:
    """A fact without which the rule cannot tell.

    Raises:
        CannotTell: it is unknown.
    """
    if value is None:
        raise CannotTell(what)
    return value


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that may be wrong.

    `looks_for` and `why` are sentences for people, `source` says where the rule or its threshold
    comes from. `check` yields nothing where all is well, and may raise CannotTell.
    """

    code: str
    looks_for: str
    why: str
    source: str
    check: Callable[[Facts], Iterator[Seen | Missing]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know, with what to do about it."""

    code: str
    severity: Level
    seen: str
    why: str
    do: str
    source: str


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A rule that could not tell, at least of a part of what it looks at."""

    code: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What all rules said: findings with the worst first, then the order of the rules."""

    findings: tuple[Finding, ...]
    not_checked: tuple[NotChecked, ...]
    passed: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 for nothing or notes, 6 for warnings, 7 for errors."""
        return max((_EXIT[finding.severity] for finding in self.findings), default=0)


def diagnose(facts: Facts, rules: Iterable[Rule]) -> Diagnosis:
    """Ask every rule."""
    findings: list[Finding] = []
    not_checked: list[NotChecked] = []
    passed: list[str] = []
    for rule in rules:
        seen, missing = _ask(rule, facts)
        findings += [
            Finding(rule.code, one.severity, one.seen, rule.why, one.do, rule.source)
            for one in seen
        ]
        if missing:
            not_checked.append(NotChecked(rule.code, tuple(missing)))
        elif not seen:
            passed.append(rule.code)
    findings.sort(key=lambda finding: _ORDER.index(finding.severity))
    return Diagnosis(tuple(findings), tuple(not_checked), tuple(passed))


def _ask(rule: Rule, facts: Facts) -> tuple[list[Seen], list[str]]:
    seen: list[Seen] = []
    missing: list[str] = []
    try:
        for said in rule.check(facts):
            if isinstance(said, Missing):
                missing.append(said.what)
            else:
                seen.append(said)
    except CannotTell as unknown:
        missing.append(unknown.what)
    return seen, missing
