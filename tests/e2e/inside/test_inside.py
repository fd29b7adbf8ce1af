"""Shows that tests run inside a machine: see test_machine.py."""

from __future__ import annotations

import os
from pathlib import Path


def test_this_runs_inside_a_machine() -> None:
    assert Path("/run/systemd/container").read_text().strip() == "systemd-nspawn"
    assert not os.environ.get("TUNERD_TEST_FAIL")
