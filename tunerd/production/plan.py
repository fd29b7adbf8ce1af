"""What would be deployed: engine, command line, unit, memory, and all that speaks against it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tunerd.app import Context
from tunerd.engine import builds, choice
from tunerd.engine.capabilities import Effect, Engine, OffloadDevice, laws_of
from tunerd.engine.conditions import FingerprintReader
from tunerd.engine.flags import (
    KINDS_WITH_PROBABILITY,
    USUAL_MARGIN_MIB,
    CommandLine,
    fits_context,
    margin_in_force,
    named_files,
    normal_spelling,
    owner_of,
    words_behind,
)
from tunerd.engine.health import Expectation
from tunerd.engine.probe import writable_by_others
from tunerd.engine.server import Address
from tunerd.engine.serving import (
    demand_replaceable,
    environment_with,
    memory_limits,
    read_key,
    read_live_unit,
    serving_now,
    specifiers_of,
    standing_text,
    unit_with,
)
from tunerd.errors import EngineError, ModelFileError, ServiceError, TunerdError
from tunerd.machine.facts import Gpu, Host
from tunerd.machine.files import at_home, is_gone, keep_newest, real_path, stamp_of
from tunerd.machine.host import has_memory_groups, mounts_on, process_facts, read_host
from tunerd.machine.net import is_listened_on, n_connections, own_host, who_listens, why_no_listener
from tunerd.machine.process import SERVICE_ACCOUNT, account, may_read, process_name, unit_of
from tunerd.model import verdict
from tunerd.model.facts import ModelFacts
from tunerd.model.memory import (
    LEAST_CONTEXT,
    LOCKING,
    Device,
    MemorySettings,
    context_that_fits,
    estimate,
)
from tunerd.production import checks
from tunerd.production.gate import PORT_PATIENCE_S, edited_under, replaced_under
from tunerd.production.measurement import measuring_pids
from tunerd.production.own import shipped_unit
from tunerd.profile.files import read_declined, read_tuned
from tunerd.profile.layers import Resolved
from tunerd.profile.schema import Speculation
from tunerd.result import ActionResult, Level, Message, error, note, rows_of, warning
from tunerd.units.live import UNIX_SOCKET, LiveUnit, Serving
from tunerd.units.manager import UnitState
from tunerd.units.text import UnitSpec, environment_of, parse_unit, render_unit, unified_diff
from tunerd.words import Family, MiB, Mode, all_known, sha256

UNASKED = "argument-check"
"""The code of an engine that could not be asked for its opinion."""
NO_WAY_BACK = "no-way-back"
"""The code of what serves, and could not be started again."""
OTHER_WAY_BACK = "way-back-replaced"
"""The code of what serves, and would be started again from other files."""


def _check_arguments(ctx: Context, engine: Engine, command: CommandLine) -> list[Message]:
    """The engine's own opinion of the command line: a dry run whose model file does not exist."""
    try:
        said = builds.refusal(ctx, engine, builds.dry_arguments(command.words))
    except EngineError as problem:
        return [error(UNASKED, problem.message, problem.hint)]
    if said is None:
        return []
    return [
        error(
            "argument-refused",
            f"{engine.name} refuses the command line: {said}",
            "`--explain` shows who set each flag",
        )
    ]


def check_port(ctx: Context, after: Serving, state: UnitState) -> list[Message]:
    """Whether the server can have its address: one of this machine, on which nobody else listens."""
    hosts = [] if after.host is None else [host.strip() for host in after.host.split(",")]
    problems = {host: why_no_listener(host) for host in hosts if not host.endswith(UNIX_SOCKET)}
    lost = [f"`{host}` ({problem})" for host, problem in problems.items() if problem is not None]
    if lost:
        text = f"no server can listen on {', '.join(lost)}: not an address of this machine"
        return [
            error("no-such-host", text, "set serving.host; `ip -brief address` shows what it has")
        ]
    if after.port is None:
        return []
    port, where = after.port, next(iter(problems), "") or "127.0.0.1"
    # Who listens may be the server itself, started since its unit was read.
    is_taken = _check_listener(ctx, port, where, state)
    return is_taken and _check_listener(ctx, port, where, ctx.services.state(ctx.unit))


def _check_listener(ctx: Context, port: int, where: str, state: UnitState) -> list[Message]:
    own = state.main_pid
    listener = who_listens(port, where, own)
    if listener is None and is_listened_on(port, where):
        if state.is_active and own is not None and _is_its_own(own, port):
            return []
        return [_taken("a process that cannot be seen from here", port)]
    if listener in {None, own} or listener in measuring_pids(ctx):
        return []
    who = f"{process_name(listener) or 'a process'} (process {listener})"
    unit = None if listener is None else unit_of(listener)
    with contextlib.suppress(TunerdError):
        if unit is not None and read_live_unit(ctx, unit).is_known:
            way = f"`tunerd settings set service.unit {unit}` deploys in its place; or "
            return [_taken(f"{who} of {unit}", port, way)]
    return [_taken(who, port)]


def _is_its_own(pid: int, port: int) -> bool:
    """By its account: a container may keep even root from looking into other accounts' processes."""
    with contextlib.suppress(LookupError):
        return own_host(pid, port) is not None
    return False


