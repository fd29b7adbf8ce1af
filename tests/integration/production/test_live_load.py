"""What a load showed of the memory estimate is kept, and the next plan of the same server uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.build_box import BuildBox, build_box
from tests.support.ports import free_port
from tests.support.waiting import LIMIT_S, until
from tunerd.engine.serving import server_now
from tunerd.model.memory import Device
from tunerd.model.verdict import parse_report
from tunerd.production.plan import KEPT_LOADS, remember_live_load

pytestmark = pytest.mark.llama
UNIT = "llama-server.service"


@pytest.fixture(scope="module")
def box() -> Iterator[BuildBox]:
    with build_box(None, shape="tiny") as made:
        made.profile("one")
        made.profile("two", serving__ctx_size=512)
        made.profile("larger", serving__ctx_size=4096)
        made.profile("elsewhere", serving__port=free_port())
        yield made


def memory(box: BuildBox, profile: str) -> dict[str, Any]:
    found: dict[str, Any] = box.json("plan", profile)["memory"]
    return found


def totals(box: BuildBox, profile: str) -> list[tuple[str, int, int]]:
    """By device: what is planned with, and what was calculated."""
    devices = memory(box, profile)["devices"]
    return [(one["name"], one["total_mib"], one["calculated_mib"]) for one in devices]


def forget(box: BuildBox) -> None:
    """Nothing is known of any load."""
    for path in box.box.folder.glob("state/cache/load-*.json"):
        path.unlink()


def reported_mib(box: BuildBox) -> float:
    """What the running server says that it allocated."""
    context = box.box.context
    life = context.services.state(UNIT).invocation_id
    lines = context.services.log(UNIT, invocation_id=life, max_lines=5000)
    found = parse_report(lines).allocated_mib(Device.HOST)
    assert found is not None
    return found


def host(box: BuildBox, profile: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [one for one in memory(box, profile)["devices"] if one["name"] == "host"]
    return found


def test_a_plan_of_what_was_loaded_needs_what_the_load_reported(box: BuildBox) -> None:
    box.apply("one")
    assert memory(box, "one")["loads"] == 1
    found, reported = host(box, "one"), reported_mib(box)
    # What is there once it listens, without what only grows with time; each in whole MiB, rounded up.
    kept_mib = sum(part["mib"] for part in found["parts"] if not part["grows"])
    assert 0 <= kept_mib - reported <= len(found["parts"])
    assert found["total_mib"] == pytest.approx(reported, abs=1)

    assert memory(box, "elsewhere")["loads"] == 1, "on another port it is the same server"
    assert memory(box, "larger")["loads"] is None
    assert host(box, "larger")["calculated_mib"] is None


@pytest.mark.parametrize("n_lines", [0, 6000])
def test_a_client_does_not_write_what_a_load_took(box: BuildBox, n_lines: int) -> None:
    """Builds print a grammar that they cannot read as it is: no plan of this server fitted into memory any more."""
    box.apply("one")
    context, kept_mib = box.box.context, host(box, "one")["total_mib"]
    server = server_now(context, context.services.state(UNIT))
    said = (
        "root ::= (\n" + "x\n" * n_lines + "load_tensors:  CPU model buffer size = 999999.00 MiB\n"
    )
    assert server is not None
    server.complete("x", n_predict=1, timeout_s=LIMIT_S, options={"grammar": said})
    life = context.services.state(UNIT).invocation_id

    def is_logged() -> bool:
        lines = context.services.log(UNIT, invocation_id=life, max_lines=20_000)
        return any(line.startswith(said.splitlines()[-1]) for line in lines)

    until(is_logged, "it is in the log")  # which a thread of the server writes

    remember_live_load(context)

    assert host(box, "one")["total_mib"] == kept_mib


def test_what_was_kept_and_cannot_be_read_stops_neither_a_plan_nor_an_apply(box: BuildBox) -> None:
    (kept,) = box.box.context.paths.cache_dir.glob("load-*.json")
    for damage in ("no record at all", '{"taken": 5}'):
        kept.write_text(damage)
        assert memory(box, "one")["loads"] is None
    box.apply("one")
    assert memory(box, "one")["loads"] == 1


def test_the_load_of_a_rollback_is_used_by_the_next_plan(box: BuildBox) -> None:
    wanted = totals(box, "one")
    box.apply("two")
    forget(box)
    assert memory(box, "one")["loads"] is None
    cache = box.box.context.paths.cache_dir
    for number in range(KEPT_LOADS):  # of years of nights
        (cache / f"load-{number:032}.json").touch()

    box.json("rollback")

    assert len(list(cache.glob("load-*.json"))) == KEPT_LOADS
    assert memory(box, "one")["loads"] == 1
    assert totals(box, "one") == wanted, "as the load of the apply showed"
