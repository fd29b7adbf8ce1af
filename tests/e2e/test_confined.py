"""tunerd's own units on a real systemd: each operation in its sandbox, and how exposed they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.e2e.conftest import Machines
from tests.support.machine import Machine
from tests.support.night import SETTINGS, Night
from tests.support.overlay import Root
from tests.support.places import Place, places
from tests.support.roots import Tunerd, host_root, sid_root
from tests.support.webhook import URL, Webhook

pytestmark = pytest.mark.timeout(900)

MOST_EXPOSED = 3.2
# A candidate is production's unit under another name.
FOREIGN = {"tunerd-candidate"}
SEEN = {"tunerd", "tunerd-job", "tunerd-guard-check", "tunerd-notify",
        "tunerd-lease", "tunerd-probe", "tunerd-web"}  # fmt: skip
# Looks once at whatever begins: looking takes a processor for a second.
WATCH = """
while sleep 0.05; do
    now=$(echo /sys/fs/cgroup/*.slice/tunerd* /sys/fs/cgroup/*.slice/*.slice/tunerd*)
    [ "$now" != "$seen" ] || continue
    seen=$now
    systemd-analyze security --no-pager --json=short >>/run/looks
    echo >>/run/looks
done
"""
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
    ("guard", "raise-margin"),
    ("engines", "--prove"),
)
# What lives for a second may end between two looks of a busy machine.
AGAIN = 3 * (("guard", "check"), ("notify", "test"), ("engines", "--prove"))


@pytest.fixture(params=places(of="system"), ids=str)
def machine(
    request: pytest.FixtureRequest, machines: Machines, build_root: Callable[..., Root]
) -> Machine:
    place: Place = request.param
    root = host_root if place.root == "host" else sid_root
    return machines(build_root(root, tunerd=Tunerd.INSTALLED))


def most_exposed(machine: Machine) -> dict[str, float]:
    """The worst score that was seen, by kind of unit."""
    seen: dict[str, float] = {}
    for line in machine.read("/run/looks").splitlines():
        for row in json.loads(line or "[]"):
            kind = re.sub(r"(-[0-9a-f]{8,12}|-\d+)?(-\d+)?\.service$", "", row["unit"])
            if kind.startswith("tunerd") and kind not in FOREIGN:
                seen[kind] = max(seen.get(kind, 0.0), float(row["exposure"]))
    return seen


def test_every_operation_of_a_member_works_in_its_sandbox_and_no_unit_is_exposed(
    machine: Machine,
) -> None:
    night = Night(machine)
    notify = f'[notify]\nwebhook = "{URL}"\nleast = "note"\n'
    night.box.settings(f"{SETTINGS.format(sweep='')}{notify}", stop_timeout_s=3, settle_s=0.1)
    hook = Webhook(machine)  # the first notices find it down, and are tried again
    machine.run("usermod", "--append", "--groups", "tunerd", "alice")
    machine.systemctl("restart", "tunerd.service")
    machine.start("sh", "-c", WATCH)

    failed = {}
    for words in OPERATIONS:
        if words[0] == "notify":
            hook.start()
        done = machine.run("tunerd", *words, user="alice", check=False, limit_s=300)
        if done.returncode:
            failed[words] = (done.returncode, done.stdout[-300:], done.stderr[-900:])
    for words in AGAIN:
        if set(most_exposed(machine)) >= SEEN:
            break
        machine.run("tunerd", *words, user="alice", limit_s=300)

    scores = most_exposed(machine)
    assert failed == {}
    assert "test" in hook.kinds()
    assert {kind: score for kind, score in scores.items() if score > MOST_EXPOSED} == {}
    assert set(scores) >= SEEN
    assert night.serves
    left = machine.sh("ls /run/systemd/system /run/systemd/transient").stdout.split()
    assert [name for name in left if name.startswith("tunerd-job")] == []
    failures = "systemctl list-units --failed --plain --no-legend 'tunerd-job*' 'tunerd-notify*'"
    assert machine.sh(failures).stdout == ""
