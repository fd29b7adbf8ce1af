"""What a page about a sweep draws, from its stored events and evidence: plain JSON values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from tunerd.core.sweep.sample import arm_from_json


def page_of(events: Sequence[Mapping[str, Any]], evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Heat maps, margins, classes, failures and pairs.

    Args:
        events: Starts and requests as `Sample.to_json` wrote them.
        evidence: As `Evidence.to_json` wrote it; empty where the sweep did not come to its end.
    """
    return {
        "arms": [{**one, "text": arm_text(one["arm"])} for one in evidence.get("arms", [])],
        "heat": _heat(evidence.get("arms", [])),
        "margins": _margins(events),
        "classes": _classes(events),
        "failures": _failures(events),
        "pairs": _pairs(evidence.get("challenges", [])),
        "n_starts": sum(event["event"] == "boot" for event in events),
        "n_requests": sum(event["event"] == "request" for event in events),
        "seconds": sum(float(event.get("seconds") or 0.0) for event in events),
    }


def _heat(arms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn time over n-max and p-min, the fastest of each point, by engine and kind."""
    best: dict[tuple[str, str, int, float], Mapping[str, Any]] = {}
    for one in arms:
        arm = one["arm"]
        key = (arm["engine"], arm["spec"], arm["n_max"], arm["p_min"])
        known = best.get(key)
        if one["believed_s"] is None:
            continue
        if known is None or one["believed_s"] < known["believed_s"]:
            best[key] = one
    return [
        {"engine": engine, "spec": spec, "n_max": n_max, "p_min": p_min,
         "measured_s": one["measured_s"], "predicted_s": one["predicted_s"],
         "believed_s": one["believed_s"]}
        for (engine, spec, n_max, p_min), one in sorted(best.items())
    ]  # fmt: skip


def _margins(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """VRAM left free with the context full by margin, and the margins that did not survive."""
    found = []
    for event in events:
        if arm_from_json(event["arm"]).is_placed:
            continue
        is_fill = event.get("purpose") == "fill"
        has_failed = event.get("failure") == "oom"
        free = (event.get("answer") or {}).get("vram_free_min_mib")
        if has_failed or (is_fill and free is not None):
            found.append({"arm": event["arm"], "fit_mib": event["arm"]["fit_mib"],
                          "free_mib": None if has_failed else free, "oom": has_failed})  # fmt: skip
    return found


def _classes(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean wall time of each kind of request by arm [s], of what was measured alone."""
    walls: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        answer = event.get("answer") or {}
        if event.get("purpose") == "block" and answer.get("wall_ms"):
            arm = {**event["arm"], "n_max": event["n_max"], "p_min": event["p_min"]}
            name = arm_text(arm)
            walls[name, event["request"]["kind"]].append(answer["wall_ms"] / 1000)
    return [
        {"arm": arm, "kind": kind, "wall_s": fmean(values), "n": len(values)}
        for (arm, kind), values in walls.items()
    ]


def _failures(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for event in events:
        if event.get("failure"):
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
    return str(arm_from_json(arm))
