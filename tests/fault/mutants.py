"""Leaves out one safeguard of the swap at a time, and shows that the tests see it. By hand.

    python -m tests.fault.mutants [NAME ...]

Works on copies; needs root for the tests with disks that forget.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUSE = "tests/unit/production/test_swap_fuse.py"
POINTS = "tests/e2e/test_crash_points.py"
_PROBLEM = re.compile(r"^E\s+(?:AssertionError: )?(\d+ \(|killed |cut |edited |Ctrl-C |\d+ )")


@dataclass(frozen=True)
class Mutant:
    """A safeguard left out: the text that goes, what stands there instead, and who is to see it."""

    name: str
    path: str
    text: str
    instead: str
    suite: str = FUSE


FILES, SWAP, BACK = "machine/files.py", "production/swap.py", "production/swap.py"
MUTANTS = (
    Mutant("sync of the file", FILES,
           'name}")\n                os.fsync(descriptor)', 'name}")', POINTS),
    Mutant("sync of the folder", FILES,
           "O_CLOEXEC)\n    try:\n        os.fsync(descriptor)",
           "O_CLOEXEC)\n    try:\n        pass", POINTS),
    Mutant("syncs of the backup", FILES,
           "self.write(target, content, like=look)", "target.write_bytes(content)", POINTS),
    Mutant("intent record, with disks that forget", "production/swap.py",
           "ctx.files.write_json(record_path(ctx), records.plain(record, schema=SCHEMA), mode=0o600)", "pass", POINTS),
    Mutant("intent record", "production/swap.py",
           "ctx.files.write_json(record_path(ctx), records.plain(record, schema=SCHEMA), mode=0o600)", "pass"),
    Mutant("reset-failed before each start", "production/gate.py",
           "ctx.services.reset_failed(ctx.unit)", "pass"),
    Mutant("hash right before the rename", FILES, "            check()", "            pass"),
    Mutant("reload", SWAP, "ctx.services.reload()", "pass"),
    Mutant("undoing after a reboot", "production/records.py",
           "Recovery.JUDGE if boot_id == record.boot_id else Recovery.UNDO", "Recovery.JUDGE"),
    Mutant("a real generation before the commit", SWAP, "raise _UnhealthyError(found)", "pass"),
    Mutant("clearing of temporaries", "production/recover.py",
           "    _clear_leftovers(ctx)", "    pass"),
    Mutant("disable on the way back", BACK, "ctx.services.disable(ctx.unit)", "pass"),
    Mutant("enable on the way back", BACK, "ctx.services.enable(ctx.unit)", "pass"),
    Mutant("holding signals on the way back", "machine/process.py",
           "if self._is_held or self._was_raised:", "if False:"),
)  # fmt: skip


def main() -> int:
    """Try the mutants that are named, or all."""
    wanted = sys.argv[1:]
    missed = 0
    for mutant in MUTANTS:
        if wanted and mutant.name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name) / "tunerd"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
            n_places = _leave_out(copy / "tunerd" / mutant.path, mutant)
            n_seen = _problems(copy, mutant.suite)
        missed += n_seen == 0
        suite = Path(mutant.suite).stem
        print(
            f"without {mutant.name} ({n_places} places): {n_seen} problems in {suite}", flush=True
        )
    return 1 if missed else 0


def _leave_out(path: Path, mutant: Mutant) -> int:
    text = path.read_text()
    n_places = text.count(mutant.text)
    if not n_places:
        raise SystemExit(f"{mutant.path} has no text `{mutant.text}`")
    path.write_text(text.replace(mutant.text, mutant.instead))
    return n_places


def _problems(copy: Path, suite: str) -> int:
    """How many cases of a suite see that something is wrong."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", suite],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in {0, 1}:
        raise SystemExit(done.stdout + done.stderr)
    lines = [line for line in done.stdout.splitlines() if _PROBLEM.match(line)]
    n_failed = len(re.findall(r"^(?:FAILED|ERROR) ", done.stdout, re.MULTILINE))
    return max(len(set(lines)), n_failed)


if __name__ == "__main__":
    sys.exit(main())
