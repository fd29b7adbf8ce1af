"""Model files on disk: opening them safely, their facts with a cache, and finding them.

What was read once is remembered by device, inode, size and time of change of every file; a cache
that cannot be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import partial
from itertools import islice
from pathlib import Path

from tunerd import __version__
from tunerd.errors import HostError, ModelFileError
from tunerd.machine.files import Files, looked_at
from tunerd.model.facts import FileIdentity, ModelFacts, ModelIdentity, facts_of, why_apart
from tunerd.model.gguf import FETCH_AGAIN, Header, read_header

# Another version may read more.
_WRITER = f"tunerd {__version__}, schema 7"
_MAX_SHARDS = 1000
MAX_DEPTH = 8
MAX_ENTRIES = 100_000
MAX_HEADERS = 200
_SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_SHOWN = 8
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A byte source over an open file; reads never move a shared position."""

    descriptor: int
    name: str
    size: int

    def read_at(self, offset: int, count: int) -> bytes:
        try:
            return os.pread(self.descriptor, count, offset)
        except OSError as error:
            raise _cannot_read(Path(self.name), error) from error


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Reads model files, remembering what it found in `cache_dir`."""

    cache_dir: Path
    files: Files

    def read_facts(self, path: Path) -> ModelFacts:
        """The facts of a model, over all its parts if `path` is one of several.

        Raises:
            ModelFileError: A part is missing, is no regular file, cannot be read, or is damaged.
        """
        try:
            return self._facts(path)
        except ModelFileError as error:
            error.state = error.state or "nothing was touched"
            error.hint = error.hint or FETCH_AGAIN
            raise

    def _facts(self, path: Path) -> ModelFacts:
        stamps = tuple(_stamp(part) for part in parts_of(path))
        text = json.dumps([_WRITER, *(stamp.stamp for stamp in stamps)])
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        entry = self.cache_dir / f"model-facts-{name}.json"
        kept = self.files.recall(ModelFacts, entry)
        before = () if kept is None else kept.identity.files
        if kept is not None and [one.stamp for one in before] == [one.stamp for one in stamps]:
            return _at(kept, stamps)
        facts = facts_of([_read_file(stamp) for stamp in stamps])
        self.files.remember(entry, facts)
        return facts

    def why_vocabularies_differ(self, target: Path, draft: Path) -> str | None:
        """Why a model cannot draft for another, as far as their tokens tell; None where it can.

        Raises:
            ModelFileError: One of them cannot be read, or is damaged.
        """
        ours, theirs = (_stamp(parts_of(path)[0]) for path in (target, draft))
        with _opened(ours) as source, _opened(theirs) as other:
            return why_apart(source, other)


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of a model in order: `path` alone, or all parts of a split model.

    The names of the parts say how many there are; a link may point anywhere, as in the cache of
    Hugging Face.
    """
    found = _PART.search(path.name)
    if found is None or not 0 < int(found[1]) <= int(found[2]) <= _MAX_SHARDS:
        return (path,)
    begin, end = path.name[: found.start(1)], path.name[found.end(1) :]
    return tuple(path.with_name(f"{begin}{n:05d}{end}") for n in range(1, int(found[2]) + 1))


