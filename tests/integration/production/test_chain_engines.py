"""The whole chain in local mode on every real engine: probe, plan, apply, drafts, rollback, failures."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault.campaign import IS_CAMPAIGN
from tests.support import needs
from tests.support.build_box import BuildBox, build_box
from tests.support.designed import Counts, read_truth
from tunerd.engine.choice import PlanRequest
from tunerd.errors import RolledBack
from tunerd.production.apply import apply
from tunerd.production.plan import Plan
from tunerd.tryout.designed import Shape, design, vocabulary, write

WORDS = vocabulary()
N_PREDICT = 65
N_MAX, P_MIN = 3, 0.75
# More than any of these servers has mapped when it serves a little, less than it needs for a lot.
_SPARE_KIB = 200 * 1024
_TOO_LONG = 1_048_576


@dataclass(frozen=True)
class Real:
    """A build, and what is its own: see docs/designed-models.md, and for `crashes` below.

    `checks_flash` tells a build that refuses a quantised V cache without flash attention when it
    reads its arguments from one that only does so when it has loaded the model. One that `crashes`
    then runs on into a segmentation fault, which may come before its log thread has written why.
    Of those that `fail` as another does, only a campaign sees the failures.
    """

    name: str
    dialect: str
    drafts: bool = True
    is_ik: bool = False
    ignores_p_min: bool = False
    checks_flash: bool = False
    crashes: bool = False
    fails: bool = True

    @property
    def program(self) -> Path | None:
        return None if self.name == "embedded" else needs.engine(self.name)

    def expected(self, box: BuildBox, token: int) -> Counts:
        """What it must draft and have accepted."""
        return read_truth(box.model).speculate(
            token,
            N_PREDICT,
            N_MAX,
            P_MIN,
            first_draft_free=self.is_ik,
            candidates=None if self.is_ik else 10,
            ignores_p_min=self.ignores_p_min,
        )


BUILDS = (
    Real("mainline-2026-04-26", "main-old", drafts=False, crashes=True, fails=IS_CAMPAIGN),
    Real("mainline-2026-05-16", "main-mid", ignores_p_min=True, crashes=True),
    Real("mainline-2026-08-18", "main-lm"),
    Real("ik-2026-06-02", "ik-may", is_ik=True, checks_flash=True, fails=IS_CAMPAIGN),
    Real("ik-2026-08", "ik-now", is_ik=True, checks_flash=True),
    Real("bee-2026-05-21", "bee-01", drafts=False, crashes=True, fails=IS_CAMPAIGN),
    Real("embedded", "main-0x", fails=IS_CAMPAIGN),
)
ENGINES = [
    pytest.param(
        real,
        marks=pytest.mark.llama if real.name == "embedded" else pytest.mark.engine,
        id=real.name,
    )
    for real in BUILDS
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("real", ENGINES)
def test_a_real_engine_goes_through_the_whole_chain_and_back_from_each_failure(real: Real) -> None:
    with build_box(real.program, shape="tiny" if real.drafts else "tiny-nomtp") as box:
        box.profile("plain")
        box.profile(
            "drafting",
            speculation__type="mtp", speculation__n_max=N_MAX, speculation__p_min=P_MIN,
        )  # fmt: skip
        box.profile("long", serving__ctx_size=_TOO_LONG)
        box.profile("slow", serving__flash_attn="off", serving__cache_type_v="q8_0")
        box.profile("other", model__path=str(box.box.folder / "other.gguf"))
        assert box.apply("plain")["engine"]["dialect"] == real.dialect
        unit = box.box.unit.read_text()
        drafts_and_goes_back(box, real, unit)
        if not real.fails:
            return

        failure = refused_argument(box, real)
        assert "flash" in failure or real.crashes, failure
        assert_serves(box, unit)
        assert taken_port(box)
        assert_serves(box, unit)
        assert "not within" in damaged_model(box)
        assert_serves(box, unit)
        assert out_of_memory(box)
        assert_serves(box, unit)
        status = box.json("status")
        assert (status["healthy"], status["profile"]) == (True, "plain"), status


def drafts_and_goes_back(box: BuildBox, real: Real, unit: str) -> None:
    """From a server without drafts to one with them, as many as must be, and back to the same text."""
    token = WORDS.region("code").first
    prompt = WORDS.decode([token])
    text = read_truth(box.model).text(token, N_PREDICT)
    answer = box.ask(prompt, N_PREDICT)
    assert text.startswith(answer["choices"][0]["text"])
    assert "draft_n" not in answer["timings"]
    if not real.drafts:
        refused = box.apply("drafting", expect=1)
        assert "cannot speculate with mtp" in refused["error"]["cause"]
        assert box.box.unit.read_text() == unit
        return
    done = box.apply("drafting")
    told = {message["text"] for message in done["messages"] if "p-min" in message["text"]}
    assert bool(told) == real.ignores_p_min, done["messages"]
    answer = box.ask(prompt, N_PREDICT)
    expected = real.expected(box, token)
    counted = (answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"])
    assert counted == (expected.drafted, expected.accepted)
    depths = answer["timings"].get("draft_by_depth", ())  # of ik
    for depth, accepted in zip(depths, expected.accepted_by_position, strict=False):
        assert depth["draft_n_accepted"] == accepted
    assert text.startswith(answer["choices"][0]["text"])

    box.json("rollback")
    assert "draft_n" not in box.ask(prompt, N_PREDICT)["timings"]
    assert_serves(box, unit)
    assert box.json("verify")["as_deployed"] is True


@pytest.mark.llama
def test_a_draft_model_that_a_profile_names_drafts_on_the_real_engine() -> None:
    # Of the same seed and width as the model, so that it knows the same successors.
    shape = Shape(n_layer=2, full_attention_interval=2, has_mtp=False)
    with build_box(None, shape="tiny") as box:
        little = write(design(shape), box.box.folder / "little.gguf")
        box.profile(
            "two",
            speculation__type="draft", speculation__n_max=4, speculation__p_min=0.0,
            speculation__draft_model=str(little),
        )  # fmt: skip
        box.apply("two")
        timings = box.ask("please go on with code", 48)["timings"]
    assert timings["draft_n"] >= 24
    assert timings["draft_n_accepted"] == timings["draft_n"]


def assert_serves(box: BuildBox, unit: str) -> None:
    """The old unit, and a server that answers where it says."""
    assert box.box.unit.read_text() == unit
    answer = box.ask("code", 5)
    assert answer["timings"]["predicted_n"] == 5


def rolled_back(box: BuildBox, kinds: set[str], *words: str) -> str:
    """Apply what must fail for one of these causes; the engine's words."""

    def attempt() -> tuple[str, str]:
        error = box.apply(*words, expect=3)["error"]
        assert error["code"] == "rolled_back", error
        return error["message"], error["cause"]

    return told(attempt, *kinds)


