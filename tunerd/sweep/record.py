"""Sweeps in the evidence store: the plan of each, its samples as they come, and what it came to."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tunerd.app import Context
from tunerd.errors import HostError, TunerdError, UsageError
from tunerd.measure.answer import Sample, Seconds
from tunerd.measure.evidence import (
    ArmRecord,
    RunOutcome,
    RunRecord,
    StoredRun,
    SummaryRecord,
    VerdictRecord,
)
from tunerd.measure.results import dropped_message
from tunerd.measure.store import EvidenceStore, reading
from tunerd.production.measurement import read_measurement
from tunerd.production.status import HandedIn
from tunerd.profile.arm import Arm
from tunerd.profile.files import failure_of, read_tuned, take_back_tuned
from tunerd.records import Unreadable, plain, read, read_or_none
from tunerd.result import ActionResult, note
from tunerd.words import counted, local_time, ratio

if TYPE_CHECKING:
    from tunerd.profile.arm import Sample as SweepSample
    from tunerd.sweep.plan import PreparedSweep, SweepRequest
    from tunerd.sweep.tuner import Outcome


KIND = "sweep"
_SUITE = "workload"
PLAN = "sweep plan"
EVIDENCE = "sweep evidence"
DECISION = "sweep decision"
PAGE = "sweep page"
POWER = "sweep power"
_IN_FULL = (PLAN, EVIDENCE, DECISION, POWER)
# Beyond it the samples of earlier nights cost more to read than they teach.
_MOST_HISTORY = 4000
# The newest sweeps are what later ones learn from, however old.
KEPT_SWEEPS = 50
_MOST_AT_ONCE = 100
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class StoredSweep:
    """A sweep as it is kept; what is None did not happen yet."""

    run: StoredRun
    plan: Mapping[str, Any]
    evidence: Mapping[str, Any] | None
    verdict: VerdictRecord | None
    decision: Mapping[str, Any] | None
    power: Mapping[str, Any] | None = None

    @property
    def number(self) -> int:
        """Its number."""
        return self.run.number

    @property
    def request(self) -> SweepRequest:
        """What was asked for, with its seed.

        Raises:
            HostError: that is damaged.
        """
        from tunerd.sweep.plan import SweepRequest

        asked = read_or_none(SweepRequest, self.plan.get("request"))
        if asked is None:
            raise HostError(
                f"what sweep {self.number} was to do cannot be read",
                state="nothing was touched",
                hint="`tunerd sweep run` starts a new one",
            )
        return replace(asked, seed=self.run.record.seed)


class SweepKeeper:
    """Stores one sweep while it runs."""

    def __init__(self, ctx: Context, store: EvidenceStore, number: int) -> None:
        self._ctx = ctx
        self._store = store
        self.number = number
        run = store.run(number)
        self._arms = {arm.name for arm in run.record.arms} if run is not None else set()

    @classmethod
    def begin(cls, ctx: Context, store: EvidenceStore, prepared: PreparedSweep) -> SweepKeeper:
        """A new sweep."""
        from tunerd.sweep.plan import plan_json

        number = store.add_run(
            RunRecord(
                kind=KIND,
                suites=(_SUITE,),
                started_s=ctx.clock.now_s(),
                target=f"{prepared.plan_request.profile}, {counted(prepared.space.n_points, 'configuration')}",
                seed=prepared.seed,
                unit=ctx.unit,
                profile=prepared.plan_request.profile,
                model_name=prepared.base_plan.facts.name,
                workload=prepared.shape.name,
            )
        )
        keeper = cls(ctx, store, number)
        keeper.plan({**plan_json(prepared), "request": plain(prepared.request)})
        return keeper

    def plan(self, figures: Mapping[str, Any]) -> None:
        """What it is to do, in place of what was kept of that before."""
        self._store.add_summary(self.number, SummaryRecord(KIND, PLAN, None, dict(figures)))

    def arm(
        self, arm: Arm | str, record: ArmRecord, workload_sha256: str, **conditions: Any
    ) -> None:
        """An arm has served under these parts of a fingerprint; it is stored once."""
        if (name := str(arm)) not in self._arms:
            record = record.under(workload_sha256=workload_sha256, **conditions)
            self._store.add_arm(self.number, replace(record, name=name))
            self._arms.add(name)

    def samples(self, arm: Arm | str, samples: Sequence[Sample]) -> None:
        """Requests of an arm, void ones included."""
        self._store.add_samples(self.number, samples, arm=str(arm))

    def power(self, table: Mapping[str, Any]) -> None:
        """Speed and energy at each power limit."""
        self._store.add_summary(self.number, SummaryRecord(KIND, POWER, None, dict(table)))

    def event(self, sample: SweepSample) -> None:
        """A start or a request, as the search sees it."""
        self._store.add_sweep_event(self.number, plain(sample))

    def result(
        self, outcome: Outcome, incumbent: Arm, workload: str,
        served: Mapping[str, Any] | None = None,
    ) -> VerdictRecord:  # fmt: skip
        """What it came to; `served` says how its drafts compare with those of production's own requests."""
        evidence = outcome.evidence.to_json()
        self._store.add_summary(self.number, SummaryRecord(KIND, EVIDENCE, None, evidence))
        page = page_of(self._store.sweep_events(self.number), evidence)
        self._store.add_summary(self.number, SummaryRecord(KIND, PAGE, None, page))
        record = _verdict(outcome, incumbent, workload)
        if served is not None:
            record = replace(record, details={**record.details, "served": dict(served)})
        self._store.add_verdict(self.number, record)
        return record

    def end(self, outcome: RunOutcome, reason: str | None) -> None:
        """How the run ended."""
        self._store.end_run(self.number, outcome, ended_s=self._ctx.clock.now_s(), reason=reason)


