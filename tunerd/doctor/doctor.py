"""`tunerd doctor`: gathers the facts of the unit that serves, and has the rules judge them; and what to attach to a call for help."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from ipaddress import IPv6Address
from pathlib import Path
from stat import S_ISREG
from typing import Any

from tunerd import __version__
from tunerd.app import Context
from tunerd.doctor.facts import (
    DEFAULT_UBATCH,
    EvidenceFacts,
    Facts,
    Locking,
    ServerFacts,
    break_even,
    diagnose,
    read_server_log,
    with_stages,
)
from tunerd.doctor.rules import ALL_RULES
from tunerd.engine import builds, flags, serving
from tunerd.engine.choice import devices_of
from tunerd.engine.fingerprint import Fingerprint, holds
from tunerd.engine.importer import import_command_line
from tunerd.engine.server import LlamaServer
from tunerd.errors import ConfigError, EngineError, HostError, ModelFileError, TunerdError
from tunerd.machine.facts import Host
from tunerd.machine.files import is_locked, real_path
from tunerd.machine.gpu import read_driver_files
from tunerd.machine.host import memlock_limit_of, memory_of, read_cpu_frequency, read_host
from tunerd.machine.process import account_homes
from tunerd.measure.answer import Timings
from tunerd.measure.evidence import ArmRecord, StoredRun
from tunerd.measure.learn import own_requests
from tunerd.measure.results import StalenessCheck
from tunerd.measure.store import EvidenceStore, reading
from tunerd.model.facts import ModelFacts
from tunerd.model.files import ModelFiles
from tunerd.model.memory import estimate
from tunerd.production.checks import masked
from tunerd.production.gate import failure_of
from tunerd.production.journal import backups
from tunerd.production.measurement import read_measurement
from tunerd.production.plan import check_port, settings_of
from tunerd.production.probation import daemon_lock
from tunerd.production.profiles import detect
from tunerd.production.status import (
    history,
    interrupted,
    not_recorded,
    status,
    unsupervised,
    verify,
)
from tunerd.profile.layers import DEFAULT_PORT
from tunerd.records import plain
from tunerd.result import ActionResult, Message, note, warning
from tunerd.settings_file import show_settings
from tunerd.units.live import UNIX_SOCKET, LiveUnit, is_shell, serving_of
from tunerd.units.manager import UnitState
from tunerd.words import Mode, counted, format_mib, have_mib, sha256

_PATHS = re.compile(rb"/[^\s\0\"'=:;,]+")
# Enough to reach back to the load on most days; a build that logs each token does not.
_LOG_LINES = 20_000
_HTTP_S = 1.0


def _read_server(ctx: Context, host: Host) -> tuple[ServerFacts, LiveUnit] | None:
    """The unit that serves or would, and its text; None where there is none.

    Raises:
        ServiceError: the service manager does not answer.
        HostError: a file of the unit cannot be read.
    """
    live = serving.read_live_unit(ctx)
    if live.text is None:
        return None
    state = ctx.services.state(ctx.unit)
    pid = state.main_pid if state.is_active else None
    memory = memory_of(pid) if pid is not None else None
    locked_mib = memory.locked_mib if memory is not None else None
    server = serving.as_it_runs(ctx, live)
    # A shell in between has words of its own.
    is_told = server is None and not is_shell(live.program or "")
    was_edited = is_told and serving.runs_with(live.argv, pid) is False
    server = server or live
    limit = memlock_limit_of(pid) if pid is not None and not was_edited else None
    lines: tuple[str, ...] = ()  # of its present life, or of the one that ended last
    if (life := state.invocation_id) is not None:
        lines = ctx.services.log(ctx.unit, invocation_id=life, max_lines=_LOG_LINES)
    log = read_server_log(lines, _own(ctx, state.active_since_s))
    facts = ServerFacts(
        unit=ctx.unit,
        is_active=state.is_active,
        systemctl=ctx.systemctl,
        no_start=f"its manager does not take it: {live.problem}"
        if state.load_state == "bad-setting"
        else builds.why_no_start(ctx, live),
        death=failure_of(ctx, state, lines) if state.has_failed else None,
        pid=pid,
        was_edited=was_edited,
        argv=server.argv or (),
        environment=server.environment,
        n_slots=None if was_edited else _slots(ctx, live, state),
        locking=None if limit is None else Locking(limit.mib, locked_mib),
        swapped_mib=memory.swapped_mib if memory is not None else None,
        log=None if was_edited else log,
        is_silent=log is None and bool(lines),
        settings_problem=live.problem,
    )
    with contextlib.suppress(HostError):  # STATE is damaged, and no way leads back
        facts = replace(facts, was_deployed=bool(ctx.generations.numbers()))
    if server.argv is not None and server.program is not None:
        facts = _with_build(ctx, host, facts, server, Path(server.program))
    return facts, live


def _own(ctx: Context, since_s: float | None) -> tuple[Timings, ...]:
    """tunerd's own requests; none where the store cannot be read, which its own reader tells of."""
    try:
        return tuple(own_requests(ctx, since_s)[0])
    except TunerdError:
        return ()


