"""The unit of the server: what is in force of it, what stands in its file, and how the server that it runs is reached."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tunerd.app import Context
from tunerd.engine.health import Failure, FailureKind
from tunerd.engine.server import Address, LlamaServer
from tunerd.errors import DeployError, HostError, ServiceError, TunerdError
from tunerd.machine.files import is_gone, stamp_of
from tunerd.machine.net import listening_ports
from tunerd.machine.process import SEARCH_PATH, account, has_group
from tunerd.units.generations import Ending, Generation
from tunerd.units.live import (
    LiveUnit,
    Serving,
    is_same_command,
    is_shell,
    limits_of,
    read_live,
    with_drop_ins,
)
from tunerd.units.manager import MemoryLimit, UnitState
from tunerd.units.needs import Kind, Need, needs_of
from tunerd.units.text import (
    UnitFile,
    environment_files_of,
    environment_of,
    parse_environment_file,
    parse_unit,
)
from tunerd.words import Mode, have_mib, sha256


def read_live_unit(
    ctx: Context,
    unit: str | None = None,
    now: UnitState | None = None,
    *,
    instead: str | None = None,
) -> LiveUnit:
    """The unit that the service manager would start, tunerd's own by default; `now` where that was just read.

    With a text `instead` of its own it is what that would be, with the same drop-ins.

    Raises:
        HostError: one of its files cannot be read.
        ServiceError: the service manager does not answer.
    """
    unit = unit or ctx.unit
    state = now or ctx.services.state(unit)
    path = state.fragment_path
    if path is None and unit == ctx.unit and ctx.unit_path.exists():
        path = ctx.unit_path
    text = instead
    if instead is None and state.load_state != "masked":
        text = _text(ctx, path)
    drop_ins = [(drop_in, _text(ctx, drop_in) or "") for drop_in in state.drop_ins]
    specifiers = specifiers_of(ctx, unit)
    live = read_live(
        unit=unit,
        path=path if instead is None else None,
        text=text,
        drop_ins=drop_ins,
        of_files=lambda merged: file_environment_of(ctx, merged, specifiers),
        specifiers=specifiers,
    )
    if live.argv and live.program is not None and "/" not in live.program:
        # Where systemd looks for a program that is named without a path: systemd.exec(5), ExecSearchPath=.
        program = shutil.which(live.program, path=live.search_path or SEARCH_PATH) or live.program
        live = replace(live, program=program, argv=(program, *live.argv[1:]))
    own = ctx.unit_path if unit == ctx.unit else path  # systemd may name where the link leads
    link_to = own.readlink() if own is not None and own.is_symlink() else None
    is_packaged = unit == ctx.unit and path is not None and not os.path.lexists(ctx.unit_path)
    return replace(live, link_to=link_to, shadowed_by=ctx.unit_path if is_packaged else None)


def file_environment_of(
    ctx: Context, unit: UnitFile, specifiers: Mapping[str, str]
) -> dict[str, str]:
    """What a unit's environment files set together; the name of one may be a pattern for several.

    Raises:
        HostError: one of them cannot be read.
    """
    names = (one.removeprefix("-") for one in environment_files_of(unit, specifiers))
    texts = (_text(ctx, path) or "" for name in names for path in _matching(name))
    return {name: value for text in texts for name, value in parse_environment_file(text).items()}


def _matching(pattern: str) -> list[Path]:
    return [Path(name) for name in sorted(glob.glob(pattern)) or [pattern]]  # noqa: PTH207


def _needs(ctx: Context, live: LiveUnit) -> Iterator[Need]:
    unit = unit_with(ctx, live.text or "", live)
    return needs_of(unit, specifiers_of(ctx, live.unit), ctx.mode)


def files_of_start(ctx: Context, live: LiveUnit) -> Iterator[Path]:
    """The files beside itself that a unit's manager reads to start it.

    Raises:
        HostError: a drop-in cannot be read.
    """
    for need in _needs(ctx, live):
        if need.kind is Kind.FILE:
            yield from _matching(need.name)


def missing_to_start(ctx: Context, live: LiveUnit) -> str | None:
    """What a unit's manager needs to start it, and does not find, in words; its server is not asked.

    Raises:
        HostError: a drop-in cannot be read.
    """
    for need in _needs(ctx, live):
        if need.is_needed and (lack := _lack(ctx, need)) is not None:
            where = live.path
            for path in live.drop_ins:
                if need.said in parse_unit(_text(ctx, path) or "").directives:
                    where = path
            return f"{lack}, which `{need.said.name}=` names" + (f" in `{where}`" if where else "")
    return None


def _lack(ctx: Context, need: Need) -> str | None:
    if need.kind is Kind.USER:
        return None if account(need.name) else f"there is no user `{need.name}`"
    if need.kind is Kind.GROUP:
        return None if has_group(need.name) else f"there is no group `{need.name}`"
    if need.kind is Kind.UNIT:
        state = _state_of(ctx, need.name)
        is_refused = state is not None and state.load_state in _REFUSED
        return f"`{need.name}` is {state.load_state}" if state and is_refused else None
    paths = _matching(need.name) if need.kind is Kind.FILE else [Path(need.name)]
    gone = next((path for path in paths if is_gone(path)), None)
    # What lies on a mount is there again once the start has mounted it.
    mounts = [_state_of(ctx, str(point)) for point in gone.parents[:-1]] if gone else []
    is_mounted = all(one is None or not one.exists or one.is_active for one in mounts)
    return f"gone: `{gone}`" if gone and is_mounted else None


# Of what a unit requires, each of these keeps it from starting.
_REFUSED = {"not-found", "masked", "bad-setting", "error"}


def _state_of(ctx: Context, name: str) -> UnitState | None:
    """The state of a unit, or of the mount at a path; None where there can be none of that name."""
    with contextlib.suppress(ServiceError):
        return ctx.services.state(name)
    return None


def hides_words(live: LiveUnit) -> bool:
    """Whether the unit starts a shell or a script, which may tell its server more than stands in the unit."""
    from tunerd.engine.probe import shebang  # which takes long to import

    program = live.program or ""
    return is_shell(program) or bool(shebang(Path(program)))


def runs_with(argv: Sequence[str] | None, pid: int | None) -> bool | None:
    """Whether a process has exactly these arguments; None where that cannot be told."""
    from tunerd.machine.host import process_facts

    process = None if pid is None else process_facts(pid)
    return is_same_command(argv or (), None if process is None else process.cmdline)


def as_it_runs(ctx: Context, live: LiveUnit) -> LiveUnit | None:
    """A unit that starts a script, with the words, folder and engine's variables of the one server that this has started.

    None where the unit itself says what it serves, or nothing or more than one of what it runs listens on a port.
    """
    from tunerd.engine.flags import ENGINE_VARIABLES  # takes long to import, as psutil does
    from tunerd.machine.host import listening_programs

    if live.names_a_model or not hides_words(live):
        return None
    pid = ctx.services.state(live.unit).main_pid
    own = account(live.user or ("root" if ctx.mode is Mode.SYSTEM else str(os.getuid())))
    if pid is None or own is None:
        return None
    kept = (*ENGINE_VARIABLES, "HF_", "HUGGINGFACE_HUB_CACHE", "LD_LIBRARY_PATH")
    found = []
    for path, words, folder, variables in listening_programs(pid, own.uid):
        given = {name: text for name, text in variables.items() if name.startswith(kept)}
        server = replace(live, script=live.program, program=path, argv=(path, *words[1:]),
                         environment={**live.environment, **given}, work_dir=folder)  # fmt: skip
        if not hides_words(server):
            found.append(server)
    return found[0] if len(found) == 1 and found[0].names_a_model else None


def work_dir_of(ctx: Context, live: LiveUnit) -> str:
    """Where the server of a unit starts."""
    is_user = ctx.mode is Mode.USER
    if live.work_dir != "~" and (live.work_dir is not None or not is_user):
        return live.work_dir or "/"
    own = account(live.user) if live.user is not None and not is_user else None
    return (own.home if own is not None else ctx.environment.get("HOME")) or "/"


def unit_with(ctx: Context, text: str, live: LiveUnit | None = None) -> UnitFile:
    """What a unit with this text would be, with the drop-ins that are in force; `live` where that was just read.

    Raises:
        HostError: one of them cannot be read.
        ServiceError: the service manager does not answer.
    """
    paths = (live or ctx.services.state(ctx.unit)).drop_ins
    return with_drop_ins(text, (_text(ctx, path) or "" for path in paths))


def environment_with(ctx: Context, text: str, live: LiveUnit | None = None) -> dict[str, str]:
    """What the server of a unit with this text would get, as `unit_with`.

    Raises:
        HostError: one of its files cannot be read.
        ServiceError: the service manager does not answer.
    """
    merged, specifiers = unit_with(ctx, text, live), specifiers_of(ctx, ctx.unit)
    return environment_of(merged, specifiers) | file_environment_of(ctx, merged, specifiers)


_OUTERMOST = "-.slice"


def memory_limits(
    ctx: Context, state: UnitState, *, is_replaced: bool = False
) -> tuple[MemoryLimit, ...]:
    """The tightest MemoryMax= and MemoryHigh= of a unit and the slices around it, as its manager has them.

    Args:
        ctx: Where.
        state: Of the unit.
        is_replaced: Another file will take the place of its own: what only that says is gone then.

    Raises:
        ServiceError: the service manager does not answer.
    """
    found: dict[str, MemoryLimit] = {}
    while True:
        own = () if state.fragment_path is None else (state.fragment_path,)
        files = state.drop_ins if is_replaced else (*own, *state.drop_ins)
        limits = {"MemoryMax": state.memory_max_bytes, "MemoryHigh": state.memory_high_bytes}
        for name, n_bytes in limits.items():
            where = None if n_bytes is None else _last_with(ctx, name, files)
            if n_bytes is not None and (where is not None or not is_replaced):
                limit = MemoryLimit(name, state.unit, have_mib(n_bytes), where)
                found[name] = min(found.get(name, limit), limit, key=lambda one: one.mib)
        stays = (
            not is_replaced or _last_with(ctx, "Slice", files) or not _last_with(ctx, "Slice", own)
        )
        if state.slice in {None, _OUTERMOST} or not stays:
            return tuple(found[name] for name in limits if name in found)
        state, is_replaced = ctx.services.state(state.slice), False


def _last_with(ctx: Context, name: str, files: Iterable[Path]) -> Path | None:
    """The last of a unit's files with this directive, which is the one that counts; of those that may be read."""
    last = None
    for path in files:
        with contextlib.suppress(HostError):
            unit = parse_unit(_text(ctx, path) or "")
            last = path if any(one.name == name for one in unit.directives) else last
    return last


