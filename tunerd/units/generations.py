"""Generations on disk: `generations/000014/` with the record, both units' texts and how it ended.

A record is never edited: the ending is a file of its own. Units that people wrote may hold keys, so all
of it is for its owner alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any

from tunerd.errors import HostError, UsageError
from tunerd.machine.files import Files, is_gone, stamp_of
from tunerd.records import Unreadable, plain, read
from tunerd.words import sha256

SCHEMA = 1


class Outcome(StrEnum):
    """How a swap ended; RUNNING while it does, or when it was cut short and not recovered yet.

    REMOVED is the good end of a swap back to where no unit file stood, and after which nothing serves.
    """

    RUNNING = "running"
    SERVING = "serving"
    REMOVED = "removed"
    ROLLED_BACK = "rolled back"
    STRANDED = "stranded"
    ABANDONED = "abandoned"

    @property
    def is_done(self) -> bool:
        """Whether the swap was committed: what it was to make live is live."""
        return self in {Outcome.SERVING, Outcome.REMOVED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a swap deployed, why, and on what machine.

    `replaced_backup` names the backup of what stood before; None with `replaced_absent` where
    nothing did. `unit_text` is None for a swap that removed the unit file. `with_tuned` says whether the
    tuned layer took part, `enable` whether it is to start at boot; records from before these were kept
    say yes. Whoever asks for a swap leaves
    the number, the moment, the old state and who asked to it.
    """

    number: int = 0
    unit: str
    reason: str
    created_s: float = 0.0
    profile: str | None = None
    engine: str | None = None
    engine_sha256: str | None = None
    engine_components: tuple[tuple[str, str], ...] = ()
    model_path: str | None = None
    model_identity: Mapping[str, Any] | None = None
    argv: tuple[str, ...] = ()
    origins: tuple[tuple[str, str, str], ...] = ()
    pins: Mapping[str, Any] = field(default_factory=dict)
    unit_sha256: str | None
    replaced_backup: str | None = None
    replaced_absent: bool = False
    was_active: bool = False
    was_enabled: bool | None = None
    enable: bool = True
    from_generation: int | None = None
    host: Mapping[str, Any] = field(default_factory=dict)
    requested_by: str | None = None
    with_tuned: bool = True