def _with_build(
    ctx: Context, host: Host, facts: ServerFacts, live: LiveUnit, program: Path
) -> ServerFacts:
    """The same with what only the build's help can say: what its command line means, and the memory that it takes."""
    known = (found for found in builds.find_programs(ctx) if found.program == program)
    found = next(known, builds.found_in_unit(live, program))
    engine = builds.engine_of(ctx, found)
    facts = replace(facts, engine=engine)
    if engine.capabilities is None:
        return replace(facts, settings_problem=engine.problem)
    foreign = builds.foreign_flags(ctx, found, live, engine.capabilities)
    facts = replace(facts, foreign_flags=foreign)
    has_gpu = engine.capabilities.lists_gpu_flags and bool(host.gpus)
    with contextlib.suppress(EngineError):
        variables = {**found.environment, **live.environment}
        devices, has_gpu = devices_of(ctx, engine, host, variables)
        facts = replace(facts, devices=devices)
    if not live.names_a_model and serving.hides_words(live):
        return replace(facts, settings_problem=f"`{live.program}` sets them, not the unit")
    if not live.names_a_model:
        problem = "it is a router, which starts a server for each model that clients ask for"
        return replace(facts, settings_problem=problem)
    try:
        imported = import_command_line(
            live.arguments, live.environment, engine.capabilities, serving.work_dir_of(ctx, live)
        )
    except ConfigError as error:
        return replace(facts, settings_problem=error.words)
    profile = with_stages(imported.resolved.profile, imported.command.argv)
    resolved = replace(imported.resolved, profile=profile)
    margin_mib = flags.margin_in_force(resolved, engine.capabilities)
    facts = replace(facts, settings=profile, margin_mib=margin_mib)
    files = ModelFiles(ctx.paths.cache_dir, ctx.files)
    model, problem = _header(files, profile.model.path)
    if model is None:
        return replace(facts, model_problem=problem)
    draft, _ = _header(files, profile.speculation.draft_model)
    settings = settings_of(resolved, engine, draft, host, has_gpu=has_gpu)
    return replace(facts, model=model, draft=draft, estimate=estimate(model, settings))


def _header(files: ModelFiles, path: str | None) -> tuple[ModelFacts | None, str]:
    """What a model file says of itself, or why nothing."""
    if path is None:
        return None, "the command line names no file"
    try:
        return files.read_facts(Path(path)), ""
    except ModelFileError as error:
        return None, error.message


def _slots(ctx: Context, live: LiveUnit, state: UnitState) -> int | None:
    address = serving.address_now(ctx, live, state)
    if address is None or not state.is_active:
        return None
    props = LlamaServer(address, ctx.clock).props(timeout_s=_HTTP_S)
    return None if props is None else props.n_slots


def read_port(
    ctx: Context, server: ServerFacts | None, live: LiveUnit | None
) -> Sequence[Message] | None:
    """What keeps the server from its address; without a unit, from tunerd's own default.

    While tunerd measures in its place, that is what is measured.
    """
    address = serving_of((), {}) if live is None else live.serving
    usual: int | None = DEFAULT_PORT
    if server is not None:
        usual = server.capabilities.default_port if server.capabilities is not None else None
    port = address.port or usual
    is_elsewhere = live is not None and live.is_container
    if port is None or is_elsewhere or (address.host or "").endswith(UNIX_SOCKET):
        return None
    with contextlib.suppress(TunerdError):
        state = ctx.services.state(ctx.unit)
        is_measured = read_measurement(ctx) is not None
        return [] if is_measured else check_port(ctx, replace(address, port=port), state)
    return None