def _taken(who: str, port: int, way: str = "") -> Message:
    text = f"{who} already listens on port {port}"
    other = "tunerd plan PROFILE --set serving.port=PORT"
    return error("port-taken", text, f"{way}end it, or use another port: {other}")


def _check_handover(
    ctx: Context, live: LiveUnit, family: Family | None, before: Serving, after: Serving
) -> list[Message]:
    """Whether what serves now leaves its port to this family only after a while; None is for nobody.

    ik closes streams from its side, so the kernel keeps the port for a minute after the last one
    (TCP_TIMEWAIT_LEN of Linux), and ik's sockets do not share it with those of other families. These
    close connections first now and then: while they load, and when a client has been idle.
    """
    if after.port is None or before.port != after.port or family is None:
        return []
    if (_family_of(ctx, live) is Family.IK) is (family is Family.IK):
        return []
    if family is Family.IK and not n_connections(after.port, after.host or "127.0.0.1"):
        return []
    return [
        warning(
            "port-kept",
            f"{ctx.unit} may be down for a minute longer than it takes to load: closed connections keep "
            f"port {after.port} for a minute, and ik_llama.cpp cannot share it with other builds",
            f"root on Linux 6.0 or newer has them forgotten; else tunerd retries the start for {PORT_PATIENCE_S:.0f} s, "
            "and a minute without requests beforehand, or another serving.port, avoids the wait",
        )
    ]


def check_key(ctx: Context, path: str | None) -> Iterator[Message]:
    """Whether the key file is there, for its credential would be missed after the old server was stopped, and whose it is."""
    if path is None:
        return
    if is_gone(Path(path)):
        yield error("no-key-file", f"serving.api_key_file does not exist: `{path}`",
                    "write the key into it, readable by root alone")  # fmt: skip
    elif ctx.mode is not Mode.SYSTEM or not os.access(path, os.F_OK, effective_ids=True):
        return  # as a member may not look into a folder of root's
    elif (who := writable_by_others(Path(path))) is not None:
        yield warning("key-file-open", f"serving.api_key_file: {who}; root reads it for the server, to which a link there would "
                      "show any file of this machine", "put the key where only root may write, such as /etc/tunerd")  # fmt: skip


def _check_return(ctx: Context, live: LiveUnit, state: UnitState) -> Iterator[Message]:
    """Whether what serves could be started again, should the new server fail: its files may be others by now."""
    if not state.is_active:
        return
    if live.serving.asked_otherwise is not None:
        yield not_asked("what serves now", live.serving)
    why = builds.why_no_start(ctx, live)
    if why is not None:
        yield warning(NO_WAY_BACK, f"if the new server fails, what serves now cannot be started again: {why}",
                      "put that right first if you can; `tunerd engines keep` keeps copies of builds")  # fmt: skip
        return
    edited = edited_under(ctx, state)
    for one in (*replaced_under(ctx, state).values(), *([edited] if edited else ())):
        yield warning(OTHER_WAY_BACK, f"if the new server fails, what serves now is started from what is there now: {one.text}",
                      "deploy something that is sure to start; docs/engines.md says how to upgrade from a kept copy")  # fmt: skip


def not_asked(what: str, serving: Serving) -> Message:
    """That nobody will be able to tell whether a server of this address answers."""
    return warning("not-asked", f"{what} answers {serving.asked_otherwise}, where tunerd cannot reach it: after a "
                   "restart tunerd can see only that it runs", "check yourself that it answers")  # fmt: skip


def check_boot(ctx: Context, state: UnitState, *, enable: bool) -> Iterator[Message]:
    """Whether the unit starts at boot afterwards, where it did not before or the other way round."""
    if state.exists and state.is_enabled is not None and state.is_enabled is not enable:
        verb, other = ("enabled", "disable") if enable else ("disabled", "enable")
        way = (
            None if ctx.mode is Mode.LOCAL else f"`{ctx.systemctl} {other} {ctx.unit}` undoes that"
        )
        yield note(f"unit-{verb}", f"{ctx.unit} will be {verb}; it is not now", way)


def check_way_back(ctx: Context, live: LiveUnit, old: LiveUnit) -> list[Message]:
    """What stands in the way of an older unit's port; told, since going back is for trouble."""
    state = ctx.services.state(ctx.unit)
    taken = [warning(one.code, one.text, one.hint) for one in check_port(ctx, old.serving, state)]
    taken += _check_return(ctx, live, state)
    if old.serving.asked_otherwise is not None:
        taken.append(not_asked("the older server", old.serving))
    if old.program == live.program:
        return taken
    family = _family_of(ctx, old) if state.is_active else None
    return [*taken, *_check_handover(ctx, live, family, live.serving, old.serving)]


def _family(engine: Engine) -> Family | None:
    return engine.capabilities.family if engine.capabilities is not None else None


def _family_of(ctx: Context, live: LiveUnit) -> Family | None:
    """Whose code the live unit runs; None where it cannot be probed."""
    if live.program is None:
        return None
    program = real_path(Path(live.program))
    found = next(
        (one for one in builds.find_programs(ctx) if real_path(one.program) == program), None
    )
    return None if found is None else _family(builds.engine_of(ctx, found))


