"""The control run without CUDA graphs as it is kept, and whether a kept one still counts."""

from __future__ import annotations

from tunerd.core.doctor.facts import GraphControl
from tunerd.core.evidence import SummaryRecord, number

NAME = "cuda graphs"
SUITE = "control"


def control_to_record(control: GraphControl, arm: str) -> SummaryRecord:
    """As it is kept with its run; `arm` is the server with graphs."""
    figures = {"gain": control.gain, "low": control.low, "high": control.high,
               "n_pairs": control.n_pairs}  # fmt: skip
    return SummaryRecord(SUITE, NAME, arm, figures)


def control_from_record(record: SummaryRecord) -> GraphControl | None:
    """As it was kept; None if this is something else."""
    gain, n_pairs = number(record.figures, "gain"), number(record.figures, "n_pairs")
    if record.name != NAME or gain is None or n_pairs is None:
        return None
    low, high = number(record.figures, "low"), number(record.figures, "high")
    return GraphControl(gain, low, high, round(n_pairs))
