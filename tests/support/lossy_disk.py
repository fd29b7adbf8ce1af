"""A disk that forgets, at a power cut, what was not synced.

ext4 on a loop device: what the file system has not sent to the block device is not in the backing
file, so a copy of that file is the image that a power cut leaves (the drive's own cache aside).
Mounting the copy replays the journal, as a boot does. A long commit interval keeps timers from
syncing what the program under test did not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import ProgramFailed, program

_COMMIT_S = 3600
# Without these ext4 syncs a file that replaces another one by rename: a kindness, not a promise.
_STRICT = ",noauto_da_alloc,data=writeback"


class LossyDisk:
    """A mounted disk in a folder of its own; `folder/disk` is where it is mounted.

    `strict` leaves out what ext4 does for programs that forget to sync.
    """

    def __init__(self, folder: Path, *, size_mib: int = 256, strict: bool = False) -> None:
        self.mount_point = folder / "disk"
        self._folder = folder
        self._size_mib = size_mib
        self._options = f"loop,commit={_COMMIT_S}{_STRICT if strict else ''}"
        self._number = 0

    def create(self) -> None:
        """Make an empty disk and mount it."""
        self.mount_point.mkdir(parents=True)
        with self._image().open("wb") as image:
            image.truncate(self._size_mib * 1024 * 1024)
        lazy = "lazy_itable_init=0,lazy_journal_init=0"
        program("mkfs.ext4", "-q", "-m", "0", "-E", lazy, self._image())
        self._mount()
        program("sync", "--file-system", self.mount_point)

    def crash_image(self) -> Path:
        """Copy what has reached the disk by now; call it when all who write are dead."""
        target = self._folder / f"disk-{self._number + 1}.img"
        program("cp", "--sparse=always", self._image(), target)
        return target

    def come_back(self, image: Path) -> None:
        """Mount a crash image instead of the disk; nobody may use the disk any more."""
        old = self._image()
        program("umount", self.mount_point)
        old.unlink()
        self._number += 1
        assert image == self._image()
        self._mount()

    def cut(self) -> None:
        """A power cut for a disk without a machine on it."""
        self.come_back(self.crash_image())

    def remove(self) -> None:
        """Unmount and delete the disk."""
        program("umount", self.mount_point, check=False)
        self._image().unlink(missing_ok=True)
        self.mount_point.rmdir()

    def _image(self) -> Path:
        return self._folder / f"disk-{self._number}.img"

    def _mount(self) -> None:
        program("mount", "-o", self._options, self._image(), self.mount_point)


@contextlib.contextmanager
def tiny_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of this size in a new folder; skips where nothing can be mounted."""
    folder.mkdir()
    try:
        program("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    except ProgramFailed as error:
        pytest.skip(f"cannot mount a tmpfs here: {error}")
    try:
        yield folder
    finally:
        program("umount", "--lazy", folder)