@dataclass(frozen=True, slots=True)
class Ending:
    """How the swap of a generation ended.

    `drop_ins` were in force for the unit by then; None where that is not known.
    """

    outcome: Outcome
    ended_s: float | None
    without_service_s: float | None
    cause: str | None
    detail: str | None
    drop_ins: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One line of history."""

    generation: Generation
    ending: Ending


_RUNNING = Ending(Outcome.RUNNING, None, None, None, None)
_DIGITS = 6
_NUMBER = re.compile(rf"[0-9]{{{_DIGITS},12}}")
_RECORD = "generation.json"
_ENDING = "outcome.json"
_UNIT = "unit"
_REPLACED = "replaced"
_PRIVATE_FOLDER, _PRIVATE = 0o700, 0o600


class Generations:
    """The generations of one STATE folder."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._files = files

    def numbers(self) -> tuple[int, ...]:
        """All numbers, highest first."""
        found = (int(name) for name in self._names() if _NUMBER.fullmatch(name))
        return tuple(sorted(found, reverse=True))

    def next_number(self) -> int:
        """One above the highest that is in use, or is in the name of a folder put aside."""
        used = (name.partition(".")[0] for name in self._names())
        return max((int(name) for name in used if _NUMBER.fullmatch(name)), default=0) + 1

    def _names(self) -> list[str]:
        return [path.name for path in self._files.listed(self._folder)]

    def create(
        self, generation: Generation, unit_text: bytes | None, replaced: bytes | None = None
    ) -> None:
        """Write a new generation durably, before its swap changes anything.

        Args:
            generation: The record.
            unit_text: What is to be live; None where the unit is removed.
            replaced: What stood before, whose backup somebody may remove; None where nothing did.

        Raises:
            HostError: it exists, or cannot be written.
        """
        folder = self._folder_of(generation.number)
        if folder.exists():
            raise HostError(f"generation {generation.number} exists already: `{folder}`")
        self._files.make_folder(self._folder, mode=_PRIVATE_FOLDER)
        with contextlib.suppress(OSError):  # one of an earlier version
            self._folder.chmod(_PRIVATE_FOLDER)
        self._files.make_folder(folder, mode=_PRIVATE_FOLDER)
        for name, text in ((_UNIT, unit_text), (_REPLACED, replaced)):
            if text is not None:
                self._files.write(folder / name, text, mode=_PRIVATE)
        record = plain(generation, schema=SCHEMA)
        for name in ("with_tuned", "enable"):  # keys that an earlier version takes for damage
            if record[name]:
                del record[name]
        self._files.write_json(folder / _RECORD, record)

    def end(self, number: int, ending: Ending) -> None:
        """Write how the swap of a generation ended."""
        self._files.write_json(self._folder_of(number) / _ENDING, plain(ending))

    def end_or_forget(self, number: int, ending: Ending) -> None:
        """Write how a swap ended that changed nothing; where a full disk takes no word, it never was."""
        try:
            self.end(number, ending)
        except HostError:
            self._files.remove(self._folder_of(number) / _RECORD)

    def has_ended(self, number: int) -> bool:
        """Whether it is written how its swap ended; also where nothing of it was written at all."""
        folder = self._folder_of(number)
        return (folder / _ENDING).exists() or not (folder / _RECORD).exists()

    def unit_text(self, number: int) -> bytes | None:
        """The unit's text of a generation; None if it removed the unit or is not kept."""
        return self._files.read(self._folder_of(number) / _UNIT)

    def replaced_text(self, number: int) -> bytes | None:
        """The text that a generation replaced; None if there was none or it is not kept."""
        return self._files.read(self._folder_of(number) / _REPLACED)

    def kept_text(self, wanted: str | None, *, replaced_by: int | None) -> bytes | None:
        """A text by its hash: of the generation that replaced it, or of one that had deployed it."""
        if replaced_by is not None:
            text = self.replaced_text(replaced_by)
            if sha256(text) == wanted:
                return text
        made = (one.generation for one in self.entries() if one.generation.unit_sha256 == wanted)
        texts = (self.unit_text(generation.number) for generation in made)
        return next((text for text in texts if sha256(text) == wanted), None)

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
            ended = _RUNNING if ending is None else read(Ending, ending)
            return HistoryEntry(_generation(data, number), ended)
        except Unreadable as error:
            raise HostError(
                f"record of generation {number} is damaged: `{folder / _RECORD}`",
                cause=str(error),
                hint=f"rename its folder to `{folder.name}.damaged`; backups in the unit's folder "
                "are not affected",
            ) from error

    def demand(self, number: int) -> HistoryEntry:
        """One generation.

        Raises:
            UsageError: there is none of this number.
            HostError: the record is damaged.
        """
        if (entry := self.read(number)) is None:
            hint = "`tunerd history` lists what there is"
            raise UsageError(f"there is no generation {number}", hint=hint)
        return entry

    def find(self, number: int) -> HistoryEntry | None:
        """One generation; None also where its record is damaged.

        One bad record must not stand in the way of going back.
        """
        try:
            return self.read(number)
        except HostError:
            return None

    def entries(self, unit: str | None = None) -> Iterator[HistoryEntry]:
        """All that can be read, or those of a unit, newest first, one by one as they are asked for."""
        for number in self.numbers():
            entry = self.find(number)
            if entry is not None and unit in {None, entry.generation.unit}:
                yield entry

    def serving(self, unit: str, *, before: float = inf) -> HistoryEntry | None:
        """The newest generation of a unit whose swap ended well; it may have removed the unit.

        `before` a number: what that one replaced.
        """
        older = (one for one in self.entries(unit) if one.generation.number < before)
        return next((one for one in older if one.ending.outcome.is_done), None)

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
    generation = read(Generation, data, schema=SCHEMA)
    if generation.number != number:
        raise Unreadable(f"it says that it is generation {generation.number}")
    return generation


def model_stamps(generation: Generation) -> dict[Path, tuple[int, int]]:
    """The files that its server reads, by the paths that name them too, with size and time of change."""
    files = (generation.model_identity or {}).get("files", ())
    return {Path(file["path"]): (file["size_bytes"], file["mtime_ns"]) for file in files}


def changed_model_files(generation: Generation) -> Iterator[tuple[Path, bool]]:
    """Files that its server reads and that are no longer what they were, with whether each is gone."""
    for path, then in model_stamps(generation).items():
        now = stamp_of(path)
        if now is None and is_gone(path):
            yield path, True
        elif now not in {None, then}:
            yield path, False