def with_limit(ctx: Context, failure: Failure, unit: str) -> Failure:
    """A kill by the kernel with the limit on the unit's RAM, where one can be told."""
    limits: tuple[MemoryLimit, ...] = ()
    if failure.kind is FailureKind.OUT_OF_RAM:
        with contextlib.suppress(TunerdError):
            limits = memory_limits(ctx, ctx.services.state(unit))
    for limit in limits:
        if limit.name == "MemoryMax":
            hint = f"raise it (`{ctx.systemctl} edit {limit.unit}`), or {failure.hint}"
            return replace(failure, words=f"{failure.words}; {limit}", hint=hint)
    return failure


def stands(ctx: Context, generation: Generation) -> bool:
    """Whether the unit is what was deployed; nothing replaces unasked what a person wrote."""
    return sha256(standing_text(ctx)) == generation.unit_sha256


def demand_unedited(ctx: Context, generation: Generation, wanted: str) -> None:
    """Refuse where what serves is not what is wanted, since somebody has edited its unit.

    Raises:
        DeployError: the unit is not as this generation deployed it.
    """
    if not stands(ctx, generation):
        raise DeployError(
            f"{ctx.unit} was edited by hand, so what serves is not {wanted}",
            state="nothing was touched",
            hint="`tunerd verify` shows the difference; `tunerd apply` puts back what the profile says",
        )


