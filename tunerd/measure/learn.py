"""`tunerd workload`: the mixes of requests that there are, and one learned from the server's own log."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunerd.app import Context
from tunerd.engine.log import (
    LEAST_REQUESTS,
    LoggedRequest,
    RequestLog,
    learn,
    rates_of,
    read_requests,
    work_of,
)
from tunerd.engine.server import Address, LlamaServer
from tunerd.engine.serving import address_now, read_live_unit
from tunerd.errors import ConfigError, HostError, TunerdError, UnknownName, UsageError
from tunerd.measure.answer import Timings, read_counters
from tunerd.measure.evidence import TurnTime
from tunerd.measure.findings import turns_at
from tunerd.measure.store import reading
from tunerd.measure.trust import of_others
from tunerd.profile import workload
from tunerd.profile.files import (
    LEARNED,
    WORKLOADS,
    load_profile,
    load_sources,
    misnamed,
    workload_files,
)
from tunerd.profile.layers import Layer, Resolved
from tunerd.result import ActionResult, Level, Message, note, warning
from tunerd.words import check_name, counted, format_duration, innermost, nearest_name, problem_of

USUAL = "chat"
NO_WORKLOAD = "not there"
_MAX_LINES = 200_000
_N_RUNS = 500  # of which tunerd's own requests are looked up
_DAY_S = 86400.0
# A log that begins this much later than was asked for is one of so many days all the same.
_DAY_SLACK_S = 3600.0
_WHOLE = 0.9  # of the counted tokens; the rest may be under way


@dataclass(frozen=True, slots=True)
class WorkloadFile:
    """A workload with the file that it stands in, and who wrote that."""

    shape: workload.WorkloadShape
    path: Path
    layer: str
    learned: Mapping[str, Any] | None = None


def list_workloads(ctx: Context) -> ActionResult:
    """Every workload, shipped, of this site, and learned."""
    found, messages = [], []
    for layer, path in workload_files(ctx).values():
        try:
            file = _read(ctx, layer, path)
        except ConfigError as error:
            messages.append(warning("bad-workload", error.message, error.cause))
            continue
        shape = file.shape
        found.append({"name": shape.name, "layer": file.layer, "path": str(file.path),
                      "description": shape.description, "classes": len(shape.classes)})  # fmt: skip
    return ActionResult("workload list", {"workloads": found}, tuple(messages))


def workload_names(ctx: Context) -> tuple[str, ...]:
    """Names of all workloads, whether or not their files are right."""
    return tuple(sorted(workload_files(ctx)))


def show_workload(ctx: Context, name: str) -> ActionResult:
    """One workload: its classes, and what a turn takes at the speed that the live server had.

    Raises:
        ConfigError: there is none of that name, or its file is wrong.
    """
    file = find_workload(ctx, name)
    rates, messages = _live_rates(ctx)
    return ActionResult("workload show", _workload_json(file, rates), messages)


def learn_workload(
    ctx: Context,
    *,
    name: str = LEARNED,
    unit: str | None = None,
    days: int | None = None,
    write: bool = True,
) -> ActionResult:
    """A workload from what the server's log says of the requests that it answered.

    Args:
        ctx: Where.
        name: Of the new workload; one that was learned before under it is replaced.
        unit: Whose log; tunerd's own unit by default.
        days: How far back to read; as much of the newest as is read at once by default.
        write: False to show only.

    Raises:
        UsageError: the name cannot be a file's, or is that of somebody else's workload.
        ConfigError: the log holds too few requests.
    """
    check_name(name, of="a workload")
    layer, path = workload_files(ctx).get(name, (LEARNED, Path()))
    if layer != LEARNED:
        raise UsageError(f"there is a workload `{name}` already: {path}", hint="--name ANOTHER")
    unit = unit or ctx.unit
    ctx.say(f"reading the log of {unit}")
    whole, reach_s, missing = _read_days(ctx, unit, days)
    theirs, n_own, messages = _theirs(ctx, whole.requests)
    log = replace(whole, requests=theirs)
    covered = f"{format_duration(log.covered_s)} of log" if log.covered_s else "its log"
    covered += "" if days is None else f" of the last {counted(days, 'day')}"
    n_work = len(work_of(log.requests))
    learned = learn(
        log.requests,
        name=name,
        description=f"learned from {unit}: {n_work} requests in {covered}",
        source=f"log of {unit}, {ctx.now_text()}; lengths only, no text",
    )
    missing = missing or _coverage(ctx, unit, whole, days)
    short = [message for message in missing if message.level is Level.WARNING]
    if learned is None:
        raise _too_few(unit, n_work, len(log.requests) - n_work, n_own, short)
    path = ctx.paths.state_dir / WORKLOADS / f"{name}.toml"
    seen = {
        **learned.to_json(),
        "covered_s": None if log.covered_s is None else round(log.covered_s),
        "lives": log.lives,
        "own": n_own,
        "asked_days": days,
        "reach_s": reach_s,
    }
    if write:
        ctx.files.make_folder(path.parent)
        ctx.files.write(path, workload.to_toml(learned.shape, seen).encode())
    file = WorkloadFile(learned.shape, path, LEARNED, seen)
    payload = {**_workload_json(file, learned.rates), "written": write}
    if n_own:
        text = f"left out: {counted(n_own, 'request')} of tunerd's own"
        messages.append(note("own-requests", text))
    return ActionResult("workload learn", payload, (*messages, *missing))


def _too_few(
    unit: str, n_work: int, n_other: int, n_own: int, short: Sequence[Message]
) -> ConfigError:
    left_out = [f"{n_other} more were too short, or of unknown length"] if n_other else []
    left_out += [f"{n_own} more were tunerd's own measurements"] if n_own else []
    return ConfigError(
        f"the log of {unit} shows {counted(n_work, 'request')} that count; at least {LEAST_REQUESTS} are needed",
        cause="; ".join([*left_out, *(message.text for message in short)]) or None,
        state="nothing was written",
        hint=next(
            (message.hint for message in short if message.hint),
            "let it serve for some days; or choose one of `tunerd workload list`",
        ),
    )


def find_workload(ctx: Context, name: str) -> WorkloadFile:
    """The workload of this name: the site's before a learned one before the shipped one.

    Raises:
        ConfigError: there is none, or its file is wrong.
    """
    files = workload_files(ctx)
    if name not in files:
        nearest = nearest_name(name, tuple(files))
        raise UnknownName(
            f"there is no workload `{name}`",
            cause=f"known: {', '.join(files)}",
            state="nothing was touched",
            hint=f"did you mean `{nearest}`?" if nearest else "`tunerd workload list`",
        )
    return _read(ctx, *files[name])


def workload_for(
    ctx: Context, name: str | None, resolved: Resolved | None
) -> tuple[workload.WorkloadShape, Message]:
    """What to measure with: as named, else the profile's own, else the one that was learned, else chat.

    What was learned of the requests that come here goes before what a shipped profile was made for.

    Raises:
        ConfigError: there is none of that name, or its file is wrong.
    """
    if name is not None:
        return find_workload(ctx, name).shape, note("workload", f"workload `{name}`, as asked for")
    own = None if resolved is None else resolved.profile.workload
    if isinstance(own, workload.WorkloadTable) and resolved is not None:
        shape = workload.shape_of(resolved.name, own)
        return shape, note("workload", f"the workload is profile `{resolved.name}`'s own")
    is_learned = LEARNED in workload_files(ctx)
    said = None if resolved is None else resolved.settings.get("workload")
    is_shipped = said is not None and said.origin.layer is Layer.SHIPPED
    if isinstance(own, str) and not (is_shipped and is_learned):
        text = f"workload `{own}`, as the profile says"
        return find_workload(ctx, own).shape, note("workload", text)
    name = LEARNED if is_learned else USUAL
    why = "since the profile names none" if own is None else f"not the shipped profile's `{own}`"
    text = f"workload `{name}`, {why}"
    return find_workload(ctx, name).shape, note("workload", text, "--workload NAME takes another")


def workload_sha256_now(ctx: Context, name: str | None, then: str | None) -> str | None:
    """The hash of the workload that a run measured, as the workload of this name is now.

    Args:
        ctx: Where.
        name: Of the workload, which may be a profile's own.
        then: Its hash when the run measured it.

    Returns:
        `then` where one of that name still is the same; `NO_WORKLOAD` where there is none of that
        name any more; None where nothing was measured with a workload, or it cannot be told.
    """
    if then is None or name is None:
        return None
    found: list[str] = []
    try:
        if name in workload_files(ctx):
            found.append(find_workload(ctx, name).shape.sha256)
        sources = load_sources(ctx)
        if name in sources.names:
            own = load_profile(ctx, name, options={}, sources=sources).profile.workload
            if isinstance(own, workload.WorkloadTable):
                found.append(workload.shape_of(name, own).sha256)
    except TunerdError:
        return then if then in found else None
    return then if then in found else next(iter(found), NO_WORKLOAD)


def _workload_json(file: WorkloadFile, rates: workload.Rates) -> dict[str, Any]:
    """As scripts read it; times are None where the server's speed is not known."""
    shape = file.shape
    *turns, mix = map(_turn_json, turns_at(shape, rates))
    rows = zip(shape.classes, shape.plain().classes, shape.shares, turns, strict=True)
    classes = [
        {
            **one.to_json(),
            "share": share,
            "reasoning_tokens": one.to_json().get("reasoning_tokens"),
            "mean": {
                "cached_tokens": plain.cached_tokens,
                "new_tokens": plain.new_tokens,
                "reasoning_tokens": None
                if (thoughts := one.reasoning_tokens) is None
                else round(thoughts.mean),
                "answer_tokens": round(one.answer_tokens.mean),
            },
            "turn": turn,
        }
        for one, plain, share, turn in rows
    ]
    return {
        "name": shape.name,
        "layer": file.layer,
        "path": str(file.path),
        "description": shape.description,
        "source": shape.source,
        "sha256": shape.sha256,
        "classes": classes,
        "rates": asdict(rates),
        "turn": mix,
        "learned": None if file.learned is None else dict(file.learned),
    }


