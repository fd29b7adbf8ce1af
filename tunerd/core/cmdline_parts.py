"""The pieces that a command line is made of, and what a renderer needs to know of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tunerd.core.resolve import Origin


@dataclass(frozen=True, slots=True)
class Argument:
    """One flag with its value, the profile key behind it, and who set that key."""

    flag: str
    value: str | None
    key: str
    origin: Origin

    @property
    def words(self) -> tuple[str, ...]:
        """As it stands in the argument vector."""
        return (self.flag,) if self.value is None else (self.flag, self.value)


@dataclass(frozen=True, slots=True)
class Note:
    """A key that left no trace on the command line, and why."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A key that this build cannot serve: what was asked, by whom, why not, and the way out."""

    key: str
    value: str
    origin: Origin
    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value} (from {self.origin}): {self.reason}; {self.hint}"


Part = Argument | Note | Refusal


_COUNTS_OF_CORES = frozenset({"serving.threads", "serving.threads_batch"})


@dataclass(frozen=True, slots=True)
class RenderContext:
    """What a command line takes from the machine.

    `paths` are files and folders found for keys that name them (`model.path` has its own field);
    `physical_cores` is None when unknown.
    """

    program: str
    model_path: str
    has_gpu: bool
    physical_cores: int | None
    paths: Mapping[str, str] = field(default_factory=dict)

    def substitute(self, key: str, value: object) -> object | None:
        """The value as this machine has it: files by their path, `physical` as a number.

        None where the machine's value is not known.
        """
        if key in self.paths:
            return self.paths[key]
        if key in _COUNTS_OF_CORES and value == "physical":
            return self.physical_cores
        return value
