"""Durable files: atomic writes, removals, and the one lock of a machine and mode.

Every call that changes the disk announces each step to `before`, so that a test can end the
process, or the disk, between any two of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tunerd.errors import Busy, HostError, UsageError
from tunerd.machine.clock import SystemClock
from tunerd.machine.process import User, is_stopped, may_read_open
from tunerd.records import plain, read_or_none

T = TypeVar("T")
MAX_READ_BYTES = 16 * 1024 * 1024
_LOOK_S = 0.1
# What a lock that somebody else holds is told by.
_HELD = frozenset({errno.EWOULDBLOCK, errno.EAGAIN})
# How `write` and `link` end the names of what they put beside a file; people have files there too.
_TEMPORARY = re.compile(r"\.([a-z0-9_]{8}|link)\.tmp\Z")
_UNCHANGED = "nothing was changed by this call"


@dataclass(frozen=True, slots=True)
class Look:
    """How a file looks: permission bits and owner."""

    mode: int
    uid: int
    gid: int


def destination(path: Path) -> Path:
    """Where a file goes that a person names, behind links; `Files.write` puts another in the place of what is there.

    Raises:
        HostError: there is no such folder, it is closed, a device or pipe stands there, which others need, or a link
            by which somebody else would choose what is replaced.
    """
    named, path = path.absolute(), Path(os.path.realpath(path))
    with told("write", path, state="nothing was written"):
        # As the kernel refuses it to who opens it, with fs.protected_symlinks: anybody may put one into /tmp.
        for link in (one for one in (named, *named.parents) if one.is_symlink()):
            is_anothers = link.lstat().st_uid not in {0, os.geteuid()}
            if is_anothers and link.parent.stat().st_mode & stat.S_ISVTX:
                raise HostError(
                    f"not your link: `{link}`",
                    cause=f"somebody else made it, and it leads to `{path}`",
                    hint="give another path",
                )
        if not path.parent.is_dir():
            raise HostError(f"no such folder: `{path.parent}`", hint="create it, or choose another")
        if path.exists() and not path.is_file():
            raise HostError(f"not a plain file: `{path}`", hint="give another path")
    return path


def demand_free(path: Path) -> None:
    """See that nothing stands where a file is to be written.

    Raises:
        UsageError: something does.
    """
    if os.path.lexists(path):
        hint = "give another path" if path.is_dir() else "--force replaces it"
        raise UsageError(f"`{path}` already exists", state="nothing was written", hint=hint)


def at_home(text: str) -> Path:
    """A path whose `~` is somebody's home; as it is written where nobody has that home."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 -- what Path has raises there


