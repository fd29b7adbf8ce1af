"""What every result is shown as: sections of facts, tables and charts, for terminal, page and report alike."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from tunerd.words import UNKNOWN, Mode, counted, format_duration, format_mib, when

Cell = str | None
"""A text; None is a figure that is missing, and is shown as such."""
Facts = tuple[tuple[str, Cell], ...]
"""Names and what they are."""


@dataclass(frozen=True, slots=True)
class Column:
    """The head of a column; numbers stand on the right."""

    title: str
    is_number: bool = True


def heads(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers; of words where the title begins with `~`."""
    return tuple(Column(one.removeprefix("~"), not one.startswith("~")) for one in titles)


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of each row names it, and leads to its link. `foot` are rows of totals."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    foot: tuple[tuple[Cell, ...], ...] = ()
    links: tuple[str | None, ...] = ()


T = TypeVar("T")
Columns: TypeAlias = Mapping[str, Callable[[T], Cell]]
"""What stands below each title, of what is in the row; words where the title begins with `~`."""


JOULES = "J/token"


def table_of(
    caption: str, rows: Iterable[T], columns: Columns[T], *, foot: Iterable[T] = (),
    link: Callable[[T], str | None] | None = None,
) -> Table:  # fmt: skip
    """A table of some things, one in a row; energy is left out where none of them has it."""
    ones, foot = list(rows), list(foot)
    if (joules := columns.get(JOULES)) and all(joules(one) is None for one in (*ones, *foot)):
        columns = {head: take for head, take in columns.items() if head != JOULES}

    def cells(one: T) -> tuple[Cell, ...]:
        return tuple(take(one) for take in columns.values())

    links = () if link is None else tuple(link(one) for one in ones)
    return Table(caption, heads(*columns), tuple(map(cells, ones)), tuple(map(cells, foot)), links)


@dataclass(frozen=True, slots=True)
class Point:
    """A figure, None where there is none, with the bounds of its spread, where there are some."""

    x: float
    y: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one colour."""

    label: str
    colour: str
    points: tuple[Point, ...]
    shade: int = 0


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines over an axis from zero, over `x_range`, or over time (seconds since the epoch).

    `crossing` is where two of them cross, with the interval of that.
    """

    lines: tuple[Line, ...]
    unit: str
    x_title: str = ""
    height: int = 280
    is_ratio: bool = False
    is_time: bool = False
    x_ticks: tuple[float, ...] | None = None
    x_range: tuple[float, float] | None = None
    crossing: Point | None = None
    axis: ClassVar[str] = "lines"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar; None is missing."""

    label: str
    colour: str
    value: float | None
    shade: int = 0


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts in a row; `total` is None where one of them is missing. The spread stands around its end."""

    label: str
    parts: tuple[Part, ...]
    total: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars below the name of their group; stacked ones have their label above."""

    groups: tuple[tuple[str, tuple[Bar, ...]], ...]
    unit: str
    is_stacked: bool = False
    digits: int = 1
    axis: ClassVar[str] = "bars"


Plot = Lines | Bars


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart under its title."""

    name: str
    title: str
    plot: Plot
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """One question and its answer; `name` is its anchor, `remarks` stand below its text."""

    name: str
    title: str
    text: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    facts: Facts = ()
    remarks: tuple[str, ...] = ()


NO_BREAK = "\u00a0"
NOT_ASKED = "n/a"
"""Where a figure cannot be: nothing is missing."""


def figure(value: float | None, digits: int = 1) -> str | None:
    """`1,234.5`; None where there is none."""
    return None if value is None else f"{value:,.{digits}f}"


def percent(ratio: float | None, digits: int = 1) -> str | None:
    """`87.5 %`, in one line; None where there is none."""
    return None if ratio is None else f"{ratio * 100:.{digits}f}{NO_BREAK}%"


def seconds(ms: float | None, digits: int = 1) -> str | None:
    """Milliseconds as seconds, without the unit."""
    return None if ms is None else figure(ms / 1000, digits)


def span(low: float | None, high: float | None, digits: int = 1, *, per: float = 1) -> str | None:
    """`39.1 to 48.9`, after they were divided by `per`; None where an end is missing."""
    if low is None or high is None:
        return None
    return f"{low / per:,.{digits}f} to {high / per:,.{digits}f}"


def joined(words: Iterable[str]) -> str:
    """`a, b and c`."""
    known = list(words)
    if len(known) < 2:  # noqa: PLR2004
        return "".join(known)
    return f"{', '.join(known[:-1])} and {known[-1]}"


