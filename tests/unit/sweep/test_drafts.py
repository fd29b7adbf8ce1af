"""Whether drafts are as often right in a sweep as they are for the people whom production serves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunerd.measure.learn import LiveDrafts
from tunerd.profile.arm import Arm, Request, Sample
from tunerd.profile.workload import RequestClass, Workload
from tunerd.sweep.observations import acceptance_of
from tunerd.sweep.run import compare_drafts

SERVES = Arm("mainline", "mtp", 3, 0.75, 512, "q8_0", 512, 2048, 8)
WORKLOAD = Workload((RequestClass(3, "code", 0, 300, 100), RequestClass(1, "chat", 0, 500, 300)))


def answered(kind: str, drafted: int, accepted: int, *, n: int = 100, arm: Arm = SERVES) -> Sample:
    told = {"predicted_n": n, "predicted_ms": 1000.0, "draft_n": drafted,
            "draft_n_accepted": accepted}  # fmt: skip
    return Sample(
        event="request", process="p", arm=arm, purpose="block", at_s=0.0, seconds=1.0,
        request=Request(kind, "one", 0, 300, 100), n_max=arm.n_max, p_min=arm.p_min, answer=told,
    )  # fmt: skip


def test_a_class_counts_by_its_weight_and_its_length() -> None:
    samples = [answered("code", 90, 90), answered("chat", 30, 0), answered("chat", 60, 0, n=200)]
    # Of a turn 300 tokens are code, with 270 drafts all right, and 300 are chat, with 90 all wrong.
    assert acceptance_of(samples, SERVES, WORKLOAD) == pytest.approx(270 / 360)


def test_drafts_of_other_settings_and_of_a_part_of_the_workload_say_nothing() -> None:
    other = replace(SERVES, n_max=6)
    samples = [answered("code", 90, 90), answered("chat", 30, 0, arm=other)]
    assert acceptance_of(samples, SERVES, WORKLOAD) is None


@pytest.mark.parametrize(
    ("here", "drafted", "accepted", "told"),
    [
        (0.62, 4000, 2400, "are like theirs"),
        (0.80, 4000, 2400, "not like the workload's"),
        (0.80, 400, 240, None),
        (None, 4000, 2400, None),
    ],
)
def test_five_points_tell_whether_texts_are_alike(
    here: float | None, drafted: int, accepted: int, told: str | None
) -> None:
    found = compare_drafts(here, LiveDrafts(12, drafted, accepted))
    assert (found is None) if told is None else (found is not None and told in found)
