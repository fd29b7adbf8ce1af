"""`tunerd results`: what was measured, in lists, in full, as files, and whether it still holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tunerd import __version__
from tunerd.app import Context
from tunerd.engine.flags import argument_changes
from tunerd.errors import HostError, Preempted, UsageError
from tunerd.machine.process import words_of
from tunerd.measure.answer import NO_ANSWER, Sample, count_marks, count_problems
from tunerd.measure.evidence import (
    ArmRecord,
    Fingerprint,
    RunOutcome,
    RunRecord,
    StoredRun,
    Validity,
    changes,
    holds,
)
from tunerd.records import plain
from tunerd.result import ActionResult, Message, note, warning

if TYPE_CHECKING:
    from tunerd.measure.conditions import FingerprintReader
    from tunerd.measure.store import EvidenceStore


DEFAULT_LIMIT = 20
_NOTHING = note("nothing-measured", "nothing was measured yet", "tunerd bench")


def results(ctx: Context, *, limit: int | None = DEFAULT_LIMIT) -> ActionResult:
    """Runs, newest first, and whether they still hold on this machine; `limit` None for all of them."""
    from tunerd.measure.store import reading

    with reading(ctx) as store:
        if store is None:
            nothing = {"results": [], "total": 0, "imported": _imported(ctx)}
            return ActionResult("results list", nothing, (_NOTHING,))
        check = StalenessCheck(ctx)
        rows = [{**run_json(run), "arms": check.rows(run)} for run in store.runs(limit=limit)]
        payload = {"results": rows, "total": _readable(store), "imported": _imported(ctx)}
        return ActionResult("results list", payload, (*damage_messages(store), *check.messages))


def _imported(ctx: Context) -> list[dict[str, Any]]:
    if not ctx.paths.imported_dir.is_dir():
        return []
    from tunerd.measure.bundle import imported

    return [
        {
            "bundle": name,
            "entries": len(one.entries),
            "sources": sorted({entry.source for entry in one.entries}),
        }
        for name, one in imported(ctx).items()
    ]


def show(ctx: Context, number: int) -> ActionResult:
    """One run: its conditions, its figures by arm and case, and its verdicts.

    Raises:
        UsageError: there is no such run.
    """
    from tunerd.measure.findings import figures

    with _opened(ctx, number) as store:
        found = store.evidence(run_of(store, number))
        messages = damage_messages(store)
    run = found.run
    payload = {
        "run": run_json(run),
        "arms": [arm_json(arm) for arm in run.record.arms],
        "samples": [
            {"arm": arm, **sample_json(one)} for arm, of in found.samples.items() for one in of
        ],
        "figures": figures(found.samples),
        "left_out": _left_out(found.samples),
        "validity": StalenessCheck(ctx).rows(run),
        "summaries": [asdict(one) for one in found.summaries],
        "verdicts": [asdict(one) for one in found.verdicts],
    }
    return ActionResult("results show", payload, messages)


def export(ctx: Context, numbers: Sequence[int]) -> ActionResult:
    """Runs with everything that is kept of them, every sample included.

    Raises:
        UsageError: there is no such run.
    """
    runs = []
    with _opened(ctx, next(iter(numbers), 0)) as store:
        for number in numbers:
            run = run_of(store, number)
            runs.append(
                {
                    **run_json(run),
                    "host": dict(run.record.host),
                    "arms": [arm_json(arm) for arm in run.record.arms],
                    "samples": [
                        {"arm": arm, **sample_json(sample)}
                        for arm, sample in store.arm_samples(number)
                    ],
                    "summaries": [asdict(one) for one in store.summaries(number)],
                    "verdicts": [asdict(one) for one in store.verdicts(number)],
                }
            )
        messages = damage_messages(store)
    return ActionResult("results export", {"runs": runs}, messages)


def export_bundle(ctx: Context, numbers: Sequence[int]) -> ActionResult:
    """Runs as a bundle that may be handed out (`bundle`): no samples, texts, paths, or names of hosts and accounts.

    Raises:
        UsageError: there is no such run, or nothing of them can be told so.
    """
    from tunerd.measure.bundle import Bundle, Entry, entries_of

    cards = ctx.gpu.read().gpus or ()
    entries: list[Entry] = []
    with _opened(ctx, next(iter(numbers), 0)) as store:
        for number in numbers:
            found = store.evidence(run_of(store, number))
            record = found.run.record
            entries += entries_of(record.arms, found.samples, record.model_name, cards)
        messages = damage_messages(store)
    if not entries:
        raise UsageError(
            "nothing of these runs can be handed out",
            cause="no arm has both figures and flags of a profile",
            hint="--format json has all of them",
        )
    bundle = Bundle(
        format="tunerd-results",
        version=1,
        written_by=f"tunerd {__version__}",
        entries=tuple(entries),
    )
    return ActionResult(
        "results export", bundle.model_dump(mode="json", by_alias=True, exclude_none=True), messages
    )


class StalenessCheck:
    """Compares evidence with the machine as it is now, read once."""

    def __init__(self, ctx: Context) -> None:
        from tunerd.measure.conditions import FingerprintReader

        self._ctx = ctx
        self.reader: FingerprintReader = FingerprintReader(ctx)
        entry = ctx.generations.serving(ctx.unit)
        self._live = entry.generation if entry is not None else None
        self._live_print: Fingerprint | None = None
        self.messages: tuple[Message, ...] = ()
        if self._live is not None:
            now = self.reader.of_generation(self._live)
            self._live_print = now.fingerprint
            self.messages = tuple(
                warning("cannot-tell", f"of what serves now: {problem}") for problem in now.problems
            )

    def of(self, arm: ArmRecord, run: RunRecord) -> Validity:
        """Whether what an arm of a run showed still holds."""
        from tunerd.measure.learn import workload_sha256_now

        if arm.argv is None:
            text = "it was measured by its address alone, so what ran there is not known"
            return Validity(None, (text,), (), None)
        then = arm.fingerprint
        workload = workload_sha256_now(self._ctx, run, then.workload_sha256)
        now = self.reader.of(arm.argv, arm.environment, workload_sha256=workload)
        found = changes(then, now.fingerprint)
        return Validity(
            holds=holds(then, now.fingerprint),
            texts=(*(one.text for one in found if not one.is_remark), *now.problems),
            remarks=tuple(one.text for one in found if one.is_remark),
            differs_from_live=self._differences(arm),
        )

    def rows(self, run: StoredRun) -> list[dict[str, Any]]:
        """The same of each arm of a run, as scripts read it."""
        return [{"arm": arm.name, **plain(self.of(arm, run.record))} for arm in run.record.arms]

    def _differences(self, arm: ArmRecord) -> tuple[str, ...] | None:
        """What the serving command line has otherwise; empty where it is the very same server."""
        if self._live is None or self._live_print is None or arm.argv is None:
            return None
        found = list(argument_changes(arm.argv, self._live.argv))
        then = replace(arm.fingerprint, workload_sha256=None)
        engines = (then.engine_sha256, self._live_print.engine_sha256)
        if None not in engines and engines[0] != engines[1]:
            found.insert(0, f"engine {arm.engine or 'unknown'} -> {self._live.engine or 'unknown'}")
        models = (then.model_sha256, self._live_print.model_sha256)
        if None not in models and models[0] != models[1]:
            found.insert(0, "another model")
        return tuple(found)


def run_json(run: StoredRun) -> dict[str, Any]:
    """A run as scripts read it."""
    head = plain(replace(run.record, arms=(), host={}))
    head["model"] = head.pop("model_name")
    del head["arms"], head["host"]
    return {
        "run": run.number,
        **head,
        "ended_s": run.ended_s,
        "outcome": None if run.outcome is None else str(run.outcome),
        "reason": run.reason,
        "arm_names": [arm.name for arm in run.record.arms],
        "samples": run.n_samples,
        "left_out": run.n_unusable,
    }


def arm_json(arm: ArmRecord) -> dict[str, Any]:
    """An arm as scripts read it."""
    return {
        **plain(arm),
        "origins": [
            {"flag": flag, "key": key, "origin": origin} for flag, key, origin in arm.origins
        ],
        "fingerprint": {"sha256": arm.fingerprint.sha256, **arm.fingerprint.to_json()},
    }


def sample_json(sample: Sample) -> dict[str, Any]:
    """A sample as scripts read it; what is missing is null."""
    return {**plain(sample), "usable": sample.is_usable}


@contextmanager
def ending(
    ctx: Context, store: EvidenceStore, number: Callable[[], int | None]
) -> Iterator[list[str]]:
    """Writes how a run ended, whatever happens; it failed where a problem is added to what this gives.

    Args:
        ctx: Where.
        store: Where it is kept.
        number: Of the run; None where none was begun.
    """
    problems: list[str] = []
    outcome, reason = RunOutcome.FAILED, None
    try:
        yield problems
        outcome = RunOutcome.FAILED if problems else RunOutcome.DONE
        reason = problems[0] if problems else None
    except BaseException as error:
        is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        if is_stopped or isinstance(error, Preempted):
            outcome = RunOutcome.STOPPED
        if is_stopped and (run := number()) is not None:
            error.add_note(f"what was measured until then is kept: `tunerd results show {run}`")
        reason = words_of(error)
        raise
    finally:
        if (run := number()) is not None:
            store.end_run(run, outcome, ended_s=ctx.clock.now_s(), reason=reason)


@contextmanager
def _opened(ctx: Context, number: int) -> Iterator[EvidenceStore]:
    """The store for this run, which cannot be there without one."""
    from tunerd.measure.store import reading

    with reading(ctx) as store:
        if store is None:
            raise _unknown(number)
        yield store


def damage_messages(store: EvidenceStore) -> tuple[Message, ...]:
    """One warning for each kind of row that was left out so far as damaged."""
    return tuple(warning("damaged-rows", one.text) for one in store.damage)


def run_of(store: EvidenceStore, number: int) -> StoredRun:
    """The run of this number.

    Raises:
        UsageError: there is none.
        HostError: its own row is damaged.
    """
    run = store.run(number)
    if run is not None:
        return run
    for one in store.damage:
        if one.table == "runs" and one.run == number:
            raise HostError(
                f"run {number} cannot be read", cause=one.text,
                state="nothing was changed; the other runs can be read",
                hint="`tunerd results list` lists them",
            )  # fmt: skip
    raise _unknown(number)


def _unknown(number: int) -> UsageError:
    return UsageError(f"there is no run {number}", hint="`tunerd results list` lists what there is")


def _readable(store: EvidenceStore) -> int:
    """How many runs there are without those that were found damaged."""
    return store.count_runs() - sum(one.n_rows for one in store.damage if one.table == "runs")


def _left_out(by_arm: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """How many samples no average may have, by arm and reason."""
    return [
        {"arm": arm, "reason": reason, "samples": n,
         "problems": dict(count_problems(measured)) if reason == NO_ANSWER else {}}
        for arm, measured in by_arm.items()
        for reason, n in count_marks(measured).items()
    ]  # fmt: skip
