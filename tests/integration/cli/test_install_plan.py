"""What `install.sh` would install, as its dry run says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.folders import ROOT


def planned(folder: Path, *options: str) -> str:
    done = subprocess.run(
        ["/bin/sh", ROOT / "install.sh", "--system", "--dry-run", *options],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DESTDIR": str(folder)},
        capture_output=True, text=True, timeout=400, check=True,
    )  # fmt: skip
    assert not (folder / "opt/tunerd/bin").exists()
    (line,) = [one for one in done.stdout.splitlines() if "and its packages into" in one]
    return line.split()[2]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ((), "tunerd[embedded]"),
        (("--without-embedded",), "tunerd"),
        (("--with-fleet",), "tunerd[embedded,fleet]"),
        (("--without-embedded", "--with-fleet"), "tunerd[fleet]"),
    ],
)
def test_options_say_which_extras_come(tmp_path: Path, options: tuple[str, ...], what: str) -> None:
    assert planned(tmp_path, *options) == what


def test_an_upgrade_keeps_what_a_shared_store_needs_though_the_python_was_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "opt/tunerd/lib/python3.99/site-packages/psycopg").mkdir(parents=True)
    assert planned(tmp_path) == "tunerd[embedded,fleet]"
