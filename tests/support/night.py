"""A machine on which nights are begun, and an engine on which a sweep finds something.

On the stand-in every draft is wrong, so the profile that serves is far slower than one without speculation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.deployment import UNIT, Deployment, profile
from tests.support.machine import Machine
from tests.support.sweep_box import RANGES, SPEED, WORKLOAD

JOBS = "tunerd-job-*"
"""The units of nights."""
# What answers of a length that no sweep asks for take in service, without speculation: the planted
# regression is slower than what it replaced.
REGRESSION_TOKENS = 64
_REGRESSION = {"by_length": {str(REGRESSION_TOKENS): [2.0, 80.0]}}
_PROVE = """
from tests.support.sweep_box import prove
from tunerd.app import build_context
prove(build_context())
"""

SETTINGS = """
[engines.fake]
path = "/srv/fake/llama-server"
allow_writable = true
[sweep]
quiet_s = 1.0
patience_s = 2.0
{sweep}
[probation]
every_s = 5.0
[daemon]
every_s = 1.0
busy_every_s = 2.0
"""
# Asks until the machine ends.
_CLIENT = """
while :; do
    curl --silent --max-time 60 --data-binary '{body}' http://127.0.0.1:8080/completion || sleep 0.2
done > /dev/null
"""


def starts(box: Deployment) -> int:
    """Candidates that a sweep has started."""
    last = box.json("sweep", "status")["last"]
    return int((last or {}).get("starts", 0))


def candidates(box: Deployment) -> str:
    """Units of a measurement that are there."""
    return box.systemctl(
        "list-units", "--plain", "--no-legend", "--state=active,activating,deactivating",
        "tunerd-candidate-*", "tunerd-lease-*",
    )  # fmt: skip


def begin_night(box: Deployment) -> str:
    """Begin a night at once; its unit."""
    unit: str = box.json("schedule", "run-now", "--yes")["unit"]
    return unit


def newest_job(box: Deployment) -> Mapping[str, Any]:
    """How the newest night goes, or went."""
    found: Mapping[str, Any] = box.json("jobs")["jobs"][0]
    return found


def is_night(box: Deployment) -> bool:
    """Whether a night is under way."""
    return bool(
        box.systemctl("list-units", "--plain", "--no-legend", "--state=active,activating,deactivating", JOBS)
    )  # fmt: skip


class Night:
    """Profile `night` serves on the stand-in; `begin_night` does the rest."""

    def __init__(
        self, machine: Machine, *, sweep: str = "", user: str | None = None, **behaviour: Any
    ) -> None:
        self.machine = machine
        self.box = Deployment(
            machine, user=user, settings=SETTINGS.format(sweep=sweep), stop_timeout_s=3,
            settle_s=0.1,
        )  # fmt: skip
        rules = [{"when": {"speculative": "off"}, "set": _REGRESSION}]
        self.box.stand_ins(fake={**SPEED, "rules": rules, **behaviour})
        self.box.profile("workloads/small", WORKLOAD)
        text = profile("fake", speculation__type="mtp", speculation__n_max=4, speculation__p_min=0.0,
                       serving__ctx_size=1024, serving__metrics=True, workload="small")  # fmt: skip
        self.box.profile("night", text + RANGES)
        machine.python("-c", _PROVE, user=user)
        self.box.apply("night")

    def client(self) -> Any:
        """Somebody who asks what no sweep asked."""
        body = {"prompt": "go on", "n_predict": REGRESSION_TOKENS, "ignore_eos": True}
        return self.machine.start("sh", "-c", _CLIENT.format(body=json.dumps(body)))

    # What there is

    def newest(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.box.json("sweep", "show")
        return found

    def speculates(self) -> bool:
        """Whether what serves was started with speculation."""
        return "--spec" in self.box.show("ExecStart")

    @property
    def serves(self) -> bool:
        """Whether production, and nothing else, answers."""
        return (
            not candidates(self.box)
            and self.box.show("ActiveState", UNIT) == "active"
            and self.box.alias() is not None
        )

    def until(self, holds: Callable[[], bool], what: str, limit_s: float = 400.0) -> float:
        """Wait until something holds; how long that took [s]."""
        began_s = time.monotonic()
        self.box.until(holds, what, unit=JOBS, limit_s=limit_s)
        return time.monotonic() - began_s
