"""What a load showed of the memory estimate is kept, and the next plan of the same server uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fault.world import a_record
from tests.support.build_box import BuildBox, build_box
from tests.support.ports import free_port
from tunerd.engine.serving import server_now
from tunerd.model.memory import Device
from tunerd.model.verdict import parse_report
from tunerd.production.journal import SCHEMA
from tunerd.production.plan import KEPT_LOADS, remember_live_load
from tunerd.records import plain

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
    server.complete("x", n_predict=1, timeout_s=10, options={"grammar": said})
    life = context.services.state(UNIT).invocation_id
    lines = context.services.log(UNIT, invocation_id=life, max_lines=20_000)
    assert any(line.startswith(said.splitlines()[-1]) for line in lines), "it is in the log"

    remember_live_load(context)

    assert host(box, "one")["total_mib"] == kept_mib


def test_what_was_kept_and_cannot_be_read_stops_neither_a_plan_nor_an_apply(box: BuildBox) -> None:
    (kept,) = box.box.context.paths.cache_dir.glob("load-*.json")
    for damage in ("no record at all", '{"taken": 5}'):
        kept.write_text(damage)
        assert memory(box, "one")["loads"] is None
    box.apply("one")
    assert memory(box, "one")["loads"] == 1


def test_the_loads_of_years_of_nights_are_not_all_kept(box: BuildBox) -> None:
    forget(box)
    cache = box.box.context.paths.cache_dir
    for number in range(KEPT_LOADS + 20):
        path = cache / f"load-{number:032}.json"
        path.write_text("{}")
        os.utime(path, (number, number))
    box.apply("one")
    left = {path.name for path in cache.glob("load-*.json")}
    assert len(left) == KEPT_LOADS
    assert memory(box, "one")["loads"] is not None
    assert f"load-{KEPT_LOADS + 19:032}.json" in left
    for path in cache.glob("load-0000*.json"):
        path.unlink()


def test_a_plan_of_what_was_loaded_imports_neither_a_database_nor_the_search(box: BuildBox) -> None:
    script = "import sys\nfrom tunerd.cli.main import main\ntry:\n    main()\nfinally:\n"
    script += (
        "    print({'sqlalchemy', 'sqlite3', 'scipy', 'numpy'} & {*sys.modules}, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", "one", "--json"], capture_output=True, text=True,
        check=True, timeout=120, env=box.environment, cwd=box.box.folder,
    )  # fmt: skip
    assert json.loads(done.stdout)["memory"]["loads"] == 1
    assert done.stderr.splitlines()[-1] == "set()"


def test_the_load_of_a_rollback_is_used_by_the_next_plan(box: BuildBox) -> None:
    wanted = totals(box, "one")
    box.apply("two")
    forget(box)
    assert memory(box, "one")["loads"] is None

    box.json("rollback")

    assert memory(box, "one")["loads"] == 1
    assert totals(box, "one") == wanted, "as the load of the apply showed"


def test_the_load_of_a_server_that_recovery_saw_serve_is_kept(box: BuildBox) -> None:
    generation = box.apply("two")["generation"]
    forget(box)
    folder = box.box.folder / "state"
    kept = folder / f"generations/{generation:06d}"
    told = json.loads((kept / "generation.json").read_text())
    (kept / "outcome.json").unlink()
    record = a_record(generation=generation, new_sha256=told["unit_sha256"])
    (folder / f"journal/{UNIT}.json").write_text(json.dumps(plain(record, schema=SCHEMA)))

    assert box.json("recover")["found"] == "judge"

    assert memory(box, "two")["loads"] == 1
    box.json("recover")
    assert memory(box, "two")["loads"] == 1, "nothing was recovered, and nothing loaded"
