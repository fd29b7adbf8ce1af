"""Which configurations a report compares: arms of several runs that are the same server are one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tunerd.core.evidence import ArmRecord, RunEvidence
from tunerd.core.fingerprint import Fingerprint
from tunerd.core.fingerprint_arguments import argument_changes
from tunerd.core.sample import Sample
from tunerd.web.report_theme import colour_of

_LETTERS = 2


@dataclass(frozen=True, slots=True)
class Series:
    """One configuration.

    `colour` names an engine's colour, `shade` counts configurations of that engine (0 is the strongest).
    `speculates` is None where no sample tells.
    """

    label: str
    arm: ArmRecord
    names: tuple[str, ...]
    runs: tuple[int, ...]
    samples: tuple[Sample, ...]
    colour: str
    shade: int
    speculates: bool | None

    def of_suite(self, *suites: str) -> tuple[Sample, ...]:
        """Its samples of these suites, warm-ups and failures included."""
        return tuple(sample for sample in self.samples if sample.suite in suites)

    def has_name(self, run: int, name: str) -> bool:
        """Whether this is what a run called by this name."""
        return run in self.runs and name in self.names


@dataclass
class _Group:
    """Arms that are one configuration, while they are collected."""

    arm: ArmRecord
    names: list[str]
    runs: list[int]
    samples: list[Sample]


def series_of(evidence: Sequence[RunEvidence]) -> tuple[Series, ...]:
    """The configurations of some runs, in the order of first appearance, drafting ones first.

    Two arms are one configuration where their fingerprints agree but for workload and tunerd; arms
    without known arguments are never taken together.
    """
    groups: dict[object, _Group] = {}
    for one in evidence:
        for arm in one.run.record.arms:
            group = groups.setdefault(_key(one.run.number, arm), _Group(arm, [], [], []))
            if arm.name not in group.names:
                group.names.append(arm.name)
            group.runs.append(one.run.number)
            group.samples.extend(one.samples.get(arm.name, ()))
    ordered = sorted(groups.values(), key=lambda group: _speculates(group.samples) is False)
    labels = _labels(ordered)
    shades: dict[str, int] = {}
    found = []
    for group, label in zip(ordered, labels, strict=True):
        colour = colour_of(group.arm.family)
        shade = shades.get(colour, 0)
        shades[colour] = shade + 1
        found.append(
            Series(
                label=label,
                arm=group.arm,
                names=tuple(group.names),
                runs=tuple(group.runs),
                samples=tuple(group.samples),
                colour=colour,
                shade=shade,
                speculates=_speculates(group.samples),
            )
        )
    return tuple(found)


def differences(series: Sequence[Series]) -> dict[str, tuple[str, ...]]:
    """By label, in what each configuration differs from the first: engine, and arguments."""
    found: dict[str, tuple[str, ...]] = {}
    for one in series:
        first = series[0].arm
        texts: list[str] = []
        if None not in {first.engine, one.arm.engine} and first.engine != one.arm.engine:
            texts.append(f"engine {first.engine} -> {one.arm.engine}")
        if first.argv is not None and one.arm.argv is not None:
            texts += argument_changes(first.argv, one.arm.argv)
        found[one.label] = tuple(texts)
    return found


def _key(run: int, arm: ArmRecord) -> object:
    same = replace(arm.fingerprint, workload_sha256=None, tunerd_version=None)
    if arm.argv is None or same == Fingerprint():
        return (run, arm.name)
    return same.sha256


def _speculates(samples: Iterable[Sample]) -> bool | None:
    """Whether it ever drafted; None where no sample has an answer to tell."""
    told = [sample.timings for sample in samples if sample.timings is not None]
    if not told:
        return None
    return any(timings.draft_n for timings in told)


def _labels(groups: Sequence[_Group]) -> list[str]:
    """A name for each that no other has."""
    labels = [_label(group) for group in groups]
    labels = _told_apart(labels, [group.names[0] for group in groups])
    labels = _told_apart(labels, [group.arm.engine for group in groups])
    return _told_apart(labels, [f"run {group.runs[0]}" for group in groups])


def _told_apart(labels: Sequence[str], extras: Sequence[str | None]) -> list[str]:
    """Labels that stand more than once get something more."""
    return [
        f"{label}, {extra}" if extra not in {None, label} and labels.count(label) > 1 else label
        for label, extra in zip(labels, extras, strict=True)
    ]


def _label(group: _Group) -> str:
    """The name that says most: the one given to it unless that is a mere letter, else the engine."""
    telling = [name for name in group.names if len(name) > _LETTERS and name != "live"]
    if telling:
        return telling[0]
    return group.arm.engine or group.arm.fingerprint.short
