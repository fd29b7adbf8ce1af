"""`tunerd sweep list`, `show`, `status`, `report`, and `tunerd verdict`: what sweeps found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.lease_record import read_measurement
from tunerd.actions.sweep_record import (
    StoredSweep,
    find_sweep,
    page_kept,
    reading,
    sweeps_in_brief,
)
from tunerd.core.result import ActionResult, note
from tunerd.errors import UsageError

_NOTHING = note("no-sweep", "there was no sweep yet", "`tunerd sweep run --dry-run`")


def list_sweeps(ctx: Context) -> ActionResult:
    """All of them, newest first."""
    with reading(ctx) as store:
        found = () if store is None else sweeps_in_brief(store)
    rows = [_row(ctx, one) for one in found]
    return ActionResult("sweep list", {"sweeps": rows}, () if rows else (_NOTHING,))


def show_sweep(ctx: Context, number: int | None) -> ActionResult:
    """One sweep in full.

    Raises:
        UsageError: there is none.
    """
    with reading(ctx) as store:
        sweep = find_sweep(store, number)
        page = None if store is None else page_kept(store, sweep.number)
        if page is None:
            from tunerd.core.sweep.page import page_of  # scipy comes with the search

            events = () if store is None else store.sweep_events(sweep.number)
            page = page_of(events, sweep.evidence or {})
    return ActionResult("sweep show", sweep_json(ctx, sweep, page))


def verdict(ctx: Context, number: int | None) -> ActionResult:
    """What a sweep came to, with the numbers behind it.

    Raises:
        UsageError: there is none, or it reached no verdict.
    """
    with reading(ctx) as store:
        sweep = find_sweep(store, number)
    if sweep.verdict is None:
        raise UsageError(
            f"sweep {sweep.number} reached no verdict: {sweep.run.reason or sweep.state}",
            hint=f"`tunerd sweep resume {sweep.number}`",
        )
    evidence = sweep.evidence or {}
    payload = {
        "sweep": sweep.number,
        **asdict(sweep.verdict),
        "reasons": list(sweep.verdict.reasons),
        "decision": sweep.decision,
        "challenges": evidence.get("challenges", []),
    }
    return ActionResult("verdict", payload)


def sweep_json(ctx: Context, sweep: StoredSweep, page: Mapping[str, Any]) -> dict[str, Any]:
    """A sweep as scripts read it, with what a page about it draws."""
    evidence = sweep.evidence or {}
    return {
        **_row(ctx, sweep),
        "plan": dict(sweep.plan),
        "reasons": list(sweep.verdict.reasons) if sweep.verdict is not None else [],
        "verdict_record": None if sweep.verdict is None else asdict(sweep.verdict),
        "arms": evidence.get("arms", []),
        "left_out": evidence.get("left_out", sweep.plan.get("left_out", [])),
        "challenges": evidence.get("challenges", []),
        "margins": evidence.get("margins", []),
        "path": evidence.get("path", []),
        "models": evidence.get("models", {}),
        "time_s": evidence.get("time_s", {}),
        "best_untried": evidence.get("best_untried"),
        "decided": sweep.decision,
        "page": page,
    }


def _row(ctx: Context, sweep: StoredSweep) -> dict[str, Any]:
    record = sweep.run.record
    started = datetime.fromtimestamp(record.started_s, UTC).strftime("%Y-%m-%d %H:%M")
    return {
        "sweep": sweep.number,
        "started_s": record.started_s,
        "started": started,
        "ended_s": sweep.run.ended_s,
        "state": _state(ctx, sweep),
        "reason": sweep.run.reason,
        "profile": record.profile,
        "model": record.model_name,
        "workload": record.workload,
        "verdict": None if sweep.verdict is None else sweep.verdict.outcome,
        "sentence": None if sweep.verdict is None else sweep.verdict.sentence,
        "decision": None if sweep.decision is None else sweep.decision.get("what"),
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