def standing_text(ctx: Context) -> bytes | None:
    """The unit file as it stands; None where there is none, empty where the unit is masked."""
    return b"" if _is_mask(ctx) else ctx.files.read(ctx.unit_path)


def other_drop_ins(ctx: Context, drop_ins: Iterable[str], ending: Ending) -> Iterator[str]:
    """What is laid over a unit now and was not when its swap ended, in words; a file that was written since counts too."""
    for path in drop_ins:
        stamp = stamp_of(Path(path))
        if path not in (ending.drop_ins or ()):
            yield f"a drop-in was added: `{path}`"
        elif stamp and ending.ended_s and ending.ended_s < stamp[1] / 1e9 <= ctx.clock.now_s():
            yield f"a drop-in was edited: `{path}`"


def drop_ins_in_force(ctx: Context) -> tuple[str, ...] | None:
    """The paths of the unit's drop-ins; None where the service manager does not say."""
    with contextlib.suppress(ServiceError):
        return tuple(str(path) for path in ctx.services.state(ctx.unit).drop_ins)
    return None


def limits_in_force(ctx: Context) -> tuple[str, ...] | None:
    """What the unit's drop-ins leave its server of processors and memory; None where that cannot be told."""
    with contextlib.suppress(HostError, ServiceError):
        return limits_of(unit_with(ctx, ""))
    return None