def _tuned_layer(
    ctx: Context, resolved: Resolved, engine: Engine, facts: ModelFacts, host: Host
) -> Iterator[Message]:
    """Whether the tuned layer took part, and whether what it rests on is still here."""
    tuned = [s.key for s in resolved.settings.values() if s.origin.layer == "tuned"]
    declined = read_declined(ctx, resolved.name)
    if not tuned and declined is not None:
        values = ", ".join(f"{key} = {value}" for key, value in sorted(declined.values.items()))
        yield note("tuned-declined", f"what sweep {declined.sweep} found ({values}) is left "
                   "out: it was rolled back by hand", f"`tunerd promote {declined.sweep}`")  # fmt: skip
    if not tuned:
        return
    yield note(
        "tuned", f"the tuned layer sets {', '.join(sorted(tuned))}", "`--untuned` leaves it out"
    )
    record = read_tuned(ctx, resolved.name)
    if record is None:
        return
    pairs = (
        ("engine", record.engine, engine.name),
        ("engine's files", record.engine_sha256, engine.identity and engine.identity.sha256),
        ("model", record.model_sha256, facts.identity.sha256),
        ("driver", record.driver_version, host.driver_version),
        ("GPU", record.gpu_names or None, tuple(gpu.name for gpu in host.gpus or ()) or None),
    )
    changed = [what for what, then, now in pairs if then != now and None not in {then, now}]
    if changed:
        yield warning("tuned-stale", f"the tuned layer was found with a different {', '.join(changed)}: "
                      "what it sets may no longer be best", "`tunerd sweep run`, or `--untuned`")  # fmt: skip


_LOW_PORTS = 1024  # below it the kernel wants CAP_NET_BIND_SERVICE


def _account_of(ctx: Context, live: LiveUnit) -> tuple[str | None, str | None]:
    """User and group of the server, None for those of the service manager.

    In system mode the settings' user, else the live unit's, else the system account.
    """
    wanted = ctx.settings.service.user
    if ctx.mode is not Mode.SYSTEM:
        return (wanted if os.geteuid() == 0 else None), None
    if wanted is not None:
        return wanted, None
    return (live.user, live.group) if live.user is not None else (SERVICE_ACCOUNT, SERVICE_ACCOUNT)


def unit_spec(
    ctx: Context, resolved: Resolved, engine: Engine, command: CommandLine, live: LiveUnit
) -> UnitSpec:
    """What the unit is rendered from, where `live` stands now."""
    user, group = _account_of(ctx, live)
    port = resolved.profile.serving.port
    paths = [word for word in command.argv if word.startswith("/")]
    # A server that also comes back where something ends it in order, as earlyoom does, goes on to.
    is_always = parse_unit(live.text or "").value("Service", "Restart") == "always"
    return UnitSpec(
        unit=ctx.unit,
        mode=ctx.mode,
        profile=resolved.name,
        engine=engine.name,
        argv=command.argv,
        environment={**engine.environment, **resolved.profile.environment},
        user=user,
        group=group,
        api_key_file=resolved.profile.serving.api_key_file,
        work_dir=str(ctx.paths.log_dir),
        wants_mlock=resolved.profile.serving.load_mode in LOCKING,
        # Of what is live alone: whoever may deploy without root gets no port that only root may have.
        binds_low=port is not None and port < _LOW_PORTS and port == live.serving.port,
        needs_home=any(path.startswith(("/home/", "/root/", "/run/user/")) for path in paths),
        restart="always" if is_always else "on-failure",
        stop_timeout_s=ctx.settings.service.stop_timeout_s,
        mounts=_late_mounts(ctx, paths) if ctx.mode is Mode.SYSTEM else (),
        wanted_by="multi-user.target" if ctx.mode is Mode.SYSTEM else "default.target",
    )


def _late_mounts(ctx: Context, paths: Sequence[str]) -> tuple[str, ...]:
    """Units of the mounts that these paths lead through, where boot has them and does not wait for them."""
    ways = {
        way for path in map(Path, paths) for way in (path, real_path(path.parent), real_path(path))
    }
    points = {point for way in ways for point in mounts_on(way)}
    asked = (ctx.services.properties(str(one), "Id", "Before", "FragmentPath") for one in points)
    late = (
        one["Id"]
        for one in asked
        # One that somebody made by hand has no file.
        if one.get("FragmentPath") and "local-fs.target" not in one.get("Before", "").split()
    )
    return tuple(sorted(late))


def unit_text_of(ctx: Context, spec: UnitSpec) -> str:
    """The unit's text, from the template of this installation."""
    return render_unit(shipped_unit(ctx, "llama-server.service.in"), spec)


def _user_facts(
    ctx: Context, user: str | None, host: Host, command: CommandLine
) -> checks.UserFacts:
    """What the account may read of what the command line names."""
    who = account(user) if user is not None else None
    pairs = itertools.pairwise(("", *command.argv))
    behind = [
        one for flag, word in pairs if flag != "--api-prefix" for one in words_behind(flag, word)
    ]
    words = [word for word in behind if word.startswith("/")]
    for word in checks.written_by(command.argv):
        words.remove(word)
    read = [path for path in named_files(command.argv).values() if path.startswith("/")]
    return checks.UserFacts(
        mode=ctx.mode,
        user=user,
        is_missing=user is not None and who is None,
        unreadable=[] if who is None else [word for word in words if not may_read(who, Path(word))],
        gone=[] if user is not None else [word for word in read if is_gone(Path(word))],
        memlock_unlimited=host.memory.memlock_unlimited,
        lacks_manager=ctx.lacks_manager,
    )


