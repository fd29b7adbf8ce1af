"""`tunerd engines keep`: copies a program and its libraries, so that an upgrade in place leaves a way back."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.engines import named
from tunerd.actions.find_engines import find_engines, prober
from tunerd.core.engine import SHORT, EngineIdentity
from tunerd.core.quantity import have_mib
from tunerd.core.result import ActionResult
from tunerd.errors import EngineError, HostError, UsageError
from tunerd.system.engine_programs import Found
from tunerd.system.files import lock, sync_folder

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
_RECORD = "identity.json"
_BACKEND = re.compile(r"libggml-(?!base)[a-z0-9_-]+\.so")


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy: its folder, its program, and how much it holds."""

    folder: Path
    program: Path
    n_files: int
    n_bytes: int
    is_new: bool


def keep(ctx: Context, name: str) -> ActionResult:
    """Keep an engine by name or path.

    Raises:
        UsageError: there is no such engine.
        EngineError: it is the embedded one, or cannot be read.
        HostError: the copy cannot be written.
        Busy: another change is under way.
    """
    engine = named(find_engines(ctx), name)
    if engine is None:
        raise UsageError(f"no such engine: `{name}`", hint="`tunerd engines` lists them")
    if engine.is_embedded:
        raise EngineError(
            "the embedded engine is a Python package",
            hint="pin its version with pip to keep it",
        )
    with lock(ctx.paths.lock, purpose=f"engines keep {name}", since=ctx.now_text()):
        kept = keep_program(ctx, str(engine.program))
    payload = {
        "engine": engine.name,
        "folder": str(kept.folder),
        "program": str(kept.program),
        "files": kept.n_files,
        "mib": have_mib(kept.n_bytes),
        "new": kept.is_new,
    }
    return ActionResult("engines keep", payload, has_acted=True)


def kept_folder(ctx: Context, sha256: str) -> Path | None:
    """Where a copy of the build of this identity is kept; None where there is none."""
    folder = ctx.paths.engines_dir / sha256[:SHORT]
    return folder if (folder / _RECORD).exists() else None


def keep_program(ctx: Context, program: str) -> Kept:
    """Copy a program and what it maps below STATE; a copy that is there already stays.

    Raises:
        EngineError: it cannot be probed or read.
        HostError: the copy cannot be written.
    """
    identity = prober(ctx).identity(Found(Path(program), "kept"))
    folder = ctx.paths.engines_dir / identity.short
    target = folder / "bin" / Path(program).name
    n_bytes = sum(component.size for component in identity.components)
    if (folder / _RECORD).exists():
        return Kept(folder, target, len(identity.components), n_bytes, is_new=False)
    ctx.files.make_folder(ctx.paths.engines_dir)
    unfinished = ctx.paths.engines_dir / f".{identity.short}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _copy(identity, Path(program), unfinished)
        from tunerd.system.engines import identity_to_json

        ctx.files.write_json(unfinished / _RECORD, identity_to_json(identity))
        unfinished.rename(folder)
        sync_folder(ctx.paths.engines_dir)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise HostError(
            f"cannot keep `{program}`", cause=error.strerror or str(error), state="nothing was kept"
        ) from error
    return Kept(folder, target, len(identity.components), n_bytes, is_new=True)


def _copy(identity: EngineIdentity, program: Path, folder: Path) -> None:
    """The program into `bin`, its libraries into `lib`, by the names under which it asks for them.

    Backends, which are opened by hand and not by name, are looked for beside the program.
    """
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    real = program.resolve()
    for component in identity.components:
        if component.path == real:
            shutil.copy2(component.path, folder / "bin" / program.name)
        elif _BACKEND.fullmatch(component.path.name):
            for backend in component.path.parent.glob("libggml-*.so"):
                shutil.copy2(backend, folder / "bin" / backend.name)
        elif not component.path.name.startswith(_SYSTEM_LIBRARIES):
            shutil.copy2(component.path, folder / "lib" / component.path.name)
            for alias in component.path.parent.glob("*.so*"):
                if alias.is_symlink() and alias.resolve() == component.path:
                    (folder / "lib" / alias.name).symlink_to(component.path.name)
