"""Generations on disk: `generations/000014/` with the record, the unit's text and how it ended.

A record is never edited: the ending is a file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from tunerd.core.generation import SCHEMA, Ending, Generation, HistoryEntry, Outcome
from tunerd.errors import HostError
from tunerd.system.files import Files

_DIGITS = 6
_NUMBER = re.compile(rf"[0-9]{{{_DIGITS},12}}")
_RECORD = "generation.json"
_ENDING = "outcome.json"
_UNIT = "unit"


class Generations:
    """The generations of one STATE folder."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._files = files
        self.damaged: set[int] = set()  # numbers whose record could not be read, as far as seen

    def numbers(self) -> tuple[int, ...]:
        """All numbers, highest first."""
        found = (int(name) for name in self._names() if _NUMBER.fullmatch(name))
        return tuple(sorted(found, reverse=True))

    def next_number(self) -> int:
        """One above the highest that is in use, or is in the name of a folder put aside."""
        used = (name.partition(".")[0] for name in self._names())
        return max((int(name) for name in used if _NUMBER.fullmatch(name)), default=0) + 1

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise HostError(f"cannot read `{self._folder}`", cause=error.strerror) from error

    def create(self, generation: Generation, unit_text: bytes | None) -> None:
        """Write a new generation durably, before its swap changes anything.

        Raises:
            HostError: it exists, or cannot be written.
        """
        folder = self._folder_of(generation.number)
        if folder.exists():
            raise HostError(f"generation {generation.number} exists already: `{folder}`")
        self._files.make_folder(folder)
        if unit_text is not None:
            self._files.write(folder / _UNIT, unit_text)
        self._files.write_json(folder / _RECORD, {"schema": SCHEMA, **asdict(generation)})

    def end(self, number: int, ending: Ending) -> None:
        """Write how the swap of a generation ended."""
        self._files.write_json(self._folder_of(number) / _ENDING, asdict(ending))

    def has_ended(self, number: int) -> bool:
        """Whether it is written how its swap ended; also where nothing of it was written at all."""
        folder = self._folder_of(number)
        return (folder / _ENDING).exists() or not (folder / _RECORD).exists()

    def unit_text(self, number: int) -> bytes | None:
        """The unit's text of a generation; None if it removed the unit or is not kept."""
        return self._files.read(self._folder_of(number) / _UNIT)

    def read(self, number: int) -> HistoryEntry | None:
        """One generation; None if there is none, or its record was cut short while written.

        Raises:
            HostError: the record is damaged.
        """
        folder = self._folder_of(number)
        data = self._files.read_json(folder / _RECORD)
        if data is None:
            return None
        ending = self._files.read_json(folder / _ENDING)
        try:
            return HistoryEntry(_generation(data, number), _ending(ending))
        except (KeyError, TypeError, ValueError) as error:
            raise HostError(
                f"record of generation {number} is damaged: `{folder / _RECORD}`",
                cause=repr(error),
                hint=f"rename its folder to `{folder.name}.damaged`; backups in the unit's folder "
                "are not affected",
            ) from error

    def find(self, number: int) -> HistoryEntry | None:
        """One generation; None also where its record is damaged, which `damaged` then says.

        One bad record must not stand in the way of going back.
        """
        try:
            return self.read(number)
        except HostError:
            self.damaged.add(number)
            return None

    def entries(self) -> Iterator[HistoryEntry]:
        """All that can be read, newest first, one by one as they are asked for."""
        for number in self.numbers():
            entry = self.find(number)
            if entry is not None:
                yield entry

    def serving(self, unit: str) -> HistoryEntry | None:
        """The newest generation of a unit whose swap ended well; it may have removed the unit."""
        for entry in self.entries():
            if entry.generation.unit == unit and entry.ending.outcome.is_done:
                return entry
        return None

    def remove_temporaries(self) -> None:
        """Remove what writes left that were cut short: since the last swap that ended well.

        Raises:
            HostError: something could not be removed.
        """
        for number in self.numbers():
            self._files.remove_temporaries(self._folder_of(number))
            entry = self.find(number)
            if entry is not None and entry.ending.outcome.is_done:
                return

    def _folder_of(self, number: int) -> Path:
        return self._folder / f"{number:0{_DIGITS}d}"


def _generation(data: object, number: int) -> Generation:
    if not isinstance(data, dict) or data.pop("schema") != SCHEMA:
        message = "another version of tunerd wrote it"
        raise ValueError(message)
    generation = Generation(**data)
    if generation.number != number:
        message = f"it says that it is generation {generation.number}"
        raise ValueError(message)
    return replace(
        generation,
        argv=tuple(generation.argv),
        engine_components=tuple((path, digest) for path, digest in generation.engine_components),
        origins=tuple((flag, key, origin) for flag, key, origin in generation.origins),
    )


def _ending(data: object) -> Ending:
    if data is None:
        return Ending(Outcome.RUNNING, None, None, None, None)
    if not isinstance(data, dict):
        message = "the ending is no table"
        raise TypeError(message)
    drop_ins = data.get("drop_ins")
    known = None if drop_ins is None else tuple(str(path) for path in drop_ins)
    return Ending(**{**data, "outcome": Outcome(data["outcome"]), "drop_ins": known})
