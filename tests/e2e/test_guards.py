"""The daemon's guards under a real systemd, with its unit as it is shipped and a stand-in engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import pytest

from tests.e2e.conftest import KeptMachine
from tests.fault.daemon_victim import PROFILES, WATCHED
from tests.support.deployment import UNIT, Deployment, place_units
from tests.support.machine import Machine
from tests.support.places import Place, places
from tests.support.stand_in import RTX_4070_SUPER

pytestmark = pytest.mark.timeout(1800)  # one machine for all

SETTINGS = f'{WATCHED}[guards]\ndrift = "act"\n'


@pytest.fixture(scope="module", params=places(), ids=str)
def machine(request: pytest.FixtureRequest, kept_machine: KeptMachine) -> tuple[Place, Machine]:
    return request.param, kept_machine(request.param.root)


@pytest.fixture
def box(machine: tuple[Place, Machine]) -> Iterator[Deployment]:
    """tunerd with a stand-in that serves well, and its daemon, which has seen nothing yet."""
    place, booted = machine
    made = Deployment(
        booted, user=place.user, settings=SETTINGS, profiles=PROFILES, stop_timeout_s=2
    )
    made.stand_ins(eng={"device": RTX_4070_SUPER, "tg_tok_s": 50.0})
    place_units(booted, "tunerd.service", user=place.user)
    yield made
    made.systemctl("stop", "tunerd.service", check=False)
    made.systemctl("stop", UNIT, check=False)


def events(box: Deployment) -> list[dict[str, Any]]:
    """What the daemon told since it was started last, as the journal has it."""
    pid = box.show("MainPID", "tunerd.service")
    lines = box.machine.run("journalctl", "--output=json", "--boot", f"_PID={pid}").stdout
    entries = [json.loads(line) for line in lines.splitlines()]
    return [entry for entry in entries if entry.get("TUNERD_EVENT", "").startswith("event.")]


def told(box: Deployment, kind: str) -> Callable[[], str | None]:
    """The text of the newest event of a kind; None before there is one."""

    def newest() -> str | None:
        found = [one for one in events(box) if one["TUNERD_EVENT"] == f"event.{kind}"]
        return str(found[-1]["TUNERD_TEXT"]) if found else None

    return newest


def watched(box: Deployment) -> None:
    """The daemon is up and has looked into what serves."""
    findings = f"{box.state}/guards.json"
    box.machine.run("rm", "-f", findings)
    box.systemctl("start", "tunerd.service")
    box.until(lambda: box.machine.exists(findings), "the daemon looked")


def test_a_server_without_vram_comes_back_with_a_larger_margin(box: Deployment) -> None:
    first = box.apply("card")
    assert "1664" in first["argv"], first["argv"]
    watched(box)
    tight = {"when": {"fit-target": "1664"}, "set": {"fail": "oom-weights"}}
    box.behave("eng", device=RTX_4070_SUPER, rules=[tight])

    box.machine.kill(box.show("MainPID"))

    text = box.until(told(box, "guard-acted"), "the margin was raised")
    assert f"generation {first['generation'] + 1} serves" in text
    assert "1792" in box.show("ExecStart")
    assert box.alias() == "card"
    box.generate()
    newest = box.json("history")["generations"][0]
    assert (newest["number"], newest["reason"]) == (first["generation"] + 1, "guard")
    (raised,) = [one for one in events(box) if one["TUNERD_EVENT"] == "event.oom"]
    assert "raised to 1792 MiB" in raised["TUNERD_TEXT"]
    assert "cudaMalloc failed" in raised["TUNERD_TEXT"]
    assert "raised to 1792 MiB" in raised["MESSAGE"]
    assert raised["PRIORITY"] == "4"


LATE = """\
[Unit]
StartLimitBurst={}
[Service]
ExecStartPost=/bin/sleep 60
TimeoutStartSec=1
RestartSec=0.5
"""


def starts_again(status: dict[str, Any]) -> bool:
    """Whether that is said while a start is under way, too, and not in the pause before it alone."""
    return status["sub_state"].startswith("start") and any(
        one["code"] == "restarts" for one in status["drift"]
    )


def test_an_end_without_words_is_told_by_what_the_manager_saw_and_starts_that_take_too_long_are_given_up(
    box: Deployment,
) -> None:
    """A stop that was not obeyed has the same result, and nobody wants to be told of one."""
    box.apply("plain")
    watched(box)
    daemon = box.show("MainPID", "tunerd.service")
    found = ("journalctl", "--output=json", "--boot", f"_PID={daemon}", "TUNERD_EVENT=server.died")

    box.machine.kill(box.show("MainPID"), "SEGV")

    died = json.loads(str(box.until(lambda: box.machine.run(*found).stdout, "it saw the death")))
    assert died["TUNERD_CAUSE"] == "crash"
    assert died["TUNERD_WORDS"].startswith("signal 11; ")
    box.until(lambda: box.alias() == "plain", "it is started again")
    drop_in = f"{box.units}/{UNIT}.d"
    box.machine.write(f"{drop_in}/late.conf", LATE.format(1000))
    box.systemctl("daemon-reload")

    box.machine.kill(box.show("MainPID"))

    box.until(lambda: starts_again(box.json("status")), "it said that the server is started again")
    box.machine.write(f"{drop_in}/late.conf", LATE.format(3))
    box.systemctl("daemon-reload")

    text = box.until(told(box, "server-failed"), "it was told")
    assert "hang: start-post operation timed out" in text
    box.machine.run("rm", "-r", drop_in)
    box.systemctl("daemon-reload")
    box.systemctl("reset-failed", UNIT)


def test_a_server_that_decays_is_told_of_and_restarted_when_idle(box: Deployment) -> None:
    speed = {"tg_tok_s": 2000.0, "pp_tok_s": 20000.0, "time_scale": 1.0}
    box.stand_ins(eng=speed)
    box.apply("plain")

    def measure() -> Any:
        """A bench; on a busy machine some of its samples are disturbed, and more are needed."""
        box.json("bench", "--suite", "mtp", "--repeats", "3", "--yes")
        return box.json("guard", "check")["confirmed"]

    confirmed = box.until(measure, "enough was measured")
    assert 1500 < confirmed["floor_tok_s"] < 2000
    box.behave("eng", **speed, decay_per_request=0.02)
    box.systemctl("restart", UNIT)
    box.until(lambda: box.alias() == "plain", "it serves")
    watched(box)
    before = box.show("InvocationID")

    def is_restarted() -> bool:
        """One more request; a restart may meet one that comes just then."""
        body = {"prompt": "please go on with code", "n_predict": 600, "temperature": 0}
        status, _ = box.ask("/completion", body)
        return status != HTTPStatus.OK or box.show("InvocationID") != before

    box.until(is_restarted, "it was restarted")
    text = box.until(told(box, "drift-restart"), "it was told")
    assert text == "the server slowed down, and is restarted"
    assert "it slowed down after its start, to " in str(told(box, "drift")())