class Files:
    """Reads and durably changes files of tunerd and of the service manager."""

    def __init__(self, before: Callable[[str], object] = lambda _step: None) -> None:
        self._before = before

    def listed(self, folder: Path) -> list[Path]:
        """What is in a folder; nothing if there is no such folder.

        Raises:
            HostError: it cannot be read.
        """
        try:
            return list(folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _cannot("read", folder, error) from error

    def read(self, path: Path, *, reader: User | None = None) -> bytes | None:
        """The content, None if there is no such file.

        It is looked at before it is opened, for opening a device may do something.

        Args:
            path: Links are followed.
            reader: Who must be able to read what was found, where others say where the path leads.

        Raises:
            HostError: it is no regular file, too large, or cannot be read.
        """

        def check(found: int) -> None:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise HostError(
                    f"not a regular file: `{path}`",
                    state="nothing was read",
                    hint="give the path of a plain file",
                )
            if reader is not None and not may_read_open(reader, found):
                raise HostError(f"cannot read `{path}`", cause="whoever asks may not read it")

        with (
            told("read", path),
            contextlib.suppress(FileNotFoundError),
            looked_at(path, check) as descriptor,
            open(descriptor, "rb", closefd=False) as file,
        ):
            content = file.read(MAX_READ_BYTES + 1)
            if len(content) > MAX_READ_BYTES:
                raise HostError(f"file is larger than {MAX_READ_BYTES} bytes: `{path}`")
            return content
        return None

    def read_json(self, path: Path) -> Any:
        """The parsed content, None if there is no such file.

        Raises:
            HostError: it cannot be read, or is no JSON.
        """
        content = self.read(path)
        if content is None:
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise HostError(f"not valid JSON: `{path}`", cause=str(error)) from error

    def look(self, path: Path) -> Look | None:
        """Mode and owner of a file, None if there is no such file; of a link the mode where it leads.

        What takes a link's place belongs to whoever made the link: the file behind it may be anybody's.
        """
        with told("look at", path), contextlib.suppress(FileNotFoundError):
            mode, own = path.stat().st_mode, path.lstat()
            return Look(stat.S_IMODE(mode), own.st_uid, own.st_gid)
        return None

    def write(
        self,
        path: Path,
        content: bytes,
        *,
        mode: int = 0o644,
        like: Look | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Replace or create a file so that after a power cut it holds the old or the new content.

        The temporary file stands in the same folder (same file system, same SELinux label), is
        synced before the rename, and the folder after it. It is locked as long as somebody writes it.

        Args:
            path: Its folder must exist.
            content: The whole content.
            mode: Permission bits of a new file; the umask plays no part.
            like: Mode and owner to take over instead.
            check: Called right before the rename; what it raises is raised, and the old content
                stands.

        Raises:
            HostError: it could not be written. The old content stands, or the new one where only
                the sync of the folder failed.
        """
        temporary: Path | None = None
        try:
            self._before(f"create temporary for {path.name}")
            while temporary is None:
                descriptor, name = tempfile.mkstemp(
                    prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
                )
                temporary = Path(name)
                if not _stays(descriptor, temporary):
                    os.close(descriptor)
                    temporary.unlink(missing_ok=True)
                    temporary = None
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, like.mode if like is not None else mode)
                if like is not None and os.geteuid() == 0:
                    made = os.fstat(descriptor)
                    # tunerd.service may not: a unit that is root's alone serves as well
                    if (made.st_uid, made.st_gid) != (like.uid, like.gid):
                        with contextlib.suppress(PermissionError):
                            os.fchown(descriptor, like.uid, like.gid)
                file.write(content)
                file.flush()
                self._before(f"sync temporary for {path.name}")
                os.fsync(descriptor)
                self._before(f"rename to {path.name}")
                check()
                temporary.rename(path)
                temporary = None
            self._before(f"sync folder of {path.name}")
            sync_folder(path.parent)
        except OSError as error:
            raise _cannot("write", path, error) from error
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink()

    def link(self, path: Path, target: str, *, check: Callable[[], object] = lambda: None) -> None:
        """Put a symbolic link in a file's place, as atomically and durably as `write`.

        Raises:
            HostError: it could not be made; the file stands.
        """
        temporary = path.with_name(f".{path.name}.link.tmp")
        with told("link", path):
            self._before(f"link {path.name}")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            check()
            temporary.rename(path)
            self._before(f"sync folder of {path.name}")
            sync_folder(path.parent)

    def write_json(self, path: Path, data: Any, *, mode: int = 0o644) -> None:
        """Write a JSON file durably.

        Paths that are not UTF-8 have surrogates in them; `read_json` reads these back.
        """
        text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        self.write(path, text.encode("utf-8", "surrogatepass"), mode=mode)

    def recall(self, kind: type[T], path: Path, *, schema: int | None = None) -> T | None:
        """What `remember` kept; None where it is not there, is damaged, or of another version."""
        try:
            return read_or_none(kind, self.read_json(path), schema=schema)
        except HostError:
            return None

    def remember(
        self, path: Path, value: Any, *, schema: int | None = None, mode: int = 0o644
    ) -> None:
        """Keep a record that can be found out again, as it is where no file can be written."""
        with contextlib.suppress(HostError):
            self.keep(path, value, schema=schema, mode=mode)

    def keep(self, path: Path, value: Any, *, schema: int | None = None, mode: int = 0o644) -> None:
        """Keep a record, in a folder that need not be there.

        Raises:
            HostError: it cannot be written.
        """
        self.make_folder(path.parent)
        self.write_json(path, plain(value, schema=schema), mode=mode)

    def copy(self, source: Path, target: Path) -> None:
        """A durable copy with the mode and owner of its source, which is synced first.

        An editor may have written the source a moment ago without syncing it.

        Raises:
            HostError: the source is gone, or the copy could not be written.
        """
        content, look = self.read(source), self.look(source)
        if content is None or look is None:
            raise HostError(f"file is gone: `{source}`")
        with told("sync", source):
            self._before(f"sync {source.name}")
            with _opened(source, os.O_RDONLY) as descriptor:
                os.fsync(descriptor)
        self.write(target, content, like=look)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name in its folder, durably; needs no space.

        Raises:
            HostError: it could not be renamed.
        """
        with told("rename", source):
            self._before(f"rename {source.name} to {target.name}")
            source.rename(target)
            self._before(f"sync folder of {target.name}")
            sync_folder(target.parent)

    def set_aside(self, path: Path, n_bytes: int) -> None:
        """A file that only takes space, so that removing it gives some; one that is there is kept.

        Raises:
            HostError: there is not that much space.
        """
        try:
            self._before(f"set aside {path.name}")
            with _opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
                os.posix_fallocate(descriptor, 0, n_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise _cannot("set aside space in", path, error) from error

    def remove(self, path: Path, *, check: Callable[[], object] = lambda: None) -> None:
        """Remove a file durably; one that is not there is no error.

        Args:
            path: What to remove.
            check: Called right before; what it raises is raised, and the file stays.

        Raises:
            HostError: it could not be removed.
        """
        with told("remove", path):
            self._before(f"remove {path.name}")
            check()
            path.unlink(missing_ok=True)
            self._before(f"sync folder after removing {path.name}")
            sync_folder(path.parent)

    def make_folder(self, path: Path, *, mode: int = 0o755) -> None:
        """Create a folder and its parents durably; one that is there is no error.

        Raises:
            HostError: it could not be created.
        """
        with told("look at", path):
            missing = [one for one in (path, *path.parents) if not one.exists()]
        for folder in reversed(missing):
            with told("create", folder):
                self._before(f"make folder {folder.name}")
                folder.mkdir(mode=mode, exist_ok=True)
                folder.chmod(mode)
                sync_folder(folder.parent)

    def remove_temporaries(self, folder: Path, name: str = "") -> None:
        """Remove what a write left that was cut short, of one file or of all in the folder; one under way stays.

        Raises:
            HostError: the folder could not be read, or a file not removed.
        """
        prefix = f".{name}." if name else "."
        with told("read", folder):
            found = list(folder.iterdir()) if folder.is_dir() else []
        for path in found:
            if path.name.startswith(prefix) and _TEMPORARY.search(path.name) and path.is_file():
                with _looked_at_lock(path) as is_held:
                    if not is_held:
                        self.remove(path)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def looked_at(path: Path, check: Callable[[int], object], flags: int = 0) -> Iterator[int]:
    """A file open for reading, which was looked at before: to open a device or a pipe may do something.

    Args:
        path: It may lead elsewhere by then, so only what was looked at is opened.
        check: Gets a descriptor by which nothing can be read; what it raises is raised.
        flags: Beside `O_PATH`, such as `O_NOFOLLOW`.
    """
    with _opened(path, os.O_PATH | flags) as found:
        check(found)
        with _opened(Path(f"/proc/self/fd/{found}"), os.O_RDONLY) as descriptor:
            yield descriptor


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def told(verb: str, path: Path, *, state: str | None = None) -> Iterator[None]:
    """The errors of the system as ours.

    Raises:
        HostError: one came up in the body.
    """
    try:
        yield
    except OSError as error:
        raise _cannot(verb, path, error, state=state) from error
    except HostError as error:  # of a step on the way
        error.state = error.state or state
        raise


@contextlib.contextmanager
def lock(path: Path, *, purpose: str, since: str) -> Iterator[None]:
    """Hold the lock for the body; it ends with the process, whatever happens to it.

    Its file is for its owner alone: who can read a file can hold a lock on it, and stand in the way.

    Args:
        path: The lock file; it is never removed.
        purpose: What a second caller is told, such as `apply rtx-3090-ti-24gb`.
        since: Time for people, told with it.

    Raises:
        Busy: another process holds it.
        HostError: the lock file cannot be opened.
    """
    with told("open the lock", path, state=_UNCHANGED):
        if not path.parent.exists():  # such as STATE, which an account that serves must enter
            Files().make_folder(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with contextlib.suppress(OSError):  # one of an earlier version, which all could read
            os.fchmod(descriptor, 0o600)
        _take(descriptor, path)
        note = json.dumps({"pid": os.getpid(), "purpose": purpose, "since": since})
        with contextlib.suppress(OSError):  # on a full disk the lock holds without its note
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, note.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> None:
    """Lock it; `is_locked` may stand in the way for a moment, anybody else does for long."""
    clock = SystemClock()
    end_s = clock.monotonic_s() + _LOOK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD:
                raise _cannot("lock", path, error, state=_UNCHANGED) from error
            if clock.monotonic_s() > end_s:
                raise _busy(descriptor) from error
            clock.sleep(_LOOK_S / 10)
        else:
            return


def _stays(descriptor: int, temporary: Path) -> bool:
    """Whether it is locked and still there: before it was, it was taken for what a dead process left."""
    try:
        _take(descriptor, temporary)
    except Busy:
        return False
    except HostError:
        pass  # of a file system that knows no locks
    return temporary.exists()


def holder_of(path: Path) -> int | None:
    """The process that took the lock last, by its own note; None where there is none to be read."""
    try:
        return int(json.loads(path.read_bytes())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def demand_writable(path: Path) -> None:
    """See that a file's file system takes changes at all, before anything is done for its sake.

    Raises:
        HostError: it does not, or the folder is not there.
    """
    with told("write", path, state=_UNCHANGED):
        if os.statvfs(path.parent).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def make_private(path: Path, *sides: Path) -> None:
    """See that a file on which locks are held is its owner's alone; it is made where there is none.

    What hinders that is left for whoever opens it to say.

    Args:
        path: The file, which must not be opened and closed here: that would drop this process's locks.
        sides: Files beside it, which are not made.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for one in (path, *sides):
        with contextlib.suppress(OSError):
            if one.stat().st_mode & 0o077:
                one.chmod(0o600)


def keep_newest(found: Iterable[Path], keep: int) -> None:
    """Remove all but the newest of some files; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        dated = sorted((path.stat().st_mtime, path) for path in found)
        for _at_s, path in dated[: max(0, len(dated) - keep)]:
            path.unlink(missing_ok=True)


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True
        error = error.__cause__
    return False


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock now."""
    with _looked_at_lock(path) as is_held:
        return is_held


@contextlib.contextmanager
def _looked_at_lock(path: Path) -> Iterator[bool]:
    """Whether some process holds the lock; where none does, none has it before the end of the body."""
    is_held = False
    with contextlib.ExitStack() as looked:
        with contextlib.suppress(OSError):
            descriptor = looked.enter_context(_opened(path, os.O_RDONLY | os.O_NOFOLLOW))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:  # of others nobody can lock it, which whoever tries will say
                is_held = error.errno in _HELD
        yield is_held


def stopped_hint(pid: int) -> str:
    """What to do about a process that holds the lock and stands still, as after Ctrl-Z."""
    return f"it is paused: `kill -CONT {pid}` resumes it; after `kill -KILL {pid}` a swap is undone"


def _busy(descriptor: int) -> Busy:
    holder, hint = "another tunerd", "wait for it to end, then try again"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        note = json.loads(os.pread(descriptor, 4096, 0))
        holder = f"tunerd `{note['purpose']}` (process {note['pid']}) since {note['since']}"
        if is_stopped(int(note["pid"])):
            hint = stopped_hint(note["pid"])
    return Busy(
        "another change is under way",
        cause=f"{holder} holds the lock",
        state=_UNCHANGED,
        hint=hint,
    )


def _cannot(verb: str, path: Path, error: OSError, *, state: str | None = None) -> HostError:
    hint = None
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        hint = f"free some space on the file system of {path.parent}; where `df -i` says 100 %, remove files"
    elif error.errno == errno.EROFS:
        where = shlex.quote(str(path.parent))
        hint = (
            f"`findmnt -T {where}` shows which mount is read-only: `mount -o remount,rw` its target, or `mount -o "
            "remount,bind,rw` if it is a bind mount; `dmesg` may say why it is read-only"
        )
    elif error.errno == errno.EPERM and os.geteuid() == 0:
        shown = f"`lsattr -d {shlex.quote(str(path))} {shlex.quote(str(path.parent))}`"
        hint = f"{shown} shows an `i` for what is immutable; `chattr -i` makes it changeable"
    elif error.errno in {errno.EACCES, errno.EPERM}:
        hint = "run the command as the owner, or as root"
    elif error.errno in {errno.ENOLCK, errno.EOPNOTSUPP}:
        hint = (
            "files cannot be locked on its file system, as on some network mounts: have `TUNERD_STATE_DIR` and "
            "`TUNERD_CONFIG_DIR` name folders on a local disk"
        )
    cause = error.strerror or str(error)
    return HostError(f"cannot {verb} `{path}`", cause=cause, state=state, hint=hint)


def stamp_of(path: Path) -> tuple[int, int] | None:
    """By which a change of a file is seen; None where it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def is_gone(path: Path) -> bool:
    """Whether nothing is there; what may not be looked at, as in a closed home, may be there."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
    return False


def real_path(path: Path) -> Path:
    """Where its links lead; the path itself where that cannot be told."""
    try:
        return Path(os.path.realpath(path, strict=True))
    except OSError:
        return path
