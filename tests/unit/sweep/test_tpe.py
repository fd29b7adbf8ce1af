"""`--strategy tpe`: Optuna proposes, everything else is the sweep's own."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulator.box import Truth
from benchmarks.simulator.tasks import task
from tunerd.profile.arm import as_arm
from tunerd.sweep.tuner import tune

pytest.importorskip("optuna")

HOUR_S = 3600.0


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_tpe_finds_a_better_arm_that_runs_and_leaves_walls_alone() -> None:
    one = task("12G", "agent", 1)
    space = replace(
        one.space, families={key: one.space.families[key] for key in (("ik", "off"), ("ik", "mtp"))}
    )
    outcome = tune(
        one.box(), space, one.workload, one.incumbent, 0.7 * HOUR_S, np.random.default_rng(1),
        strategy="tpe",
    )  # fmt: skip
    truth = Truth(one.card)
    last = outcome.evidence.path[-1].arm
    assert truth.turn_ms(last, one.workload) < truth.turn_ms(one.incumbent, one.workload)
    assert truth.headroom_mib(as_arm(outcome.arm)) > 0
    ooms = Counter(
        sample.arm.canonical()
        for sample in outcome.evidence.samples
        if sample.event == "boot" and sample.failure == "oom"
    )
    assert ooms
    assert max(ooms.values()) == 1
    purposes = {sample.purpose for sample in outcome.evidence.samples if sample.event == "boot"}
    assert "probe" not in purposes
    assert "explore" in purposes


def test_tpe_goes_on_from_samples_alone() -> None:
    one = task("12G", "agent", 1)
    first = tune(
        one.box(), one.space, one.workload, one.incumbent, 0.25 * HOUR_S, np.random.default_rng(1),
        strategy="tpe",
    )  # fmt: skip
    assert first.verdict == "inconclusive"
    second = tune(
        one.box(1), one.space, one.workload, one.incumbent, 0.3 * HOUR_S, np.random.default_rng(2),
        strategy="tpe", history=first.evidence.samples,
    )  # fmt: skip
    started = [sample for sample in second.evidence.samples if sample.event == "boot"]
    assert started[0].purpose != "incumbent"
    known = {sample.arm.canonical() for sample in first.evidence.samples if sample.failure == "oom"}
    assert not known & {sample.arm.canonical() for sample in started}


def test_without_optuna_the_command_that_installs_it_is_named() -> None:
    told = in_a_fresh_process(
        "import sys; sys.modules['optuna'] = None\n"
        "from tunerd.sweep.search import load_optuna\n"
        "try: load_optuna()\n"
        "except ValueError as error: print(error)"
    )
    assert "pip install 'tunerd[tpe]'" in told


def test_nobody_else_pays_for_optuna() -> None:
    code = "import sys, tunerd.sweep, tunerd.cli.sweep; print('optuna' in sys.modules)"
    assert in_a_fresh_process(code) == "False"
