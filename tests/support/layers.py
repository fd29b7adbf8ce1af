"""Layers of test roots, made by running a script in a root with this host's network.

The script reaches package mirrors as this host does: its resolver, certificates, proxies and pip
settings are lent to it, with the local files that they name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import overlay, run_folder
from tests.support.overlay import Root
from tests.support.programs import program

_LENT_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
_LENT_VARIABLE = re.compile(
    r"PIP_\w+|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(https?|ftp|no|all)_proxy",
    re.IGNORECASE,
)
_PIP_SETTING = re.compile(r"(?:global|install|wheel)\.([a-z-]+)='(.*)'")
_NOT_LENT = {"PIP_REQUIRE_VIRTUALENV", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_CACHE_DIR"}
_LIMIT_S = 900.0


def build(
    cache: Path,
    target: Path,
    root: Root,
    script: str,
    *arguments: str,
    writable: Mapping[str, Path] | None = None,
) -> None:
    """Run a POSIX sh script in the root; what it changes becomes the layer `target`.

    Folders in `writable` are seen at the given places and what is written there stays in them.

    Raises:
        ProgramFailed: the script failed; the text has its output.
    """
    folder = run_folder.create(cache)
    try:
        merged = overlay.mount(root, folder, folder / "top")
        environment = _lent_environment()
        program("mount", "-t", "proc", "proc", merged / "proc")
        program("mount", "--bind", "/dev", merged / "dev")
        program("mount", "-t", "tmpfs", "tmpfs", merged / "tmp")
        for place, source in {**root.binds, **_lent_places(environment)}.items():
            _bind(source, merged, place, "ro")
        for place, source in (writable or {}).items():
            _bind(source, merged, place, "rw")
        env = ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]
        shell = ["sh", "-c", script, "sh", *arguments]
        program("chroot", merged, *env, *shell, timeout_s=_LIMIT_S)
        run_folder.unmount(folder)
        (folder / "top" / "upper").rename(target)
    finally:
        run_folder.destroy(folder)


def _bind(source: Path, merged: Path, place: str, mode: str) -> None:
    point = merged / place.lstrip("/")
    if source.is_dir():
        point.mkdir(parents=True, exist_ok=True)
    elif not point.exists():
        point.parent.mkdir(parents=True, exist_ok=True)
        point.touch()
    program("mount", "-o", f"bind,{mode}", source, point.resolve())


def _lent_environment() -> dict[str, str]:
    """Variables by which programs in the root reach package mirrors as this host does."""
    lent = {}
    for line in program(sys.executable, "-m", "pip", "config", "list").stdout.decode().splitlines():
        if match := _PIP_SETTING.fullmatch(line):
            lent["PIP_" + match[1].upper().replace("-", "_")] = match[2].replace("\\n", " ")
    lent |= {name: value for name, value in os.environ.items() if _LENT_VARIABLE.fullmatch(name)}
    own = {
        "HOME": "/tmp",  # noqa: S108  a tmpfs of the root's own
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PIP_NO_CACHE_DIR": "1",
        "DEBIAN_FRONTEND": "noninteractive",
    }
    return {name: value for name, value in lent.items() if name not in _NOT_LENT} | own


def _lent_places(environment: Mapping[str, str]) -> dict[str, Path]:
    """Host files and folders that the lent settings name, by their place."""
    places = [*_LENT_FILES]
    for name, value in environment.items():
        if name in {"HOME", "PATH"}:
            continue
        for word in value.split():
            path = word.removeprefix("file://")
            # A local package index links to files beside itself.
            places.append(str(Path(path).parent) if word.startswith("file:///") else path)
    return {
        place: Path(place)
        for place in places
        if place.startswith("/") and place != "/" and Path(place).exists()
    }