def _context_of_fit(
    chosen: choice.Choice, facts: ModelFacts, settings: MemorySettings, free: verdict.Free
) -> tuple[int, int] | None:
    """The context that the engine's fit makes, where it is left to it, and what it would make with more room."""
    resolved, capabilities = chosen.resolved, chosen.engine.capabilities
    there = free.gpu_mib if chosen.has_gpu else free.ram_total_mib
    if capabilities is None or there is None or not fits_context(resolved, capabilities):
        return None
    margin = margin_in_force(resolved, capabilities)
    margin = USUAL_MARGIN_MIB if margin is None else margin
    words = list(map(normal_spelling, resolved.profile.extra_args or ()))
    said = [value for flag, value in itertools.pairwise(words) if flag in {"--fit-ctx", "-fitc"}]
    least = int(said[-1]) if said and said[-1].isdecimal() else LEAST_CONTEXT
    return context_that_fits(facts, settings, there - margin, least)


def memory_of_plan(
    ctx: Context,
    chosen: choice.Choice,
    facts: ModelFacts,
    host: Host,
    correction: verdict.MemoryCorrection | None,
    state: UnitState,
) -> verdict.MemoryPlan:
    """The estimate, with what earlier loads showed of it, and what it means here."""
    resolved, has_gpu = chosen.resolved, chosen.has_gpu
    draft = choice.draft_facts(ctx, chosen.command)
    settings = settings_of(resolved, chosen.engine, draft, host, has_gpu=has_gpu)
    free = _free(ctx, chosen, host, state)
    n_ctx, most = _context_of_fit(chosen, facts, settings, free) or (settings.ctx_size, 0)
    settings = replace(settings, ctx_size=n_ctx)
    calculated = estimate(facts, settings)
    judged = verdict.judge_memory(
        replace(calculated, parts=verdict.corrected(calculated.parts, correction)),
        free,
        has_gpu=has_gpu,
        fit_mib=margin_in_force(resolved, chosen.engine.capabilities),
    )
    if n_ctx < most:
        text = f"serving.ctx_size is not set, and {most} tokens do not fit"
        level = warning if n_ctx <= LEAST_CONTEXT else note
        told = level("fit-context", f"{text}: the engine's fit will take about {n_ctx}",
                     "set serving.ctx_size to what you need")  # fmt: skip
        judged = replace(judged, messages=(told, *judged.messages))
    cards = cards_of(host, chosen) if has_gpu else ()
    if len(cards) > 1:
        names = ", ".join(gpu.name for gpu in cards)
        text = f"the model may be spread over {names}, which count as one here: one of them may be full before the others"
        several = note("several-cards", text, "memory.device names those that it may use")
        judged = replace(judged, messages=(*judged.messages, several))
    if correction is None:
        return judged
    return replace(judged, calculated=calculated, correction=correction)


# What the build's own estimate is asked with. A card with less room than this is left alone: asking takes a
# little of it, and the margin of what serves is no place for that.
_ESTIMATED_KEYS = frozenset(
    {"model.path", "serving.ctx_size", "serving.n_parallel", "serving.flash_attn",
     "serving.cache_type_k", "serving.cache_type_v", "serving.n_batch", "serving.n_ubatch"}
)  # fmt: skip
_ROOM_TO_ASK_MIB = 1024
# Between the two on 21 cases of 0.7.0 with a software GPU: at most 46 MiB, of outputs that a server keeps.
_DIFFERS_MIB, _DIFFERS_RATIO = 100, 0.05


def _check_estimate(ctx: Context, made: Plan) -> list[Message]:
    """Our estimate of the card's memory against that of the build itself, where it can tell."""
    free = [gpu.free_mib for gpu in made.host.gpus or ()]
    if not made.has_gpu or any(mib is None or mib < _ROOM_TO_ASK_MIB for mib in free):
        return []
    words = [
        word
        for one in made.command.arguments
        if one.key in _ESTIMATED_KEYS or one.key.startswith("memory.")
        for word in one.words
        if not one.key.startswith("memory.fit")
    ]
    environment = {**made.engine.environment, **made.resolved.profile.environment}
    try:
        said = builds.prober(ctx).estimated_mib(made.engine, environment, words)
    except EngineError:
        said = None
    if said is None:
        return []
    settings = settings_of(made.resolved, made.engine, None, made.host, has_gpu=True)
    plain = replace(settings, speculation="off", n_max=0, projector_bytes=0, adapter_bytes=0)
    calculated = estimate(made.facts, plain)
    ours = calculated.start_mib(Device.GPU)
    theirs = sum(mib for name, mib in said.items() if verdict.device_of(name) is Device.GPU)
    text = f"the build itself estimates {theirs} MiB of VRAM without speculation, tunerd "
    if not calculated.is_complete:
        return [note("estimate-checked", f"{text}cannot tell")]
    text += f"{ours} MiB"
    if theirs - ours > max(_DIFFERS_MIB, _DIFFERS_RATIO * theirs):
        hint = f"leave {theirs - ours} MiB more free (memory.fit_mib), or trust what the first start takes"
        return [warning("estimate-differs", text, hint)]
    return [note("estimate-checked", text)]