_N_RUNS = 200
# What may differ between a server and the same server without speculation: the kind itself, and
# the room that its memory takes.
_MAY_DIFFER = ("speculation.", "memory.")


def _evidence(
    ctx: Context, server: ServerFacts | None, messages: list[Message]
) -> EvidenceFacts | None:
    """What is stored of the server; None where the store is damaged or cannot be read."""
    facts = EvidenceFacts()
    try:
        with reading(ctx) as store:
            if store is None:
                return facts
            runs = store.runs(limit=_N_RUNS)
            if server is not None and server.argv and runs:
                facts = _of_what_serves(ctx, store, runs, server)
            messages += [warning("damaged-rows", one.text) for one in store.damage]
    except TunerdError as problem:
        messages.append(_could_not("stored measurements", problem))
        return None
    return facts


def _of_what_serves(
    ctx: Context, store: EvidenceStore, runs: Sequence[StoredRun], server: ServerFacts
) -> EvidenceFacts:
    check = StalenessCheck(ctx)
    now = check.reader.of(server.argv, server.environment).fingerprint
    n_ubatch = server.settings.serving.n_ubatch if server.settings is not None else None
    base = _base(server.argv)

    def is_plain(arm: ArmRecord) -> bool:
        """Without speculation; also of its own command line: an engine may leave it out by request."""
        return _is_same(arm, now) or (arm.argv is not None and _base(arm.argv) == base)

    drafting = store.samples_of(runs, lambda arm: _is_same(arm, now) and _counts(arm, now))
    plainly = store.samples_of(runs, lambda arm: is_plain(arm) and _counts(arm, now))
    return replace(
        _newest(check, runs, now),
        break_even=break_even(drafting, plainly, n_ubatch or DEFAULT_UBATCH),
    )


def _newest(check: StalenessCheck, runs: Sequence[StoredRun], now: Fingerprint) -> EvidenceFacts:
    """The newest run of this very command line, and whether it still counts."""
    for run in runs:
        for arm in run.record.arms:
            if _is_same(arm, now) and run.n_samples:
                found = check.of(arm, run.record)
                return EvidenceFacts(newest_run=run.number, holds=found.holds, changes=found.texts)
    return EvidenceFacts()


def _is_same(arm: ArmRecord, now: Fingerprint) -> bool:
    own = flags.arguments_sha256(arm.argv, arm.environment) if arm.argv is not None else None
    return own is not None and own == now.arguments_sha256


def _base(argv: Sequence[str]) -> list[list[str]]:
    """The arguments that a server has with speculation and without."""
    return [
        group
        for group in flags.compared_arguments(argv)
        if not (flags.owner_of(group[0]) or "").startswith(_MAY_DIFFER)
    ]


def _counts(arm: ArmRecord, now: Fingerprint) -> bool:
    """Whether engine, model, driver and card are those of now, whatever the arguments."""
    then = replace(arm.fingerprint.of_server, arguments_sha256=now.arguments_sha256)
    return holds(then, now) is True


def examine(ctx: Context) -> ActionResult:
    """What may be wrong here, and what to do. Reads only; exit code 0 for nothing or notes, 6 for warnings, 7 for errors."""
    facts, messages = gather(ctx)
    diagnosis = diagnose(facts, ALL_RULES)
    server = facts.server
    payload = {
        "unit": server.unit if server is not None else None,
        "active": server.is_active if server is not None else None,
        **plain(diagnosis),
    }
    return ActionResult("doctor", payload, tuple(messages), diagnosis.exit_code)


