"""What keeps a real systemd from starting a unit is seen before its server is stopped, and what does not keeps nothing away."""

from __future__ import annotations

import json

import pytest

from tests.support.machine import Machine
from tests.support.unit_lines import FAILS as FAIL_ANYWHERE
from tests.support.unit_lines import STARTS as START_ANYWHERE

FAILS = {
    **FAIL_ANYWHERE,
    "Slice=held.slice": "`held.slice` is masked",
}

# Which a start mounts that needs what lies there.
_MOUNT = "[Mount]\nWhat=/etc\nWhere=/mnt/no\nType=none\nOptions=bind\n"
STARTS = (
    *START_ANYWHERE,
    "WorkingDirectory=/mnt/no/systemd",
    "[Unit]\nRequires=basic.target no.slice -.mount\n[Service]\nSlice=no.slice",
)

_TRY = """
import json, subprocess, sys
from pathlib import Path
from tunerd.app import build_context
from tunerd.engine.serving import missing_to_start, read_live_unit
cases, user = json.load(sys.stdin), sys.argv[1:]
ctx, found = build_context(mode="user" if user else "system"), {}
ctx.paths.unit_dir.mkdir(parents=True, exist_ok=True)
for number, lines in enumerate(cases):
    text = f"[Service]\\nType=exec\\n{lines}\\nExecStart=/bin/sleep infinity\\n"
    Path(ctx.paths.unit_dir, f"case{number}.service").write_text(text)
ctx.services.reload()
for number, lines in enumerate(cases):
    unit = f"case{number}.service"
    missing = missing_to_start(ctx, read_live_unit(ctx, unit))
    subprocess.run(["systemctl", *user, "start", unit], stderr=subprocess.DEVNULL)
    found[lines] = [ctx.services.state(unit).is_active, missing]
    subprocess.run(["systemctl", *user, "stop", unit], stderr=subprocess.DEVNULL)
print(json.dumps(found))
"""


@pytest.mark.both_roots
def test_a_unit_starts_just_where_nothing_is_missing_of_what_it_names(machine: Machine) -> None:
    found = _tried(machine)
    assert {lines: said for lines in STARTS if (said := found[lines]) != (True, None)} == {}
    assert {lines: found[lines] for lines, what in FAILS.items() if found[lines][0]} == {}
    assert {lines for lines, what in FAILS.items() if what not in (found[lines][1] or "")} == set()


def test_nothing_is_missing_to_a_manager_of_a_user_that_starts_the_unit(
    host_machine: Machine,
) -> None:
    """One of systemd 252 starts units without the mounts that it may not make for them."""
    found = _tried(host_machine, user="alice")
    assert {lines: said for lines, (starts, said) in found.items() if starts and said} == {}
    assert found["ExecStartPre=!/no"][1] is not None


def _tried(machine: Machine, user: str | None = None) -> dict[str, tuple[bool, str | None]]:
    options = () if user is None else ("--user",)
    machine.write("/etc/systemd/system/mnt-no.mount", _MOUNT)
    machine.systemctl("mask", "held.slice")
    told = json.dumps([*FAILS, *STARTS])
    answer = machine.run("/opt/tunerd/bin/python", "-c", _TRY, *options, user=user, stdin=told)
    return {lines: (starts, said) for lines, (starts, said) in json.loads(answer.stdout).items()}