# Values that the estimate takes as they are.
_OF_SERVING = ("ctx_size", "n_parallel", "kv_unified", "cache_type_k", "cache_type_v", "n_batch", "n_ubatch",
               "load_mode", "ctx_checkpoints", "cache_ram_mib")  # fmt: skip
_OF_MEMORY = ("n_cpu_moe", "cpu_moe", "n_cpu_ffn", "kv_offload", "moe_cache_mib")


# With these ik rewrites weights after it has read them, so that they are no pages of the file any more.
# Source: RssAnon and RssFile of its builds of June and August 2026.
_REWRITES = frozenset({"-rtr", "--run-time-repack"})


def settings_of(
    resolved: Resolved,
    engine: Engine,
    draft: ModelFacts | None,
    host: Host,
    *,
    has_gpu: bool,
) -> MemorySettings:
    """The profile's values as the estimate takes them; what it leaves open is the engine's default."""
    serving, memory = resolved.profile.serving, resolved.profile.memory
    speculation = resolved.profile.speculation
    values: dict[str, Any] = {
        **{key: getattr(serving, key) for key in _OF_SERVING},
        **{key: getattr(memory, key) for key in _OF_MEMORY},
        "draft_cache_type_k": speculation.cache_type_k,
        "draft_cache_type_v": speculation.cache_type_v,
        "flash_attn": None if serving.flash_attn is None else serving.flash_attn != "off",
        "speculation": _drafting(speculation),
        "n_max": speculation.n_max if speculation.type != "off" else 0,
        "draft_n_gpu_layers": _layers(speculation.n_gpu_layers),
        "draft_n_ubatch": speculation.n_ubatch,
        "n_gpu_layers": _layers(memory.n_gpu_layers),
    }
    given = {key: value for key, value in values.items() if value is not None}
    if resolved.profile.model.mmproj is not None:
        given["projector_bytes"] = _size(at_home(resolved.profile.model.mmproj))
    extra = list(map(normal_spelling, resolved.profile.extra_args or ()))
    given["projector_offload"] = "--no-mmproj-offload" not in extra
    beside = {"--lora", "--lora-scaled"}
    if speculation.draft_model is None:
        beside |= {flag for flag in extra if owner_of(flag) == "speculation.draft_model"}
    pairs = (pair for pair in itertools.pairwise(extra) if pair[0] in beside)
    files = [_size(Path(name)) for flag, names in pairs for name in words_behind(flag, names)]
    given["adapter_bytes"] = None if None in files else sum(filter(None, files))
    given["has_rules"] = bool(memory.override_tensor)
    if not _REWRITES.isdisjoint(extra):
        given["load_mode"] = "mlock" if serving.load_mode in LOCKING else "none"
    capabilities = engine.capabilities
    if capabilities is not None:
        laws = laws_of(capabilities)
        is_windowed = laws.has_windowed_cache and "--swa-full" not in extra
        given["laws"] = replace(laws, has_windowed_cache=is_windowed)
        own = {"n_max": capabilities.default_n_max, "n_parallel": capabilities.default_slots}
        given = {key: value for key, value in own.items() if value is not None} | given
        if capabilities.first_of("--ctx-size-draft", "--spec-draft-ctx-size") is not None:
            given["draft_ctx_size"] = speculation.ctx_size or 0
        if capabilities.family is Family.IK:  # its drafts keep what the target keeps
            for name in ("cache_type_k", "cache_type_v"):
                given.setdefault(f"draft_{name}", given.get(name, "f16"))
        if serving.n_parallel is None and capabilities.chooses_slots:
            given["kv_unified"] = True
    return MemorySettings(
        **given,
        draft=draft,
        has_gpu=has_gpu,
        is_cuda=bool(host.gpus),
    )


def _size(path: Path) -> int | None:
    stamp = stamp_of(path)
    return None if stamp is None else stamp[0]


def _drafting(speculation: Speculation) -> str | None:
    """The kind that needs memory; of a chain the one that drafts by a model, else what is set."""
    links = (speculation.type or "").split(",")
    words = (link.removeprefix("draft-").partition("-")[0] for link in links)
    return next((word for word in words if word in KINDS_WITH_PROBABILITY), speculation.type)


def _layers(value: int | str | None) -> int | None:
    """A number of layers; `all` and `auto` mean all of them."""
    return value if isinstance(value, int) else None


def _free(ctx: Context, chosen: choice.Choice, host: Host, state: UnitState) -> verdict.Free:
    """What is free, and beside it what the present server will give back; and how much its unit may have."""
    pid = state.main_pid
    facts = process_facts(pid) if pid is not None else None
    ram = host.memory.available_mib
    if ram is not None and facts is not None and facts.rss_mib is not None:
        total = host.memory.total_mib
        ram = MiB(ram + facts.rss_mib if total is None else min(total, ram + facts.rss_mib))
    limits = memory_limits(ctx, state, is_replaced=True)
    # What a card's driver pins was not seen to count.
    is_strict = not chosen.has_gpu and host.memory.swap_total_mib == 0 and has_memory_groups()
    vram = _free_vram(host, chosen, pid)
    return verdict.Free(vram, ram, host.memory.total_mib, limits, is_strict)