def check_manager(ctx: Context) -> None:
    """See that the service manager can do what a swap will ask of it.

    Raises:
        DeployError: it cannot, so nothing is begun.
    """
    try:
        ctx.services.check_ready()
    except ServiceError as error:
        raise DeployError(
            error.message, cause=error.cause, state="nothing was touched", hint=error.hint
        ) from error


def demand_replaceable(ctx: Context) -> None:
    """Leave a masked unit alone, for somebody said that it shall not start, and another name of a unit.

    systemd calls an empty file a mask as well; that one is a broken unit, and may be replaced. A container that
    runs is stopped as its own unit says, which is replaced before a restart stops anything.

    Raises:
        DeployError: it is masked, the name is an alias, or it runs a container.
    """
    state = ctx.services.state(ctx.unit)
    if state.unit != ctx.unit:
        raise DeployError(
            f"{ctx.unit} is another name of {state.unit}",
            cause="a unit file of this name would start a second server, and the first one would keep running",
            state="nothing was changed",
            hint=f"`tunerd settings set service.unit {state.unit}`, or remove the alias",
        )
    is_file = ctx.unit_path.exists() and not _is_mask(ctx)
    if state.load_state == "masked" and not is_file:
        raise DeployError(
            f"{state.unit} is masked: somebody does not want it to start",
            state="nothing was changed",
            hint=f"{ctx.systemctl} unmask {state.unit}",
        )
    # One that starts is there already: podman tells its manager late, when the model is loaded.
    if state.runs and not state.is_waiting and read_live_unit(ctx, now=state).is_container:
        raise DeployError(
            f"{ctx.unit} runs a container, which only its own unit knows how to stop",
            cause="the container would keep running, and hold the card's memory and the port",
            state="nothing was changed",
            hint=f"`{ctx.systemctl} stop {ctx.unit}` first; a rollback starts it again. If the new server fails, "
            f"`{ctx.systemctl} start {ctx.unit}` starts it: what you stopped stays stopped",
        )


def serving_now(ctx: Context, live: LiveUnit, state: UnitState) -> Serving:
    """How the running server is reached and named: what its unit leaves to the build is looked up."""
    serving = live.serving
    address = address_now(ctx, live, state)
    if address is None or not state.is_active:
        return serving
    server, alias = LlamaServer(address, ctx.clock), serving.alias
    if alias is None:
        props = server.props(timeout_s=1.0)
        if props is not None and props.is_router:  # the names that it lists are those of its models
            return replace(serving, port=address.port, is_router=True)
        alias = server.alias(timeout_s=1.0)
    return replace(serving, port=address.port, alias=alias)


