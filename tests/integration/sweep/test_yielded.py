"""A sweep that has given the place back, for others use the server, and waits until nobody does; one whose server was stopped, or sleeps."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.bench_samples import sweep_event
from tests.support.fake_gpu import FakeGpuReader, SlowGpuReader, rtx_4070_super
from tests.support.faked import set_to
from tests.support.fakes import AheadClock
from tests.support.stores import queried
from tests.support.sweep_box import SweepBox, swept, upgrade
from tests.support.waiting import LIMIT_S, until
from tunerd.app import Context
from tunerd.errors import Busy, DeployError, TunerdError, UsageError
from tunerd.machine.files import is_locked, lock
from tunerd.machine.peers import only_one
from tunerd.measure.evidence import RunOutcome
from tunerd.measure.store import EvidenceStore
from tunerd.result import ActionResult, Progress
from tunerd.sweep.plan import SweepRequest
from tunerd.sweep.record import history_of
from tunerd.sweep.run import resume_sweep, run_night, run_sweep

pytestmark = pytest.mark.timeout(540)


@pytest.fixture(scope="module")
def shared() -> Iterator[SweepBox]:
    with swept() as found:
        yield found


@pytest.fixture
def box(shared: SweepBox) -> SweepBox:
    """It serves profile `night`, whatever the test before has left."""
    ctx = shared.box.context
    ctx.services.start(ctx.unit)
    until(lambda: shared.serves, "it serves")
    shared.call("apply", "night", "--yes")
    return shared


@contextlib.contextmanager
def somebody_else(box: SweepBox) -> Iterator[None]:
    """Asks whoever serves, again and again."""
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            box.ask(n_predict=60)

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield
    finally:
        ends.set()
        client.join()


def test_a_sweep_that_has_yielded_does_not_stop_what_was_deployed_meanwhile(box: SweepBox) -> None:
    """It went on from what had served before, and stopped the new server for a winner that nobody could deploy."""
    sweep = box.begin("run", "--budget", "600s")
    try:
        with somebody_else(box):
            until(lambda: box.json("sweep", "status")["waits"] is not None, "it waits")
            box.call("apply", "night", "--set", "serving.alias=other", "--yes")
        told = json.loads(sweep.communicate(timeout=LIMIT_S)[0])
    finally:
        sweep.kill()
    assert "what serves has changed since it began" in str(told["messages"]), told
    assert "other" in box.call("status").stdout
    assert box.serves


def run(
    box: SweepBox, ctx: Context, then: Callable[[contextlib.ExitStack], None], **asked: Any
) -> ActionResult:
    """A sweep that somebody else disturbs once it has the server's place; `then` is what happens when it has yielded.

    It does not go on then.
    """
    begun = []

    def follow(progress: Progress) -> None:
        if progress.text == "starting the first configuration":
            begun.append(progress)
            assert len(begun) == 1
            others.enter_context(somebody_else(box))
        elif progress.text.startswith("the sweep yielded"):
            then(others)

    with contextlib.ExitStack() as others:
        request = SweepRequest(**{"budget_s": 600.0, "seed": 3, **asked})
        return run_sweep(replace(ctx, progress=follow), request, confirm=lambda _: None)


def test_a_sweep_that_has_yielded_ends_where_somebody_stops_the_server(box: SweepBox) -> None:
    """Who wants the card had it taken again for the rest of the night."""
    ctx, served = box.box.context, []
    ctx.services.stop(ctx.unit)  # --start-after starts it once, not again and again

    def stop(others: contextlib.ExitStack) -> None:
        others.close()
        ctx.services.stop(ctx.unit)
        served.append(len(box.engine.served()))

    done = run(box, ctx, stop, start_after=True)
    assert served == [len(box.engine.served())]
    assert not ctx.services.state(ctx.unit).runs
    assert f"ended early: {ctx.unit} was stopped" in done.messages[-1].text
    assert box.newest()["reason"] == f"{ctx.unit} was stopped"


def test_a_sweep_whose_server_is_stopped_before_it_is_taken_away_measures_nothing(
    box: SweepBox,
) -> None:
    ctx = box.box.context
    for start_after in (False, True):
        ctx.services.start(ctx.unit)
        until(lambda: box.serves, "it serves")
        before = len(box.engine.served())
        request = SweepRequest(budget_s=30.0, seed=3, start_after=start_after)
        done = run_sweep(ctx, request, confirm=lambda _: ctx.services.stop(ctx.unit))
        assert done.exit_code == 1
        assert len(box.engine.served()) == before
        assert not ctx.services.state(ctx.unit).runs
        assert box.newest()["reason"] == f"{ctx.unit} was stopped"


class Reached(Exception):
    """The sweep goes on."""


def stopped(box: SweepBox) -> tuple[Context, int]:
    """A sweep that was cut at its first configuration, as would be whatever goes on with it."""

    def stop(progress: Progress) -> None:
        if progress.text == "starting the first configuration":
            raise Reached

    ctx = replace(box.box.context, progress=stop)
    with pytest.raises(Reached):
        run_sweep(ctx, SweepRequest(budget_s=600.0, seed=3), confirm=lambda _: None)
    number: int = box.newest()["sweep"]
    return ctx, number


class Asking(AheadClock):
    """Does something before each wait."""

    def __init__(self, before: Callable[[], object]) -> None:
        super().__init__(0.0)
        self._before = before

    def sleep(self, seconds: float) -> None:
        self._before()
        super().sleep(seconds)


def test_a_sweep_that_has_yielded_waits_on_where_somebody_else_was_faster(box: SweepBox) -> None:
    """A bench that began between its last look and its going on ended it for that night."""
    yielded, begun = list[str](), list[str]()
    others, bench = contextlib.ExitStack(), contextlib.ExitStack()

    def follow(progress: Progress) -> None:
        if progress.text == "starting the first configuration":
            begun.append(progress.text)
            if len(begun) > 1:
                raise Reached
            others.enter_context(somebody_else(box))
        elif progress.text.startswith("the sweep yielded"):
            yielded.append(progress.text)
            others.close()

    with bench, others:
        ctx = box.box.context

        def measure() -> None:
            if len(yielded) == 1 and not is_locked(ctx.paths.measure_lock):
                bench.enter_context(lock(ctx.paths.measure_lock, purpose="bench", since="now"))

        request = SweepRequest(budget_s=600.0, seed=3)
        ctx = replace(
            ctx, progress=follow, clock=Asking(bench.close), gpu=SlowGpuReader(ctx.gpu, measure)
        )
        with pytest.raises(Reached):
            run_sweep(ctx, request, confirm=lambda _: None)
        assert len(yielded) == 2
        assert box.serves


def test_a_sweep_rests_between_its_tries_while_another_state_has_the_card(box: SweepBox) -> None:
    """With `sweep.quiet_s = 0` it planned and tried again without a pause for the rest of its time."""
    box.gets_a_card()
    yielded, begun, rests = list[int](), list[str](), list[str]()
    card = rtx_4070_super()

    def follow(progress: Progress) -> None:
        if progress.text == "starting the first configuration":
            begun.append(progress.text)
            others.enter_context(somebody_else(box))
        elif progress.text.startswith("the sweep yielded"):
            if not yielded:
                others.close()
                elsewhere.enter_context(only_one(f"card-{card.uuid}"))
            yielded.append(len(rests))
            if len(yielded) == 3:
                raise Reached

    with contextlib.ExitStack() as elsewhere, contextlib.ExitStack() as others:
        ctx = replace(
            set_to(box.box.context, sweep__quiet_s=0.0), progress=follow, gpu=FakeGpuReader(card),
            clock=Asking(lambda: rests.append("")),
        )  # fmt: skip
        with pytest.raises(Reached):
            run_sweep(ctx, SweepRequest(budget_s=600.0, seed=3), confirm=lambda _: None)
        assert len(begun) == 1
        assert yielded[1] < yielded[2]
        assert box.serves


def test_a_sweep_is_not_held_against_what_was_replaced_while_its_question_stood_open(
    box: SweepBox,
) -> None:

    def deploy(_prepared: object) -> None:
        box.call("apply", "night", "--set", "serving.alias=other", "--yes")

    before = box.json("sweep", "list")["sweeps"]
    with pytest.raises(DeployError, match="since this was planned"):
        run_sweep(box.box.context, SweepRequest(budget_s=30.0, seed=3), confirm=deploy)
    assert box.json("sweep", "list")["sweeps"] == before
    assert box.serves


def test_a_sleeping_server_is_stopped_without_being_woken_and_started_again(box: SweepBox) -> None:
    box.call("apply", "night", "--set", "serving.sleep_idle_s=3", "--yes")
    until(lambda: box.json("status")["asleep"] is True, "it sleeps")
    n_before = len(box.engine.record.read_text().splitlines())

    stopped(box)

    rows = [json.loads(row) for row in box.engine.record.read_text().splitlines()[n_before:]]
    happened = [row["event"] for row in rows if row["event"] in {"wake", "exit", "load"}]
    assert happened[:2] == ["exit", "load"]
    assert box.serves


class Suspended(AheadClock):
    """That of a machine which sleeps in the next wait."""

    sleeps = False

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.by_s = 12 * 3600.0 if self.sleeps else 0.0


def test_a_sweep_that_waits_in_a_machine_that_sleeps_ends_with_its_window(box: SweepBox) -> None:
    """It waited on for all of its budget, by a clock that stands still in sleep, with people at the server."""
    ctx, clock = box.box.context, Suspended(0.0)

    def sleep(_others: contextlib.ExitStack) -> None:
        clock.sleeps = True

    ctx = replace(ctx, clock=clock)
    hour = int(clock.now_s()) // 3600
    window = f"{(hour - 1) % 24:02d}:00-{(hour + 6) % 24:02d}:00"
    done = run(box, ctx, sleep, budget_s=3 * 3600.0, window=window)
    assert "not quiet" in done.payload["sentence"]
    assert box.serves


@pytest.mark.parametrize("sleeps_in", ["wait", "question"])
def test_no_sweep_begins_in_a_window_that_has_closed_since_it_was_asked_for(
    box: SweepBox, sleeps_in: str
) -> None:
    """It had no end to keep to, and took the server away for all of its budget; amid a day, where the machine had slept."""
    gpu = FakeGpuReader()

    def sleep() -> None:
        gpu.show()
        clock.by_s = 12 * 3600.0

    clock = Asking(sleep)
    if sleeps_in == "wait":
        gpu.show(replace(rtx_4070_super(), throttle_reasons=("software thermal slowdown",)))
    ctx = replace(set_to(box.box.context, sweep__timezone="UTC"), clock=clock, gpu=gpu)
    hour, before = int(clock.now_s()) // 3600, len(box.engine.served())
    request = SweepRequest(
        budget_s=600.0, seed=3, window=f"{(hour - 1) % 24:02d}:00-{(hour + 6) % 24:02d}:00"
    )
    with pytest.raises(UsageError, match="window"):
        run_sweep(ctx, request, confirm=lambda _: sleep())
    assert len(box.engine.served()) == before
    assert box.serves


# From here on another program runs, which keeps no record of what it served.


def test_a_sweep_that_has_yielded_is_known_and_does_not_go_on_with_another_build(
    box: SweepBox,
) -> None:
    """What the new build showed was kept as shown by the old one, for arms are planned anew.

    `status` said that no sweep runs, `start` began another, and the first ended with an error for it.
    """
    sweep = box.begin("run", "--budget", "600s")
    try:
        with somebody_else(box):
            until(lambda: box.json("sweep", "status")["waits"] is not None, "it waits")
            assert f"kill -INT {sweep.pid}" in box.call("sweep", "stop", code=None).stderr
            refused = box.call("sweep", "start", "--budget", "30s", "--yes", code=None)
            assert "another measurement is under way" in refused.stderr
            paths = box.box.context.paths
            until(lambda: not is_locked(paths.measure_lock), "its lease has ended")
            bench = lock(paths.measure_lock, purpose="bench", since="now")
            bench.__enter__()
        until(lambda: box.serves and not is_locked(paths.lock), "production serves")
        upgrade(box)
        box.box.context.services.restart(box.box.context.unit)
        until(lambda: box.serves, "the new build serves")
        bench.__exit__(None, None, None)
        told = json.loads(sweep.communicate(timeout=LIMIT_S)[0])
    finally:
        sweep.kill()
    assert "what serves, an engine, " in str(told["messages"])
    assert box.serves
    arms = box.json("results", "show", str(box.newest()["sweep"]))["arms"]
    assert len({one["fingerprint"]["engine_sha256"] for one in arms}) == 1


# Last, for what these add to the evidence is not whole.


def test_a_sweep_that_went_on_while_somebody_was_asked_about_it_is_not_continued_twice(
    box: SweepBox,
) -> None:
    ctx, number = stopped(box)

    def go_on(_prepared: object) -> None:
        with EvidenceStore(ctx.paths.evidence) as store:
            store.add_sweep_event(number, sweep_event("p"))
            store.end_run(number, RunOutcome.DONE, ended_s=ctx.clock.now_s())

    with pytest.raises(Busy, match=f"sweep {number} was continued meanwhile"):
        resume_sweep(ctx, None, confirm=go_on)
    with EvidenceStore(ctx.paths.evidence) as store:
        found = store.run(number)
    assert found is not None
    assert found.outcome is RunOutcome.DONE
    assert box.serves


def test_challenges_of_a_sweep_that_goes_on_after_a_rollback_are_of_what_serves_then(
    box: SweepBox,
) -> None:
    """They counted as of the generation before the rollback, so the next sweep had the same share of alpha again."""
    ctx, number = stopped(box)
    box.call("apply", "night", "--set", "serving.alias=other", "--yes")
    box.call("rollback", "--yes")
    with pytest.raises(Reached):
        resume_sweep(ctx, number, confirm=lambda _: None)
    now = ctx.deployed()
    assert now is not None
    with EvidenceStore(ctx.paths.evidence) as store:
        store.add_sweep_event(number, sweep_event("p", (1, 1)))
        assert history_of(store, "", now.number).n_challenges == 1


def test_a_sweep_of_which_something_is_damaged_keeps_no_later_night_from_sweeping(
    box: SweepBox,
) -> None:
    """Each night tried to go on with it, and ended with an error; what was asked was told by a traceback."""

    def stop(progress: Progress) -> None:
        if progress.text == "starting the first configuration":
            raise Reached

    ctx = replace(box.box.context, progress=stop)
    path, numbers = ctx.paths.evidence, list[int]()
    for damaged in ("kind = 'event'", "name = 'sweep plan'", None):
        with pytest.raises(Reached):
            run_night(ctx, confirm=lambda _: None, at_once=True)
        numbers.append(box.json("sweep", "list")["sweeps"][0]["sweep"])
        with EvidenceStore(path) as store:
            store.add_sweep_event(numbers[-1], sweep_event("p"))
        if damaged is not None:
            spoil = f"UPDATE entry SET body = '{{bad' WHERE run_id = ? AND {damaged}"  # noqa: S608
            queried(path, spoil, numbers[-1])
            box.json("sweep", "status")
            box.json("sweep", "show")
            with pytest.raises(TunerdError, match=r"cannot continue|cannot be read"):
                resume_sweep(ctx, numbers[-1], confirm=lambda _: None)
    assert len(set(numbers)) == len(numbers)
    assert box.serves
