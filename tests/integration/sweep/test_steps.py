"""Single verification steps, as real builds tell them: they account for every token and every millisecond."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.real_box import RealBox
from tunerd.measure.life import Life
from tunerd.measure.trust import speculation_of
from tunerd.profile.arm import Arm, Request, read

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
N_MAX, P_MIN = 8, 0.5
MTP = Arm("it", "mtp", N_MAX, P_MIN, 0, "f16", 512, 2048, 1)
WORDS = {
    "mainline-2026-08-18": ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(N_MAX), "--spec-draft-p-min", str(P_MIN)),
    "ik-2026-08": ("--spec-type", f"mtp:n_max={N_MAX},p_min={P_MIN}"),
}  # fmt: skip


@pytest.mark.parametrize("engine", WORDS)
def test_the_steps_of_an_answer_sum_up_to_its_timings(engine: str, tmp_path: Path) -> None:
    box = RealBox([str(needs.engine(engine))], tmp_path, *WORDS[engine])
    try:
        assert box.restart(MTP).ok
        asked = [
            box.measure(Request(kind, f"{kind} {n}", 0, 200, 96))
            for n in range(3)
            for kind in ("code", "creative", "chat")
        ]
    finally:
        box.close()
    # Where others take the processor in the middle of an answer its steps are not told.
    answers = [answer for answer in asked if "steps" in answer]
    assert len(answers) >= 3
    for answer in answers:
        steps = answer["steps"]
        assert sum(drafted for _, drafted, _ in steps) == answer["draft_n"]
        assert sum(accepted for _, _, accepted in steps) == answer["draft_n_accepted"]
        assert sum(1 + accepted for _, _, accepted in steps) == answer["predicted_n"] - 1
        assert sum(ms for ms, _, _ in steps) == pytest.approx(answer["predicted_ms"], rel=0.05)
        assert all(accepted <= drafted <= N_MAX for _, drafted, accepted in steps)
        reading = read(answer)
        assert reading.steps is not None
        assert reading.n_steps == len(steps) == sum(one.n_steps for one in reading.steps)
    # A draft that is cut short by its confidence shows what shorter ones take.
    assert len({drafted for one in answers for _, drafted, _ in one["steps"]}) > 1


@pytest.mark.parametrize("kind", ["ngram-mod", "ngram-simple"])
def test_n_grams_that_find_nothing_to_repeat_are_measured(kind: str, tmp_path: Path) -> None:
    """No bench and no comparison of a server with n-grams began: three short answers drafted nothing."""
    words = ("--spec-type", kind)
    box = RealBox([str(needs.engine("mainline-2026-08-18"))], tmp_path, *words)
    try:
        assert box.restart(replace(MTP, spec=kind)).ok
        assert box._process is not None
        target = replace(box._process.life.target, speculation=speculation_of(("x", *words)))
        life = Life(box.ctx, target)
        assert life.warm_up(box.texts.first(life), drafts=target.speculation.drafts) is False
    finally:
        box.close()
