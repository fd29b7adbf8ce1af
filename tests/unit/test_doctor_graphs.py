"""What of a comparison is taken for the control run without CUDA graphs."""

from __future__ import annotations

from typing import Any

from tunerd.actions.doctor_graphs import control_of
from tunerd.core.doctor.facts import GraphControl


def part(name: str, of_class: str | None, gain: float, low: float | None) -> dict[str, Any]:
    return {"part": name, "class": of_class, "gain": gain, "gain_low": low, "gain_high": 0.5}


def test_decoding_over_the_whole_mix_counts_and_neither_prompts_nor_a_class() -> None:
    parts = [
        part("turn", None, 0.1, 0.05),
        part("prefill", None, 0.2, 0.15),
        part("decode", "chat", 0.3, 0.25),
        part("decode", None, 0.4, 0.35),
    ]

    assert control_of({"parts": parts, "pairs": 7}) == GraphControl(0.4, 0.35, 0.5, 7)


def test_too_few_pairs_have_no_interval() -> None:
    found = control_of({"parts": [part("decode", None, 0.4, None)], "pairs": 2})

    assert found == GraphControl(0.4, None, 0.5, 2)


def test_a_comparison_without_pairs_is_no_control() -> None:
    assert control_of({"parts": [], "pairs": 0}) is None
