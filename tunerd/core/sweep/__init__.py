"""The search for better settings: a model of speculation, honest measurement, an honest verdict."""

from tunerd.core.sweep.arm import Arm
from tunerd.core.sweep.evidence import Evidence, Outcome
from tunerd.core.sweep.night import PathPoint
from tunerd.core.sweep.protocol import (
    Boot,
    Box,
    Family,
    Policy,
    Preempted,
    Refused,
    Request,
    ServerDied,
    Space,
)
from tunerd.core.sweep.sample import Sample, sample_from_json
from tunerd.core.sweep.tune import tune
from tunerd.core.workload import RequestClass, Workload

__all__ = [
    "Arm",
    "Boot",
    "Box",
    "Evidence",
    "Family",
    "Outcome",
    "PathPoint",
    "Policy",
    "Preempted",
    "Refused",
    "Request",
    "RequestClass",
    "Sample",
    "ServerDied",
    "Space",
    "Workload",
    "sample_from_json",
    "tune",
]
