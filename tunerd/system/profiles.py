"""Profile files on disk: shipped, site and tuned."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunerd.core.layers import ProfileSources
from tunerd.core.names import is_name
from tunerd.core.profile_check import Problem
from tunerd.core.resolve import Layer
from tunerd.errors import HostError
from tunerd.system.files import Files

_SUFFIX = ".toml"
_MAX_BYTES = 1024 * 1024


def read_profile(path: Path, files: Files) -> Mapping[str, Any] | Problem:
    """One parsed profile file, or why it cannot be read or parsed."""
    try:
        content = files.read(path)
    except HostError as error:  # a folder, a pipe, a file that may not be read
        why = f"{error.message}: {error.cause}" if error.cause else error.message
        return Problem(str(path), "file", why, "a profile file that can be read")
    if content is None:
        return Problem(str(path), "file", "no such file", "a profile file")
    if len(content) > _MAX_BYTES:
        return Problem(str(path), "file", f"{len(content)} bytes", f"at most {_MAX_BYTES} bytes")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        return Problem(str(path), "file", str(error), "valid TOML in UTF-8")


def read_sources(
    *, shipped: Path, site: Path, tuned: Path, files: Files
) -> tuple[ProfileSources, tuple[Problem, ...]]:
    """Every profile file that can be parsed, and a problem for each that cannot.

    Raises:
        HostError: a folder cannot be read.
    """
    found: dict[Layer, dict[str, Mapping[str, Any]]] = {}
    paths: dict[tuple[Layer, str], str] = {}
    problems: list[Problem] = []
    for layer, folder in ((Layer.SHIPPED, shipped), (Layer.SITE, site), (Layer.TUNED, tuned)):
        found[layer] = {}
        for path in _profile_files(folder):
            data = read_profile(path, files)
            if isinstance(data, Problem):
                problems.append(data)
            else:
                found[layer][path.stem] = data
                paths[layer, path.stem] = path.name if layer is Layer.SHIPPED else str(path)
    sources = ProfileSources(
        shipped=found[Layer.SHIPPED],
        site=found[Layer.SITE],
        tuned=found[Layer.TUNED],
        paths=paths,
    )
    return sources, tuple(problems)


def _profile_files(folder: Path) -> list[Path]:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HostError(f"cannot read folder `{folder}`", cause=error.strerror) from error
    return [
        folder / name
        for name in names
        if name.endswith(_SUFFIX) and is_name(name.removesuffix(_SUFFIX))
    ]