def gather(ctx: Context) -> tuple[Facts, list[Message]]:
    """All facts, and what went wrong on the way to them."""
    messages: list[Message] = []
    host = read_host(ctx.gpu)
    server = live = None
    is_read = True
    try:
        server, live = _read_server(ctx, host) or (None, None)
    except TunerdError as problem:
        messages.append(_could_not("the unit", problem))
        is_read = False  # nor is it asked for again: a manager that is gone is waited for each time
    if server is not None and server.was_edited:
        text = (
            f"{ctx.unit} runs with other arguments than its text has: it was edited after its start, or starts a script. "
            "The findings are about the text; what only the running server can show is unknown"
        )
        hint = f"`tunerd verify` shows the edit; `{ctx.systemctl} restart {ctx.unit}` puts the text into force"
        messages.append(note("edited", text, hint))
    facts = Facts(
        host=host,
        frequency=read_cpu_frequency(),
        driver=read_driver_files(),
        server=server,
        port=read_port(ctx, server, live) if is_read else None,
        evidence=_evidence(ctx, server, messages),
        own=_own_facts(ctx, is_read=is_read),
    )
    return facts, messages


def _own_facts(ctx: Context, *, is_read: bool) -> Mapping[str, Message | None] | None:
    try:
        return {
            "no-supervisor": unsupervised(ctx),
            "no-daemon": _unwatched(ctx),
            "no-linger": next(iter(ctx.until_logout()), None),
            "read-only": not_recorded(ctx),
            "settings-wrong": next(iter(ctx.settings_messages()), None),
            "kept-engines": needless_engines(ctx) if is_read else None,
            "swap-cut-short": interrupted(ctx),
        }
    except TunerdError:  # which the unit's reader told of
        return None


def needless_engines(ctx: Context) -> Message | None:
    """Kept engines that nothing names which starts a server, or may once more; None also where that cannot be told."""
    kept = ctx.paths.engines_dir
    try:
        folders = sorted(kept.iterdir()) if kept.is_dir() and not is_locked(ctx.paths.lock) else []
        named = set(_naming_engines(ctx)) if folders else set()
        paths = {Path(os.fsdecode(path)) for text in named for path in _PATHS.findall(text)}
        named |= {os.fsencode(real_path(path)) for path in paths}  # by a link
        found = [one for one in folders if not any(one.name.encode() in text for text in named)]
        parts = (part.lstat() for one in found for part in one.rglob("*"))
        mib = have_mib(sum(part.st_size for part in parts if S_ISREG(part.st_mode)))
    except (OSError, TunerdError):
        return None
    if not found:
        return None
    what = counted(len(found), "kept engine")
    text = f"{what} that no unit, backup, setting or profile names: {format_mib(mib)}"
    return note("kept-engines", text, f"rm -r {shlex.join(map(str, found))}")


def _naming_engines(ctx: Context) -> Iterator[bytes]:
    """Whatever may start a kept engine, and the builds that backups start, or did before an upgrade in place."""
    paths, generations = ctx.paths, ctx.generations
    units = _contents(ctx, paths.unit_dir, paths.runtime_unit_dir)
    yield from units
    yield from _contents(ctx, paths.config_dir, paths.tuned_dir, paths.journal_dir)
    # Which its files of variables may name.
    yield os.fsencode(serving.read_live_unit(ctx).program or "")
    standing = {sha256(text) for text in units}
    swaps = (one.generation for one in backups(ctx) if one.generation is not None)
    oldest = min(swaps, default=math.inf)
    replaced = generations.serving(ctx.unit, before=oldest)
    since = oldest if replaced is None else replaced.generation.number
    for number in generations.numbers():
        yield generations.unit_text(number) or b""
        yield generations.replaced_text(number) or b""
        entry = generations.read(number)
        made = None if entry is None else entry.generation
        if made is not None and (number >= since or made.unit_sha256 in standing):
            standing.discard(made.unit_sha256)  # of several the newest counts
            yield (made.engine_sha256 or "").encode()


def _contents(ctx: Context, *folders: Path) -> list[bytes]:
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return [ctx.files.read(path) or b"" for path in files]


def _unwatched(ctx: Context) -> Message | None:
    if ctx.mode is Mode.LOCAL or ctx.deployed() is None or is_locked(daemon_lock(ctx)):
        return None
    hint = f"`{ctx.systemctl} start tunerd`, or `tunerd daemon` in a terminal"
    return warning("no-daemon", "tunerd's daemon is not running", hint)


def _could_not(what: str, problem: TunerdError) -> Message:
    cause = f": {problem.cause}" if problem.cause else ""
    return warning("cannot-read", f"{what} cannot be read: {problem.message}{cause}", problem.hint)


