"""What `promote` refuses, what it takes back, and what is left of one that is killed."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.measure.test_store import RUN, SAMPLE
from tests.support.fake_gpu import FakeGpuReader, rtx_4070_super
from tests.support.faked import set_to
from tests.support.made_sweep import put_proposal
from tests.support.sweep_box import SweepBox, swept
from tests.support.waiting import until
from tunerd.app import Context
from tunerd.calendar import Deadline
from tunerd.errors import DeployError, UsageError
from tunerd.machine.facts import GpuReading
from tunerd.machine.files import Files, is_locked
from tunerd.measure.store import EvidenceStore
from tunerd.profile.files import read_tuned, remember_failure
from tunerd.result import ActionResult, Progress
from tunerd.sweep.plan import SweepRequest, prepare
from tunerd.sweep.promote import follow_policy, preview, promote
from tunerd.sweep.run import resume_sweep

# Each test leaves the box as it found it: with drafts, and nothing tuned.
pytestmark = pytest.mark.timeout(540)


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    with swept() as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_tuned(box: SweepBox) -> Iterator[None]:
    """Nor any memory of what failed."""
    yield
    shutil.rmtree(box.box.context.paths.tuned_dir, ignore_errors=True)


def deploy(ctx: Context, number: int) -> ActionResult:
    return promote(ctx, number, drain=False, confirm=lambda _plan: None)


def by_itself(ctx: Context) -> Context:
    """Winners are deployed without being asked about."""
    return set_to(ctx, sweep__promote="auto")


def drafts(box: SweepBox) -> bool:
    return "--spec-draft-n-max 4" in " ".join(box.engine.served()[-1])


@contextmanager
def put_back(path: Path) -> Iterator[bytes]:
    """What a file holds, and holds again afterwards."""
    before = path.read_bytes()
    try:
        yield before
    finally:
        path.write_bytes(before)


def serving(box: SweepBox) -> int:
    entry = box.box.context.generations.serving(box.box.context.unit)
    assert entry is not None
    return entry.generation.number


def test_a_promotion_is_shown_before_anything_is_touched_and_what_was_not_proved_is_none(
    box: SweepBox,
) -> None:
    number = put_proposal(box.box.context, is_proved=False)
    none = box.json("promote", "--dry-run", code=1)
    assert "proved no winner" in none["nothing"]
    with pytest.raises(UsageError, match="proved no winner"):
        deploy(box.box.context, number)
    number = put_proposal(box.box.context)
    assert "--spec-draft" in box.json("promote", str(number), "--dry-run")["diff"]
    assert "command line" in box.call("promote", "--dry-run").stdout
    assert serving(box) == 1


def test_what_was_proved_under_other_conditions_is_not_promoted_and_these_are_named(
    box: SweepBox,
) -> None:
    then: tuple[tuple[dict[str, Any], str], ...] = (
        ({"model_sha256": "0" * 64}, "no longer holds here"),
        ({"variables": {"GGML_CUDA_FORCE_MMQ": "1"}}, "variable GGML_CUDA_FORCE_MMQ"),
    )
    for conditions, told in then:
        number = put_proposal(box.box.context, **conditions)
        assert told in box.call("promote", str(number), code=1).stderr
    assert serving(box) == 1
    box.call("decline", str(number), "--why", "not tonight")
    assert box.newest()["decided"]["text"] == "not tonight"


@pytest.mark.parametrize(
    ("added", "refused"),
    [
        ('[environment]\nGGML_CUDA_FORCE_MMQ = "1"', "another command line or environment"),
        ('[pin]\nspeculation.type = "mtp"', "no longer holds here"),
    ],
)
def test_what_nobody_measured_is_not_deployed_in_the_name_of_a_winner(
    box: SweepBox, added: str, refused: str
) -> None:
    """The profile says more by now than when it was proved."""
    ctx = box.box.context
    number = put_proposal(ctx)
    path = ctx.paths.config_dir / "profiles" / "night.toml"
    with put_back(path) as before:
        path.write_bytes(before + f"\n{added}\n".encode())
        with pytest.raises(DeployError, match=refused):
            deploy(ctx, number)
        box.call("promote", "--dry-run", code=1)
    assert serving(box) == 1


def test_a_winner_that_drafts_by_n_grams_is_deployed_with_the_kind_that_was_measured(
    box: SweepBox,
) -> None:
    """An arm says `ngram`, which is no type of a profile."""
    ctx = box.box.context
    path = ctx.paths.config_dir / "profiles" / "night.toml"
    with put_back(path) as before:
        path.write_bytes(before + b'"speculation.type" = ["off", "mtp", "ngram-mod"]\n')
        number = put_proposal(ctx, fast="ngram")
        assert "--spec-type ngram-mod" in preview(ctx, number).payload["diff"]


@pytest.mark.parametrize("incumbent", [None, {"engine": "fake"}])
def test_a_sweep_that_cannot_say_what_served_is_refused_in_words(
    box: SweepBox, incumbent: object
) -> None:
    ctx = box.box.context
    number = put_proposal(ctx)
    with EvidenceStore(ctx.paths.evidence) as store:
        (plan,) = store.summaries(number, names=("sweep plan",))
        figures = {**plan.figures, "incumbent": incumbent}
        store.add_summary(number, replace(plan, figures=figures))
    assert "cannot be read" in box.call("promote", str(number), "--yes", code=1).stderr


def test_a_unit_that_was_edited_by_hand_is_neither_swept_nor_replaced_by_a_winner(
    box: SweepBox,
) -> None:
    """What would be measured as what serves is not what serves."""
    ctx = box.box.context
    number = put_proposal(ctx)
    with put_back(box.box.unit) as before:
        edited = before.replace(b"--threads 1", b"--threads 2")
        box.box.unit.write_bytes(edited)
        with pytest.raises(DeployError, match="was changed while it ran"):
            deploy(ctx, number)
        told = box.call("sweep", "run", "--yes", "--budget", "40s", code=1)
        assert "was changed while it ran" in told.stderr
        assert box.box.unit.read_bytes() == edited
    assert serving(box) == 1


def test_a_winner_is_not_deployed_where_it_could_not_be_kept_what_becomes_of_it(
    box: SweepBox,
) -> None:
    """It served without its last measurement, so that none that is slower was taken back."""
    ctx = box.box.context
    path, filler = ctx.paths.evidence, list(range(3000))
    with EvidenceStore(path) as store:
        store.add_samples(
            store.add_run(RUN), [replace(SAMPLE, details={"filler": filler})], arm="live"
        )
    number = put_proposal(ctx)
    with put_back(path) as before:
        at = before.index(b" 1500, 1501") // 4096 * 4096
        path.write_bytes(before[:at] + os.urandom(4096) + before[at + 4096 :])
        refused = box.call("promote", str(number), "--yes", code=1).stderr
        assert "the evidence store is damaged" in refused
    assert serving(box) == 1


def test_what_the_settings_say_of_sweeps_by_now_keeps_no_winner_from_being_promoted(
    box: SweepBox,
) -> None:
    """It was refused for its sweep's budget, or for a limit that only root may search."""
    number = put_proposal(box.box.context)
    space = ("gpu.power_limit_w=100",)
    ctx = set_to(box.box.context, sweep__downtime_s=600.0, sweep__space=space)
    assert "--spec-draft" in preview(ctx, number).payload["diff"]


