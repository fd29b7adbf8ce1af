"""Where the checkout and its test data are, for whatever lies deeper than one folder."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
SUPPORT = TESTS / "support"


def plant(root: Path, files: dict[str, str]) -> Path:
    """A tree of files, such as a `/proc` of another machine."""
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root
