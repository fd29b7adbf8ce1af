"""What a supervised unit is said to be: its files as last read."""

from __future__ import annotations

from tunerd.core.local_service import ServiceSpec, read_service
from tunerd.core.paths import Paths
from tunerd.errors import ConfigError, ServiceError
from tunerd.system.unit_source import UnitSource, enabled_mark, read_source, signature


class UnitDefinition:
    """The definition of a unit; `spec` is None where it cannot be started."""

    def __init__(self, unit: str, paths: Paths) -> None:
        self.unit = unit
        self.spec: ServiceSpec | None = None
        self.load_state = "not-found"
        self.load_error = ""
        self._paths = paths
        self._source: UnitSource
        self.load()

    def load(self) -> None:
        """Read the unit's files."""
        source = read_source(self._paths, self.unit)
        self._source = source
        self.spec, self.load_error = None, ""
        if source.path is None:
            self.load_state = "not-found"
        elif source.is_empty:
            self.load_state = "masked"
        elif any(problem.is_fatal for problem in source.file.problems):
            self.load_state = "error"
        else:
            try:
                self.spec = read_service(self.unit, source.file)
                self.load_state = "loaded"
            except ConfigError as error:
                self.load_state, self.load_error = "bad-setting", error.message

    def demand(self) -> ServiceSpec:
        """What to start.

        Raises:
            ServiceError: There is no usable definition.
        """
        if self.spec is not None:
            return self.spec
        if self.load_state == "not-found":
            raise ServiceError(f"unit {self.unit} not found")
        if self.load_state == "masked":
            raise ServiceError(f"unit {self.unit} is masked", cause="its file is empty")
        raise ServiceError(f"unit {self.unit} does not load", cause=self.load_error)

    def properties(self) -> dict[str, str]:
        """Its part of what `systemctl show` would print."""
        return {
            "Id": self.unit,
            "LoadState": self.load_state,
            "LoadError": self.load_error,
            "FragmentPath": str(self._source.path or ""),
            "DropInPaths": " ".join(str(path) for path in self._source.drop_ins),
            "NeedDaemonReload": "yes" if self.needs_reload else "no",
            "UnitFileState": self._file_state(),
        }

    @property
    def needs_reload(self) -> bool:
        """Whether its files changed since they were read."""
        return signature(self._paths, self.unit) != self._source.signature

    def _file_state(self) -> str:
        if self.load_state == "not-found":
            return ""
        if enabled_mark(self._paths, self.unit).exists():
            return "enabled"
        return "disabled" if self.spec is None or self.spec.can_be_enabled else "static"