def _verdict(outcome: Outcome, incumbent: Arm, workload: str) -> VerdictRecord:
    from tunerd.sweep.tuner import sentence_of

    evidence = outcome.evidence
    decisive = evidence.won or evidence.challenges[-1:]
    gain = evidence.gain
    ratio, low, high = (None, None, None) if gain is None else gain.ratios
    return VerdictRecord(
        outcome=outcome.verdict,
        sentence=sentence_of(outcome, incumbent, workload),
        arm_a=str(incumbent),
        arm_b=str(decisive[-1].candidate) if decisive else None,
        what=f"turn time on {workload}"
        if evidence.wanted_tok_s is None
        else f"the largest context with {evidence.wanted_tok_s:g} tok/s on {workload}",
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        n_pairs=sum(len(one.pairs) for one in decisive) if decisive else None,
        reasons=evidence.reasons,
        details={"arm": plain(outcome.arm), "elapsed_s": evidence.elapsed_s,
                 "restarts": evidence.restarts},
    )  # fmt: skip


def sweeps(
    ctx: Context, store: EvidenceStore, *, limit: int | None = None, in_full: bool = False
) -> tuple[StoredSweep, ...]:
    """Sweeps, newest first, with plan, verdict and decision: the evidence of a night is a megabyte."""
    names = _IN_FULL if in_full else (PLAN, DECISION)
    found = store.runs(limit=limit, kind=KIND, with_arms=False)
    return tuple(_stored(ctx, store, run, names) for run in found)


def find_sweep(ctx: Context, store: EvidenceStore | None, number: int | None) -> StoredSweep:
    """One sweep; the newest without a number.

    Raises:
        UsageError: there is none.
    """
    if store is not None:
        newest = store.runs(limit=1, kind=KIND) if number is None else (store.run(number),)
        for run in newest:
            if run is not None and run.record.kind == KIND:
                return _stored(ctx, store, run)
    said = "there has been no sweep yet" if number is None else f"there is no sweep {number}"
    raise UsageError(said, hint="`tunerd sweep list`, or `tunerd sweep run`")


def keep_decision(ctx: Context, number: int, decision: Mapping[str, Any]) -> None:
    """Keep what became of a sweep's proposal."""
    with EvidenceStore(ctx.paths.evidence) as store:
        store.add_summary(number, SummaryRecord(KIND, DECISION, None, dict(decision)))


PROMOTED, ROLLED_BACK, TAKEN_BACK = "promoted", "rolled back", "taken back"


def after_failure(
    ctx: Context, profile: str, sweep: int, arm: Arm, engine_sha256: str | None, reason: str
) -> None:
    """As `take_back_tuned`, and what became of the sweep.

    Raises:
        HostError: a file cannot be written.
    """
    take_back_tuned(ctx, profile, sweep, arm, engine_sha256, reason)
    keep_decision(ctx, sweep, {"what": TAKEN_BACK, "text": f"failed in service: {reason}"})


