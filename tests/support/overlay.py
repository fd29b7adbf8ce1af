"""A writable view of read-only folders, by overlayfs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.programs import program

_HOST = Path("/")
# Copies only: a layer must mean the same wherever it is mounted, and under other layers.
_PLAIN = "index=off,metacopy=off,redirect_dir=nofollow"


@dataclass(frozen=True, slots=True)
class Root:
    """What a machine boots from.

    `lowers` are its layers, the topmost first; of the lowest the folders in `hidden` are not seen.
    `seed` is copied into the machine's writable top; `binds` are host folders, seen read-only at
    the given places.
    """

    name: str
    lowers: tuple[Path, ...]
    seed: Path | None = None
    hidden: tuple[str, ...] = ()
    binds: dict[str, Path] = field(default_factory=dict)


def mount(root: Root, folder: Path, top: Path) -> Path:
    """Mount the root in `folder` with its changes in `top`; where it is mounted.

    `top` is kept: mounted again, it shows what was written before.
    """
    upper, work, merged = top / "upper", top / "work", folder / "root"
    if not upper.exists():
        upper.mkdir(parents=True)
        for name in root.hidden:
            _hide(upper, name, root.lowers[:-1])
        if root.seed is not None:
            program("cp", "--archive", f"{root.seed}/.", upper)
    work.mkdir(exist_ok=True)
    merged.mkdir(exist_ok=True)
    lowers = ":".join(map(str, _stackable(root.lowers, folder)))
    options = f"{_PLAIN},lowerdir={lowers},upperdir={upper},workdir={work}"
    program("mount", "-t", "overlay", "overlay", "-o", options, merged)
    return merged


def _hide(upper: Path, name: str, layers: Sequence[Path]) -> None:
    """Let the folder show what these layers have in it, and nothing of the host's own."""
    path = upper
    for part in Path(name).parts:
        path /= part
        if not path.exists():
            below = (_HOST / path.relative_to(upper)).stat()
            path.mkdir()
            path.chmod(below.st_mode)
            os.chown(path, below.st_uid, below.st_gid)
    for layer in reversed(layers):
        if (layer / name).is_dir():
            program("cp", "--archive", f"{layer / name}/.", path)
    os.setxattr(path, "trusted.overlay.opaque", b"y")


def _stackable(lowers: tuple[Path, ...], folder: Path) -> tuple[Path, ...]:
    """The layers in a form that overlayfs takes.

    Above the host's own root it refuses folders that lie in it; joined to a file system of their
    own they do not.
    """
    if _HOST not in lowers or len(lowers) == 1:
        return lowers
    above = [lower for lower in lowers if lower != _HOST]
    joined, nothing = folder / "layers", folder / "nothing"
    nothing.mkdir(exist_ok=True)  # an overlay without a top wants two layers at least
    if not joined.is_mount():
        joined.mkdir(exist_ok=True)
        lower = ":".join(map(str, [*above, nothing]))
        program("mount", "-t", "overlay", "overlay", "-o", f"{_PLAIN},lowerdir={lower}", joined)
    return (joined, _HOST)