def test_a_sweep_that_came_to_its_end_is_told_as_that_however_hot_the_card_is(
    box: SweepBox,
) -> None:
    """After a wait, that the card was hot was all that was told."""
    number = put_proposal(box.box.context)
    hot = replace(rtx_4070_super(), throttle_reasons=("software thermal slowdown",))
    ctx = replace(box.box.context, gpu=FakeGpuReader(hot))
    with pytest.raises(UsageError, match=f"sweep {number} is finished"):
        resume_sweep(ctx, number, confirm=lambda _: None)


class WhoLooks(FakeGpuReader):
    """Lets a person save a unit with other flags, once, at a moment at which cards are looked at."""

    unit: Path | None = None
    is_now: Callable[[], bool]
    edited: str | None = None

    def read(self) -> GpuReading:
        if self.unit is not None and self.is_now():
            self.edited = self.unit.read_text().replace("--threads 1", "--threads 2")
            self.unit.write_text(self.edited)
            self.unit = None
        return super().read()


def test_a_unit_that_is_edited_while_a_winner_is_made_ready_stays_as_it_was_edited(
    box: SweepBox,
) -> None:
    """What a person had just saved was replaced by what a night had proved against another."""
    gpu = WhoLooks()
    ctx = replace(box.box.context, gpu=gpu)
    number = put_proposal(ctx)
    gpu.unit, gpu.is_now = box.box.unit, lambda: is_locked(ctx.paths.lock)
    with put_back(box.box.unit):
        told = follow_policy(by_itself(ctx), number)
        assert box.box.unit.read_text() == gpu.edited
    assert "was edited by hand" in told[0].text
    assert serving(box) == 1


