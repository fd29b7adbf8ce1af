"""What `tunerd bench` shows to people: one table for each suite."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tunerd.cli.output import columns

MISSING = "n/a"


def render(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"run {payload['run']}: {payload['suite']} of {payload['target']}, seed {payload['seed']}"
    yield ""
    yield from _SUITES[payload["suite"]](payload)
    yield from _positions(payload)
    if payload["against"] is not None:
        yield ""
        yield from _against(payload["against"])


def _mtp(payload: Mapping[str, Any]) -> Iterator[str]:
    for arm, table in payload["tables"].items():
        if len(payload["tables"]) > 1:
            yield f"{arm}:"
        for row in table["rows"]:
            counts = " ".join(
                f"{name}={_whole(row[key]):>4}"
                for name, key in (("pred", "predicted"), ("draft", "drafted"), ("acc", "accepted"))
            )
            rate, tok_s = _figure(row["acceptance_ratio"], 3), _figure(row["tok_s"], 1)
            left = f"  ({row['n']} requests{_left_out(row['n_left_out'])})"
            yield f"  {row['kind']:<18} {counts} rate={rate} tok/s={tok_s}{left}"
        yield "Aggregate: " + json.dumps(
            {
                "n_requests": table["n_requests"],
                "total_predicted": table["predicted"],
                "total_draft": table["drafted"],
                "total_draft_accepted": table["accepted"],
                "aggregate_accept_rate": _rounded(table["acceptance_ratio"], 4),
                "wall_s_total": _rounded(table["wall_s"], 2),
            }
        )
        yield (
            f"tok/s: {_figure(table['tok_s'], 2)} (all tokens over all time{_without(table)}), "
            f"{_figure(table['mean_tok_s'], 2)} (mean of the kinds); "
            f"wall of one round {_figure(table['wall_s'], 2)} s"
        )
        yield from _by_client(payload, arm)


def _without(table: Mapping[str, Any]) -> str:
    return f", without {', '.join(table['missing'])}" if table["missing"] else ""


def _lengths(payload: Mapping[str, Any]) -> Iterator[str]:
    yield from _cases(payload, "tokens")
    if payload["crossover"] is None and len(payload["arms"]) < 2:  # noqa: PLR2004
        return
    yield ""
    for row in payload["lengths"]:
        lead = row["lead_ms"]
        if lead is None:
            said = "not measured for both"
        elif row["arm"] is None:
            said = f"a tie (within {lead / 1000:.2f} s)"
        else:
            said = f"{row['arm']} by {lead / 1000:.2f} s"
        yield f"{row['n_tokens']:>6} tokens: {said}"
    yield _crossing(payload["crossover"])


def _crossing(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "no crossing: a figure is missing"
    arm, than = found["arm"], found["than"]
    if found["n_tokens"] is None:
        return f"{arm} is faster than {than} at no length that was measured"
    if found["n_tokens"] == 0:
        return f"{arm} is faster than {than} at every length that was measured"
    low, high = (_figure(found[key], 0) for key in ("low", "high"))
    high = "without end" if found["high"] is None else high
    return (
        f"{arm} is faster than {than} from about {found['n_tokens']:.0f} tokens on "
        f"({found['level']:.0%} interval {low} to {high})"
    )


def _cache(payload: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for arm, case, samples in _grouped(payload):
        usable = [one for one in samples if one["usable"]]
        rows.append(
            (
                case,
                str(len(usable)),
                _median(usable, lambda one: one["timings"] and one["timings"]["prompt_ms"], 1),
                _median(usable, lambda one: one["details"].get("cached"), 0),
                _median(usable, lambda one: one["client"] and one["client"]["ttft_ms"], 1),
                arm,
            )
        )
    heads = ("case", "requests", "prompt ms", "tokens reused", "TTFT ms", "arm")
    yield from columns(rows, heads)
    for found in payload["reuse"].values():
        for one in found:
            yield f"{one['case']}: {one['text']}"


def _deep(payload: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (
            _figure(sample["details"].get("depth"), 0),
            _rate(sample, "predicted", 1),
            _rate(sample, "prompt", 0),
            _figure(sample["vram_free_min_mib"], 0),
            sample["problem"] or ", ".join(sample["marks"]),
        )
        for sample in payload["samples"]
        if sample["case"] != "warm-up"
    ]
    yield from columns(rows, ("tokens", "tok/s", "prompt tok/s", "free VRAM MiB", ""))
    for found in payload["depth"].values():
        if found["failed_tokens"] is not None:
            yield f"it ends at about {found['failed_tokens']:.0f} tokens: {found['why']}"
        elif found["spill_tokens"] is not None:
            yield f"it spills from {found['spill_tokens']:.0f} tokens on: {found['why']}"
        else:
            yield f"filled up to {_figure(found['filled_tokens'], 0)} tokens: {found['why']}"


def _quality(payload: Mapping[str, Any]) -> Iterator[str]:
    gates = [found for key in ("quality", "against_serving") if (found := payload[key]) is not None]
    if not gates:
        yield from _cases(payload, "case")
        yield "one arm alone: there is nothing to compare its answers with"
    for number, found in enumerate(gates):
        if number:
            yield ""
        yield from quality_lines(found, found["candidate"], found["reference"])


def quality_lines(found: Mapping[str, Any], candidate: str, reference: str) -> Iterator[str]:
    """The quality gate: a row for each case, and what it came to."""
    rows = [
        (
            one["case"],
            f"{one['n_same']} of {one['n']}" + _left_out(one["n_missing"] + one["n_left_out"]),
            MISSING if one["n_called"] is None else f"{one['n_called']} of {one['n']}",
            MISSING if one["n_valid"] is None else f"{one['n_valid']} of {one['n']}",
            _figure(one["drift_letters"], 0),
            " / ".join(_figure(n, 0) for n in one["reasoning_letters"]),
        )
        for one in found["cases"]
    ]
    heads = ("case", "same", "with calls", "valid JSON", "drift in letters", "letters of thoughts")
    yield from columns(rows, heads)
    words = {True: "passed", False: "failed", None: "no verdict"}
    yield f"gate, {candidate} against {reference}: {words[found['passes']]}"
    yield from (f"  {reason}" for reason in found["reasons"])


def _concurrency(payload: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (row["case"], str(row["n_groups"]), _figure(row["together_tok_s"], 1),
         _figure(row["each_tok_s"], 1), _figure(row["ttft_ms"], 1), row["arm"])
        for row in payload["streams"]
    ]  # fmt: skip
    heads = ("case", "rounds", "together tok/s", "each tok/s", "TTFT ms", "arm")
    yield from columns(rows, heads)


def _workload(payload: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (row["request_class"] or "the whole mix", _figure(row["prefill_s"], 2),
         _figure(row["reasoning_s"], 2), _figure(row["decode_s"], 2),
         _figure(row["waiting_s"], 2), _figure(row["total_s"], 2),
         MISSING if row["weight"] is None else f"{row['weight']:.0%}", row["arm"])
        for row in payload["turns"]
    ]  # fmt: skip
    heads = ("class", "prefill s", "reasoning s", "decode s", "waiting s", "turn s", "share", "arm")
    yield from columns(rows, heads)


def _cases(payload: Mapping[str, Any], head: str) -> Iterator[str]:
    rows = [
        (
            row["case"],
            row["arm"],
            f"{row['n']}{_left_out(row['n_unusable'])}",
            _figure(row["ttft_ms"]["median"], 1),
            _figure(row["decode"]["tok_s"] or _client(row), 1),
            _spread(row["decode_tok_s"]),
            _figure(row["wall_ms"]["median"], 0),
        )
        for row in sorted(payload["summary"], key=lambda row: _as_number(row["case"]))
    ]
    heads = (head, "arm", "requests", "TTFT ms", "tok/s", "each", "wall ms")
    yield from columns(rows, heads)


def _as_number(case: str) -> int:
    return int(case) if case.isdigit() else 0


def _by_client(payload: Mapping[str, Any], arm: str) -> Iterator[str]:
    """Of a server that reports no timings, what the client's clock saw."""
    rows = [row for row in payload["summary"] if row["arm"] == arm and row["client_tok_s"]]
    if rows:
        yield ""
        yield "by the client's clock, since the server reports no timings:"
        yield from columns(
            [(row["case"], _figure(_client(row), 1), _figure(row["ttft_ms"]["median"], 1),
              _figure(row["wall_ms"]["median"], 0)) for row in rows],
            ("kind", "tok/s", "TTFT ms", "wall ms"),
        )  # fmt: skip