def cards_of(host: Host, chosen: choice.Choice) -> tuple[Gpu, ...]:
    """The cards that its server would use, of those that the driver tells of; empty where that cannot be told.

    The driver counts cards as the bus does, CUDA the fastest first, and a variable hides some. So a build is asked
    for its devices: a card is known by their names, and among several of one name by what is free on it.
    """
    gpus, profile = list(host.gpus or ()), chosen.resolved.profile
    if {gpu.name for gpu in gpus}.isdisjoint(one.description for one in chosen.devices):
        # It lists none, or calls them otherwise.
        variables = {**chosen.engine.environment, **profile.environment}
        shown = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
        found = [gpu for gpu in gpus if gpu.uuid in [one.strip() for one in shown]]
        memory = profile.memory
        is_asked = (memory.device, memory.main_gpu, memory.split_mode) != (None, None, None)
        if found or len(gpus) == 1 or not (is_asked or any(shown)):
            return tuple(found or gpus)
        return ()
    used = []
    for device in _used_devices(host, chosen):
        of_name = [gpu for gpu in gpus if gpu.name == device.description and gpu not in used]
        free_mib = device.free_mib or 0
        used += sorted(of_name, key=lambda gpu: abs((gpu.free_mib or 0) - free_mib))[:1]
    return tuple(used)


def _used_devices(host: Host, chosen: choice.Choice) -> list[OffloadDevice]:
    """Those of the build's devices that the model would go to: beside a card no graphics of a processor."""
    memory = chosen.resolved.profile.memory
    names = {gpu.name for gpu in host.gpus or ()}
    cards = [one for one in chosen.devices if one.description in names]
    used = cards or list(chosen.devices)
    if memory.device is not None:  # of these the first is the main one, whatever its number
        named = memory.device.lower().split(",")  # as ggml finds them, in any case
        used = [one for name in named for one in chosen.devices if one.name.lower() == name]
    return used[memory.main_gpu or 0 :][:1] if memory.split_mode == "none" else used


def _free_vram(host: Host, chosen: choice.Choice, pid: int | None) -> MiB | None:
    """What is free on its cards together with what its forerunner holds there, else as the build itself sees it."""
    if "--rpc" in (chosen.resolved.profile.extra_args or ()):  # cards of other machines take a part
        return None
    cards = cards_of(host, chosen)
    free = all_known(gpu.free_mib for gpu in cards)
    if not free:
        told = (one.free_mib for one in _used_devices(host, chosen))
        return max((mib for mib in told if mib is not None), default=None)
    processes = (one for gpu in cards for one in gpu.processes or () if one.pid == pid)
    return MiB(sum(free) + sum(one.used_mib or 0 for one in processes))


def _memory_json(plan: verdict.MemoryPlan) -> dict[str, Any]:
    """A memory plan as scripts read it."""
    return {
        "verdict": plan.verdict,
        "n_ctx": plan.estimate.n_ctx,
        "is_complete": plan.estimate.is_complete,
        "locked_mib": plan.estimate.locked_mib,
        "loads": None if plan.correction is None else plan.correction.n_loads,
        "devices": [
            {
                "name": str(device),
                "total_mib": plan.estimate.start_mib(device),
                "calculated_mib": None
                if plan.calculated is None
                else plan.calculated.start_mib(device),
                "worst_mib": plan.estimate.worst_mib(device),
                "free_mib": free_mib,
                "parts": [
                    {"name": str(part.kind), "mib": part.mib, "why": part.formula,
                     "grows": part.grows}
                    for part in plan.estimate.on(device)
                ],
            }
            for device, free_mib in plan.free_mib.items()
        ],
    }  # fmt: skip


# More than an engine says of its load: a build of April 2026 names each tensor and special token then, for each
# placement that its fit tries.
LOAD_LINES = 10_000
_PREFIX = "load-"
KEPT_LOADS = 500  # each configuration that a night tries has one


def _correction_of(
    ctx: Context, argv: Sequence[str], unit_text: str
) -> verdict.MemoryCorrection | None:
    """What the newest load of this very server took; None where none is known."""
    if not any(ctx.paths.cache_dir.glob(f"{_PREFIX}*.json")):
        return None
    path = _path(ctx, argv, unit_text)
    return None if path is None else ctx.files.recall(verdict.MemoryCorrection, path)


def remember_load(
    ctx: Context, argv: Sequence[str], unit_text: str, lines: Sequence[str]
) -> tuple[Message, ...]:
    """Keep what a load took; a server serves whether that can be kept or not.

    Args:
        ctx: Where.
        argv: The command that was loaded.
        unit_text: Of its unit.
        lines: What the engine wrote while it loaded.
    """
    seen = verdict.taken(verdict.parse_report(lines))
    if not seen:
        return ()
    try:
        path = _path(ctx, argv, unit_text)
        if path is None:
            return ()
        before = ctx.files.recall(verdict.MemoryCorrection, path)
        n_loads = 1 if before is None else before.n_loads + 1
        ctx.files.keep(path, verdict.MemoryCorrection(seen, n_loads))
        keep_newest(path.parent.glob(f"{_PREFIX}*.json"), KEPT_LOADS)
    except TunerdError as problem:
        text = f"what this load took could not be recorded: {problem.message}"
        return (note("memory-evidence", text, problem.hint),)
    return ()


