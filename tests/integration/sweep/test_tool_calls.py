"""What a sweep makes of a model that was never made for tools."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.sweep_box import swept
from tunerd.sweep.plan import SweepRequest
from tunerd.sweep.run import run_sweep

pytestmark = pytest.mark.timeout(900)


def test_a_model_that_answers_calls_of_tools_with_nonsense_is_measured_by_its_classes() -> None:
    """Each start counted as one that died, so that `nothing else is faster` for want of anything else."""
    said: list[str] = []
    with swept(breaks_beyond=150, breaks_into="ha ") as box:
        ctx = replace(box.box.context, progress=lambda told: said.append(told.text))
        run_sweep(ctx, SweepRequest(budget_s=30.0, seed=3), confirm=lambda _prepared: None)
    assert any(text.startswith("tool: ") for text in said)
    assert [text for text in said if "gave up" in text] == []
