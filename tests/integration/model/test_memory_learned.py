"""What a load showed of the memory estimate is kept, and the next plan of the same server uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support import needs
from tests.support.local_box import Box, deployed, settings
from tunerd.machine.net import free_port
from tunerd.model.memory import Device
from tunerd.model.report import parse_report

pytestmark = pytest.mark.llama
PORT = free_port()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    if find_spec("xllamacpp") is None:
        needs.missing("llama", "no embedded engine", "pip install 'tunerd[embedded]'")
    with deployed(tmp_path_factory.mktemp("learned"), PORT) as box:
        yield box


def plan(box: Box, **changes: object) -> dict[str, Any]:
    words = settings(box, serving__port=PORT, **changes)
    done = box.call("plan", "cpu-embedded", "--json", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def host(said: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [device for device in said["memory"]["devices"] if device["name"] == "host"]
    return found


def reported_mib(box: Box) -> float:
    """What the running server says that it allocated."""
    context = box.context
    state = context.services.state(context.unit)
    lines = context.services.log(context.unit, invocation_id=state.invocation_id, max_lines=5000)
    found = parse_report(lines).allocated_mib(Device.HOST)
    assert found is not None
    return found


def kept_parts_mib(said: dict[str, Any]) -> float:
    """What is there once the server listens, without what only grows with time."""
    mib: list[float] = [part["mib"] for part in host(said)["parts"] if not part["grows"]]
    return sum(mib)


def test_a_plan_of_what_was_loaded_needs_what_the_load_reported(box: Box) -> None:
    said = plan(box)

    assert said["memory"]["loads"] == 1
    # Each part is shown in whole MiB, rounded up.
    n_parts = len(host(said)["parts"])
    assert 0 <= kept_parts_mib(said) - reported_mib(box) <= n_parts
    assert host(said)["total_mib"] == pytest.approx(reported_mib(box), abs=1)


def test_another_port_is_the_same_server_and_another_context_is_not(box: Box) -> None:
    elsewhere = box.call(
        "plan", "cpu-embedded", "--json", *settings(box, serving__port=free_port())
    )
    assert json.loads(elsewhere.stdout)["memory"]["loads"] == 1

    larger = plan(box, serving__ctx_size=4096)
    assert larger["memory"]["loads"] is None
    assert host(larger)["calculated_mib"] is None


def test_what_was_kept_and_cannot_be_read_stops_neither_a_plan_nor_an_apply(box: Box) -> None:
    (kept,) = box.context.paths.cache_dir.glob("load-*.json")
    for damage in ("no record at all", '{"taken": 5}'):
        kept.write_text(damage)
        assert plan(box)["memory"]["loads"] is None

    done = box.call("apply", "cpu-embedded", "--yes", "--json", *settings(box, serving__port=PORT))

    assert done.returncode == 0, done.stdout
    assert plan(box)["memory"]["loads"] == 1


def test_a_plan_of_what_was_loaded_imports_neither_a_database_nor_the_search(box: Box) -> None:
    script = "import sys\nfrom tunerd.cli.main import main\ntry:\n    main()\nfinally:\n"
    script += (
        "    print({'sqlalchemy', 'sqlite3', 'scipy', 'numpy'} & {*sys.modules}, file=sys.stderr)\n"
    )
    words = ["plan", "cpu-embedded", "--json", *settings(box, serving__port=PORT)]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=True,
        timeout=120, env=box.environment, cwd=box.folder,
    )  # fmt: skip
    assert json.loads(done.stdout)["memory"]["loads"] == 1
    assert done.stderr.splitlines()[-1] == "set()"