def test_a_window_that_ends_before_the_load_could_deploys_nothing(box: SweepBox) -> None:
    ctx = box.box.context
    number = put_proposal(ctx)
    deadline = Deadline(ctx.clock.now_s() + 30.0, 0.0, "until 07:00")
    (told,) = follow_policy(by_itself(ctx), number, deadline=deadline, load_s=60.0)
    assert "ends before it could load" in told.text
    assert serving(box) == 1


def test_a_winner_does_not_start_a_server_that_somebody_stopped(box: SweepBox) -> None:
    """Who stopped it before the night, or while it came back after it, had it started with another text."""
    ctx = box.box.context
    number = put_proposal(ctx)
    ctx.services.stop(ctx.unit)
    try:
        (told,) = follow_policy(by_itself(ctx), number)
        assert not ctx.services.state(ctx.unit).runs
    finally:
        ctx.services.start(ctx.unit)
        until(lambda: box.serves, "it serves")
    assert told.text == f"the winner was not deployed: {ctx.unit} does not run"
    assert serving(box) == 1


def test_a_winner_that_is_slower_in_service_is_taken_back(box: SweepBox) -> None:
    ctx = box.box.context
    done = deploy(ctx, put_proposal(ctx, token_ms=0.05))
    assert done.exit_code == 3
    assert drafts(box)
    assert read_tuned(ctx, "night") is None
    assert [row["arm"] for row in box.json("sweep", "run", "--dry-run")["plan"]["rejected"]]
    assert "failed in service" in box.newest()["decided"]["text"]


def test_a_winner_that_was_taken_back_is_told_as_that_though_nothing_more_can_be_kept_of_it(
    box: SweepBox,
) -> None:
    """It read as deployed, with exit code 1, and a rollout left the box alone for it."""
    failures = box.box.context.paths.tuned_dir / "night.failed.json"

    def told(one: Progress) -> None:
        if "once more" in one.text:
            failures.mkdir(parents=True)  # which no file takes the place of

    ctx = replace(box.box.context, progress=told)
    done = deploy(ctx, put_proposal(ctx, token_ms=0.05))
    assert done.exit_code == 3
    assert done.payload["generation"] == serving(box)
    assert [one.code for one in done.messages][-2:] == ["taken-back", "unfinished"]
    assert "the tuned layer may still be in force" in done.messages[-1].text
    assert drafts(box)


def test_a_slower_winner_whose_unit_was_edited_meanwhile_is_left_as_it_was_edited(
    box: SweepBox,
) -> None:
    """It went back to what served before, and the edit was gone."""
    gpu, looks = WhoLooks(), [math.inf]

    def told(one: Progress) -> None:
        if "once more" in one.text:
            looks.append(gpu.n_readings + 8)  # by then it is asked

    ctx = replace(box.box.context, gpu=gpu, progress=told)
    number = put_proposal(ctx, token_ms=0.05)
    gpu.unit, gpu.is_now = box.box.unit, lambda: gpu.n_readings >= looks[-1]
    try:
        done = deploy(ctx, number)
        assert gpu.edited is not None
        assert box.box.unit.read_text() == gpu.edited
        assert (done.exit_code, done.messages[-1].code) == (1, "overtaken")
        assert "in the pairs it took" in done.messages[-1].text
        assert "--untuned" in (done.messages[-1].hint or "")  # its layer is in force
        assert "or its unit edited" in box.newest()["decided"]["text"], (
            "and not that it was cut short"
        )
    finally:
        box.json("rollback", "--yes", "--to", "1")
    assert drafts(box)


