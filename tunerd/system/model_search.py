"""Finds model files below the folders of `models.dirs`, by name or by what their headers say."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import islice
from pathlib import Path

from tunerd.core.model import ModelFacts
from tunerd.errors import ModelFileError
from tunerd.system.model_files import ModelFiles

MAX_DEPTH = 8
MAX_ENTRIES = 100_000
MAX_HEADERS = 200
_SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-\d{5}(?=\.gguf$)", re.IGNORECASE)
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuery:
    """What is looked for; None is not asked.

    `file_name` is a file name, a glob over it, or one over the end of the path if it has a slash;
    upper and lower case are the same. Of a split model the name may leave out which part it is.
    `model_name` is a glob over the name in the metadata.
    """

    file_name: str | None = None
    architecture: str | None = None
    model_name: str | None = None
    needs_mtp: bool = False

    @property
    def asks_header(self) -> bool:
        """Whether names alone cannot answer."""
        asked = (self.architecture, self.model_name)
        return self.needs_mtp or any(one is not None for one in asked)

    def __str__(self) -> str:
        words = [
            f"a file `{self.file_name}`" if self.file_name else "a model file",
            f"of architecture `{self.architecture}`" if self.architecture else "",
            f"named `{self.model_name}`" if self.model_name else "",
            "with an MTP block" if self.needs_mtp else "",
        ]
        return " ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found, in order of path; `problems` are files and folders it could not read.

    `is_complete` is False when a limit ended the search.
    """

    paths: tuple[Path, ...]
    problems: tuple[str, ...]
    is_complete: bool


def find_models(dirs: Sequence[Path], query: ModelQuery, models: ModelFiles) -> Found:
    """Every model that the query describes, the first part of split ones."""
    walk = _Walk()
    matches = _name_filter(query.file_name)
    named = sorted({path for folder in dirs for path in walk.files(folder) if matches(path)})
    if not query.asks_header:
        return Found(tuple(named), tuple(walk.problems), walk.is_complete)
    fitting: list[Path] = []
    for path in named[:MAX_HEADERS]:
        try:
            facts = models.read_facts(path)
        except ModelFileError as error:
            walk.problems.append(error.message)
            continue
        if _fits(facts, query):
            fitting.append(path)
    is_complete = walk.is_complete and len(named) <= MAX_HEADERS
    return Found(tuple(fitting), tuple(walk.problems), is_complete)


def find_model(dirs: Sequence[Path], query: ModelQuery, models: ModelFiles) -> Path:
    """The one model that the query describes.

    Raises:
        ModelFileError: There is none, or more than one.
    """
    found = find_models(dirs, query, models)
    if len(found.paths) == 1:
        return found.paths[0]
    where = ", ".join(f"`{folder}`" for folder in dirs) or "no folder, since `models.dirs` is empty"
    if not found.paths:
        unread = "; ".join(found.problems[:_SHOWN])
        raise ModelFileError(
            f"cannot find {query}",
            cause=f"searched {where}" + (f"; could not read: {unread}" if unread else ""),
            state="nothing was touched",
            hint="fetch it into one of these folders, or give its path with `--set model.path=`",
        )
    names = ", ".join(f"`{path}`" for path in found.paths[:_SHOWN])
    more = f" and {len(found.paths) - _SHOWN} more" if len(found.paths) > _SHOWN else ""
    raise ModelFileError(
        f"found {len(found.paths)} files for {query}",
        cause=f"{names}{more}",
        state="nothing was touched",
        hint="give the path of one with `--set model.path=`",
    )


class _Walk:
    """Walks folders, each once however links lead to it, within limits."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.is_complete = True
        self._n_entries = 0
        self._seen: set[tuple[int, int]] = set()

    def files(self, folder: Path, depth: int = 0) -> Iterator[Path]:
        """GGUF files below a folder."""
        if depth > MAX_DEPTH:
            self.is_complete = False
            return
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in self._seen:
                return
            self._seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                room = MAX_ENTRIES + 1 - self._n_entries
                found = sorted(islice(entries, room), key=lambda entry: entry.name)
        except OSError as error:
            self.problems.append(f"cannot search `{folder}`: {error.strerror}")
            return
        for entry in found:
            self._n_entries += 1
            if self._n_entries > MAX_ENTRIES:
                self.is_complete = False
                return
            if _is(entry, "directory"):
                yield from self.files(Path(entry.path), depth + 1)
            elif entry.name.lower().endswith(_SUFFIX) and _is(entry, "file"):
                yield Path(entry.path)


def _is(entry: os.DirEntry[str], what: str) -> bool:
    """Whether it is that, links followed; a link that leads nowhere or in a circle is nothing."""
    try:
        return entry.is_dir() if what == "directory" else entry.is_file()
    except OSError:
        return False


def _name_filter(wanted: str | None) -> Callable[[Path], bool]:
    """Whether a path has the wanted name and is no later part of a split model.

    A later part is found only by its exact name. Without a wanted name projectors are left out.
    """
    if wanted is None:
        return lambda path: _is_first(path) and not path.name.lower().startswith("mmproj")
    pattern = re.compile(translate(wanted), re.IGNORECASE)
    n_parts = wanted.count("/") + 1

    def matches(path: Path) -> bool:
        if not _is_first(path) and path.name.lower() != wanted.lower():
            return False
        tail = "/".join(path.parts[-n_parts:])
        return any(pattern.match(name) for name in (tail, _PART.sub("", tail)))

    return matches


def _is_first(path: Path) -> bool:
    part = _PART.search(path.name)
    return part is None or int(part[1]) == 1


def _fits(facts: ModelFacts, query: ModelQuery) -> bool:
    if query.architecture is not None and facts.architecture != query.architecture:
        return False
    if query.needs_mtp and not facts.has_mtp:
        return False
    if query.model_name is None:
        return True
    pattern = re.compile(translate(query.model_name), re.IGNORECASE)
    return facts.name is not None and pattern.match(facts.name) is not None