def _turn_json(turn: TurnTime) -> dict[str, float | None] | None:
    names = ("prefill_s", "reasoning_s", "decode_s", "total_s")
    return None if turn.whole_s is None else {name: getattr(turn, name) for name in names}


def _read(ctx: Context, layer: str, path: Path) -> WorkloadFile:
    if (problem := misnamed(path)) is not None:
        raise _wrong(path, str(problem))
    try:
        data = tomllib.loads((ctx.files.read(path) or b"").decode("utf-8-sig"))
        table = workload.WorkloadTable.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        places = (problem_of(workload.WorkloadTable, path.name, dict(one)) for one in found)
        raise _wrong(path, "\n".join(map(str, innermost(places)))) from error
    except (ValueError, RecursionError) as error:
        raise _wrong(path, str(error)) from error
    except HostError as error:  # a folder of that name, or a file that may not be read
        raise _wrong(path, error.cause or error.message) from error
    return WorkloadFile(workload.shape_of(path.stem, table), path, layer, table.learned)


def _wrong(path: Path, cause: str) -> ConfigError:
    return ConfigError(f"workload file `{path}` is wrong", cause=cause, state="nothing was touched")


def _read_log(ctx: Context, unit: str) -> RequestLog:
    return read_requests(ctx.services.log_since(unit, 0.0, max_lines=_MAX_LINES).lines)