def test_a_winner_that_does_not_come_up_in_service_is_not_proposed_again(box: SweepBox) -> None:
    """Else every night would prove it, deploy it, and go back."""
    ctx = box.box.context
    number = put_proposal(ctx)
    box.engine.configure(rules=[{"when": {"speculative": "off"}, "set": {"fail": "segfault"}}])
    (told,) = follow_policy(by_itself(ctx), number)
    box.engine.configure(rules=[])
    for said in ("was not deployed", "crash: signal 11", "rolled back"):
        assert said in told.text
    (rejected,) = box.json("sweep", "run", "--dry-run")["plan"]["rejected"]
    assert "no speculation" in rejected["arm"]
    assert "crash" in rejected["reason"]
    assert drafts(box)


def test_a_sweep_of_which_all_was_turned_down_stops_nothing(box: SweepBox) -> None:
    """Each night would stop the server, measure nothing, and start it again."""
    ctx = box.box.context
    space = ("--space", "speculation.n_max=4")
    request = SweepRequest(budget_s=600.0, space=("speculation.n_max=4",))
    prepared = prepare(ctx, request, proves=False)
    off = replace(prepared.space.base.arm, spec="off")
    remember_failure(ctx, "night", off, prepared.seen.identities[off.engine], "it died")
    before = len(box.engine.served())

    refused = box.call("sweep", "run", "--yes", "--budget", "10m", *space, code=2).stderr

    assert "there is nothing to try" in refused
    assert "failed in service: it died" in refused
    assert len(box.engine.served()) == before
    assert "failed in service: it died" in box.call("sweep", "run", "--dry-run", *space).stdout


def test_a_winner_that_gives_no_answer_is_taken_back(box: SweepBox) -> None:
    ctx = box.box.context
    number = put_proposal(ctx)
    # What the swap itself asks is answered.
    box.engine.configure(reply=["normal", "normal", "normal", "error"])
    done = deploy(ctx, number)
    box.engine.configure(reply="normal")
    assert done.exit_code == 3
    assert "it gave no answer" in done.payload["measured_again"]["text"]
    assert drafts(box)
    box.box.context.services.restart(ctx.unit)


def test_a_winner_that_says_one_token_over_and_over_where_nothing_did_in_its_sweep_is_taken_back(
    box: SweepBox,
) -> None:
    """It was kept, as several times as fast as before."""
    ctx = box.box.context
    number = put_proposal(ctx)
    box.engine.configure(breaks_beyond=60, breaks_into="ha ")  # what the swap asks is shorter
    done = deploy(ctx, number)
    box.engine.configure(breaks_beyond=None)
    assert done.exit_code == 3
    assert "repeats one token" in done.payload["measured_again"]["text"]
    assert drafts(box)
    box.box.context.services.restart(ctx.unit)


def test_one_that_is_killed_while_it_measures_again_leaves_the_winner_kept_and_watched(
    box: SweepBox,
) -> None:
    def die(progress: Progress) -> None:
        if "once more" in progress.text:
            raise KeyboardInterrupt

    ctx = box.box.context
    number = put_proposal(ctx)
    with pytest.raises(KeyboardInterrupt):
        deploy(replace(ctx, progress=die), number)
    watched = box.probation()
    assert (watched["generation"], watched["sweep"]) == (serving(box), number)
    assert watched["state"] in {"running", "cut"}, "no daemon runs here"
    assert box.newest()["decision"] == "promoted"
    assert box.json("plan", "night")["diff"] == "", "the next apply keeps it"
    assert "--spec" not in " ".join(box.engine.served()[-1])
    back = box.json("rollback", "--yes")
    assert "tuned-declined" in {one["code"] for one in back["messages"]}
    assert drafts(box)


class Killed(BaseException):
    """What no code of tunerd sees coming."""


