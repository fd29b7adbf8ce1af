"""What befalls a sweep: arms that fail, requests of others, a person, SIGKILL. Production serves after each."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.sweep_box import SweepBox, kill, swept, until
from tunerd.app import build_context
from tunerd.machine.clock import SystemClock
from tunerd.machine.net import free_port
from tunerd.production.measurement import read_measurement
from tunerd.result import Progress
from tunerd.sweep.plan import SweepRequest
from tunerd.sweep.run import run_sweep

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]
ENDLESS = ("run", "--budget", "600s", "--seed", "5")


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    rules = [
        {"when": {"speculative": "off"}, "set": {"fail": "oom-compute"}},
        {"when": {"n_max": "2"}, "set": {"fail": "segfault"}},
    ]
    with swept(free_port(), rules=rules) as found:
        yield found


def starts(box: SweepBox) -> int:
    return len(box.engine.served())


def under_way(box: SweepBox, before: int, process: subprocess.Popen[str]) -> None:
    """Some candidates of a sweep have served."""
    until(lambda: starts(box) >= before + 2 or process.poll() is not None, "two candidates")
    assert process.poll() is None, process.communicate()


def test_arms_that_run_out_of_memory_or_crash_are_results_with_reasons(box: SweepBox) -> None:
    found = box.sweep("--space", "speculation.n_max=2,4", budget="30s")
    assert found["verdict"] != "promote"
    shown = box.newest()
    failures = {row["failure"]: row["arm"] for row in shown["page"]["failures"]}
    assert "no speculation" in failures["oom"]
    assert "mtp 2/0" in failures["crash"]
    assert box.serves


def test_a_person_who_starts_production_ends_the_sweep_and_it_goes_on_later(box: SweepBox) -> None:
    before = starts(box)
    process = box.begin(*ENDLESS, "--space", "speculation.n_max=1,2,3,4,5,6")
    under_way(box, before, process)
    box.box.context.services.start("llama-server.service")
    said, errors = process.communicate(timeout=90)
    assert json.loads(said)["verdict"] == "inconclusive", errors
    assert box.serves
    shown = box.newest()
    assert shown["state"] == "stopped"
    assert shown["page"]["n_requests"] > 0


def test_a_killed_sweep_leaves_production_serving_and_resumes_from_its_samples(
    box: SweepBox,
) -> None:
    before = starts(box)
    process = box.begin("run", "--budget", "25s", "--seed", "6", "--workload", "small",
                        "--space", "speculation.n_max=1,2,3")  # fmt: skip
    under_way(box, before, process)
    kill(process)
    until(lambda: box.serves, "production serves")
    cut = box.newest()
    assert cut["state"] == "cut"
    assert cut["page"]["n_starts"] >= 1
    done = box.json("sweep", "resume", "--yes", code=None)
    assert done["sweep"] == cut["sweep"]
    assert done["known_before"] >= cut["page"]["n_starts"]
    whole = box.newest()
    assert whole["page"]["n_starts"] >= cut["page"]["n_starts"]
    assert whole["state"] == "done"
    assert box.serves
    assert box.leftovers() == []


def test_ctrl_c_ends_a_sweep_and_production_serves(box: SweepBox) -> None:
    before = starts(box)
    process = box.begin(*ENDLESS, "--space", "speculation.n_max=1,2,3,4,5,6,7")
    under_way(box, before, process)
    kill(process, signal.SIGINT)
    assert box.serves
    assert box.newest()["state"] == "stopped"


class Shifted(SystemClock):
    """The machine's clock, its wall time moved."""

    def __init__(self, to_s: float) -> None:
        self._ahead_s = to_s - super().now_s()

    def now_s(self) -> float:
        return super().now_s() + self._ahead_s


@pytest.fixture
def fresh_box() -> Iterator[SweepBox]:
    """One that no earlier sweep has taught how long a load may take."""
    with swept(free_port()) as found:
        yield found


def test_the_end_of_a_window_in_the_middle_of_a_load_puts_production_back_in_time(
    fresh_box: SweepBox,
) -> None:
    """38 s before noon, and the first candidate never ends to load; what serves afterwards does."""
    box = fresh_box
    noon_s = 1_800_000_000.0 - 1_800_000_000.0 % 86400 + 43200
    before, n_loads = box.engine.settings.read_text(), starts(box)
    ends: list[float] = []
    variables = {**box.box.environment, "TUNERD_SWEEP__TIMEZONE": "UTC"}
    ctx = build_context(environment=variables, start_supervisor=True)

    def note_the_end(_progress: Progress) -> None:
        record = read_measurement(ctx)
        ends.extend([] if record is None else [record.until_s])

    def behave_again() -> None:
        until(lambda: starts(box) > n_loads, "a candidate loads")
        box.engine.settings.write_text(before)

    box.engine.configure(load_never_ends=True)
    behaving = threading.Thread(target=behave_again)
    behaving.start()
    ctx = replace(ctx, clock=Shifted(noon_s - 38), progress=note_the_end)
    request = SweepRequest(budget_s=20.0, window="01:00-12:00", seed=9,
                           space=("speculation.n_max=4",))  # fmt: skip
    done = run_sweep(ctx, request, confirm=lambda _prepared: None)
    behaving.join()
    assert done.payload["verdict"] == "inconclusive"
    assert "the window 01:00-12:00 ends" in done.payload["sentence"]
    assert max(ends) <= noon_s - 5, "what the service manager was told keeps time for the load"
    assert box.newest()["state"] == "stopped"
    assert box.serves
    assert box.leftovers() == []


def test_samples_with_requests_of_others_are_void_and_the_sweep_yields(box: SweepBox) -> None:
    """A client that keeps asking gets its answers; none of what was measured beside it counts."""
    before = starts(box)
    process = box.begin("run", "--budget", "25s", "--seed", "7",
                        "--space", "speculation.n_max=1,3,5,7")  # fmt: skip
    under_way(box, before, process)
    stop = threading.Event()
    answered: list[int] = []

    def ask() -> None:
        while not stop.is_set():
            reply = box.ask()
            answered.append(reply)
            stop.wait(0.05)

    client = threading.Thread(target=ask)
    client.start()
    try:
        until(lambda: _void(box) > 0, "a void sample")
    finally:
        stop.set()
        client.join()
    process.communicate(timeout=120)
    assert 200 in answered
    assert box.serves
    assert box.newest()["state"] in {"done", "stopped"}


def _void(box: SweepBox) -> int:
    return int(box.newest()["left_out_samples"])


def test_a_sweep_in_the_background_is_a_job_that_is_told_of_and_ended(box: SweepBox) -> None:
    words = ("sweep", "start", "--yes", *ENDLESS[1:], "--space", "speculation.n_max=1,2,3,4,5,6")
    begun = box.json(*words)
    until(lambda: box.json("sweep", "status")["sweep"] is not None, "a sweep runs")
    second = box.call(*words, code=75)
    assert "another measurement is under way" in second.stderr
    assert box.json("sweep", "status")["unit"] == begun["unit"] == "tunerd-job-1.service"
    (job,) = box.json("jobs")["jobs"]
    assert (job["kind"], job["state"]) == ("sweep run", "running")
    assert "--seed=5" in job["argv"]

    box.call("sweep", "stop")

    assert box.serves
    assert box.leftovers() == []
    assert box.newest()["state"] == "stopped"
    ended = box.json("jobs", "watch", "1", code=130)
    assert ended["error"]["code"] == "interrupted"