def address_now(ctx: Context, live: LiveUnit, state: UnitState) -> Address | None:
    """Where the running server is reached, its own process alone; None where that cannot be told."""
    port = live.serving.port
    if port is None and state.is_active and state.main_pid is not None:
        port = min(listening_ports(state.main_pid) or (), default=None)
    address = _address(ctx, replace(live.serving, port=port), live)
    if address is None:
        return None
    if state.main_pid is None:  # without a process nobody is told the key
        return replace(address, api_key=None)
    return replace(address, pid=state.main_pid)


def server_now(ctx: Context, state: UnitState) -> LlamaServer | None:
    """The server of the unit that stands; None where it is not reached."""
    address = address_now(ctx, read_live_unit(ctx), state) if state.is_active else None
    return None if address is None else LlamaServer(address, ctx.clock)


def is_asleep(ctx: Context) -> bool:
    """Whether the server sleeps because nobody asks it; asking this does not wake it."""
    server = server_now(ctx, ctx.services.state(ctx.unit))
    props = None if server is None else server.props()
    return props is not None and props.is_asleep


def address_of(ctx: Context, live: LiveUnit) -> Address | None:
    """Where a unit's server will listen; None where its text does not say."""
    return _address(ctx, live.serving, live)


def _address(ctx: Context, serving: Serving, live: LiveUnit) -> Address | None:
    if serving.port is None or serving.asked_otherwise is not None:
        return None
    key = serving.api_key or read_key(ctx, serving.api_key_file, live)
    return Address(serving.host or "", serving.port, key)


def read_key(ctx: Context, path: str | None, live: LiveUnit | None = None) -> str | None:
    """The first key of an API key file, to ask the server with; None if there is none to be read.

    A file that the server opens by itself is read with its account's rights, unless root alone says where its
    path leads: whoever else does would be told what stands there.
    """
    if path is None:
        return None
    reader = None
    source = path if live is None else live.source_of(path)
    if source != path:
        path = source
    elif live is not None:
        path = str(Path(work_dir_of(ctx, live), path))
        if live.user is not None and ctx.mode is Mode.SYSTEM:
            from tunerd.engine.probe import writable_by_others  # which takes long to import

            reader = None if writable_by_others(Path(path)) is None else account(live.user)
    try:
        content = ctx.files.read(Path(path), reader=reader)
    except HostError:
        return None
    lines = (content or b"").decode("utf-8", "replace").splitlines()
    return next((line.strip() for line in lines if line.strip() and line[0] != "#"), None)


def specifiers_of(ctx: Context, unit: str) -> dict[str, str]:
    """The specifiers that units of this mode commonly use, by letter."""
    name = unit.removesuffix(".service")
    home = ctx.environment.get("HOME", "/root")
    is_system = ctx.mode is Mode.SYSTEM
    prefix, _, instance = name.partition("@")
    return {
        "n": unit,
        "N": name,
        "p": prefix,
        "i": instance,
        "h": "/root" if is_system else home,
        "j": prefix.rpartition("-")[2],
        **({"g": "root", "G": "0"} if is_system else {}),
        "u": "root" if is_system else ctx.environment.get("USER", ""),
        "U": "0" if is_system else str(os.getuid()),
        "S": "/var/lib" if is_system else f"{home}/.local/state",
        "C": "/var/cache" if is_system else f"{home}/.cache",
        "L": "/var/log" if is_system else f"{home}/.local/state/log",
        "t": "/run" if is_system else ctx.environment.get("XDG_RUNTIME_DIR", "/run"),
        "E": "/etc" if is_system else f"{home}/.config",
        "T": "/tmp",  # noqa: S108 -- systemd's own meaning
    }


def _is_mask(ctx: Context) -> bool:
    return ctx.unit_path.is_symlink() and ctx.unit_path.readlink() == Path("/dev/null")


def _text(ctx: Context, path: Path | None) -> str | None:
    if path is None:
        return None
    content = ctx.files.read(path)
    return None if content is None else content.decode("utf-8", "surrogateescape")
