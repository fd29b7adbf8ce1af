"""Skips that say what is missing, and that are failures where TUNERD_TEST_REQUIRE asks for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

ENGINES_VARIABLE = "TUNERD_TEST_ENGINES"
REQUIRE_VARIABLE = "TUNERD_TEST_REQUIRE"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="it mounts, or becomes somebody else: run `sudo ./tests/run`"
)


def missing(mark: str, what: str, how: str) -> NoReturn:
    """Skip with what is missing and how to get it; fail instead where `mark` is required."""
    text = f"{what}; {how}"
    required = {name.strip() for name in os.environ.get(REQUIRE_VARIABLE, "").split(",")}
    if mark in required:
        pytest.fail(f"{REQUIRE_VARIABLE} asks for {mark}, but {text}", pytrace=False)
    pytest.skip(text)


def engines() -> list[Path]:
    """The real engine programs in the folder in TUNERD_TEST_ENGINES."""
    folder = Path(os.environ.get(ENGINES_VARIABLE) or os.devnull)
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if path.is_file() and os.access(path, os.X_OK))


def engine(name: str) -> Path:
    """The real engine program of this name, from the folder in TUNERD_TEST_ENGINES."""
    folder = os.environ.get(ENGINES_VARIABLE)
    if not folder:
        missing("engine", "no real engines here", f"set {ENGINES_VARIABLE} to a folder of builds")
    program = Path(folder) / name
    if not os.access(program, os.X_OK):
        missing("engine", f"no program {name} in {folder}", "build that engine there")
    return program