def sentence(parts: Sequence[str]) -> str:
    """Parts as one sentence with its full stop; names such as `ik-b4400` keep their small letter."""
    text = " ".join(part for part in parts if part)
    is_word = text.split(" ", 1)[0].rstrip(":,").isalpha()
    begin = text[:1].upper() if is_word else text[:1]
    return begin + text[1:] + ("" if text.endswith((".", "?")) else ".")


# What serves, what served, and what would

_NONE = "-"


def health_words(health: str | None, active: str, *, is_asleep: bool | None) -> str:
    """What the server says of itself, where it was asked."""
    said = health or (UNKNOWN if active == "active" else "not running")
    return f"{said}, asleep until somebody asks it" if is_asleep else said


def status_facts(status: Mapping[str, Any]) -> Facts:
    """What serves now, since when, from which generation."""
    is_absent = not status["exists"] and status["active"] == "inactive"
    runs = status["active"] not in {"inactive", "failed"}
    told = "since" if runs else "last started"
    since = f", {told} {when(status['since_s'])}" if status["since_s"] else ""
    unit = "there is none" if is_absent else f"{status['active']} ({status['sub_state']}){since}"
    serves = f"{status['alias'] or UNKNOWN} at {status['address'] or UNKNOWN}"
    health = health_words(status["health"], status["active"], is_asleep=status["asleep"])
    health += ", a router that starts a server for each model" if status["router"] else ""
    at = "with tunerd's supervisor" if status["mode"] == Mode.LOCAL else "at boot"
    at = "when you log in" if status["lingers"] is False else at
    boot = {True: f"starts {at}", False: f"does not start {at}", None: UNKNOWN}[status["enabled"]]
    measurement, last = status["measurement"], status["last_swap"]
    facts = [
        ("unit", f"{status['unit']}: {unit}"),
        ("health", health),
        (
            "serves",
            "nothing" if is_absent else serves if runs else f"nothing; once started, {serves}",
        ),
        *([("model", status["model"])] if status["model"] else []),
        ("boot", "nothing to start" if is_absent and status["enabled"] is None else boot),
        ("generation", _generation(status)),
    ]
    if measurement is not None:
        until = when(measurement["until_s"])
        facts.append(("measures", f"{measurement['purpose']}, until {until} at the latest"))
    if last is not None:
        said = f"generation {last['number']} by {last['reason']}: {_outcome(last)}"
        facts.append(("last swap", said))
    return tuple(facts)


def _generation(status: Mapping[str, Any]) -> str:
    if status["generation"] is None:
        return "none by tunerd"
    profile, engine = status["profile"], status["engine"]
    what = f"profile {profile}, engine {engine}" if profile else "not by a profile"
    if status["outcome"] == "removed":
        what = "went back to where there was none"
    return f"{status['generation']} ({what})"


def _outcome(one: Mapping[str, Any]) -> str:
    return f"{one['outcome']}: {one['cause']}" if one["cause"] else str(one["outcome"])


def generations_table(generations: Sequence[Mapping[str, Any]]) -> Table:
    """Every swap, newest first."""
    return table_of("Every swap, newest first", generations, {
        "~no": lambda one: str(one["number"]),
        "~when": lambda one: when(one["created_s"]),
        "~reason": lambda one: one["reason"],
        "~profile": lambda one: one["profile"] or _NONE,
        "~engine": lambda one: one["engine"] or _NONE,
        "~outcome": _outcome,
        "without service": lambda one: (
            _NONE if one["without_service_s"] is None else format_duration(one["without_service_s"])
        ),
    }, link=lambda one: f"/generations/{one['number']}")  # fmt: skip


def generation_facts(kept: Mapping[str, Any]) -> Facts:
    """Everything that is kept of one generation but its flags and its unit."""
    one, ending = kept["generation"], kept["ending"]
    return (
        ("generation", str(one["number"])),
        ("when", when(one["created_s"])),
        ("reason", one["reason"]),
        ("by", one["requested_by"]),
        ("profile", one["profile"] or _NONE),
        ("engine", f"{one['engine'] or _NONE} {(one['engine_sha256'] or '')[:16]}"),
        ("model", one["model_path"] or _NONE),
        ("outcome", ending["outcome"]),
        ("cause", ending["cause"] or _NONE),
        ("detail", ending["detail"] or _NONE),
        ("replaced", one["replaced_backup"] or "no unit file"),
        ("pins", json.dumps(one["pins"]) if one["pins"] else _NONE),
    )


