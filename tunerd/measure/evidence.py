"""What is kept of a measurement: the run, its arms, figures that it came to, and its verdict.

No text of prompts or answers is among it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from tunerd.engine.fingerprint import Fingerprint
from tunerd.measure.answer import Sample, Seconds
from tunerd.records import plain, read_or_none
from tunerd.words import all_known

# Longer texts in the details of a sample are not names or reasons, and may be what somebody wrote.
MAX_DETAIL_LETTERS = 200
USUAL_LEVEL = 0.95


class RunOutcome(StrEnum):
    """How a run ended; a run without an outcome is under way, or was cut short."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRecord:
    """One configuration that a run measured.

    `name` tells the arms of a run apart (`live`, `A`, `speculation off`). `argv` is None where the
    server was reached by its address alone, `environment` what its unit sets. `origins` says of each flag its words, the profile key, and
    who set it. `family` is the engine's, for what treats engines alike.
    """

    name: str
    fingerprint: Fingerprint
    engine: str | None = None
    family: str | None = None
    engine_version: str | None = None
    program: str | None = None
    model_path: str | None = None
    argv: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    origins: tuple[tuple[str, str, str], ...] = ()
    generation: int | None = None

    def under(self, **conditions: Any) -> ArmRecord:
        """The same, measured under these parts of a fingerprint."""
        return replace(self, fingerprint=replace(self.fingerprint, **conditions))


@dataclass(frozen=True, slots=True)
class Dropped:
    """What is left of a run's samples: how many there were."""

    n_samples: int
    n_unusable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One call of a command that measures.

    `kind` is the command (bench, compare, sweep), `target` what it was pointed at in words, `seed` that
    of the order of requests. The machine, and the tunerd, are in the fingerprints of its arms. `dropped` is None
    where its samples are kept.
    """

    kind: str
    suites: tuple[str, ...]
    started_s: Seconds
    target: str
    seed: int | None = None
    unit: str | None = None
    profile: str | None = None
    model_name: str | None = None
    workload: str | None = None
    arms: tuple[ArmRecord, ...] = ()
    dropped: Dropped | None = None

    def arm(self, name: str) -> ArmRecord | None:
        """The arm of this name."""
        return next((arm for arm in self.arms if arm.name == name), None)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it is kept; of its `n_samples` requests, `n_unusable` may enter no average."""

    number: int
    record: RunRecord
    outcome: RunOutcome | None
    ended_s: Seconds | None
    reason: str | None
    n_samples: int
    n_unusable: int


@dataclass(frozen=True, slots=True)
class SummaryRecord:
    """Figures that a run came to beside its samples, under the name of what they are.

    `figures` holds JSON values. Names that reports draw have a class below; others are kept and exported. `arm` is None where the figures are of the whole run.
    """

    suite: str
    name: str
    arm: str | None
    figures: Mapping[str, Any]


class ArmFigures:
    """Figures of an arm that reports draw, kept field by field under their `NAME`."""

    __slots__ = ()
    NAME: ClassVar[str]

    def to_record(self, suite: str) -> SummaryRecord:
        """As it is kept."""
        figures = plain(self)
        return SummaryRecord(suite, self.NAME, figures.pop("arm"), figures)

    @classmethod
    def from_record(cls, record: SummaryRecord) -> Self | None:
        """As it was kept; None if this is something else."""
        if record.name != cls.NAME:
            return None
        return read_or_none(cls, {**record.figures, "arm": record.arm})


@dataclass(frozen=True, slots=True)
class Crossover(ArmFigures):
    """From which output length on one arm is faster than the other, in tokens.

    0 where it is faster at every length that was measured, None where it is at none; `low` and `high`
    bound the interval of `level`.
    """

    arm: str
    than: str
    n_tokens: float | None
    low: float | None = None
    high: float | None = None
    level: float = USUAL_LEVEL

    NAME = "crossover"


@dataclass(frozen=True, slots=True)
class TurnTime(ArmFigures):
    """Expected seconds of one turn of a class of requests (None: of the whole workload), by part.

    `whole_s` is the turn by the client's wall; None where only the parts were kept. `waiting_s` is
    what of it was neither reading nor generating, None where that cannot be told.
    """

    arm: str
    request_class: Annotated[str | None, Field(alias="class")]
    prefill_s: float | None
    reasoning_s: float | None
    decode_s: float | None
    weight: float | None = None
    waiting_s: float | None = None
    whole_s: float | None = None

    NAME = "turn time"

    @property
    def total_s(self) -> float | None:
        """The whole turn; None where neither it nor each of its parts is known."""
        if self.whole_s is not None:
            return self.whole_s
        known = all_known((self.prefill_s, self.reasoning_s, self.decode_s))
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class AcceptanceByPosition(ArmFigures):
    """By a server's counters, the share of verification passes in which each position was accepted."""

    arm: str
    ratios: tuple[float, ...]

    NAME = "acceptance by position"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRecord:
    """What a comparison came to.

    `sentence` is what a person is told. `ratio` is the effect as time of B over time of A with its
    interval of `level`, `what` the quantity it is of (turn time on chat). `reasons` say what else
    spoke for or against it.
    """

    outcome: str
    sentence: str
    arm_a: str | None = None
    arm_b: str | None = None
    what: str | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    level: float = USUAL_LEVEL
    n_pairs: int | None = None
    reasons: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Damage:
    """Rows of a store that could not be read and are left out."""

    run: int
    table: str
    why: str
    n_rows: int

    @property
    def text(self) -> str:
        """For people."""
        rows = "a row" if self.n_rows == 1 else f"{self.n_rows} rows"
        return f"{rows} of `{self.table}` in run {self.run} left out as damaged: {self.why}"


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """A run with all that was stored of it; `samples` by arm, in the order of measurement."""

    run: StoredRun
    samples: Mapping[str, tuple[Sample, ...]]
    summaries: tuple[SummaryRecord, ...]
    verdicts: tuple[VerdictRecord, ...]


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether what an arm showed still counts.

    `holds` is None where it cannot be told. `texts` say what changed or is unknown, `remarks` what
    changed without harm. `differs_from_live` lists arguments in which the serving command line differs,
    and is None where no generation serves. `holds_at` is what would have to be set for it to count.
    """

    holds: bool | None
    texts: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    differs_from_live: tuple[str, ...] | None = None
    holds_at: str | None = None


def number(figures: Mapping[str, Any], key: str) -> float | None:
    """A number among figures; None where it is missing or no number."""
    value: Any = figures.get(key)
    return float(value) if type(value) in {int, float} else None


def without_text(details: Mapping[str, Any]) -> dict[str, Any]:
    """Details of a sample as they may be kept: no long text."""
    return {key: _short(value) for key, value in details.items()}


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_DETAIL_LETTERS:
        return f"[{len(value)} letters left out]"
    if isinstance(value, Mapping):
        return without_text(value)
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return value
