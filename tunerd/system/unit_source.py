"""Where the text of a supervised unit stands, and whether it changed since it was read."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from tunerd.core.paths import Paths
from tunerd.core.unit_file import UnitFile, parse_unit
from tunerd.errors import ServiceError

_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]{1,240}\.service")
_MAX_FILE_BYTES = 2 * 1024 * 1024
_ENABLED_SUFFIX = ".wants"

Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class UnitSource:
    """A unit's files as read at one moment; `path` is None where there is no unit file."""

    unit: str
    path: Path | None
    drop_ins: tuple[Path, ...]
    file: UnitFile
    is_empty: bool
    signature: Signature


def check_name(unit: str) -> str:
    """`unit`, if it is the name of a service.

    Raises:
        ServiceError: It is none, or would lead out of the folder.
    """
    if not _NAME.fullmatch(unit) or unit.startswith("."):
        raise ServiceError(f"not the name of a service unit: {unit!r}")
    return unit


def enabled_mark(paths: Paths, unit: str) -> Path:
    """The file whose presence makes the unit start with the supervisor."""
    return paths.unit_dir / f"{unit}{_ENABLED_SUFFIX}"


def enabled_units(paths: Paths) -> tuple[str, ...]:
    """Units that start with the supervisor."""
    marks = paths.unit_dir.glob(f"*.service{_ENABLED_SUFFIX}")
    return tuple(sorted(mark.name.removesuffix(_ENABLED_SUFFIX) for mark in marks))


def unit_names(paths: Paths) -> tuple[str, ...]:
    """Names of all units that have a file."""
    folders = (paths.unit_dir, paths.runtime_unit_dir)
    found = {path.name for folder in folders for path in folder.glob("*.service")}
    return tuple(sorted(name for name in found if _NAME.fullmatch(name)))


def read_source(paths: Paths, unit: str) -> UnitSource:
    """The unit's file and drop-ins; the durable folder wins over the one that a reboot forgets."""
    path = _fragment(paths, unit)
    drop_ins = _drop_ins(paths, unit)
    text = _text(path) if path is not None else ""
    file = parse_unit(text, source=str(path or ""))
    for drop_in in drop_ins:
        file = file.with_drop_in(parse_unit(_text(drop_in), source=str(drop_in)))
    return UnitSource(unit, path, drop_ins, file, not text.strip(), signature(paths, unit))


def signature(paths: Paths, unit: str) -> Signature:
    """Changes when one of the unit's files does."""
    found = []
    for path in (_fragment(paths, unit), *_drop_ins(paths, unit)):
        if path is not None:
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((str(path), status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def _fragment(paths: Paths, unit: str) -> Path | None:
    for folder in (paths.unit_dir, paths.runtime_unit_dir):
        path = folder / unit
        if path.is_file():
            return path
    return None


def _drop_ins(paths: Paths, unit: str) -> tuple[Path, ...]:
    """By file name, as systemd orders them; the same name in the durable folder wins."""
    by_name: dict[str, Path] = {}
    for folder in (paths.runtime_unit_dir, paths.unit_dir):
        for path in (folder / f"{unit}.d").glob("*.conf"):
            by_name[path.name] = path
    return tuple(by_name[name] for name in sorted(by_name))


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "surrogateescape")
    return ""
