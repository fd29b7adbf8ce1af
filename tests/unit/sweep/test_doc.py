"""The box in docs/sweep.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.folders import ROOT
from tunerd.profile.arm import Box

PAGE = ROOT / "docs/sweep.md"


def test_the_example_of_another_box_finds_what_it_says(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "my_box.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    verdict, arm, *reasons = done.stdout.splitlines()
    assert verdict == "promote"
    assert "mtp 4/0" in arm
    assert any("faster over" in reason for reason in reasons)


def test_every_method_of_a_box_is_described() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = [name for name in vars(Box) if not name.startswith("_")]
    assert len(names) == 6
    assert [name for name in names if f"`{name}" not in text] == []
