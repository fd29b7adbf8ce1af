"""Model files on disk: opening them safely, their facts and hashes with a cache, and finding them.

What was read once is remembered by device, inode, size and time of change of every file; a cache
that cannot be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd import __version__
from tunerd.core.gguf import Header, read_header
from tunerd.core.model import FileIdentity, ModelFacts, ModelIdentity, facts_of
from tunerd.core.vocabulary import read_vocabulary, why_apart
from tunerd.errors import HostError, ModelFileError
from tunerd.system.files import Files

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_SCHEMA = 2
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MAX_SHARDS = 1000
_READ_BYTES = 4 * 1024 * 1024
_FETCH_AGAIN = "compare its size and checksum with its origin, and fetch it again"


@dataclass(frozen=True, slots=True)
class _Stamp:
    """A regular file at one moment: its path without links, and what changes when it changes."""

    path: Path
    device: int
    inode: int
    size: int
    mtime_ns: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        return (self.device, self.inode, self.size, self.mtime_ns)


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


class ModelFiles:
    """Reads model files, remembering what it found in `cache_dir` (None: nothing is kept)."""

    def __init__(self, cache_dir: Path | None, files: Files) -> None:
        self._cache_dir = cache_dir
        self._files = files

    def read_facts(self, path: Path) -> ModelFacts:
        """The facts of a model, over all its parts if `path` is one of several.

        Raises:
            ModelFileError: A part is missing, is no regular file, cannot be read, or is damaged.
        """
        try:
            return self._facts(path)
        except ModelFileError as error:
            error.state = error.state or "nothing was touched"
            error.hint = error.hint or _FETCH_AGAIN
            raise

    def _facts(self, path: Path) -> ModelFacts:
        stamps = tuple(_stamp(part) for part in parts_of(path))
        remembered = self._remembered("facts", stamps)
        if remembered is not None:
            facts = _from_json(remembered)
            if facts is not None and len(facts.identity.files) == len(stamps):
                return _at(facts, stamps)
        facts = facts_of([_read_file(stamp) for stamp in stamps])
        self._remember("facts", stamps, _to_json(facts))
        return facts

    def why_vocabularies_differ(self, target: Path, draft: Path) -> str | None:
        """Why a model cannot draft for another, as far as their tokens tell; None where it can.

        Raises:
            ModelFileError: One of them cannot be read, or is damaged.
        """
        known = []
        for path in (target, draft):
            with _opened(_stamp(parts_of(path)[0])) as source:
                known.append(read_vocabulary(source))
        return why_apart(*known)

    def content_sha256(self, path: Path) -> str:
        """Hash over the whole content of all parts, in order; reads every byte the first time.

        Raises:
            ModelFileError: A part cannot be read, or changed while it was read.
        """
        stamps = tuple(_stamp(part) for part in parts_of(path))
        remembered = self._remembered("content", stamps)
        if isinstance(remembered, str):
            return remembered
        digest = hashlib.sha256()
        for stamp in stamps:
            _hash_into(digest, stamp)
        self._remember("content", stamps, digest.hexdigest())
        return digest.hexdigest()

    def _remembered(self, kind: str, stamps: Sequence[_Stamp]) -> Any:
        if self._cache_dir is None:
            return None
        try:
            entry = self._files.read_json(self._entry(kind, stamps))
        except (HostError, RecursionError):
            return None
        if not isinstance(entry, dict) or entry.get("written_by") != _writer():
            return None
        return entry.get(kind)

    def _remember(self, kind: str, stamps: Sequence[_Stamp], value: Any) -> None:
        if self._cache_dir is None:
            return
        entry = {"written_by": _writer(), kind: value}
        with suppress(HostError):
            self._files.make_folder(self._cache_dir)
            self._files.write_json(self._entry(kind, stamps), entry)

    def _entry(self, kind: str, stamps: Sequence[_Stamp]) -> Path:
        text = json.dumps([stamp.key for stamp in stamps])
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return (self._cache_dir or Path()) / f"model-{kind}-{name}.json"


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of a model in order: `path` alone, or all parts of a split model.

    The names of the parts say how many there are; a link may point anywhere, as in the cache of
    Hugging Face.
    """
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    if not 0 < int(found["number"]) <= count <= _MAX_SHARDS:
        return (path,)
    suffix = path.name[found.end("count") :]
    return tuple(
        path.with_name(f"{found['stem']}-{number:05d}-of-{count:05d}{suffix}")
        for number in range(1, count + 1)
    )


def _stamp(path: Path) -> _Stamp:
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
            hint="give its whole path, or name its folder in `models.dirs`",
        ) from error
    except (OSError, ValueError) as error:
        raise _cannot_read(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(
            f"not a regular file: `{path}`",
            cause=f"it is {_kind_of(status.st_mode)}",
            hint="give the path of a GGUF file",
        )
    return _Stamp(real, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _kind_of(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


@contextmanager
def _opened(stamp: _Stamp) -> Iterator[_OpenFile]:
    """The file that the stamp was taken of, open for reading.

    It is opened without waiting, and looked at again, since it may have been replaced by a pipe
    in the meantime.
    """
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = os.open(stamp.path, flags)
    except OSError as error:
        raise _cannot_read(stamp.path, error) from error
    try:
        _check_unchanged(stamp, descriptor)
        yield _OpenFile(descriptor, str(stamp.path), stamp.size)
        _check_unchanged(stamp, descriptor)
    finally:
        os.close(descriptor)


def _check_unchanged(stamp: _Stamp, descriptor: int) -> None:
    now = os.fstat(descriptor)
    key = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
    if not stat.S_ISREG(now.st_mode) or key != stamp.key:
        raise ModelFileError(
            f"model file changed while it was read: `{stamp.path}`",
            hint="wait until it is completely written",
        )


def _read_file(stamp: _Stamp) -> tuple[FileIdentity, Header]:
    with _opened(stamp) as source:
        header = read_header(source)
    return _identity(stamp, header.sha256), header


def _identity(stamp: _Stamp, header_sha256: str) -> FileIdentity:
    return FileIdentity(
        stamp.path, stamp.device, stamp.inode, stamp.size, stamp.mtime_ns, header_sha256
    )


def _hash_into(digest: Any, stamp: _Stamp) -> None:
    with _opened(stamp) as source:
        offset = 0
        while offset < source.size:
            chunk = source.read_at(offset, _READ_BYTES)
            if not chunk:
                break
            digest.update(chunk)
            offset += len(chunk)


def _at(facts: ModelFacts, stamps: Sequence[_Stamp]) -> ModelFacts:
    """Remembered facts with the paths of today; a file may have been renamed."""
    files = tuple(
        _identity(stamp, file.header_sha256)
        for stamp, file in zip(stamps, facts.identity.files, strict=True)
    )
    return replace(facts, identity=ModelIdentity(files))


def _writer() -> str:
    return f"tunerd {__version__}, schema {_SCHEMA}"


@cache
def _adapter() -> TypeAdapter[ModelFacts]:
    from pydantic import TypeAdapter

    return TypeAdapter(ModelFacts)


def _to_json(facts: ModelFacts) -> Any:
    return _adapter().dump_python(facts, mode="json")


def _from_json(data: Any) -> ModelFacts | None:
    from pydantic import ValidationError

    try:
        return _adapter().validate_python(data)
    except ValidationError:
        return None


def _cannot_read(path: Path, error: OSError | ValueError) -> ModelFileError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    hint = "look at its rights and at the disk; `head -c 4 FILE` must print GGUF"
    return ModelFileError(f"cannot read model file: `{path}`", cause=reason, hint=hint)