def beyond_keeping(
    runs: Sequence[StoredRun], keep_days: int, *, handed_in_s: Seconds | None, sends: bool
) -> tuple[StoredRun, ...]:
    """Sweeps whose starts and requests are not kept any longer.

    Args:
        runs: All sweeps, newest first; what is old is so by the middle one of those that are kept, for a clock
            may be wrong for a night.
        keep_days: How long they are kept; 0 for ever.
        handed_in_s: When the shared store was last known to have everything.
        sends: Whether there is one.
    """
    old = runs[KEPT_SWEEPS:] if keep_days else ()
    times_s = sorted(one.record.started_s for one in runs[:KEPT_SWEEPS])
    return tuple(
        one
        for one in old
        if one.record.dropped is None
        and one.record.started_s < times_s[len(times_s) // 2] - keep_days * _DAY_S
        and (not sends or (one.ended_s or math.inf) < (handed_in_s or 0.0))
    )


def drop_old_requests(ctx: Context, store: EvidenceStore) -> None:
    """Make room for a sweep that begins; where that fails, it begins all the same."""
    url = ctx.settings.store.url
    handed = ctx.files.recall(HandedIn, ctx.paths.handed_in)
    found = beyond_keeping(
        store.runs(kind=KIND, with_arms=False), ctx.settings.sweep.keep_days,
        handed_in_s=handed.at_s if handed is not None and handed.url == url else None,
        sends=url is not None,
    )  # fmt: skip
    try:
        for one in found[-_MOST_AT_ONCE:]:
            store.drop_requests(one)
        store.give_back()
    except TunerdError as problem:
        ctx.say(f"old sweeps keep their requests: {problem.words}")


@dataclass(frozen=True, slots=True)
class History:
    """What earlier sweeps leave: samples, oldest first, and how many challenges what serves has had."""

    samples: list[dict[str, Any]]
    n_challenges: int


def history_of(
    store: EvidenceStore,
    basis: str,
    generation: int,
    *,
    but: int | None = None,
    most: int = _MOST_HISTORY,
) -> History:
    """Samples of earlier sweeps with the same basis.

    Those that began from another one than the `generation` that serves are of no challenge any more: each
    has an alpha of its own. What its challenges have spent of it is remembered for as long as it serves,
    whatever they were measured under, whatever the clock said then, and where a damaged plan does not tell.
    """
    found: list[list[dict[str, Any]]] = []
    n_challenges = 0
    for at, run in enumerate(store.runs(kind=KIND, with_arms=False)):
        plan = _last(store, run.number, (PLAN,)).get(PLAN, {})
        is_current = plan.get("generation", generation) == generation
        is_full = sum(map(len, found)) > most
        if not is_current and (is_full or at >= KEPT_SWEEPS):
            break
        is_same = plan.get("basis") == basis
        if run.number == but or not (is_same or is_current):
            continue
        events, n_damaged = store.readable_events(run.number)
        if is_current:
            numbers = (event["pair"][0] for event in events if event.get("pair"))
            n_challenges = max(n_challenges, *numbers, 0) + n_damaged  # each may have had another
        spent = {} if is_current else {"pair": None}
        if is_same and not n_damaged:
            kept = (event for event in events if not is_full or event.get("pair"))
            found.append([{**event, "is_earlier": True, **spent} for event in kept])
    samples = [event for events in reversed(found) for event in events]
    return History(samples, n_challenges)


def _last(
    store: EvidenceStore, number: int, names: Collection[str]
) -> dict[str, Mapping[str, Any]]:
    """The last figures of each of these names."""
    found = store.summaries(number, names=names)
    return {one.name: one.figures for one in found if one.suite == KIND}


def _stored(
    ctx: Context, store: EvidenceStore, run: StoredRun, names: Collection[str] = _IN_FULL
) -> StoredSweep:
    last, verdicts = _last(store, run.number, names), store.verdicts(run.number)
    verdict = verdicts[-1] if verdicts else None
    return StoredSweep(
        run=run,
        plan=last.get(PLAN, {}),
        evidence=last.get(EVIDENCE),
        verdict=verdict,
        decision=_decision(ctx, run, verdict, last.get(DECISION)),
        power=last.get(POWER),
    )


def _decision(
    ctx: Context, run: StoredRun, verdict: VerdictRecord | None, kept: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """What became of a proposal: as it was kept, or what its tuned layer tells of later.

    The layer is settled with each swap, also of one that was killed before it could say so here.
    """
    profile, what = run.record.profile, (kept or {}).get("what")
    arm = None if verdict is None else read_or_none(Arm, verdict.details.get("arm"))
    if arm is None or profile is None or not ctx.paths.tuned_dir.exists():
        return kept
    with contextlib.suppress(TunerdError, Unreadable):
        layer, failed = read_tuned(ctx, profile), failure_of(ctx, profile, arm)
        if layer is not None and layer.sweep == run.number:
            text = layer.measured_again.get("text", "")
            now = {"what": PROMOTED, "generation": layer.generation, "text": text}
            return kept if what == PROMOTED else now
        if failed is not None and failed.sweep == run.number and what in {None, PROMOTED}:
            return {"what": ROLLED_BACK, "text": failed.reason}
        if failed is not None and failed.sweep is None and what == PROMOTED:
            return {"what": TAKEN_BACK, "text": f"failed in service: {failed.reason}"}
    return kept


def unfinished(ctx: Context, request: SweepRequest) -> StoredSweep | None:
    """The newest sweep, if it asked for the same and did not come to its end."""
    with reading(ctx) as store:
        found = sweeps(ctx, store, limit=1) if store is not None else ()
    if not found or found[0].run.outcome is RunOutcome.DONE:
        return None
    return found[0] if found[0].plan.get("request") == plain(request) else None


_NOTHING = note("no-sweep", "there has been no sweep yet", "`tunerd sweep run --dry-run`")


def list_sweeps(ctx: Context) -> ActionResult:
    """All of them, newest first."""
    with reading(ctx) as store:
        found = () if store is None else sweeps(ctx, store)
    rows = [_row(ctx, one) for one in found]
    return ActionResult("sweep list", {"sweeps": rows}, () if rows else (_NOTHING,))


def show_sweep(ctx: Context, number: int | None) -> ActionResult:
    """One sweep in full.

    Raises:
        UsageError: there is none.
    """
    with reading(ctx) as store:
        sweep = find_sweep(ctx, store, number)
        assert store is not None  # noqa: S101 -- it was found there
        page = _last(store, sweep.number, (PAGE,)).get(PAGE)  # there is none before its end
        page = page or page_of(store.readable_events(sweep.number)[0], sweep.evidence or {})
    return ActionResult("sweep show", _sweep_json(ctx, sweep, page), dropped_message(sweep.run))


def _sweep_json(ctx: Context, sweep: StoredSweep, page: Mapping[str, Any]) -> dict[str, Any]:
    """A sweep as scripts read it, with what a page about it draws."""
    evidence = sweep.evidence or {}
    return {
        **_row(ctx, sweep),
        "plan": dict(sweep.plan),
        "reasons": list(sweep.verdict.reasons) if sweep.verdict is not None else [],
        "verdict_record": None if sweep.verdict is None else asdict(sweep.verdict),
        "served": None if sweep.verdict is None else sweep.verdict.details.get("served"),
        **{name: evidence.get(name, []) for name in ("arms", "challenges", "path")},
        **{name: evidence.get(name, {}) for name in ("models", "time_s")},
        "left_out": [*sweep.plan.get("left_out", []), *evidence.get("left_out", [])],
        "best_untried": evidence.get("best_untried"),
        "decided": sweep.decision,
        "power": sweep.power,
        "page": page,
    }


def _row(ctx: Context, sweep: StoredSweep) -> dict[str, Any]:
    record, verdict, decision = sweep.run.record, sweep.verdict, sweep.decision
    return {
        "sweep": sweep.number,
        "started_s": record.started_s,
        "started": local_time(record.started_s, "%Y-%m-%d %H:%M %Z"),
        "ended_s": sweep.run.ended_s,
        "state": _state(ctx, sweep),
        "reason": sweep.run.reason,
        "profile": record.profile,
        "model": record.model_name,
        "workload": record.workload,
        "verdict": None if verdict is None else verdict.outcome,
        "sentence": None if verdict is None else verdict.sentence,
        "decision": None if decision is None else decision.get("what"),
        "samples": sweep.run.n_samples,
        "left_out_samples": sweep.run.n_unusable,
    }


def _state(ctx: Context, sweep: StoredSweep) -> str:
    """`running` where it is the measurement under way, `cut` where nobody ended it."""
    if sweep.run.outcome is not None:
        return str(sweep.run.outcome)
    return "running" if running_sweep(ctx) == sweep.number else "cut"


def running_sweep(ctx: Context) -> int | None:
    """The number of the sweep under way; None if there is none."""
    record = read_measurement(ctx)
    if record is None:
        return None
    words = record.purpose.split()
    is_sweep = len(words) > 1 and words[0] == "sweep" and words[1].isdigit()
    return int(words[1]) if is_sweep else None


def page_of(events: Sequence[Mapping[str, Any]], evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Arms, margins, classes, failures and pairs.

    Args:
        events: Starts and requests as `Sample.to_json` wrote them.
        evidence: As `Evidence.to_json` wrote it; empty where the sweep did not come to its end.
    """
    wanted, joules = evidence.get("wanted_tok_s"), _joules(events)
    named = [{**one, "text": arm_text(one["arm"])} for one in evidence.get("arms", [])]
    return {
        "arms": [{**one, "joules_per_token": joules.get(one["text"])} for one in named],
        "margins": _margins(events),
        "classes": evidence.get("turns", []),
        "failures": _failures(events),
        "pairs": _pairs(evidence.get("challenges", [])),
        "against": "what serves" if wanted is None else f"turns at {wanted:g} tok/s",
        "n_starts": sum(event["event"] == "boot" for event in events),
        "n_requests": sum(event["event"] == "request" for event in events),
        "seconds": sum(float(event.get("seconds") or 0.0) for event in events),
    }


def _joules(events: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """All energy over all tokens of whole answers, by arm with the draft in force: of rounds through the workload [J].

    What does not draft is asked for shorter answers than what does, among which a prompt counts for more, but in pairs.
    """
    found: dict[Arm, list[tuple[float, float, bool]]] = defaultdict(list)
    for event in events:
        answer = event.get("answer") or {}
        energy_j, n = answer.get("energy_j"), answer.get("predicted_n")
        if event.get("purpose") == "block" and energy_j and n and not answer.get("decode_left_ms"):
            arm = read(Arm, event["arm"])
            if arm.drafts:
                arm = arm.with_draft(event.get("n_max", arm.n_max), event.get("p_min", arm.p_min))
            found[arm.canonical()].append((energy_j, n, event.get("pair") is not None))
    drafts = any(arm.drafts for arm in found)
    alike = {
        arm: [
            (joules, n) for joules, n, is_of_pair in told if arm.drafts or is_of_pair or not drafts
        ]
        for arm, told in found.items()
    }
    return {
        str(arm): ratio(sum(joules for joules, _ in told), sum(n for _, n in told))
        for arm, told in alike.items()
    }


def _margins(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """VRAM left free with the context full by margin, and the margins that did not survive."""
    found = []
    for event in events:
        if read(Arm, event["arm"]).is_placed:
            continue
        is_fill = event.get("purpose") == "fill"
        has_failed = event.get("failure") == "oom"
        free = (event.get("answer") or {}).get("vram_free_min_mib")
        if has_failed or (is_fill and free is not None):
            found.append({"arm": event["arm"], "fit_mib": event["arm"]["fit_mib"],
                          "free_mib": None if has_failed else free, "oom": has_failed})  # fmt: skip
    return found


def _failures(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    from tunerd.sweep.observations import FILL, TOOL  # which takes numpy

    counts: dict[tuple[str, str], int] = defaultdict(int)
    for event in events:
        # How long a prompt may be, and whether tools are known, is found out by asking.
        is_question = event.get("failure") == "refused" and event.get("purpose") in {FILL, TOOL}
        if event.get("failure") and not is_question:
            counts[arm_text(event["arm"]), event["failure"]] += 1
    return [{"arm": arm, "failure": why, "n": n} for (arm, why), n in counts.items()]


def _pairs(challenges: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"candidate": arm_text(one["candidate"]), "outcome": one["outcome"],
         "reasons": list(one["reasons"]), "gain": one["gain"], "by_kind": one["by_kind"],
         "log_ratios": [pair["log_ratio"] for pair in one["pairs"]]}
        for one in challenges
    ]  # fmt: skip


def arm_text(arm: Mapping[str, Any]) -> str:
    """An arm's JSON in words."""
    return str(read(Arm, arm))