def _stamp(path: Path) -> FileIdentity:
    """A file's identity, after a check that reading it cannot hang.

    Raises:
        ModelFileError: It is missing, not a regular file, or cannot be reached.
    """
    try:
        real = Path(os.path.realpath(path, strict=True))
        status = real.stat()
    except FileNotFoundError as error:
        raise ModelFileError(
            f"no such model file: `{path}`",
            hint="give its full path, or add its folder to `models.dirs`",
        ) from error
    except (OSError, ValueError) as error:
        raise _cannot_read(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(
            f"not a regular file: `{path}`",
            cause=f"it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}",
            hint="give the path of a GGUF file",
        )
    return FileIdentity(real, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@contextmanager
def _opened(stamp: FileIdentity) -> Iterator[_OpenFile]:
    """The file that the stamp was taken of, open for reading.

    It may have been replaced by a pipe or a device in the meantime.
    """
    with ExitStack() as stack:
        try:
            check = partial(_check_unchanged, stamp)
            descriptor = stack.enter_context(looked_at(stamp.path, check, os.O_NOFOLLOW))
        except OSError as error:
            raise _cannot_read(stamp.path, error) from error
        yield _OpenFile(descriptor, str(stamp.path), stamp.size_bytes)
        check(descriptor)


def _check_unchanged(stamp: FileIdentity, descriptor: int) -> None:
    now = os.fstat(descriptor)
    key = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
    if not stat.S_ISREG(now.st_mode) or key != stamp.stamp:
        raise ModelFileError(
            f"model file changed while it was read: `{stamp.path}`",
            hint="wait until it is completely written",
        )


def _read_file(stamp: FileIdentity) -> tuple[FileIdentity, Header]:
    with _opened(stamp) as source:
        header = read_header(source)
    return replace(stamp, header_sha256=header.sha256), header


def _at(facts: ModelFacts, stamps: Sequence[FileIdentity]) -> ModelFacts:
    """Remembered facts with the paths of today; a file may have been renamed."""
    files = tuple(
        replace(stamp, header_sha256=file.header_sha256)
        for stamp, file in zip(stamps, facts.identity.files, strict=True)
    )
    return replace(facts, identity=ModelIdentity(files))


def _cannot_read(path: Path, error: OSError | ValueError) -> ModelFileError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    hint = "check its permissions and the disk; `head -c 4 FILE` must print GGUF"
    return ModelFileError(f"cannot read model file: `{path}`", cause=reason, hint=hint)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """What a search found, in order of path; `problems` say what it could not read."""

    paths: tuple[Path, ...]
    problems: tuple[str, ...]

    def why_not_one(self, dirs: Sequence[Path]) -> str:
        """Where nothing was found, or what was found instead of one."""
        if self.paths:
            names = ", ".join(f"`{path}`" for path in self.paths[:_SHOWN])
            n_more = len(self.paths) - _SHOWN
            return names + (f" and {n_more} more" if n_more > 0 else "")
        where = ", ".join(f"`{folder}`" for folder in dirs)
        unread = "; ".join(self.problems[:_SHOWN])
        cause = f"searched {where or 'no folder, since `models.dirs` is empty'}"
        return cause + (f"; {unread}" if unread else "")


def find_models(
    dirs: Sequence[Path],
    models: ModelFiles,
    *,
    file_name: str | None = None,
    model_name: str | None = None,
    needs_mtp: bool = False,
) -> FoundModel:
    """Every model that is looked for, the first part of split ones.

    Args:
        dirs: The folders to search.
        models: Reads headers where names alone cannot answer.
        file_name: A file name, a glob over it, or one over the end of the path if it has a slash;
            upper and lower case are the same. Of a split model the name may leave out which part it is.
        model_name: A glob over the name in the metadata.
        needs_mtp: Only models that can draft for themselves.
    """
    walk = _Walk()
    matches = _name_filter(file_name)
    named = sorted({path for folder in dirs for path in walk.files(folder) if matches(path)})
    if model_name is None and not needs_mtp:
        return FoundModel(tuple(named), tuple(walk.problems))
    pattern = re.compile(translate(model_name or "*"), re.IGNORECASE)
    fitting: list[Path] = []
    for path in named[:MAX_HEADERS]:
        try:
            facts = models.read_facts(path)
        except ModelFileError as error:
            walk.problems.append(error.message)
            continue
        is_able = facts.no_model is None and (facts.has_mtp or not needs_mtp)
        if is_able and pattern.match(facts.name or ""):
            fitting.append(path)
    if len(named) > MAX_HEADERS:
        walk.problems.append(f"more than {MAX_HEADERS} files have that name")
    return FoundModel(tuple(fitting), tuple(walk.problems))


# In this order, each with what lies below it. Source: llama.cpp's common/hf-cache.cpp, and the builds of
# May and August 2026 tried with each.
_HUBS = (
    ("LLAMA_CACHE", ""),
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
    ("HOME", ".cache/huggingface/hub"),
)
_REPO = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}/[A-Za-z0-9_][\w.-]{0,127}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What a repository without a quantisation means, where there is such a file.
_USUAL_QUANTS = ("Q4_K_M", "Q8_0")
_NO_MODEL = re.compile(r"mmproj|imatrix")
# Builds since May 2026 leave these out too; those before serve what is called so.
_DRAFTER = re.compile(r"(?:mtp|eagle3|dflash|dspark)-")


def hub_cache(environment: Mapping[str, str]) -> Path | None:
    """Where a server with this environment keeps what it fetched from Hugging Face."""
    found = ((environment.get(name), below) for name, below in _HUBS)
    return next((Path(value) / below for value, below in found if value), None)


def cached_models(hub: Path, repo: str, file_name: str | None = None) -> tuple[Path, ...]:
    """The files of a repository in such a cache that a server would take; empty where there is none.

    More than one only where the server would take whichever its folder lists first.

    Args:
        hub: As `hub_cache` says.
        repo: `user/name`, or `user/name:QUANT`, as after `-hf`.
        file_name: A file of the repository; then its quantisation does not matter.
    """
    name, _, quant = repo.partition(":")
    files = _cached(hub, name)
    if file_name is not None:
        return tuple(path for path in files if _name_filter(file_name)(path))
    models = [path for path in files if not _NO_MODEL.search(path.name)]
    models = [path for path in models if not _DRAFTER.search(path.name)] or models
    for wanted in (quant,) if quant else _USUAL_QUANTS:
        is_it = re.compile(rf"{re.escape(wanted)}[.-]", re.IGNORECASE)
        found = [path for path in models if is_it.search(path.name)]
        if found:
            return tuple(found)
    return () if quant else tuple(models)


def cached_siblings(hub: Path, repo: str, word: str) -> tuple[Path, ...]:
    """The files of a repository in such a cache with this word in their names: a server that is told `-hf` takes one along."""
    return tuple(path for path in _cached(hub, repo.partition(":")[0]) if word in path.name)


def _cached(hub: Path, name: str) -> list[Path]:
    """What a cache has of a repository, of split models the first part."""
    if not _REPO.fullmatch(name):
        return []
    folder = hub / f"models--{name.replace('/', '--')}"
    commit = _commit_of(folder / "refs")
    found = () if commit is None else _Walk().files(folder / "snapshots" / commit)
    return sorted(path for path in found if _is_first(path))


def _commit_of(refs: Path) -> str | None:
    """What is current in a repository of the cache: what `main` says, or the only other branch."""
    for ref in (refs / "main", *sorted(refs.glob("*"))):
        with suppress(ModelFileError), _opened(_stamp(ref)) as opened:
            commit = opened.read_at(0, 40).decode("ascii", "replace")
            if _COMMIT.fullmatch(commit):
                return commit
    return None


_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_OLLAMA_NAME = re.compile(
    r"(?:(?:([\w-][\w.-]*)/)?([\w-][\w.-]*)/)?([\w-][\w.-]*)(?::([\w-][\w.-]*))?", re.ASCII
)


def ollama_layers(store: Path, name: str, files: Files) -> dict[str, Path]:
    """What Ollama's store has of a model, by the last word of its media type; empty where it has none.

    Source: Ollama's manifests, as its own documentation and stores of others show them.

    Args:
        store: Its folder of models.
        name: `model`, `model:tag`, `user/model:tag` or `host/user/model:tag`.
        files: Reads the manifest, which may be anybody's.
    """
    found = _OLLAMA_NAME.fullmatch(name)
    if found is None:
        return {}
    host, user, model, tag = found.groups()
    folder = store / "manifests" / (host or "registry.ollama.ai") / (user or "library")
    kinds: dict[str, Path] = {}
    with suppress(HostError, RecursionError):
        manifest = files.read_json(folder / model / (tag or "latest"))
        layers = manifest.get("layers") if isinstance(manifest, dict) else None
        for layer in layers if isinstance(layers, list) else ():
            told = layer if isinstance(layer, dict) else {}
            if (digest := _DIGEST.fullmatch(str(told.get("digest")))) is not None:
                kind = str(told.get("mediaType")).rpartition(".")[2]
                kinds.setdefault(kind, store / "blobs" / f"sha256-{digest[1]}")
    return kinds


@dataclass(slots=True)
class _Walk:
    """Walks folders, each once however links lead to it, within limits."""

    problems: list[str] = field(default_factory=list)
    _n_entries: int = 0
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def files(self, folder: Path, depth: int = 0) -> Iterator[Path]:
        """GGUF files below a folder; a link that leads nowhere or in a circle is none."""
        if depth > MAX_DEPTH:
            self.problems.append(f"`{folder}` is more than {MAX_DEPTH} folders deep")
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
                self.problems.append(f"there are more than {MAX_ENTRIES} files")
                return
            with suppress(OSError):
                if entry.is_dir():
                    yield from self.files(Path(entry.path), depth + 1)
                elif entry.name.lower().endswith(_SUFFIX) and entry.is_file():
                    yield Path(entry.path)


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
