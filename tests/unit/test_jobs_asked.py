"""What may be asked for without root: names and plain values, in whatever place of a request they stand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tunerd.core.job import (
    JobKind,
    JobRequest,
    Lane,
    check_arguments,
    check_sides,
    check_space,
    plain_keys,
    request_from_json,
)
from tunerd.errors import UsageError
from tunerd.web.api_models import BenchBody, CompareBody, LearnBody, ScheduleBody, SweepBody
from tunerd.web.api_routes import JOBS

EVIL = [
    {"profile": "../../etc/shadow"},
    {"profile": "/etc/tunerd/profiles/x"},
    {"profile": ".hidden"},
    {"base": "a/b"},
    {"workload": "../../../etc/passwd"},
    {"workload": "a\nb"},
    {"name": "../tuned/x"},
    {"set": {"engine.prefer": ["/home/alice/evil"]}},
    {"set": {"engines.eng.extra_args": ["--x"]}},
    {"set": {"extra_args": ["--log-file", "/etc/cron.d/x"]}},
    {"set": {"environment.LD_PRELOAD": "/home/alice/evil.so"}},
    {"set": {"model.path": "/etc/shadow"}},
    {"set": {"speculation.draft_model": "/etc/shadow"}},
    {"set": {"model.chat_template_file": "/etc/shadow"}},
    {"set": {"serving.slot_save_path": "/etc"}},
    {"set": {"memory.override_tensor": ["x=/dev/mem"]}},
    {"space": ["model.path=/etc/shadow"]},
    {"space": ["engine=/home/alice/evil"]},
    {"space": ["engine.prefer=ik,../evil"]},
    {"space": ["extra_args=--x"]},
    {"space": ["speculation.draft_model=x"]},
    {"space": ["speculation.n_max"]},
    {"space": ["serving.threads=1, 2"]},
    {"sides": ["/home/alice/evil"]},
    {"sides": ["../x"]},
    {"sides": ["engine.prefer=evil"]},
    {"sides": ["model.path=x"]},
    {"sides": ["serving.chat_template=x"]},
    {"sides": ['speculation.n_max=[1]\nx = "y"']},
]


@pytest.mark.parametrize("arguments", EVIL, ids=str)
def test_nothing_that_names_a_file_a_program_or_free_text_passes(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        check_arguments(arguments)


def test_names_and_plain_values_pass() -> None:
    check_arguments({"profile": "rtx-3090-ti-24gb", "workload": "coding-agent", "base": None})
    check_space(["speculation.n_max=1,2,3", "speculation=mtp,off", "engine=mainline-0.7.0,ik"])
    check_space(["serving.load_mode=mmap+mlock", "serving.temp=0.7"])
    check_sides(["live", "14", "rtx-3090-ti-24gb", "speculation.n_max=2"])


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_leads_a_sweep_or_a_comparison_out_of_the_plain_keys(key: str, value: str) -> None:
    for check, text in ((check_space, f"{key}={value}"), (check_sides, f"{key}={value}")):
        try:
            check([text])
        except UsageError:
            continue
        name = text.partition("=")[0]
        assert name in plain_keys() | {"engine", "engine.prefer", "speculation"}
        assert "/" not in text
        assert text.isprintable()


@pytest.mark.parametrize(
    ("body", "given"),
    [
        (SweepBody, {"space": ["model.path=/etc/shadow"]}),
        (SweepBody, {"window": "01:00-06:30; rm"}),
        (SweepBody, {"strategy": "../x"}),
        (SweepBody, {"budget_s": float("inf")}),
        (BenchBody, {"url": "http://169.254.169.254/"}),
        (BenchBody, {"profile": "a/b"}),
        (BenchBody, {"suite": "deep", "repeats": 10**9}),
        (CompareBody, {"sides": ["a", "b", "c"]}),
        (CompareBody, {"sides": ["/bin/sh"]}),
        (LearnBody, {"unit": "sshd.service"}),
        (LearnBody, {"name": "../../x"}),
        (ScheduleBody, {"timezone": "../../etc/shadow"}),
        (ScheduleBody, {"timezone": "/etc/shadow"}),
        (ScheduleBody, {"days": 'mon"\n[engines.x]\npath = "/home/alice/evil'}),
    ],
)
def test_a_body_takes_no_paths_addresses_or_units(body: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        body.model_validate(given)


def test_every_route_that_begins_a_job_has_a_kind_of_its_own() -> None:
    kinds = [route.kind for route in JOBS]
    assert len(kinds) == len(set(kinds))
    assert {kind for kind in JobKind if kind.changes} <= set(kinds)


def test_a_swap_does_not_wait_for_a_measurement_and_a_question_for_neither() -> None:
    assert JobKind.ROLLBACK.lane is not JobKind.COMPARE.lane
    assert JobKind.SWEEP_STOP.lane not in {JobKind.SWEEP_RUN.lane, Lane.LOOK}
    asked = JobRequest(JobKind.PROMOTE, "alice", 0.0, {"ask": True})
    assert asked.lane is Lane.LOOK
    assert request_from_json(asked.to_json()) == asked
    assert JobKind.BENCH.lane is Lane.MEASURE
    assert not JobKind.DETECT.changes
