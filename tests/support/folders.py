"""Where the checkout and its test data are, for whatever lies deeper than one folder; folders of a test."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
SUPPORT = TESTS / "support"


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that other accounts may enter, such as that of probes, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="tunerd-test-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def plant(root: Path, files: dict[str, str]) -> Path:
    """A tree of files, such as a `/proc` of another machine."""
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root