# What somebody who is asked for help wants to see, without what is nobody's business.

_SHOWN_LINES = 80
# Of an engine's log only lines that tell of trouble: others may hold what people asked it.
_TROUBLE = re.compile(r"(?i)\b(error|warn|fail|fatal|abort|assert|exception|out of memory)")
_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}\b")
_ADDRESS_6 = re.compile(r"(?<![\w:])[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]+(?![\w:])")
_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f-]{30,40}")
_LINK = re.compile(r"[a-z][a-z0-9+.-]*://(?!127\.0\.0\.1|localhost)[^\s\"']+")
_HIDDEN = "[hidden]"


def support_bundle(ctx: Context) -> ActionResult:
    """`tunerd support-bundle`: versions, what is here, what serves, what is wrong; nothing is changed.

    Names of people and machines, addresses, links and secrets are taken out; texts of requests are not in it.
    """
    log = ctx.services.log
    parts: dict[str, Callable[[], Any]] = {
        "tunerd": lambda: {"version": __version__, "python": platform.python_version()},
        "system": lambda: {
            "release": _release(),
            "kernel": platform.release(),
            "mode": str(ctx.mode),
        },
        "detect": lambda: detect(ctx).payload,
        "status": lambda: status(ctx).payload,
        "verify": lambda: verify(ctx).payload,
        "doctor": lambda: examine(ctx).payload,
        "history": lambda: history(ctx).payload,
        "settings": lambda: [
            row for row in show_settings(ctx).payload["settings"] if row["source"] != "default"
        ],
        "unit": lambda: masked(
            (serving.standing_text(ctx) or b"").decode(errors="replace"), _HIDDEN
        ).splitlines(),
        "log of the server": lambda: [
            line for line in log(ctx.unit, max_lines=2000) if _TROUBLE.search(line)
        ][-_SHOWN_LINES:],
        "log of the daemon": lambda: list(log("tunerd.service", max_lines=_SHOWN_LINES)),
    }
    hide = _hider(ctx)
    found = {name: hide(_part(read)) for name, read in parts.items()}
    return ActionResult("support-bundle", {"parts": found})


def _release() -> str | None:
    with contextlib.suppress(OSError):  # a small image has no such file
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    return None


def _part(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (TunerdError, OSError) as problem:  # one part that cannot be had is a part of the story
        return {"problem": problem.words if isinstance(problem, TunerdError) else str(problem)}


def _without_address(found: re.Match[str]) -> str:
    """Nothing of an address of IPv6; a time of day looks like one, and is none."""
    try:
        address = IPv6Address(found[0])
    except ValueError:
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else "[address]"


def _hider(ctx: Context) -> Callable[[Any], Any]:
    """Takes out of texts, in whatever they stand, who and where this is."""
    names = {home.name for home in account_homes()} | {ctx.environment.get("USER", "")}
    hosts = {platform.node(), platform.node().partition(".")[0]}
    words = dict.fromkeys(names - {"", "root"}, "USER") | dict.fromkeys(hosts - {""}, "HOST")
    known = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in words) or r"(?!)")

    def hide_text(text: str) -> str:
        text = _ADDRESS_6.sub(_without_address, masked(text, _HIDDEN))
        text = _UUID.sub(r"\1-[hidden]", _LINK.sub("[link]", _ADDRESS.sub("[address]", text)))
        return known.sub(lambda one: words[one[0]], text)

    def hide(value: Any) -> Any:
        if isinstance(value, str):
            return hide_text(value)
        if isinstance(value, Mapping):
            return {
                key: _HIDDEN
                if isinstance(one, str) and flags.is_secret_variable(key)
                else hide(one)
                for key, one in value.items()
            }
        if isinstance(value, (list, tuple)):
            pairs = zip(["", *map(str, value)], value, strict=False)
            return [
                _HIDDEN if flags.normal_spelling(before) in flags.SECRET_FLAGS else hide(one)
                for before, one in pairs
            ]
        return value

    return hide


def bundle_text(payload: Mapping[str, Any]) -> str:
    """As the file that people attach."""
    return json.dumps(payload["parts"], indent=1, ensure_ascii=False, default=str) + "\n"