def killed_at(ctx: Context, step: str) -> Context:
    """One whose process ends before this change of the disk."""

    def die(one: str) -> None:
        if one == step:
            raise Killed

    return replace(ctx, files=Files(before=die))


@pytest.mark.parametrize(
    ("token_ms", "step", "is_kept"),
    [
        pytest.param(None, "create temporary for night.evidence.json", True, id="promoted"),
        pytest.param(0.05, "create temporary for night.failed.json", False, id="taken back"),
    ],
)
def test_one_that_is_killed_before_it_wrote_of_the_tuned_layer_has_it_written_by_recovery(
    box: SweepBox, token_ms: float | None, step: str, *, is_kept: bool
) -> None:
    """The next apply took the winner away again, or deployed again what had done worse."""
    ctx = box.box.context
    number = put_proposal(ctx) if token_ms is None else put_proposal(ctx, token_ms=token_ms)
    with pytest.raises(Killed):
        deploy(killed_at(ctx, step), number)
    box.json("recover")
    record = read_tuned(ctx, "night")
    assert (record is not None) is is_kept
    assert record is None or (record.sweep, record.generation) == (number, serving(box))
    assert drafts(box) is not is_kept
    assert box.json("plan", "night")["diff"] == "", "the next apply changes nothing"
    failed = (ctx.paths.tuned_dir / "night.failed.json").exists()
    assert failed is not is_kept, "and the next night leaves out what was taken back alone"
    assert box.newest()["decision"] == ("promoted" if is_kept else "taken back")
    if is_kept:
        box.json("rollback", "--yes")


def test_what_somebody_deploys_while_a_winner_is_measured_again_stays(box: SweepBox) -> None:
    words = ("apply", "night", "--yes", "--no-probation")

    def overtake(progress: Progress) -> None:
        if "once more" in progress.text:
            box.json(*words, "--set", "serving.n_ubatch=256")

    ctx = box.box.context
    done = deploy(replace(ctx, progress=overtake), put_proposal(ctx, token_ms=0.05))
    assert done.exit_code == 1
    assert "overtaken" in {one.code for one in done.messages}
    assert "--ubatch-size 256" in " ".join(box.engine.served()[-1])
    shutil.rmtree(ctx.paths.tuned_dir, ignore_errors=True)
    box.json(*words)
    assert drafts(box)


def test_a_winner_over_something_else_than_served_then_is_not_promoted_and_no_sweep_goes_on(
    box: SweepBox,
) -> None:
    """It would prove a winner over what serves now, and `promote` take it for one over what served then."""
    number = put_proposal(box.box.context)
    box.json("apply", "night", "--set", "speculation.n_max=2", "--yes", "--no-probation")
    served = serving(box)
    with pytest.raises(DeployError, match="began from generation"):
        deploy(box.box.context, number)
    assert serving(box) == served
    with EvidenceStore(box.box.context.paths.evidence) as store:
        store.reopen_run(number)
    told = box.call("sweep", "resume", str(number), "--yes", code=2)
    assert "what serves" in told.stderr


def test_a_restart_from_before_it_was_measured_again_is_not_held_against_a_winner(
    box: SweepBox,
) -> None:
    """systemd may make one start of a restart that was due and the one that a swap asks for."""
    ctx = box.box.context

    def start_again(progress: Progress) -> None:
        if "once more" not in progress.text:
            return
        # What it tells from now on cannot be used, which is no failure of what serves.
        box.engine.configure(told_timings={"prompt_ms": -1, "predicted_ms": -1})
        state = ctx.services.state(ctx.unit)
        assert state.main_pid is not None
        os.kill(state.main_pid, signal.SIGKILL)
        until(lambda: ctx.services.state(ctx.unit).n_restarts == 1, "its manager started it again")
        until(lambda: box.serves, "it serves")

    number = put_proposal(ctx)
    try:
        done = deploy(replace(ctx, progress=start_again), number)
    finally:
        box.engine.configure(told_timings=None)
    assert done.exit_code == 0, done.payload["measured_again"]
    assert "could not be measured undisturbed" in done.payload["measured_again"]["text"]
    box.json("rollback", "--yes")