def _read_days(
    ctx: Context, unit: str, days: int | None
) -> tuple[RequestLog, int | None, tuple[Message, ...]]:
    """The requests of so many days, how far back the log was read [s], and what is missing of them.

    How far is None where that is not known, or was not asked for.
    """
    if days is None:
        return _read_log(ctx, unit), None, ()
    now_s = ctx.clock.now_s()
    span = ctx.services.log_since(unit, now_s - days * _DAY_S, max_lines=_MAX_LINES)
    log, hint = read_requests(span.lines), None
    if span.begins_s is None:
        text = f"{counted(days, 'day')} were asked for, but how far the log of {unit} reaches is not known"
        return log, None, (warning("fewer-days", text),)
    reach_s = max(0.0, now_s - span.begins_s)
    if reach_s >= days * _DAY_S - _DAY_SLACK_S:
        return log, round(reach_s), ()
    why = "more lines than are read at once"
    if not span.is_cut:
        why = "what is older was never written, or is gone"
        hint = "journald keeps more with a larger SystemMaxUse="
    text = (
        f"{counted(days, 'day')} were asked for, but only the last {format_duration(reach_s)} of the log of {unit} "
        f"could be read: {why}"
    )
    return log, round(reach_s), (warning("fewer-days", text, hint),)


def own_requests(ctx: Context, since_s: float | None = None) -> tuple[list[Timings], int]:
    """Requests of the newest measurements, whatever server they were put to, and how many more have no counts to find them by.

    Args:
        ctx: Where.
        since_s: When the log begins in which they are looked for: what was over a day before is not read.

    Raises:
        HostError: the store is damaged or cannot be read.
    """
    with reading(ctx) as store:
        if store is None:
            return [], 0
        begin_s = -math.inf if since_s is None else since_s - _DAY_S
        runs = [
            run
            for run in store.runs(limit=_N_RUNS, with_arms=False)
            if run.ended_s is None or run.ended_s >= begin_s
        ]
        told = [one.timings for run in runs for one in store.samples(run.number)]
        n_damaged = sum(one.n_rows for one in store.damage)
    known = (one for one in told if one is not None)
    found = [one for one in known if None not in (one.prompt_ms, one.predicted_ms)]
    return found, len(told) - len(found) + n_damaged


