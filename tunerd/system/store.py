"""Evidence that stays: runs, their arms and samples, figures, verdicts, and what loads showed.

The only users of SQLAlchemy are this file and its parts `store_file`, `store_schema`,
`store_rows`, `store_checked`.
Queries are SQLAlchemy's own and in no dialect, so that another database can take the place of the
file. Everything that a call stores is durable when it returns, or none of it is there.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from tunerd.core.evidence import (
    ArmRecord,
    Damage,
    RunOutcome,
    RunRecord,
    StoredRun,
    SummaryRecord,
    VerdictRecord,
)
from tunerd.core.fingerprint import Fingerprint
from tunerd.core.memory_correction import MemoryCorrection, Observation, PartGroup, observe
from tunerd.core.memory_parts import Device, Part
from tunerd.core.memory_report import MemoryReport
from tunerd.core.sample import Sample
from tunerd.errors import HostError
from tunerd.system.store_checked import CheckedRows, why_damaged
from tunerd.system.store_file import StoreFile, StoreIsOld
from tunerd.system.store_rows import (
    arm_from_row,
    arm_to_row,
    run_from_row,
    run_to_row,
    sample_from_row,
    sample_to_row,
    summary_from_row,
    summary_to_row,
    verdict_from_row,
    verdict_to_row,
)
from tunerd.system.store_schema import (
    arms,
    fingerprints,
    memory_loads,
    memory_observations,
    runs,
    samples,
    summaries,
    sweep_events,
    verdicts,
)

BUSY_TIMEOUT_S = 60.0
_FETCH = 1000
_MAX_NUMBER = 2**63 - 1  # of SQLite


class EvidenceStore:
    """The evidence of one machine and mode.

    Opened to write by default; see `StoreFile` for what that does and raises. Every call raises
    HostError where the disk is full, read-only or damaged, and Busy where another process keeps the
    file for longer than `wait_s`.
    """

    def __init__(
        self,
        path: Path,
        *,
        writable: bool = True,
        check: bool = True,
        wait_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        self._file = StoreFile(path, writable=writable, check=check, wait_s=wait_s)
        self._rows = CheckedRows()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @property
    def damage(self) -> tuple[Damage, ...]:
        """What the calls so far had to leave out of what they gave back."""
        return self._rows.damage

    def add_run(self, record: RunRecord) -> int:
        """Begin a run; returns its number."""
        with self._file.writing() as connection:
            number = _insert(connection, runs, run_to_row(record))
            for arm in record.arms:
                _insert_arm(connection, number, arm)
        return number

    def add_arm(self, run: int, arm: ArmRecord) -> None:
        """Add an arm to a run that has begun.

        Raises:
            HostError: the run has an arm of this name.
        """
        with self._file.writing() as connection:
            _insert_arm(connection, run, arm)

    def end_run(
        self, run: int, outcome: RunOutcome, *, ended_s: float, reason: str | None = None
    ) -> None:
        """Write how a run ended."""
        values = {"outcome": str(outcome), "ended_s": ended_s, "reason": reason}
        with self._file.writing() as connection:
            connection.execute(runs.update().where(runs.c.id == run), values)

    def reopen_run(self, run: int) -> None:
        """Take back how a run ended, for it goes on."""
        values = {"outcome": None, "ended_s": None, "reason": None}
        with self._file.writing() as connection:
            connection.execute(runs.update().where(runs.c.id == run), values)

    def add_sweep_event(self, run: int, event: Mapping[str, Any]) -> None:
        """Store a start or a request of a sweep, as JSON values."""
        with self._file.writing() as connection:
            connection.execute(sweep_events.insert(), {"run_id": run, "event": dict(event)})

    def sweep_events(self, run: int) -> tuple[dict[str, Any], ...]:
        """What a sweep did, in order.

        Raises:
            HostError: a row is damaged; without it, it would go on from another place.
        """
        chosen = (
            sa.select(sweep_events.c.id, sweep_events.c.event)
            .where(sweep_events.c.run_id == run)
            .order_by(sweep_events.c.id)
        )
        with self._file.reading() as connection:
            rows = connection.execute(chosen).mappings().all()
        for row in rows:
            self._refuse_damaged(sweep_events, row)
        return tuple(row["event"] for row in rows)

    def add_samples(self, run: int, measured: Sequence[Sample], *, arm: str | None = None) -> None:
        """Store samples in the order in which they were measured.

        Args:
            run: Its number.
            measured: The samples.
            arm: Which arm they are of; None where the run has only one.

        Raises:
            ValueError: the run has no such arm, or several and none was named.
        """
        if not measured:
            return
        with self._file.writing() as connection:
            common = {"run_id": run, "arm_id": _arm_id(connection, run, arm)}
            rows = [{**common, **sample_to_row(sample)} for sample in measured]
            connection.execute(samples.insert(), rows)

    def add_summary(self, run: int, summary: SummaryRecord) -> None:
        """Store figures that a run came to.

        Raises:
            ValueError: the run has no arm of that name.
        """
        with self._file.writing() as connection:
            arm = None if summary.arm is None else _arm_id(connection, run, summary.arm)
            _insert(
                connection, summaries, {"run_id": run, "arm_id": arm, **summary_to_row(summary)}
            )

    def add_verdict(self, run: int, verdict: VerdictRecord) -> None:
        """Store what a comparison came to."""
        with self._file.writing() as connection:
            _insert(connection, verdicts, {"run_id": run, **verdict_to_row(verdict)})

    def add_memory_observation(
        self,
        fingerprint: Fingerprint,
        estimated: Sequence[Part],
        report: MemoryReport,
        *,
        observed_s: float,
    ) -> bool:
        """Store what a load showed of the estimate that was made for it.

        Returns:
            False where nothing can be stored: the log says nothing of buffers, or a part of the
            fingerprint that memory depends on is not known.
        """
        seen, key = observe(estimated, report), fingerprint.memory_key
        if not seen or key is None:
            return False
        with self._file.writing() as connection:
            load = {"fingerprint_id": _fingerprint_id(connection, fingerprint),
                    "memory_key": key, "observed_s": observed_s}  # fmt: skip
            number = _insert(connection, memory_loads, load)
            rows = [
                {
                    "load_id": number,
                    "device": str(one.device),
                    "part_group": str(one.group),
                    "estimated_mib": one.estimated_mib,
                    "reported_mib": one.reported_mib,
                }
                for one in seen
            ]
            connection.execute(memory_observations.insert(), rows)
        return True

    def memory_correction(self, fingerprint: Fingerprint) -> MemoryCorrection | None:
        """What the newest load showed that needs the same memory; None if there was none."""
        key = fingerprint.memory_key
        if key is None:
            return None
        loads = sa.select(memory_loads.c.id, memory_loads.c.observed_s).where(
            memory_loads.c.memory_key == key
        )
        newest_first = (memory_loads.c.observed_s.desc(), memory_loads.c.id.desc())
        with self._file.reading() as connection:
            newest = connection.execute(loads.order_by(*newest_first).limit(1)).first()
            if newest is None:
                return None
            n_loads = connection.scalar(sa.select(sa.func.count()).select_from(loads.subquery()))
            of_load = memory_observations.select().where(memory_observations.c.load_id == newest.id)
            rows = connection.execute(of_load.order_by(memory_observations.c.id)).mappings().all()
        self._refuse_damaged(memory_loads, {"observed_s": newest.observed_s})
        for row in rows:
            self._refuse_damaged(memory_observations, row)
        observations = tuple(self._understood(_observation, row) for row in rows)
        return MemoryCorrection(observations, n_loads or 0, newest.observed_s)

    def runs(
        self, *, limit: int | None = None, kind: str | None = None, with_arms: bool = True
    ) -> tuple[StoredRun, ...]:
        """Runs, newest first.

        Args:
            limit: At most so many.
            kind: Only those of this command.
            with_arms: Whether to read their arms, of which a sweep has hundreds.
        """
        chosen = runs.select().order_by(runs.c.started_s.desc(), runs.c.id.desc()).limit(limit)
        if kind is not None:
            chosen = chosen.where(runs.c.kind == kind)
        return self._read_runs(chosen, with_arms=with_arms)

    def run(self, number: int) -> StoredRun | None:
        """One run; None if there is none of this number."""
        if not 0 <= number <= _MAX_NUMBER:
            return None
        found = self._read_runs(runs.select().where(runs.c.id == number))
        return found[0] if found else None

    def count_runs(self) -> int:
        """How many runs there are."""
        with self._file.reading() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(runs)) or 0

    def samples(self, run: int, *, arm: str | None = None) -> tuple[Sample, ...]:
        """The samples of a run (of one arm if given), in the order in which they were measured."""
        return tuple(sample for name, sample in self.arm_samples(run) if arm in {None, name})

    def arm_samples(self, run: int) -> Iterator[tuple[str, Sample]]:
        """The samples of a run in order, each with the name of its arm; none of a damaged arm."""
        chosen = samples.select().where(samples.c.run_id == run).order_by(samples.c.id)
        with self._file.reading() as connection:
            found = _arms(connection, [run]).get(run, [])
            names = {row["id"]: arm.name for row in found if (arm := self._arm(row)) is not None}
            for row in connection.execution_options(yield_per=_FETCH).execute(chosen).mappings():
                if row["arm_id"] not in names:
                    continue
                sample = self._rows.take("samples", row, sample_from_row, run=run)
                if sample is not None:
                    yield names[row["arm_id"]], sample

    def summaries(
        self, run: int, *, names: Collection[str] | None = None
    ) -> tuple[SummaryRecord, ...]:
        """The figures of a run, in the order in which they were stored; only of these names if given."""
        chosen = (
            sa.select(summaries, arms.c.name.label("arm"))
            .join(arms, arms.c.id == summaries.c.arm_id, isouter=True)
            .where(summaries.c.run_id == run)
            .order_by(summaries.c.id)
        )
        if names is not None:
            chosen = chosen.where(summaries.c.name.in_(names))
        with self._file.reading() as connection:
            rows = connection.execute(chosen).mappings().all()
        found = [self._rows.take("summaries", row, summary_from_row, run=run) for row in rows]
        return tuple(one for one in found if one is not None)

    def verdicts(self, run: int) -> tuple[VerdictRecord, ...]:
        """The verdicts of a run, in the order in which they were reached."""
        chosen = verdicts.select().where(verdicts.c.run_id == run).order_by(verdicts.c.id)
        with self._file.reading() as connection:
            rows = connection.execute(chosen).mappings().all()
        found = [self._rows.take("verdicts", row, verdict_from_row, run=run) for row in rows]
        return tuple(one for one in found if one is not None)

    def _read_runs(
        self, chosen: sa.Select[Any], *, with_arms: bool = True
    ) -> tuple[StoredRun, ...]:
        with self._file.reading() as connection:
            rows = connection.execute(chosen).mappings().all()
            numbers = [row["id"] for row in rows]
            counts = _counts(connection, numbers)
            of_run = _arms(connection, numbers) if with_arms else {}
        found = [
            self._run(row, of_run.get(row["id"], []), counts.get(row["id"], (0, 0))) for row in rows
        ]
        return tuple(one for one in found if one is not None)

    def _run(self, row: Any, of_run: Sequence[Any], counts: tuple[int, int]) -> StoredRun | None:
        known = [arm for one in of_run if (arm := self._arm(one)) is not None]
        n_samples, n_unusable = counts

        def read(row: Any) -> StoredRun:
            return run_from_row(row, known, n_samples=n_samples, n_unusable=n_unusable)

        found: StoredRun | None = self._rows.take("runs", row, read, run=row["id"])
        return found

    def _arm(self, row: Any) -> ArmRecord | None:
        """An arm; its fingerprint is part of it."""

        def read(row: Any) -> ArmRecord:
            wrong = why_damaged("fingerprints", row)
            if wrong is not None:
                raise ValueError(f"fingerprint: {wrong}")
            return arm_from_row(row)

        found: ArmRecord | None = self._rows.take("arms", row, read, run=row["run_id"])
        return found

    def _refuse_damaged(self, table: sa.Table, row: Mapping[Any, Any]) -> None:
        why = why_damaged(table.name, row)
        if why is not None:
            raise HostError(
                f"the evidence store has a damaged row of `{table.name}`: `{self._file.path}`",
                cause=why,
                state="nothing in it was changed, and what serves does not depend on it",
            )

    def _understood(self, read: Any, *arguments: Any, **named: Any) -> Any:
        """What a row says.

        Raises:
            HostError: it holds a word that this tunerd does not know.
        """
        try:
            return read(*arguments, **named)
        except (KeyError, TypeError, ValueError) as error:
            raise HostError(
                f"the evidence store holds what this tunerd does not understand: "
                f"`{self._file.path}`",
                cause=str(error),
                hint="use the tunerd that wrote it",
            ) from error


def open_to_read(path: Path) -> EvidenceStore | None:
    """The store for reading; None where nothing was ever stored.

    A store of an older tunerd is brought up to date first, by whoever may write it.

    Raises:
        HostError: as `StoreFile`.
    """
    if not path.exists():
        return None
    try:
        return EvidenceStore(path, writable=False)
    except StoreIsOld:
        if not all(os.access(place, os.W_OK) for place in (path, path.parent)):
            raise
    with EvidenceStore(path):
        pass
    return EvidenceStore(path, writable=False, check=False)


def _observation(row: Mapping[Any, Any]) -> Observation:
    return Observation(
        Device(row["device"]), PartGroup(row["part_group"]), row["estimated_mib"],
        row["reported_mib"],
    )  # fmt: skip


def _insert(connection: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> int:
    key = connection.execute(table.insert().values(row)).inserted_primary_key
    return int(key[0])  # type: ignore[index]  # None only for many rows at once


def _insert_arm(connection: sa.Connection, run: int, arm: ArmRecord) -> None:
    fingerprint = _fingerprint_id(connection, arm.fingerprint)
    _insert(connection, arms, {"run_id": run, "fingerprint_id": fingerprint, **arm_to_row(arm)})


def _fingerprint_id(connection: sa.Connection, fingerprint: Fingerprint) -> int:
    """The row of a fingerprint, which many arms share; made where there is none."""
    wanted = sa.select(fingerprints.c.id).where(fingerprints.c.sha256 == fingerprint.sha256)
    found = connection.scalar(wanted)
    if found is not None:
        return int(found)
    row = {"sha256": fingerprint.sha256, "parts": fingerprint.to_json()}
    try:
        with connection.begin_nested():
            return _insert(connection, fingerprints, row)
    except IntegrityError:
        # Where writers do not exclude each other, somebody was faster.
        return int(connection.execute(wanted).scalar_one())


def _arm_id(connection: sa.Connection, run: int, name: str | None) -> int:
    chosen = sa.select(arms.c.id).where(arms.c.run_id == run)
    if name is not None:
        chosen = chosen.where(arms.c.name == name)
    found = connection.scalars(chosen.limit(2)).all()
    if len(found) != 1:
        wanted = f"arm `{name}`" if name is not None else "single arm"
        raise ValueError(f"run {run} has no {wanted}")
    return int(found[0])


def _counts(connection: sa.Connection, numbers: Sequence[int]) -> dict[int, tuple[int, int]]:
    """How many samples each run has, and how many of them are not usable."""
    unusable = sa.func.sum(sa.case((samples.c.is_usable, 0), else_=1))
    chosen = (
        sa.select(samples.c.run_id, sa.func.count(), unusable)
        .where(samples.c.run_id.in_(numbers))
        .group_by(samples.c.run_id)
    )
    return {run: (n, int(bad or 0)) for run, n, bad in connection.execute(chosen)}


def _arms(connection: sa.Connection, numbers: Sequence[int]) -> dict[int, list[Any]]:
    """The arms of each run, with their fingerprints."""
    chosen = (
        sa.select(arms, fingerprints.c.parts)
        .join(fingerprints, fingerprints.c.id == arms.c.fingerprint_id)
        .where(arms.c.run_id.in_(numbers))
        .order_by(arms.c.id)
    )
    found: dict[int, list[Any]] = {}
    for row in connection.execute(chosen).mappings():
        found.setdefault(row["run_id"], []).append(row)
    return found
