"""`tunerd status`, `verify` and `history`: what serves, whether that is what was deployed, and what served before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from tunerd.app import Context
from tunerd.engine import serving
from tunerd.engine.health import HttpState
from tunerd.engine.server import LlamaServer
from tunerd.errors import HostError, NoSupervisor, ServiceError
from tunerd.machine.files import demand_writable, is_locked
from tunerd.paths import paths_for
from tunerd.production.journal import cut_short, others_on_record, read_record, unrecorded_since
from tunerd.production.measurement import measuring, read_measurement
from tunerd.records import plain
from tunerd.result import ActionResult, Message, error, note, rows_of, warning
from tunerd.units.generations import Generation, HistoryEntry, Outcome, changed_model_files
from tunerd.units.manager import LeaseRecord, UnitState, lacks_manager
from tunerd.units.text import is_ours, unified_diff
from tunerd.words import Mode, counted, sha256

DEFAULT_LIMIT = 20
_DRIFT = 6
_SHOWN = 3
_BUSY = warning("busy", "a change is under way right now")
_OF_CARD = ("index", "name", "total_mib", "used_mib", "free_mib")
_OF_GENERATION = ("number", "created_s", "reason", "profile", "engine")


def history(ctx: Context, *, limit: int | None = DEFAULT_LIMIT) -> ActionResult:
    """Generations, newest first; `limit` None for all of them."""
    rows: list[dict[str, Any]] = []
    messages = []
    numbers = ctx.generations.numbers()
    total = len(numbers)
    for number in numbers:
        if len(rows) == limit:
            break
        try:
            entry = ctx.generations.read(number)
        except HostError:
            text = f"the record of generation {number} cannot be read"
            messages.append(warning("damaged", text, f"`tunerd history show {number}` says why"))
            entry = None
        if entry is not None:
            rows.append(_summary_json(entry))
        else:  # damaged, or given up when the disk was full: no older one that --all would show
            total -= 1
    return ActionResult("history", {"generations": rows, "total": total}, tuple(messages))


def show(ctx: Context, number: int) -> ActionResult:
    """Everything that is kept of one generation.

    Raises:
        UsageError: there is no such generation.
    """
    entry = ctx.generations.demand(number)
    payload = {
        "generation": asdict(entry.generation),
        "ending": {**asdict(entry.ending), "outcome": str(entry.ending.outcome)},
        "unit": _unit_text(ctx, number),
    }
    return ActionResult("history show", payload)


def diff(ctx: Context, one: int, other: int) -> ActionResult:
    """How the units of two generations differ.

    Raises:
        UsageError: one of them does not exist.
    """
    for number in (one, other):
        ctx.generations.demand(number)
    texts = _unit_text(ctx, one), _unit_text(ctx, other)
    names = (f"generation {one}", f"generation {other}")
    text = unified_diff(*texts, ctx.unit, names=names)
    return ActionResult("history diff", {"from": one, "to": other, "diff": text})


def _unit_text(ctx: Context, number: int) -> str | None:
    text = ctx.generations.unit_text(number)
    return None if text is None else text.decode("utf-8", "replace")


def _summary_json(entry: HistoryEntry) -> dict[str, Any]:
    """One line of history as scripts read it."""
    generation, ending = entry.generation, entry.ending
    return {
        **{name: getattr(generation, name) for name in _OF_GENERATION},
        "outcome": str(ending.outcome),
        "cause": ending.cause,
        "detail": ending.detail,
        "without_service_s": ending.without_service_s,
        "replaced": generation.replaced_backup
        or ("no unit file" if generation.replaced_absent else None),
        "from_generation": generation.from_generation,
    }


# How often the shared store hears of this box; also how soon it has what it lacks.
HAND_IN_EVERY_S = 600.0


@dataclass(frozen=True, slots=True)
class HandedIn:
    """When evidence was last handed in to the shared store of this address, and why it was not since."""

    at_s: float | None = None
    problem: str | None = None
    url: str | None = None


def interrupted(ctx: Context) -> Message | None:
    """A swap that was cut short; None while anything is changed, for one that runs looks the same."""
    if is_locked(ctx.paths.lock):  # one that ends meanwhile would be seen in a part
        return None
    record, others = read_record(ctx), others_on_record(ctx)
    if is_locked(ctx.paths.lock) or not (record or others):
        return None
    text = cut_short(ctx, record) if record else f"a swap of {', '.join(others)} was cut short"
    return warning("interrupted", text, "tunerd recover")


def status(ctx: Context) -> ActionResult:
    """Reads only, and takes no lock: what it shows may be a moment old."""
    was_under_way = is_locked(ctx.paths.lock)  # one that ends meanwhile is seen in a part only
    state = ctx.services.state(ctx.unit)
    live = serving.read_live_unit(ctx)
    entry = ctx.generations.serving(ctx.unit)
    last = next(ctx.generations.entries(ctx.unit), None)
    address = serving.address_now(ctx, live, state)
    http = props = None
    alias = live.serving.alias
    if state.is_active and address is not None:
        server = LlamaServer(address, ctx.clock)
        http = server.health(timeout_s=1.0)
        props = server.props(timeout_s=1.0) if http is HttpState.READY else None
        if alias is None and props is not None and not (props.is_asleep or props.is_router):
            alias = server.alias(timeout_s=1.0)
    drifts = find_drift(ctx, entry, deep=False) if entry is not None else []
    under_way = was_under_way or is_locked(ctx.paths.lock)
    measurement = read_measurement(ctx)
    gpus = ctx.gpu.read()
    problem = gpus.gpu_problem
    payload: dict[str, Any] = {
        "unit": ctx.unit,
        "mode": str(ctx.mode),
        "exists": state.exists,
        "active": state.active_state,
        "sub_state": state.sub_state,
        "since_s": state.active_since_s,
        "pid": state.main_pid,
        "restarts": state.n_restarts,
        "enabled": state.is_enabled,
        "lingers": ctx.lingers,
        "health": None if http is None else str(http),
        "healthy": None if http is None else http is HttpState.READY,
        "asleep": None if props is None else props.is_asleep,
        "router": None if props is None else props.is_router,
        "address": None if address is None else address.url,
        "alias": alias,
        "model": live.serving.model,
        "program": live.program,
        "generation": entry.generation.number if entry is not None else None,
        "outcome": str(entry.ending.outcome) if entry is not None else None,
        "profile": entry.generation.profile if entry is not None else None,
        "engine": entry.generation.engine if entry is not None else None,
        "last_swap": _summary_json(last) if last is not None else None,
        "change_under_way": under_way,
        "measurement": None if measurement is None else plain(measurement),
        "vram": None
        if gpus.gpus is None
        else [{name: getattr(gpu, name) for name in _OF_CARD} for gpu in gpus.gpus],
        "gpu_problem": problem,
        "drift": rows_of(drifts),
    }
    messages = _messages(
        ctx, state, measurement, problem, is_under_way=under_way, was_deployed=last is not None
    )
    way = live.serving.asked_otherwise
    if state.is_active and way is not None:
        text = f"it answers {way}, where tunerd cannot reach it: only that it runs is seen, and nothing is measured"
        hint = "let it listen on 127.0.0.1, and a proxy (nginx, caddy, socat) offer it otherwise"
        messages.append(warning("not-asked", text, hint))
    return ActionResult("status", payload, tuple(messages))


def _messages(
    ctx: Context,
    state: UnitState,
    measurement: LeaseRecord | None,
    gpu_problem: str | None,
    *,
    is_under_way: bool,
    was_deployed: bool,
) -> list[Message]:
    messages: list[Message] = []
    if is_under_way:
        messages.append(_BUSY)
    elif found := interrupted(ctx):
        messages.append(found)
    elif state.has_failed and not state.is_waiting:
        text = f"the unit has failed ({state.result})"
        hint = "tunerd rollback" if was_deployed else f"{ctx.log_of(ctx.unit)}; `tunerd doctor`"
        messages.append(warning("failed", text, hint))
    handed = ctx.settings.store.url and ctx.files.recall(HandedIn, ctx.paths.handed_in)
    if handed and handed.problem is not None:
        text = f"evidence is not handed in to the shared store, and is kept here: {handed.problem}"
        messages.append(warning("not-handed-in", text, "tunerd fleet hand-in"))
    if ctx.lacks_manager:
        messages.append(lacks_manager())
    messages += filter(None, (unsupervised(ctx), _not_let_in(ctx), not_recorded(ctx)))
    if measurement is not None:
        messages.append(measuring(ctx, measurement))
    if gpu_problem is not None:
        messages.append(warning("gpu", gpu_problem, "`tunerd doctor`"))
    return messages


def not_recorded(ctx: Context) -> Message | None:
    """That STATE takes no changes, as after an error of its disk: no swap begins, and the daemon keeps and sends no word."""
    try:
        if ctx.paths.state_dir.exists():
            demand_writable(ctx.paths.lock)
    except HostError as problem:
        text = f"nothing can be deployed or recorded: {problem.message} ({problem.cause})"
        return warning("read-only", text, problem.hint)
    return None


def _not_let_in(ctx: Context) -> Message | None:
    """That the system has a server of its own, of which this account is not told."""
    path = paths_for(Mode.SYSTEM, ctx.environment).socket
    if ctx.mode is Mode.SYSTEM or not path.exists() or os.access(path, os.R_OK | os.W_OK):
        return None
    text = "this is about your own server; the system's is shown to root and to members of group tunerd"
    return note(
        "not-a-member", text, "sudo usermod -aG tunerd $USER; it counts from the next login on"
    )


def unsupervised(ctx: Context) -> Message | None:
    """That local mode's supervisor does not run, with what served; None elsewhere, and where there is no unit.

    Raises:
        ServiceError: it does not answer.
    """
    state = ctx.services.state(ctx.unit) if ctx.mode is Mode.LOCAL else None
    if state is None or not state.exists:
        return None
    try:
        ctx.services.check_ready()
    except NoSupervisor as problem:
        generation = ctx.deployed()
        served = ctx.unit if generation is None else f"generation {generation.number}"
        profile = None if generation is None else generation.profile
        if state.is_active:
            text = f"{problem.message}: {served} still serves, but nothing starts it again when it ends"
            return warning("no-supervisor", text, "`tunerd supervise` watches over it again")
        served += "" if generation is None else ", which served,"
        text = f"{problem.message}, and {served} is down"
        hint = "`tunerd supervise` starts both"
        if not state.is_enabled:
            hint = f"`tunerd apply {profile or 'PROFILE'}` starts it"
        return error("no-supervisor", text, hint)
    return None


def verify(ctx: Context) -> ActionResult:
    """Exit code 0 as deployed, 6 drift, 1 could not tell."""
    entry = ctx.generations.serving(ctx.unit)
    if entry is None:
        text = f"tunerd has deployed nothing as {ctx.unit} yet"
        if is_ours((serving.standing_text(ctx) or b"").decode("utf-8", "replace")):
            text = f"there is no record of {ctx.unit}, though tunerd wrote it: its STATE was lost, or is another one"
        return _result(None, [], (warning("nothing-deployed", text, "tunerd apply PROFILE"),), 1)
    was_under_way = is_locked(ctx.paths.lock)
    try:
        drifts = find_drift(ctx, entry, deep=True)
    except ServiceError as problem:
        message = warning("cannot-tell", f"{problem.message}: {problem.cause}", problem.hint)
        return _result(entry.generation, [], (message,), 1)
    if drifts and (was_under_way or is_locked(ctx.paths.lock)):  # of something half done
        return _result(entry.generation, [], (_BUSY,), 1)
    record = read_measurement(ctx)
    away = None if record is None else measuring(ctx, record)
    told = (*drifts, *filter(None, (unsupervised(ctx), away)))
    return _result(entry.generation, drifts, told, _DRIFT if drifts else 0)


def find_drift(ctx: Context, entry: HistoryEntry, *, deep: bool) -> list[Message]:
    """Every difference between what a generation deployed and what is there.

    Args:
        ctx: Where.
        entry: The generation that should serve.
        deep: Whether to read the engine's files again, which takes as long as they are large.
    """
    generation = entry.generation
    drifts = [*_unit_drift(ctx, generation), *_state_drift(ctx, entry)]
    if generation.unit_sha256 is not None:
        drifts += _model_drift(generation)
        if deep:
            drifts += [*_engine_drift(generation), *_words_drift(ctx)]
    return drifts


def _engine_drift(generation: Generation) -> Iterator[Message]:
    from tunerd.engine.probe import changed_files

    changes = changed_files(generation.engine_components, generation.argv)
    if not changes:
        return
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    text = f"the engine changed: {'; '.join(changes[:_SHOWN])}{more}"
    hint = "`tunerd plan` shows whether the profile still works with it"
    yield warning("engine-changed", text, hint)


def _words_drift(ctx: Context) -> Iterator[Message]:
    live, pid = serving.read_live_unit(ctx), ctx.services.state(ctx.unit).main_pid
    if serving.hides_words(live) and serving.runs_with(live.argv, pid) is False:
        text = f"`{live.program}` is a script and starts its server with other arguments than the unit's"
        hint = f'make the script pass on what it is given, "$@"; `{ctx.systemctl} status {ctx.unit}` shows what it passes'
        yield warning("other-arguments", text, hint)


def _unit_drift(ctx: Context, generation: Generation) -> Iterator[Message]:
    standing, record = serving.standing_text(ctx), read_record(ctx)
    ours = {generation.unit_sha256}
    if record is not None:
        ours |= {record.old_sha256, record.new_sha256}
    stands = sha256(standing)
    made = ctx.generations.entries(ctx.unit)
    of_text = (one for one in made if one.generation.unit_sha256 == stands)
    known = None if stands in ours else next(of_text, None)
    if known is not None and known.ending.outcome is Outcome.RUNNING:
        pass  # that it serves could not be written, on a full disk; recovery settles it
    elif known is not None and standing is not None:
        hint = f"`tunerd rollback --to {generation.number}` returns to the newest"
        text = f"somebody put the unit of generation {known.generation.number} back by hand"
        yield warning("unit-edited", text, hint)
    elif stands not in ours:
        wanted = _unit_text(ctx, generation.number)
        hint = f"`tunerd apply` or `tunerd rollback --to {generation.number}` puts back what was deployed"
        if standing is None:
            text = f"the unit file is gone: `{ctx.unit_path}`"
        elif not standing:
            text = f"the unit is masked, or its file is empty: `{ctx.unit_path}`"
        elif wanted is None:
            text = f"there is a unit file again, which generation {generation.number} had removed"
        else:
            from tunerd.production.checks import masked

            difference = unified_diff(wanted, standing.decode(errors="replace"), ctx.unit)
            changed = [line for line in difference.splitlines()[2:] if line[:1] in {"+", "-"}]
            newer = unrecorded_since(ctx, generation.created_s)
            who = "the unit was edited by hand"
            if newer is not None:
                who = f"the unit is newer than the records, which do not know `{newer}`: STATE may be an older copy"
                hint = f"`tunerd apply PROFILE` begins anew with what stands; `tunerd rollback --to {generation.number}` goes back to the older"
            text = f"{who}: {masked('; '.join(changed[:6]))}"
        yield warning("unit-edited", text, hint)
    yield from filter(None, (interrupted(ctx),))


def _state_drift(ctx: Context, entry: HistoryEntry) -> Iterator[Message]:
    generation, ending = entry.generation, entry.ending
    state = ctx.services.state(ctx.unit)
    live = serving.read_live_unit(ctx)
    if generation.unit_sha256 is None:
        return
    if state.fragment_path is not None and state.fragment_path != ctx.unit_path:
        yield warning("other-file", f"the service manager uses another unit file: `{state.fragment_path}`",
                      "remove it, or set service.unit")  # fmt: skip
    if ending.drop_ins is None:  # how it ended was settled by recovery
        ending = replace(ending, drop_ins=tuple(generation.host.get("drop_ins", ())))
    for text in serving.other_drop_ins(ctx, map(str, live.drop_ins), ending):
        yield warning("drop-in", text, f"`{ctx.systemctl} cat {ctx.unit}` shows it")
    if ctx.mode is Mode.LOCAL:
        for path in sorted(ctx.unit_path.with_name(f"{ctx.unit}.d").glob("*.conf")):
            yield warning("drop-in", f"a drop-in does nothing without systemd: `{path}`",
                          "put it into the profile, then `tunerd apply`")  # fmt: skip
    if state.needs_reload:
        yield warning("not-reloaded", "the unit changed on disk since it was loaded",
                      f"{ctx.systemctl} daemon-reload")  # fmt: skip
    n_again = state.n_restarts if state.active_state == "activating" else None
    if state.is_waiting or n_again:
        text = f"the server ended ({state.result}), and its manager will start it again"
        if not state.is_waiting:  # whose start made its result a success again
            text = f"the server ended, and its manager starts it again, {counted(n_again or 0, 'time')} so far"
        hint = "`tunerd doctor` may say why; `tunerd rollback` if it keeps ending"
        yield warning("restarts", text, hint)
    elif not state.is_active and read_measurement(ctx) is None:
        yield warning("not-running", f"the unit is {state.active_state} ({state.result})",
                      f"{_by_hand(ctx, 'start', generation)}, or `tunerd rollback`")  # fmt: skip
    if state.is_enabled is False and generation.enable:
        yield warning("not-enabled", "the unit does not start at boot",
                      _by_hand(ctx, "enable", generation))  # fmt: skip


def _by_hand(ctx: Context, verb: str, generation: Generation) -> str:
    """What is typed to have the manager do something with the unit."""
    if ctx.mode is Mode.LOCAL:
        if verb == "start" and ctx.services.state(ctx.unit).is_enabled and unsupervised(ctx):
            return "`tunerd supervise`"
        return f"`tunerd apply {generation.profile or 'PROFILE'}`"
    return f"{ctx.systemctl} {verb} {ctx.unit}"


def _model_drift(generation: Generation) -> Iterator[Message]:
    for path, is_gone in changed_model_files(generation):
        if is_gone:
            text = f"a file of the model is gone: `{path}`"
            yield warning("model-gone", text, "put it back, or `tunerd rollback`")
        else:
            text = f"a file of the model changed: `{path}`"
            yield warning("model-changed", text, "if you meant that, apply the profile again")


def _result(
    generation: Generation | None, drifts: list[Message], messages: tuple[Message, ...], code: int
) -> ActionResult:
    payload = {
        "generation": generation.number if generation is not None else None,
        "profile": generation.profile if generation is not None else None,
        "as_deployed": None if code == 1 else code == 0,
        "drift": rows_of(drifts),
    }
    return ActionResult("verify", payload, messages, code)