def remember_live_load(ctx: Context) -> tuple[Message, ...]:
    """Keep what the load of the running server took, where no plan was made of it.

    A rollback or recovery is done when this is called, so nothing here raises: what cannot be told is
    not kept.
    """
    with contextlib.suppress(TunerdError):
        live, lines = read_live_unit(ctx), load_lines(ctx)
        if lines and live.text and live.argv:
            return remember_load(ctx, live.argv, live.text, lines)
    return ()


def load_lines(ctx: Context) -> tuple[str, ...]:
    """What the server that runs wrote while it loaded; empty where nobody can tell."""
    with contextlib.suppress(TunerdError):
        state = ctx.services.state(ctx.unit)
        if state.is_active and state.invocation_id is not None:
            life = state.invocation_id
            said = ctx.services.log(ctx.unit, invocation_id=life, max_lines=LOAD_LINES)
            return tuple(verdict.lines_of_load(said, LOAD_LINES))
    return ()


def _path(ctx: Context, argv: Sequence[str], unit_text: str) -> Path | None:
    """The file of this server; None where a part that its memory depends on is not known."""
    environment = environment_of(parse_unit(unit_text), specifiers_of(ctx, ctx.unit))
    key = FingerprintReader(ctx).of(argv, environment).fingerprint.memory_key
    return None if key is None else ctx.paths.cache_dir / f"{_PREFIX}{key[:32]}.json"


@dataclass(frozen=True, slots=True)
class Sketch(choice.Choice):
    """What would be deployed, as far as that is known without the model's header."""

    unit_text: str
    live: LiveUnit
    diff: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Plan(Sketch):
    """Everything that `apply` needs, and everything that a person wants to see before it.

    `stamps` are of the files that its server reads, as they were when it was made.
    """

    live_sha256: str | None
    facts: ModelFacts
    memory: verdict.MemoryPlan
    host: Host
    stamps: Mapping[Path, tuple[int, int] | None]

    @property
    def errors(self) -> tuple[Message, ...]:
        """What stands against deploying it."""
        return tuple(one for one in self.messages if one.level is Level.ERROR)


def plan(ctx: Context, request: choice.PlanRequest, *, with_explain: bool = False) -> ActionResult:
    """`tunerd plan PROFILE`; exit code 1 if it would be refused.

    Without the model file it shows what would be run with it, and what is missing.
    """
    try:
        made = make_plan(ctx, request)
    except ModelFileError as problem:
        try:
            found = choice.choose(ctx, request, read_host(ctx.gpu), has_weights=False)
        except (
            EngineError
        ) as none:  # both are to be had: whoever fetches one learns of the other now
            raise ModelFileError(
                f"{problem.message}, and {none.message}",
                cause="\n".join(filter(None, (problem.cause, none.cause))),
                state=problem.state,
                hint="; ".join(filter(None, (problem.hint, none.hint))),
            ) from problem
        except TunerdError:
            raise problem from None
        return _without_weights(ctx, found, problem, with_explain=with_explain)
    made = replace(made, messages=(*made.messages, *_check_estimate(ctx, made)))
    payload = plan_json(made, with_explain=with_explain)
    return ActionResult("plan", payload, made.messages, 1 if made.errors else 0)


def _without_weights(
    ctx: Context, found: choice.Choice, problem: ModelFileError, *, with_explain: bool
) -> ActionResult:
    live = read_live_unit(ctx)
    spec = unit_spec(ctx, found.resolved, found.engine, found.command, live)
    unit_text = unit_text_of(ctx, spec)
    made = Sketch(
        **_fields(found),
        unit_text=unit_text,
        live=live,
        diff=unified_diff(live.text, unit_text, ctx.unit),
        messages=(error("model-missing", problem.words, problem.hint),),
    )
    payload = {**plan_json(made, with_explain=with_explain), "passed_over": []}
    payload["model"] |= {"name": found.resolved.profile.model.name}
    return ActionResult("plan", payload, made.messages, 1)


def _fields(chosen: choice.Choice) -> dict[str, Any]:
    return {one.name: getattr(chosen, one.name) for one in fields(chosen)}


def plan_json(made: Sketch, *, with_explain: bool) -> dict[str, Any]:
    """A plan as scripts read it, with the model's header or without it."""
    engine, resolved, command = made.engine, made.resolved, made.command
    facts, memory = (made.facts, made.memory) if isinstance(made, Plan) else (None, None)
    explained = [
        {"flag": flag, "key": key, "origin": origin}
        for flag, key, origin in checks.explain(command, resolved)
    ]
    same = ("name", "architecture", "quant", "file_bytes", "has_mtp")
    return {
        "profile": resolved.name,
        "layers": list(resolved.layers),
        "engine": {
            "name": engine.name,
            "path": str(engine.program),
            "dialect": engine.capabilities.dialect if engine.capabilities else None,
        },
        "argv": list(command.argv),
        "explain": explained if with_explain else None,
        "passed_over": [{"engine": name, "reason": why} for name, why in made.passed_over],
        "unit": made.unit_text,
        "unit_path": str(made.live.path) if made.live.path else None,
        "diff": made.diff,
        "memory": None if memory is None else _memory_json(memory),
        "published_vram_mib": resolved.profile.published.vram_mib,
        "model": {
            "path": command.value_of("model.path"),
            **{name: getattr(facts, name) if facts else None for name in same},
        },
        "warnings": rows_of(one for one in made.messages if one.level is not Level.NOTE),
        "refused": any(one.level is Level.ERROR for one in made.messages),
    }


