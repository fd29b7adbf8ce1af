"""What systemd makes of a unit's files, as far as the fake manager needs it: drop-ins and masks count."""

from __future__ import annotations

from pathlib import Path

from tunerd.errors import ConfigError, ServiceError
from tunerd.paths import Paths
from tunerd.tryout.local_service import ServiceSpec, read_service
from tunerd.tryout.local_state import enabled_mark
from tunerd.units.text import UnitFile, parse_unit


class UnitDefinition:
    """The definition of a unit as last read; `spec` is None where it cannot be started."""

    def __init__(self, unit: str, paths: Paths) -> None:
        self.unit = unit
        self._paths = paths
        self.load()

    def load(self) -> None:
        """Read the unit's files."""
        self.spec: ServiceSpec | None = None
        self._signature = self._look()
        self._path, self._drop_ins = self._files()
        if self._path is None:
            self.load_state = "not-found"
            return
        text = _text(self._path)
        file = parse_unit(text)
        for path in self._drop_ins:
            file = file.with_drop_in(parse_unit(_text(path)))
        self.load_state = _load_state(text, file)
        if self.load_state == "loaded":
            try:
                self.spec = read_service(self.unit, file)
            except ConfigError:
                self.load_state = "bad-setting"

    def demand(self) -> ServiceSpec:
        """What to start."""
        if self.spec is None:
            raise ServiceError(f"unit {self.unit} does not load", cause=self.load_state)
        return self.spec

    def properties(self) -> dict[str, str]:
        """Its part of what `systemctl show` would print."""
        state = "" if self.load_state == "not-found" else "disabled"
        if self.spec is not None and not self.spec.can_be_enabled:
            state = "static"
        if state and enabled_mark(self._paths, self.unit).exists():
            state = "enabled"
        return {
            "Id": self.unit,
            "LoadState": self.load_state,
            "FragmentPath": str(self._path or ""),
            "DropInPaths": " ".join(str(path) for path in self._drop_ins),
            "NeedDaemonReload": "yes" if self._look() != self._signature else "no",
            "UnitFileState": state,
        }

    def _files(self) -> tuple[Path | None, list[Path]]:
        """By file name, as systemd orders drop-ins; the same name in the durable folder wins."""
        folders = (self._paths.unit_dir, self._paths.runtime_unit_dir)
        fragments = [folder / self.unit for folder in folders if (folder / self.unit).is_file()]
        named = {
            path.name: path
            for folder in reversed(folders)
            for path in (folder / f"{self.unit}.d").glob("*.conf")
        }
        return next(iter(fragments), None), [named[name] for name in sorted(named)]

    def _look(self) -> list[tuple[str, int, int, int]]:
        fragment, drop_ins = self._files()
        files = [*([fragment] if fragment is not None else []), *drop_ins]
        found = [(path, path.stat()) for path in files]
        return [(str(path), s.st_ino, s.st_mtime_ns, s.st_size) for path, s in found]


def _load_state(text: str, file: UnitFile) -> str:
    if not text.strip():
        return "masked"
    return "error" if file.is_broken else "loaded"


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")
