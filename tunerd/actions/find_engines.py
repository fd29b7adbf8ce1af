"""Which engines this machine has, and what each was probed and proved to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.live import read_live_unit
from tunerd.core.engine import Engine, Family
from tunerd.core.host import Mode
from tunerd.errors import EngineError, TunerdError
from tunerd.system.accounts import account_homes, probe_account
from tunerd.system.engine_programs import (
    Found,
    build_folders,
    distinct,
    is_own_server,
    own_server,
    path_folders,
    programs_in,
    writable_by_others,
)
from tunerd.system.engines import EngineProber
from tunerd.system.proofs import read_proofs

_KNOWN_UNITS = ("llama-server.service",)


def prober(ctx: Context) -> EngineProber:
    """The prober of this mode: as the service's user where we are root."""
    account = probe_account(ctx.settings.service.user)
    return EngineProber(ctx.paths.cache_dir, ctx.files, account)


def find_programs(ctx: Context) -> tuple[Found, ...]:
    """Programs that may be engines, from the operator's settings to common build folders."""
    named = [
        Found(
            program=settings.path,
            found_by=f"settings engines.{name}",
            name=name,
            environment=tuple(sorted(settings.environment.items())),
            allow_writable=settings.allow_writable,
        )
        for name, settings in ctx.settings.engines.items()
    ]
    embedded = own_server()
    own = () if embedded is None else (Found(embedded, "installed with tunerd"),)
    serving = tuple(_serving(ctx))
    on_path = programs_in(path_folders(ctx.environment.get("PATH", "")), "PATH")
    kept = tuple(_kept(ctx))
    homes = account_homes() if ctx.mode is Mode.SYSTEM else (_home(ctx),)
    built = programs_in(build_folders(homes), "build folder")
    return distinct((*named, *own, *serving, *on_path, *kept, *built))


def engine_of(ctx: Context, found: Found) -> Engine:
    """The engine behind a program; one that cannot be probed is an engine with a problem."""
    is_embedded = is_own_server(found.program)
    blank = Engine(
        name=found.name or ("embedded" if is_embedded else found.program.name),
        program=found.program,
        found_by=found.found_by,
        identity=None,
        version=None,
        capabilities=None,
        proofs=(),
        problem=None,
        is_embedded=is_embedded,
        environment=dict(found.environment),
    )
    refused = _refusal(ctx, found, is_embedded=is_embedded)
    if refused is not None:
        return replace(blank, problem=refused)
    try:
        result = prober(ctx).probe(found)
    except EngineError as error:
        return replace(
            blank, problem=f"{error.message}: {error.cause}" if error.cause else error.message
        )
    capabilities = result.capabilities
    engine = replace(
        blank,
        identity=result.identity,
        version=result.version,
        capabilities=capabilities,
        proofs=read_proofs(ctx.paths.cache_dir, ctx.files, result.identity),
    )
    if found.name is not None or is_embedded:
        return engine
    return replace(engine, name=_name(engine, capabilities.family))


def find_engines(ctx: Context) -> tuple[Engine, ...]:
    """Every engine, each under a name of its own."""
    engines: list[Engine] = []
    taken: set[str] = set()
    for found in find_programs(ctx):
        engine = engine_of(ctx, found)
        name, nth = engine.name, 1
        while name in taken:
            nth += 1
            name = f"{engine.name}-{nth}"
        taken.add(name)
        engines.append(replace(engine, name=name))
    return tuple(engines)


def candidates(engines: tuple[Engine, ...], wanted: str) -> tuple[Engine, ...]:
    """Engines that a word of `engine.prefer` means: a family, `embedded`, a name or a path."""
    if "/" in wanted:
        path = Path(wanted)
        return tuple(engine for engine in engines if _same_file(engine.program, path))
    exact = tuple(engine for engine in engines if engine.name == wanted)
    if exact:
        return exact
    if wanted == "embedded":
        return tuple(engine for engine in engines if engine.is_embedded)
    return tuple(
        engine
        for engine in engines
        if engine.capabilities is not None
        and engine.capabilities.family == wanted
        and not engine.is_embedded
    )


def _refusal(ctx: Context, found: Found, *, is_embedded: bool) -> str | None:
    """Why a program may not be run; only system mode, where root decides what runs, is strict."""
    if ctx.mode is not Mode.SYSTEM or found.allow_writable or is_embedded:
        return None
    who = writable_by_others(found.program)
    if who is None:
        return None
    return f"not run, because {who}; name it in `{ctx.paths.settings_file}` to allow it"


def _serving(ctx: Context) -> Iterator[Found]:
    """Programs of units that serve already."""
    for unit in {ctx.unit, *_KNOWN_UNITS}:
        try:
            live = read_live_unit(ctx, unit)
        except TunerdError:
            continue
        if live.program is not None and Path(live.program).name != "sh":
            yield Found(Path(live.program), f"unit {unit}")


def _kept(ctx: Context) -> Iterator[Found]:
    """Copies that `engines keep` made."""
    if not ctx.paths.engines_dir.is_dir():
        return
    for folder in sorted(ctx.paths.engines_dir.iterdir()):
        for program in sorted((folder / "bin").glob("*")):
            if program.suffix == ".so":
                continue
            libraries = folder / "lib"
            environment = (("LD_LIBRARY_PATH", str(libraries)),) if libraries.is_dir() else ()
            yield Found(program, "kept copy", f"kept-{folder.name}", environment)


def _name(engine: Engine, family: Family) -> str:
    version = engine.version
    if version is not None and version.semantic is not None:
        return f"{family}-{version.semantic}"
    if version is not None and version.build:
        return f"{family}-b{version.build}"
    identity = engine.identity.sha256[:8] if engine.identity is not None else "unknown"
    return f"{family}-{identity}"


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _home(ctx: Context) -> Path:
    return Path(ctx.environment.get("HOME", "/"))
