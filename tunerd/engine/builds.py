"""The builds on this machine: found, probed, each under a name, kept, and asked what they refuse."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunerd.app import Context
from tunerd.engine import probe
from tunerd.engine.capabilities import Capabilities, Engine, EngineIdentity, Found, SpecStyle
from tunerd.engine.flags import PLAIN_FLAGS, named_files, normal_spelling
from tunerd.engine.health import argument_error, last_words
from tunerd.engine.importer import unlisted_flags
from tunerd.engine.serving import missing_to_start, read_live_unit
from tunerd.errors import EngineError, HostError, ModelFileError, TunerdError, UsageError
from tunerd.machine.files import is_gone, lock, real_path, sync_folder
from tunerd.machine.net import free_port
from tunerd.machine.process import account_homes, probe_account
from tunerd.model.facts import ModelFacts
from tunerd.model.files import ModelFiles, parts_of
from tunerd.profile.schema import SPEC_WORDS
from tunerd.records import plain
from tunerd.result import ActionResult
from tunerd.units.live import MODEL_VARIABLES, LiveUnit, is_shell
from tunerd.units.sandbox import BUS, Sandbox
from tunerd.units.systemd import Systemd
from tunerd.words import Family, Mode, have_mib

_KNOWN_UNITS = ("llama-server.service",)


def prober(ctx: Context) -> probe.EngineProber:
    """The prober of this mode."""
    return probe.EngineProber(ctx.paths.cache_dir, ctx.files, sandbox(ctx), tell=ctx.say)


def sandbox(ctx: Context) -> Sandbox:
    """Where foreign programs are run: in units of the system's systemd where that is ours to ask."""
    account = probe_account(ctx.settings.service.user)
    may_ask = ctx.mode is Mode.SYSTEM and os.geteuid() == 0 and BUS.exists()
    if may_ask and isinstance(ctx.services, Systemd):
        return Sandbox(account, ctx.services)
    return Sandbox(account)


def find_programs(ctx: Context) -> tuple[Found, ...]:
    """Programs that may be engines, from the operator's settings to common build folders."""
    named = [
        Found(one.path, f"settings engines.{name}", name, dict(sorted(one.environment.items())))
        for name, one in ctx.settings.engines.items()
    ]
    embedded = probe.own_server()
    own = () if embedded is None else (Found(embedded, "installed with tunerd"),)
    kept = tuple(_kept(ctx))
    by_name = {real_path(one.program): one for one in kept}  # what serves is still called so
    serving = tuple(by_name.get(real_path(one.program), one) for one in _serving(ctx))
    on_path = probe.programs_in(probe.path_folders(ctx.environment.get("PATH", "")), "PATH")
    homes = (
        account_homes() if ctx.mode is Mode.SYSTEM else (Path(ctx.environment.get("HOME", "/")),)
    )
    built = probe.programs_in(probe.build_folders(homes), "build folder")
    return probe.distinct((*named, *own, *serving, *on_path, *kept, *built))