def backups_table(backups: Sequence[Mapping[str, Any]]) -> Table:
    """What one can go back to; where each leads."""
    return table_of("What was replaced, as files beside the unit", backups, {
        "~backup": lambda one: one["name"],
        "~kept": lambda one: when(one["changed_s"]),
        "~before generation": lambda one: str(one["generation"] or "not on record"),
        "~profile": lambda one: one["profile"] or ("by tunerd" if one["is_ours"] else "not by tunerd"),
        "~": lambda one: "is live" if one["is_live"] else "",
    }, link=lambda one: None if one["is_live"] else f"/rollback?to={one['name']}")  # fmt: skip


def came_to(result: Mapping[str, Any]) -> str:
    """What a job did, in a sentence; empty where its result has none, as with the file that `emit` writes."""
    said = (result.get(key) for key in ("summary", "text", "sentence"))
    return next((one for one in said if isinstance(one, str) and "\n" not in one), "")


def flags_table(origins: Sequence[Sequence[str]]) -> Table:
    """Every flag, and who set it."""
    rows = tuple((flag, key or "", origin) for flag, key, origin in origins)
    return Table("Flags, and who set them", heads("~flag", "~key", "~set by"), rows)


def plan_facts(plan: Mapping[str, Any]) -> Facts:
    """What a profile becomes on this machine."""
    engine, model = plan["engine"], plan["model"]
    said = "no GGUF file there yet"
    if model["file_bytes"] is not None:
        size = format_mib(model["file_bytes"] // 1024**2)
        said = f"{model['architecture']}, {model['quant']}, {size}"
    return (
        ("profile", f"{plan['profile']} ({', '.join(plan['layers'])})"),
        ("engine", f"{engine['name']} ({engine['dialect']}), {engine['path']}"),
        ("model", f"{model['path']} ({said})"),
        *(("passed over", f"{one['engine']}: {one['reason']}") for one in plan["passed_over"]),
    )


def without_header(plan: Mapping[str, Any]) -> str:
    """What can be said of memory before a model file that can be read is there."""
    published = plan["published_vram_mib"]
    known = f"; published with this model: {format_mib(published)} in use" if published else ""
    return f"known once the GGUF file is there{known}"


def needs_facts(plan: Mapping[str, Any]) -> Facts:
    """Whether its memory suffices, and by how much on each card."""
    memory = plan["memory"]
    if memory is None:
        return (("memory", without_header(plan)),)
    return (
        ("memory", memory["verdict"]),
        *((one["name"], f"{format_mib(one['worst_mib'])} of {format_mib(one['free_mib'])} free")
          for one in memory["devices"]),
    )  # fmt: skip


# A workload: the mean request of each class, and the time that it takes

_TOKENS = (("cached_tokens", "cached prompt", "waiting"), ("new_tokens", "new prompt", "prefill"),
           ("reasoning_tokens", "reasoning", "reasoning"), ("answer_tokens", "answer", "decode"))  # fmt: skip
_TIMES = (("prefill_s", "prefill", "prefill"), ("reasoning_s", "reasoning", "reasoning"),
          ("decode_s", "decode", "decode"))  # fmt: skip


def workload_section(workload: Mapping[str, Any]) -> Section:
    """Its classes; with the speed that the live server had, what their turns take."""
    classes, rates, learned = workload["classes"], workload["rates"], workload["learned"] or {}
    means = [(one["name"], one["mean"]) for one in classes]
    charts = [Chart("tokens", "Tokens of one request", _of_classes(_TOKENS, "tokens", 0, means))]
    tables = [table_of("Mean request of each class", classes, _CLASS)]
    text = "turn times: unknown, because no log shows how fast the live server is"
    if workload["turn"] is not None:
        text = (
            f"turn times: at {rates['prompt_tok_s']:.0f} tok/s of prompt and "
            f"{rates['decode_tok_s']:.1f} tok/s of answer"
        )
        turns = [*((one["name"], one["turn"]) for one in classes), ("expected", workload["turn"])]
        charts.append(Chart("turns", "Turn time", _of_classes(_TIMES, "seconds", 1, turns)))
        tables.append(table_of("Turn time [s]", turns, _TURN))
    accepted = percent(learned.get("acceptance_ratio"))
    facts = (("drafts accepted", accepted),) if accepted else ()
    return Section("workload", workload["name"], text, tuple(charts), tuple(tables), facts)


def _of_classes(
    parts: Iterable[tuple[str, str, str]],
    unit: str,
    digits: int,
    rows: Iterable[tuple[str, Mapping[str, Any]]],
) -> Bars:
    """A bar for each class; what a workload does not have takes nothing: it is not missing."""
    groups = []
    for name, sizes in rows:
        found = tuple(Part(label, colour, float(sizes[key] or 0)) for key, label, colour in parts)
        groups.append((name, (Bar(name, found, sum(part.value or 0.0 for part in found)),)))
    return Bars(tuple(groups), unit, is_stacked=True, digits=digits)


_CLASS: Columns[Mapping[str, Any]] = {
    "~class": lambda one: one["name"],
    "share": lambda one: percent(one["share"], 0),
    "~kind": lambda one: one["kind"],
    "cached [tok]": lambda one: figure(one["mean"]["cached_tokens"], 0),
    "new [tok]": lambda one: figure(one["mean"]["new_tokens"], 0),
    "reasoning [tok]": lambda one: figure(one["mean"]["reasoning_tokens"], 0) or "in the answer",
    "answer [tok]": lambda one: figure(one["mean"]["answer_tokens"], 0),
    "at once": lambda one: str(one["concurrency"]),
}
_TURN: Columns[tuple[str, Mapping[str, Any]]] = {
    "~class": lambda one: one[0],
    "prefill": lambda one: figure(one[1]["prefill_s"]),
    "reasoning": lambda one: figure(one[1]["reasoning_s"]) or "in the answer",
    "decode": lambda one: figure(one[1]["decode_s"]),
    "turn": lambda one: figure(one[1]["total_s"]),
}


# A sweep

_MOST_ARMS = 30
_MOST_OF_A_KIND = 5
_IN_SHORT = (
    "Configurations in short: engine; kind of drafts, n-max/p-min; margin, VRAM that a start leaves free [MiB]; "
    "kv, type of the cache; ub and b, batches [tokens]; t, threads."
)


def sweep_facts(sweep: Mapping[str, Any]) -> Facts:
    """When, of what, and what became of it."""
    text = (sweep["decided"] or {}).get("text")
    then = ": ".join(one for one in (sweep["decision"], text) if one)
    return (
        ("begun", when(sweep["started_s"])),
        ("state", sweep["state"]),
        ("profile", sweep["profile"]),
        ("workload", sweep["workload"]),
        ("verdict", sweep["verdict"] or "none"),
        ("then", then or "nothing yet"),
    )


def sweep_section(number: int, page: Mapping[str, Any], evidence: Mapping[str, Any]) -> Section:
    """One sweep, by what `sweep/tuner` gathered and what it came to."""
    untried = evidence.get("best_untried")
    text = f"{counted(page['n_starts'], 'start')} and {counted(page['n_requests'], 'request')}."
    if page["arms"]:
        text += f" {_IN_SHORT}"
    if untried is not None:
        most = f" What was not tried is expected to gain at most {untried:.1%}."
        text += most if untried > 0 else " Nothing that was not tried is expected to be faster."
    tables = (*_tried(page), *_depths(page), *_left(evidence))
    if power := evidence.get("power"):
        text += " " + sentence([f"Power limits: {'; '.join((power['text'], *power['reasons']))}"])
        tables = (_power_limits(power["rows"]), *tables)
    return Section(
        name=f"sweep-{number}",
        title=f"Sweep {number}: what was tried, and why this is the result",
        text=text,
        charts=_cliff(number, page),
        tables=tuple(table for table in tables if table.rows),
    )


def _cliff(number: int, page: Mapping[str, Any]) -> tuple[Chart, ...]:
    """VRAM left by margin: nothing where it ran out. Dots alone, as each is of another configuration."""
    steps = sorted(page["margins"], key=lambda one: one["fit_mib"])
    if len({one["fit_mib"] for one in steps}) < 2:  # noqa: PLR2004 -- a curve needs two
        return ()
    lines = tuple(
        Line(label, colour, tuple(Point(one["fit_mib"], free) for one in found for free in
                                  (0 if is_out else one["free_mib"], None)))
        for label, colour, is_out in (("left", "mainline", False), ("out of memory", "bad", True))
        if (found := [one for one in steps if one["oom"] is is_out])
    )  # fmt: skip
    room = (steps[-1]["fit_mib"] - steps[0]["fit_mib"]) * 0.04
    plot = Lines(
        lines,
        unit="MiB left",
        x_title="margin (fit_mib) [MiB]",
        x_range=(steps[0]["fit_mib"] - room, steps[-1]["fit_mib"] + room),
    )
    return (Chart(f"sweep-{number}-margins", "VRAM left with the context full, by margin", plot),)


def _tried(page: Mapping[str, Any]) -> Iterable[Table]:
    """Configurations, the pairs by which they were held against what serves, and what they failed by."""
    left = len(page["arms"]) - _MOST_ARMS
    yield table_of(
        "Turn time by configuration [s]" + (f", without {left} slower ones" if left > 0 else ""),
        page["arms"][:_MOST_ARMS],
        {
            "~Configuration": lambda one: one["text"],
            "Starts": lambda one: str(one["n_processes"]),
            "Measured": lambda one: figure(one["measured_s"], 3),
            "Predicted": lambda one: figure(one["predicted_s"], 3),
            "Estimated": lambda one: figure(one["believed_s"], 3),
            JOULES: lambda one: figure(one.get("joules_per_token"), 2),
            "~Not recommended because": lambda one: one["reason"],
        },
    )
    yield Table(
        f"Paired differences from {page.get('against', 'what serves')}, 95 % interval",
        heads("~Challenger", "~Text", "Faster by", "From", "To", "Pair by pair"),
        tuple(
            (one["candidate"], name, f"{gain['estimate']:+.1%}", _bound(gain["lower"]),
             _bound(gain["upper"]), ", ".join(f"{math.expm1(ratio):+.1%}" for ratio in ratios))
            for one in page["pairs"]
            for name, gain, ratios in [
                *([("all", one["gain"], one["log_ratios"])] if one["gain"] else []),
                *((kind["kind"], kind["gain"], []) for kind in one["by_kind"]),
            ]
        ),
    )  # fmt: skip
    rows = tuple((one["arm"], one["failure"], str(one["n"])) for one in page["failures"])
    yield Table("Failures", heads("~Configuration", "~Failure", "Times"), rows)


def _power_limits(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Speed and energy at each power limit."""
    return table_of(
        "Power limits",
        rows,
        {
            "~Configuration": lambda one: one["case"],
            "Limit [W]": lambda one: f"{one['limit_w']:g}",
            "Rounds": lambda one: str(one["rounds"]),
            "Turn [s]": lambda one: figure(one["turn_s"], 2),
            "tok/s": lambda one: figure(one["tok_s"]),
            JOULES: lambda one: figure(one["joules_per_token"], 2),
        },
    )


def _depths(page: Mapping[str, Any]) -> Iterable[Table]:
    """Turn time by depth and gate of drafts, VRAM by margin, and wall time by kind of text."""
    grids: dict[tuple[str, str], dict[int, dict[float, float]]] = {}
    for one in page["arms"]:  # the fastest first
        arm = one["arm"]
        if arm["spec"] != "off" and one["believed_s"] is not None:
            grid = grids.setdefault((arm["engine"], arm["spec"]), {})
            grid.setdefault(arm["n_max"], {}).setdefault(arm["p_min"], one["believed_s"])
    for (engine, spec), grid in sorted(grids.items()):
        gates = sorted({p_min for row in grid.values() for p_min in row})
        yield Table(
            f"Turn time by n-max and p-min [s]: {engine}, {spec}",
            heads("~n-max", *(f"p-min {p_min:g}" for p_min in gates)),
            tuple(
                (str(n_max), *(figure(row[p], 3) if p in row else NOT_ASKED for p in gates))
                for n_max, row in sorted(grid.items())
            ),
        )
    steps = sorted(page["margins"], key=lambda one: one["fit_mib"])
    yield table_of("VRAM left with the context full [MiB]", steps, {
        "~Margin": lambda one: str(one["fit_mib"]),
        "Left": lambda one: "out of memory" if one["oom"] else f"{one['free_mib']:.0f}",
    })  # fmt: skip
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for one in sorted(page["classes"], key=lambda one: one["wall_s"]):
        by_kind.setdefault(one["kind"], []).append(one)
    yield Table(
        "Wall time by kind of request, the fastest of each [s]",
        heads("~Configuration", "~Text", "Wall time", "Requests"),
        tuple(
            (one["arm"], kind, figure(one["wall_s"], 3), str(one["n"]))
            for kind in sorted(by_kind)
            for one in by_kind[kind][:_MOST_OF_A_KIND]
        ),
    )


def _left(evidence: Mapping[str, Any]) -> Iterable[Table]:
    """Where the time went, and what was not tried."""
    spent = sorted(evidence.get("time_s", {}).items(), key=lambda one: -one[1])
    rows = tuple((name, f"{s:.0f}") for name, s in spent)
    yield Table("Where the time went", heads("~For", "Seconds"), rows)
    untried = tuple((one["what"], one["reason"]) for one in evidence.get("left_out", []))
    yield Table("Not tried, or given up", heads("~What", "~Why"), untried)


def _bound(value: float | None) -> str | None:
    return None if value is None else f"{value:+.1%}"