def make_plan(ctx: Context, request: choice.PlanRequest) -> Plan:
    """The plan.

    Raises:
        ConfigError: the profile is wrong.
        DeployError: the unit is masked or an alias.
        ModelFileError: the model file is missing, damaged, or not unique.
        EngineError: no engine can serve the profile.
    """
    # gather
    host = read_host(ctx.gpu)
    demand_replaceable(ctx)
    chosen = choice.choose(ctx, request, host)
    state = ctx.services.state(ctx.unit)  # now, for a build may have been tried for minutes
    live = read_live_unit(ctx, now=state)
    live_text = standing_text(ctx)
    engine, resolved, command = chosen.engine, chosen.resolved, chosen.command
    stamps = {path: stamp_of(path) for _, path in builds.files_of(command.argv)}
    facts = builds.read_facts(ctx, chosen.model_path)
    before = serving_now(ctx, live, state)
    is_handed_over = state.is_active and live.program != str(engine.program)

    # decide
    spec = unit_spec(ctx, resolved, engine, command, live)
    unit_text = unit_text_of(ctx, spec)
    correction = _correction_of(ctx, command.argv, unit_text)
    memory = memory_of_plan(ctx, chosen, facts, host, correction, state)
    after = checks.serving_after(
        command, engine.capabilities, environment_with(ctx, unit_text, live)
    )
    messages = (
        *choice.named_by_plan(ctx, request),
        *checks.check_machine(resolved, host, chosen.devices),
        *checks.check_left_out(resolved, command, host),
        *checks.check_model(resolved, engine, facts, choice.draft_facts(ctx, command)),
        *checks.check_context(memory.estimate.n_ctx_slot, facts),
        *choice.found_by_metadata(resolved, chosen.model_path),
        *checks.check_values(resolved, host),
        *checks.check_asked(after),
        *checks.check_proofs(resolved, engine),
        *checks.environment_conflicts(resolved.profile.environment),
        *checks.check_live(
            after,
            live,
            before,
            lost=checks.lost_lines(live, unit_text, command.argv),
            systemctl=ctx.systemctl,
        ),
        *checks.check_user(
            _user_facts(ctx, spec.user, host, command), wants_mlock=spec.wants_mlock
        ),
        *ctx.until_logout(),
        *check_key(ctx, resolved.profile.serving.api_key_file),
        *checks.check_written(command.argv, unit_with(ctx, unit_text, live), ctx.unit),
        *_check_arguments(ctx, engine, command),
        *check_port(ctx, after, state),
        *_check_handover(ctx, live, _family(engine) if is_handed_over else None, before, after),
        *_check_return(ctx, live, state),
        *check_boot(ctx, state, enable=True),
        *check_unit(ctx, unit_text),
        *memory.messages,
        *_tuned_layer(ctx, resolved, engine, facts, host),
    )
    old = live_text.decode("utf-8", "replace") if live_text is not None else live.text
    return Plan(
        **_fields(chosen),
        unit_text=unit_text,
        live=live,
        live_sha256=sha256(live_text),
        diff=unified_diff(old, unit_text, ctx.unit),
        facts=facts,
        memory=memory,
        host=host,
        stamps=stamps,
        messages=messages,
    )


# Of User=nobody, which systemd 252 and 262 run all the same, as they did in the unit that stood there before.
_ADVICE = "Special user"


def check_unit(ctx: Context, text: str) -> Iterator[Message]:
    """What the service manager would say of a unit's text."""
    try:
        for line in ctx.services.verify(ctx.unit, text):
            if _ADVICE in line:
                yield warning("unit-advice", f"systemd advises against this: {line}",
                              "`tunerd settings set service.user ACCOUNT` names an account of its own")  # fmt: skip
            else:
                yield error("unit-refused", f"the service manager would complain: {line}")
    except ServiceError as trouble:  # of what checks, such as a /tmp that cannot be written
        yield warning("unit-unchecked", trouble.words)


def address_of_plan(ctx: Context, made: Plan) -> Address:
    """Where its server will listen, with the key that it will want."""
    after = checks.serving_after(made.command, made.engine.capabilities)
    key = read_key(ctx, made.resolved.profile.serving.api_key_file)
    return Address(after.host or "", after.port or 0, key)


def expectation_of_plan(made: Plan) -> Expectation:
    """Who should answer; what this build cannot do is told in the plan, and is not expected here."""
    speculation = made.resolved.profile.speculation
    wants_draft = "mtp" in speculation.kinds
    proved = made.engine.proof("mtp").effect is Effect.PROVED
    counts = made.engine.proof("counts").effect is not Effect.NO_EFFECT
    return Expectation(
        old_invocation=None,
        alias=checks.serving_after(made.command, made.engine.capabilities).alias,
        expects_draft=wants_draft and proved,
        must_draft=wants_draft and proved and counts and not speculation.p_min,
    )