def _positions(payload: Mapping[str, Any]) -> Iterator[str]:
    for arm, ratios in payload["by_position"].items():
        if ratios:
            shown = " / ".join(f"{ratio:.3f}" for ratio in ratios)
            yield f"accepted by position of the draft ({arm}): {shown}"


def _against(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "beside the published numbers:"
    shown = [
        (row["what"], _figure(row["here"], 3), _figure(row["published"], 3),
         MISSING if row["ratio"] is None else f"{row['ratio']:.2f}x", row["unit"])
        for row in rows
    ]  # fmt: skip
    yield from columns(shown, ("", "here", "published", "ratio", ""))


def _grouped(payload: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Mapping[str, Any]]]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for sample in payload["samples"]:
        if sample["case"] != "warm-up":
            groups.setdefault((sample["arm"], sample["case"]), []).append(sample)
    for (arm, case), samples in groups.items():
        yield arm, case, samples


def _rate(sample: Mapping[str, Any], kind: str, digits: int) -> str:
    timings = sample["timings"] or {}
    n, ms = timings.get(f"{kind}_n"), timings.get(f"{kind}_ms")
    if not n or not ms:
        return MISSING
    n -= kind == "predicted"
    return _figure(n / ms * 1000, digits)


def _median(
    samples: Sequence[Mapping[str, Any]], take: Callable[[Mapping[str, Any]], Any], digits: int
) -> str:
    from statistics import median

    known = [value for one in samples if (value := take(one)) is not None]
    return _figure(median(known), digits) if known else MISSING


def _client(row: Mapping[str, Any]) -> float | None:
    found = row["client_tok_s"]
    return None if found is None else found["median"]


def _spread(found: Mapping[str, Any]) -> str:
    if found["least"] is None:
        return MISSING
    return f"{found['least']:.1f} to {found['most']:.1f}"


def _figure(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _left_out(n: int) -> str:
    return f", {n} left out" if n else ""


_SUITES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "mtp": _mtp,
    "lengths": _lengths,
    "cache": _cache,
    "deep": _deep,
    "quality": _quality,
    "concurrency": _concurrency,
    "workload": _workload,
}