def refused_argument(box: BuildBox, real: Real) -> str:
    if real.checks_flash:
        error = box.apply("slow", expect=1)["error"]
        assert "refuses the command line" in error["cause"]
        return str(error["cause"])
    return rolled_back(box, {"argument refused", *(["crash"] if real.crashes else [])}, "slow")


def taken_port(box: BuildBox) -> str:
    """Somebody listens there while a person reads the plan."""

    def attempt() -> tuple[str, str]:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            request = PlanRequest("plain", {"serving.port": holder.getsockname()[1]})
            return failed_after_plan(box, request, lambda _: holder.listen())

    return told(attempt, "port taken")


def damaged_model(box: BuildBox) -> str:
    """The file is cut short while a person reads the plan."""
    path = box.box.folder / "other.gguf"

    def attempt() -> tuple[str, str]:
        shutil.copy(box.model, path)
        n_left = path.stat().st_size - 100_000
        return failed_after_plan(box, PlanRequest("other", {}), lambda _: os.truncate(path, n_left))

    return told(attempt, "model file damaged")


def told(attempt: Callable[[], tuple[str, str]], *kinds: str) -> str:
    """The engine's words; now and then one ends before it has written any, and is asked again."""
    for _ in range(4):
        message, cause = attempt()
        if not message.endswith(": unknown"):
            break
    assert message.rpartition(": ")[2] in kinds, (message, cause)
    return cause


def failed_after_plan(
    box: BuildBox, request: PlanRequest, happens: Callable[[Plan], None]
) -> tuple[str, str]:
    """Apply, with something that happens between the plan and the swap."""
    with pytest.raises(RolledBack) as caught:
        apply(box.box.context, request, drain=False, confirm=happens)
    return caught.value.message, caught.value.cause or ""


def out_of_memory(box: BuildBox) -> str:
    """A limit of the supervisor's own, which the old server fits into and a long context does not."""
    box.limit_address_space(_SPARE_KIB)
    return rolled_back(box, {"out of memory"}, "long")