def _theirs(
    ctx: Context, logged: Sequence[LoggedRequest]
) -> tuple[tuple[LoggedRequest, ...], int, list[Message]]:
    """Requests of others, how many were tunerd's own, and a warning where some cannot be told apart."""
    try:
        own, n_unknown = own_requests(ctx)
    except TunerdError as problem:
        text = f"tunerd's own requests cannot be told apart from others': {problem.message}"
        return tuple(logged), 0, [warning("own-requests-unknown", text, problem.hint)]
    theirs, messages = of_others(logged, own), list[Message]()
    if n_unknown:
        text = (
            f"{counted(n_unknown, 'request')} of tunerd's own cannot be recognised by token counts; those that this "
            "server got count as traffic"
        )
        messages.append(warning("own-requests-unknown", text))
    return theirs, len(logged) - len(theirs), messages


def _live_rates(ctx: Context) -> tuple[workload.Rates, tuple[Message, ...]]:
    """How fast the live server was with its people's requests, from its own log.

    Unknown where it has answered none; tunerd's own requests, of which some have prompts that nobody
    would write, do not count.
    """
    try:
        logged = _read_log(ctx, ctx.unit).requests
    except TunerdError:  # a picture without seconds is better than none
        logged = ()
    if not logged:
        return workload.Rates(None, None), ()
    theirs, n_own, messages = _theirs(ctx, logged)
    if n_own:
        text = f"left out of the server's speed: {counted(n_own, 'request')} of tunerd's own"
        messages.append(note("own-requests", text))
    return rates_of(theirs), tuple(messages)


def served_requests(ctx: Context, since_s: float) -> tuple[LoggedRequest, ...]:
    """What production answered to others since then, by its log, oldest first; nothing where that cannot be read."""
    try:
        span = ctx.services.log_since(ctx.unit, since_s, max_lines=_MAX_LINES)
        own, _ = own_requests(ctx, span.begins_s)
    except TunerdError:  # nothing is decided by it
        return ()
    return of_others(read_requests(span.lines).requests, own)


def _coverage(ctx: Context, unit: str, log: RequestLog, days: int | None) -> tuple[Message, ...]:
    """What of the running server's traffic the log holds, by the server's own counters."""
    state = ctx.services.state(unit)
    since_s = -math.inf if days is None else ctx.clock.now_s() - days * _DAY_S
    if state.active_since_s is not None and state.active_since_s < since_s - _DAY_SLACK_S:
        return ()  # it counts from its start, and days before were not asked for
    address = address_now(ctx, read_live_unit(ctx, unit), state) if state.is_active else None
    n_generated = None if address is None else _counted(ctx, address)
    if n_generated is None:
        text = f"{unit} has no counters, so tunerd cannot tell whether its log is complete"
        return (note("no-counters", text, "set serving.metrics = true"),)
    logged = sum(one.predicted_n for one in log.requests)
    if logged < _WHOLE * n_generated:
        text = (
            f"{unit} has generated {n_generated} tokens since it started, but its log shows only "
            f"{logged} of them: the rest is gone, was never logged, or is more than is read at once"
        )
        hint = "journald keeps more with a larger SystemMaxUse= and RateLimitBurst=; `tunerd doctor` says whether anything gets there at all"
        return (warning("log-is-short", text, hint),)
    return ()


def _counted(ctx: Context, address: Address) -> int | None:
    """Tokens that the server says it has generated since it started; None where it does not count."""
    server = LlamaServer(address, ctx.clock)
    props = server.props(timeout_s=2.0)
    if props is not None and props.is_asleep:
        return None  # some builds would load the model to answer
    text = server.metrics_text(timeout_s=2.0)
    return None if text is None else read_counters(text).n_predicted
