"""tunerd's own units on a real systemd: each operation in its sandbox."""

from __future__ import annotations

import pytest

from tests.support.deployment import profile
from tests.support.machine import Machine
from tests.support.night import SETTINGS, Night
from tests.support.stand_in import RTX_4070_SUPER
from tests.support.webhook import URL, Webhook

pytestmark = [pytest.mark.whole, pytest.mark.timeout(2700)]

OPERATIONS = (
    ("plan", "night"),
    ("detect",),
    ("engines",),
    ("guard", "check"),
    ("guard", "set", "drift", "off"),
    ("apply", "night", "--set", "serving.ctx_size=2048", "--yes"),
    ("rollback", "--yes"),
    ("recover",),
    ("bench", "--repeats", "1", "--yes"),
    ("compare", "--set", "serving.n_batch=256", "--pairs", "3", "--budget", "60s", "--yes"),
    ("sweep", "run", "--dry-run"),
    ("notify", "test"),
    ("apply", "card", "--yes"),
    ("guard", "raise-margin", "--yes"),
    ("engines", "--prove"),
)


def test_every_operation_of_a_member_works_in_its_sandbox(member_machine: Machine) -> None:
    machine = member_machine
    night = Night(machine, device=RTX_4070_SUPER)
    night.box.profile("card", profile("fake", match__gpu="RTX 4070", memory__fit_mib=1664))
    notify = f'[notify]\nwebhook = "{URL}"\nleast = "note"\n'
    night.box.settings(f"{SETTINGS.format(sweep='')}{notify}", stop_timeout_s=3, settle_s=0.1)
    hook = Webhook(machine)  # the first notices find it down, and are tried again
    machine.systemctl("restart", "tunerd.service")

    failed = {}
    for words in OPERATIONS:
        if words[0] == "notify":
            hook.start()
        done = machine.run("tunerd", *words, user="alice", check=False)
        if done.returncode:
            failed[words] = (done.returncode, done.stdout[-300:], done.stderr[-900:])
    assert failed == {}
    assert "test" in hook.kinds()
    assert night.serves
    left = machine.sh("ls /run/systemd/system /run/systemd/transient").stdout.split()
    assert [name for name in left if name.startswith("tunerd-job")] == []
    failures = "systemctl list-units --failed --plain --no-legend 'tunerd-job*' 'tunerd-notify*'"
    assert machine.sh(failures).stdout == ""
