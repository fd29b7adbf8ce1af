"""Where the checkout and its test data are, for whatever lies deeper than one folder."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
SUPPORT = TESTS / "support"
