"""Leaves out one safeguard at a time, and shows that tests which run in seconds see it. By hand.

    python -m tests.fault.mutants [NAME ...]

Works on copies; needs root for the tests with disks that forget.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUSE = "tests/unit/production/test_swap_fuse.py"
POINTS = "tests/e2e/test_crash_points.py"
SWAPS = "tests/unit/production"
BACKUPS = "tests/unit/production/test_rollback.py"
PROMOTIONS = "tests/integration/sweep/test_promote.py"
_PROBLEM = re.compile(r"^E\s+(?:AssertionError: )?(\d+ \(|killed |cut |edited |Ctrl-C |\d+ )")


@dataclass(frozen=True)
class Mutant:
    """A safeguard left out: the text that goes, what stands there instead, and who is to see it."""

    name: str
    path: str
    text: str
    instead: str
    suite: str = FUSE


FILES, SWAP = "machine/files.py", "production/swap.py"
ROLLBACK, LEASE, PROMOTE = "production/rollback.py", "production/lease.py", "sweep/promote.py"
HEALTH, PAIRS = "engine/health.py", "measure/pairs.py"
MUTANTS = (
    Mutant("sync of the file", FILES,
           'name}")\n                os.fsync(descriptor)', 'name}")', POINTS),
    Mutant("sync of the folder", FILES,
           "O_DIRECTORY) as descriptor:\n        os.fsync(descriptor)",
           "O_DIRECTORY) as descriptor:\n        pass", POINTS),
    Mutant("syncs of the backup", FILES,
           "self.write(target, content, like=look)", "target.write_bytes(content)", POINTS),
    Mutant("intent record, with disks that forget", SWAP,
           "ctx.files.write_json(record_path(ctx), plain(record, schema=SCHEMA), mode=0o600)", "pass", POINTS),
    Mutant("intent record", SWAP,
           "ctx.files.write_json(record_path(ctx), plain(record, schema=SCHEMA), mode=0o600)", "pass"),
    Mutant("reset-failed before each start", "production/gate.py",
           "ctx.services.reset_failed(ctx.unit)", "pass"),
    Mutant("hash right before the rename", FILES, "            check()", "            pass"),
    Mutant("reload", SWAP, "ctx.services.reload()", "pass"),
    Mutant("undoing after a reboot", "production/journal.py",
           "Recovery.JUDGE if boot_id == record.boot_id else Recovery.UNDO", "Recovery.JUDGE",
           "tests/unit/production/test_journal.py"),
    Mutant("a real generation before the commit", SWAP, "raise _UnhealthyError(found)", "pass"),
    Mutant("clearing of temporaries", "production/recover.py",
           "    _clear_leftovers(ctx)", "    pass"),
    Mutant("disable on the way back", SWAP, "ctx.services.disable(ctx.unit)", "pass"),
    Mutant("enable on the way back", SWAP, "ctx.services.enable(ctx.unit)", "pass"),
    Mutant("holding signals on the way back", "machine/process.py",
           "        if self._is_held:\n", "        if False:\n"),
    Mutant("what the manager parsed", SWAP, "    _check_parsed(ctx)\n", "", SWAPS),
    Mutant("who is the old server", SWAP,
           "    if _is_the_old(ctx, record, state):", "    if state.is_active:", SWAPS),
    Mutant("the text that the plan was made for", SWAP,
           "if sha256(old_text) != request.old_sha256:", "if False:", SWAPS),
    Mutant("holding signals in the commit", SWAP,
           "        with interrupts.held():\n            told =",
           "        if interrupts:\n            told =", SWAPS),
    Mutant("draining", SWAP, "drain(ctx, before) if request.drain else ()", "()", SWAPS),
    Mutant("a changed backup", SWAP,
           "content is None or sha256(content) != record.old_sha256", "content is None", SWAPS),
    Mutant("rollback passes over failed swaps", ROLLBACK,
           "if is_undone and sha256(text)", "if sha256(text)", BACKUPS),
    Mutant("rollback to the newest", ROLLBACK, "    for backup in backups(ctx):\n        if",
           "    for backup in reversed(backups(ctx)):\n        if", BACKUPS),
    Mutant("rollback of this unit", ROLLBACK,
           "ctx.generations.entries(ctx.unit):\n        name =",
           "ctx.generations.entries():\n        name =", BACKUPS),
    Mutant("enabled for certain", LEASE, "before.is_enabled is not True",
           "before.is_enabled is False", SWAPS),
    Mutant("a lease that cannot be had", LEASE,
           "if spec.restores and not now.is_active:", "if False:", SWAPS),
    Mutant("a server that still loads", LEASE,
           "(before.runs or start_after)", "(before.is_active or start_after)", SWAPS),
    Mutant("promotes what was proved", PROMOTE,
           'sweep.verdict is None or sweep.verdict.outcome != "promote"', "sweep.verdict is None",
           PROMOTIONS),
    Mutant("promotes over what the sweep began from", PROMOTE,
           "if now is None or not is_start_of(ctx, sweep, now):", "if now is None:", PROMOTIONS),
    Mutant("promotes under the same conditions", PROMOTE,
           "if found.holds is not True or", "if False or", PROMOTIONS),
    Mutant("a winner that is slower in service", PROMOTE,
           "self.live.turn_s >= self.before_s", "False", PROMOTIONS),
    Mutant("a winner without an answer", PROMOTE, "return self.is_silent or (", "return (",
           PROMOTIONS),
    Mutant("no deployment after the window", PROMOTE,
           "deadline.end_s - ctx.clock.now_s() < load_s", "False", PROMOTIONS),
    Mutant("a promotion that was overtaken", PROMOTE,
           "        raise _Overtaken", "        return", PROMOTIONS),
    Mutant("a given-up server after a failed swap", SWAP,
           "starts and record.was_given_up", "False", "tests/unit/production/test_meanwhile.py"),
    Mutant("the least gain", PAIRS, "least_gain = math.log1p(margin)", "least_gain = 0.0",
           "tests/unit/measure/test_pairs.py"),
    Mutant("host memory is not VRAM", HEALTH,
           "for kind, pattern in _PATTERNS:", "for kind, pattern in reversed(_PATTERNS):",
           "tests/unit/engine/test_health.py"),
    Mutant("a driver's fault is no loss of memory", HEALTH, "for kind, pattern in _PATTERNS:",
           "for kind, pattern in sorted(_PATTERNS, key=lambda one: one[0] is not FailureKind.DRIVER):",
           "tests/unit/engine/test_health.py"),
    Mutant("n-min", "engine/flags.py", '"n_max", "n_min"', '"n_max"',
           "tests/unit/engine/test_commandline.py tests/unit/engine/test_importer.py"),
    Mutant("percent in a description", "units/text.py",
           '{spec.profile}").replace("%", "%%")', '{spec.profile}")',
           "tests/unit/units/test_text.py"),
    Mutant("ignored signals are not handed on", "machine/process.py",
           "    return any(signal.getsignal(one)", "    return False and any(signal.getsignal(one)",
           "tests/integration/machine/test_process.py"),
    Mutant("memory for a graph", HEALTH,
           r"""            r"GGML_ASSERT\((ctx->)?mem_buffer != NULL\)",""", "",
           "tests/unit/engine/test_health.py"),
)  # fmt: skip


def main() -> int:
    """Try the mutants that are named, or all."""
    names = sys.argv[1:]
    wanted = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    for suite in dict.fromkeys(mutant.suite for mutant in wanted):
        with _copy() as copy:
            if _problems(copy, suite):
                raise SystemExit(f"{suite} fails with every safeguard there: it would see nothing")
    missed = 0
    for mutant in wanted:
        with _copy() as copy:
            n_places = _leave_out(copy / "tunerd" / mutant.path, mutant)
            n_seen = _problems(copy, mutant.suite)
        missed += n_seen == 0
        suite = " ".join(Path(one).stem for one in mutant.suite.split())
        print(
            f"without {mutant.name} ({n_places} places): {n_seen} problems in {suite}", flush=True
        )
    return 1 if missed else 0


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    """A copy of everything, which the account that looks at engines may read too."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        copy = Path(name) / "tunerd"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        yield copy


def _leave_out(path: Path, mutant: Mutant) -> int:
    text = path.read_text()
    n_places = text.count(mutant.text)
    if not n_places:
        raise SystemExit(f"{mutant.path} has no text `{mutant.text}`")
    path.write_text(text.replace(mutant.text, mutant.instead))
    return n_places


def _problems(copy: Path, suite: str) -> int:
    """How many cases of a suite see that something is wrong."""
    first = [] if suite in {FUSE, POINTS} else ["-x"]  # which count their cases themselves
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *first, *suite.split()],
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