def engine_of(ctx: Context, found: Found) -> Engine:
    """The engine behind a program; one that cannot be probed is an engine with a problem."""
    found = probe.by_own_path(found)
    is_embedded = probe.is_own_server(found.program)
    blank = Engine(
        name=found.name or ("embedded" if is_embedded else found.program.name),
        program=found.program,
        found_by=found.found_by,
        is_embedded=is_embedded,
        environment=found.environment,
    )
    refused = _refusal(ctx, found, is_embedded=is_embedded)
    if refused is not None:
        return replace(blank, problem=refused)
    try:
        result = prober(ctx).probe(found)
    except EngineError as error:
        return replace(blank, problem=error.words)
    capabilities = result.capabilities
    engine = replace(
        blank,
        identity=result.identity,
        version=result.version,
        capabilities=capabilities,
        subcommand=result.subcommand,
        proofs=probe.read_proofs(ctx.paths.cache_dir, ctx.files, result.identity),
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


def engines_meant(engines: tuple[Engine, ...], wanted: str) -> tuple[Engine, ...]:
    """Engines that a word of `engine.prefer` means: a family, `embedded`, a name or a path."""
    if "/" in wanted:
        path = real_path(Path(wanted))
        return tuple(engine for engine in engines if real_path(engine.program) == path)
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
    """Why a program may not be run; only system mode, where root decides what runs, is strict.

    What the operator allows is allowed by its path, whoever names it: settings, a unit or a profile.
    """
    named = {one.path: name for name, one in ctx.settings.engines.items()}
    name = named.get(found.program)
    is_allowed = name is not None and ctx.settings.engines[name].allow_writable
    if ctx.mode is not Mode.SYSTEM or is_allowed or is_embedded:
        return None
    who = probe.writable_by_others(found.program)
    if who is None:
        return None
    if not found.program.is_file():
        return f"not run, because {who}"
    setting = f"tunerd settings set engines.{name or 'NAME'}"
    path = "" if name else f"`{setting}.path {found.program}` and "
    return f"not run, because {who}; {path}`{setting}.allow_writable true` allow{'s' if name else ''} it"


def _serving(ctx: Context) -> Iterator[Found]:
    """Programs of units that serve already."""
    for unit in {ctx.unit, *_KNOWN_UNITS}:
        try:
            live = read_live_unit(ctx, unit)
        except TunerdError:
            continue
        if live.program is not None and not is_shell(live.program):
            yield found_in_unit(live, Path(live.program))


# By these a build finds its own libraries; of a unit's variables it needs no others to be looked at.
_FINDS_LIBRARIES = ("LD_LIBRARY_PATH", "GGML_BACKEND_PATH")


def found_in_unit(live: LiveUnit, program: Path) -> Found:
    """The program of a unit, with what the unit gives it to find its libraries by."""
    given = live.environment
    variables = {name: given[name] for name in _FINDS_LIBRARIES if name in given}
    return Found(program, f"{probe.OF_A_UNIT}{live.unit}", environment=variables)


def _kept(ctx: Context) -> Iterator[Found]:
    """Copies that `engines keep` made."""
    if not ctx.paths.engines_dir.is_dir():
        return
    for folder in sorted(ctx.paths.engines_dir.iterdir()):
        for program in sorted((folder / "bin").glob("*")):
            if program.suffix == ".so":
                continue
            libraries = folder / "lib"
            environment = {"LD_LIBRARY_PATH": str(libraries)} if libraries.is_dir() else {}
            yield Found(program, "kept copy", f"kept-{folder.name}", environment)


def _name(engine: Engine, family: Family) -> str:
    if engine.version is not None and engine.version.label is not None:
        return f"{family}-{engine.version.label}"
    identity = engine.identity.sha256[:8] if engine.identity is not None else "unknown"
    return f"{family}-{identity}"


def engine_json(engine: Engine) -> dict[str, Any]:
    """An engine as scripts read it."""
    identity, capabilities = engine.identity, engine.capabilities
    return {
        "name": engine.name,
        "path": str(engine.program),
        "found_by": engine.found_by,
        "problem": engine.problem,
        "version": None if engine.version is None else engine.version.text,
        "identity": None if identity is None else identity.sha256,
        "components": None
        if identity is None
        else [{"path": str(one.path), "sha256": one.sha256} for one in identity.components],
        "family": None if capabilities is None else str(capabilities.family),
        "dialect": None if capabilities is None else capabilities.dialect,
        "capabilities": None if capabilities is None else _capabilities_json(capabilities),
        "lacks": None if capabilities is None else list(_lacks(capabilities)),
        "proofs": [plain(proof) for proof in engine.proofs],
        "embedded": engine.is_embedded,
    }


def _capabilities_json(capabilities: Capabilities) -> dict[str, Any]:
    same = ("fit_default_on", "default_n_max", "default_p_min", "default_port")
    return {
        "spec_types": list(capabilities.spec_types),
        "spec_style": str(capabilities.spec_style),
        "fit": str(capabilities.fit),
        "load_mode": capabilities.has_load_mode,
        **{name: getattr(capabilities, name) for name in same},
    }


def _lacks(capabilities: Capabilities) -> tuple[str, ...]:
    """Profile keys and kinds of speculation that this build cannot serve."""
    missing = [
        row.key
        for row in PLAIN_FLAGS
        if row.off is None and capabilities.first_of(*row.spellings) is None
    ]
    if capabilities.spec_style is SpecStyle.NONE:
        missing.append("speculation")
    missing += [
        f"speculation.type={kind}" for kind in SPEC_WORDS if capabilities.spec_word(kind) is None
    ]
    return tuple(missing)


# Of the C library and the loader the machine has one; a copy beside another would break.
_SYSTEM_LIBRARIES = (
    "ld-linux",
    "libc.so",
    "libm.so",
    "libdl.so",
    "libpthread.so",
    "librt.so",
    "libresolv.so",
    "libnss_",
)


def keep(ctx: Context, name: str) -> ActionResult:
    """Keep an engine by name or path.

    Raises:
        UsageError: there is no such engine.
        EngineError: it is the embedded one, or cannot be read.
        HostError: the copy cannot be written.
        Busy: another change is under way.
    """
    engine = next(iter(engines_meant(find_engines(ctx), name)), None)
    if engine is None:
        raise UsageError(f"no such engine: `{name}`", hint="`tunerd engines` lists them")
    if engine.is_embedded:
        raise EngineError(
            "the embedded engine is a Python package",
            hint="pin its version with pip to keep it",
        )
    if engine.problem is not None:
        raise EngineError(
            f"cannot keep {engine.name}", cause=engine.problem, state="nothing was kept"
        )
    with lock(ctx.paths.lock, purpose=f"engines keep {name}", since=ctx.now_text()):
        identity, program, is_new = keep_program(ctx, engine)
    payload = {
        "engine": engine.name,
        "name": f"kept-{program.parents[1].name}",
        "folder": str(program.parents[1]),
        "program": str(program),
        "files": len(identity.components),
        "mib": have_mib(sum(component.size for component in identity.components)),
        "new": is_new,
    }
    return ActionResult("engines keep", payload, has_acted=True)


def keep_program(ctx: Context, found: Found) -> tuple[EngineIdentity, Path, bool]:
    """Copy a program and what it maps below STATE; a copy that is there already stays.

    Returns:
        What it consists of, the copy of the program, and whether it is new.

    Raises:
        EngineError: it cannot be probed or read.
        HostError: the copy cannot be written.
    """
    engines, program = prober(ctx), found.program
    identity = engines.identity(found)
    folder = ctx.paths.engines_dir / identity.short
    target = folder / "bin" / program.name
    started = _started_build(engines, found, identity)
    if started is not None:
        raise EngineError(
            f"a copy of `{program}` would not keep the build: it is a script that starts `{started}`",
            state="nothing was kept",
            hint="set `path` in [engines.NAME] to that program; a unit may start it without the script",
        )
    if probe.kept_folder(ctx.paths.engines_dir, identity.sha256):
        return identity, target, False
    ctx.files.make_folder(ctx.paths.engines_dir)
    unfinished = ctx.paths.engines_dir / f".{identity.short}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        for name in ("bin", "lib"):
            ctx.files.make_folder(unfinished / name)
        _copy(engines, identity, program, unfinished)
        ctx.files.write_json(unfinished / probe.KEPT_RECORD, plain(identity))
        unfinished.rename(folder)
        sync_folder(ctx.paths.engines_dir)
    except (OSError, EngineError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, EngineError):
            raise
        raise HostError(
            f"cannot keep `{program}`", cause=error.strerror or str(error), state="nothing was kept"
        ) from error
    return identity, target, True


def _started_build(
    engines: probe.EngineProber, found: Found, identity: EngineIdentity
) -> Path | None:
    """The build that a script starts, as a copy of the script would too; None where it starts none."""
    own = real_path(found.program)
    for part in identity.components:
        if part.path != own and ".so" not in part.path.name:
            with contextlib.suppress(EngineError):
                engines.probe(replace(found, program=part.path, subcommand=None))
                return part.path
    return None


def _copy(
    engines: probe.EngineProber, identity: EngineIdentity, program: Path, folder: Path
) -> None:
    """The program into `bin`, its libraries into `lib`, by the names under which it asks for them.

    Backends, which are opened by hand and not by name, are looked for beside the program.
    """
    real = program.resolve()
    for component in identity.components:
        name = component.path.name
        if component.path == real:
            engines.copy(real, component, folder / "bin" / program.name)
        elif name.startswith(_SYSTEM_LIBRARIES):
            continue
        else:
            place = folder / ("bin" if probe.BACKEND.fullmatch(name) else "lib")
            engines.copy(real, component, place / name)
            for alias in component.path.parent.glob("*.so*"):
                if alias.is_symlink() and real_path(alias) == component.path:
                    (place / alias.name).symlink_to(name)
                    if place.name == "lib" and probe.BACKEND.fullmatch(alias.name):
                        (folder / "bin" / alias.name).symlink_to(f"../lib/{name}")


# Of a program whose libraries do not fit, by the dynamic loader.
_NOT_LOADED = 127
_LEFT_OUT = frozenset(
    {"--api-key-file", "--port", "-mu", "--model-url", "-dr", "--docker-repo",
     "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"}
)  # fmt: skip
_FETCHES = re.compile(r"--(?!spec-).+-default")
_MODEL_FLAGS = frozenset({"-m", "--model"})


def refusal(ctx: Context, found: Found, arguments: Sequence[str]) -> str | None:
    """Why the engine refuses arguments whose model file does not exist; None if it does not.

    One that a signal ended is tried once more: what is wrong with an argument is wrong each time.

    Raises:
        EngineError: it could not be run, or did not end.
    """
    done = prober(ctx).run(found, arguments)
    if done.returncode is None:
        done = prober(ctx).run(found, arguments)
    return argument_error(done.returncode, f"{done.stdout}\n{done.stderr}")


def dry_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a server as a dry run takes them: no model, no key file, a port of its own.

    Builds bind their port before they look for the model; a key file is there only while the unit
    runs. One that is told no model at all would not end: it is a router.
    """
    changed: list[str] = []
    words = iter(arguments)
    for word in words:
        if normal_spelling(word) in _LEFT_OUT:
            next(words, None)
        elif word in _MODEL_FLAGS:
            changed += [word, f"/nonexistent/{Path(next(words, '')).name}"]
        elif not _FETCHES.fullmatch(word):
            changed.append(word)
    model = [] if _MODEL_FLAGS & set(changed) else ["--model", "/nonexistent/none.gguf"]
    return [*changed, *model, "--port", str(free_port())]


def foreign_flags(
    ctx: Context, found: Found, live: LiveUnit, capabilities: Capabilities
) -> tuple[str, ...]:
    """Flags, and variables in their place, that the build neither lists nor takes: a dry run has the last word."""
    gone = {option.env for option in capabilities.help.options if option.is_removed}
    variables = {name: value for name, value in live.environment.items() if name in gone}
    unlisted = (*unlisted_flags(live.arguments, capabilities), *variables)
    if not unlisted:
        return ()
    found = replace(found, environment={**found.environment, **variables})
    try:
        refused = refusal(ctx, found, dry_arguments(live.arguments))
    except EngineError:
        return ()
    return unlisted if refused is not None else ()


def files_of(argv: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """The files that a command line has its server read, every part of a split one, each with what names it."""
    for what, name in named_files(argv).items():
        yield from ((what, part) for part in parts_of(Path(name)))


def why_no_start(ctx: Context, live: LiveUnit, *, is_tried: bool = False) -> str | None:
    """Why a unit's server cannot start on what is here by now; None where nothing is known against it.

    With `is_tried` its build is asked what it says of its words, whatever flags it lists.
    """
    if (why := missing_to_start(ctx, live)) is not None:
        return why
    if live.program is None or live.argv is None or live.is_container or live.has_own_root:
        return None
    program, named = Path(live.program), named_files(live.argv)
    parts = [program, *(part for _, part in files_of(live.argv))]
    gone = [path for path in parts if path.is_absolute() and is_gone(path)]
    if "/" not in live.program:  # what is found has a path by now
        gone.insert(0, program)
    if gone and live.has_own_files:
        return None
    if gone:
        return f"gone: {', '.join(f'`{path}`' for path in gone)}"
    try:
        if "model.path" in named:
            read_facts(ctx, Path(named["model.path"]))
    except ModelFileError as error:
        if not isinstance(error.__cause__, OSError):  # which may be ours alone
            return error.words
    return _why_not_run(ctx, found_in_unit(live, program), live, is_tried=is_tried)


def _why_not_run(ctx: Context, found: Found, live: LiveUnit, *, is_tried: bool) -> str | None:
    """Why a program does not run with these arguments, where it may be asked."""
    engine = engine_of(ctx, found)
    if is_tried:
        variables = {k: v for k, v in live.environment.items() if k not in MODEL_VARIABLES}
        tried = replace(engine, environment=variables)
        with contextlib.suppress(EngineError):  # of a closed home, or a machine under load
            if (said := refusal(ctx, tried, dry_arguments(live.arguments))) is not None:
                return said
    if engine.capabilities is not None:
        flags = foreign_flags(ctx, engine, live, engine.capabilities)
        return f"`{found.program}` no longer accepts {', '.join(flags)}" if flags else None
    if _refusal(ctx, found, is_embedded=engine.is_embedded) is not None:
        return None
    try:
        done = prober(ctx).run(replace(found, subcommand=()), ("--version",))
    except EngineError:
        return None
    if done.returncode in {None, _NOT_LOADED}:
        words = last_words(f"{done.stdout}\n{done.stderr}".splitlines())
        words = words if done.returncode is not None else f"ended by signal {done.signal}"
        return f"`{found.program}` does not run: {words}"
    return None


def read_facts(ctx: Context, path: Path) -> ModelFacts:
    """What the header of a model file says.

    Raises:
        ModelFileError: it is missing or damaged.
    """
    return ModelFiles(ctx.paths.cache_dir, ctx.files).read_facts(path)
