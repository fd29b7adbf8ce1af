"""What Prometheus gets, and whether rules and dashboard ask for what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.folders import ROOT
from tests.support.needs import missing
from tests.support.readings import a_reading
from tunerd.measure.answer import Counters
from tunerd.watch.figures import Reading
from tunerd.web.metrics import exposition

FOLDER = ROOT / "docs/monitoring"
COUNTERS = Counters(1000, 500, 1, 0, 300, 200, None, 50, 2.0, 10.0)
LIMIT_S = 180.0


def samples(reading: Reading | None) -> dict[str, float]:
    """Every sample by its name, those with labels as `name{label=value}`."""
    found = {}
    for family in text_string_to_metric_families(exposition(reading).decode()):
        for one in family.samples:
            labels = {key: value for key, value in one.labels.items() if key != "unit"}
            shown = ",".join(f"{key}={value}" for key, value in labels.items())
            found[one.name + (f"{{{shown}}}" if shown else "")] = one.value
    return found


def expressions() -> list[str]:
    """Every question of the dashboard."""
    board = json.loads((FOLDER / "dashboard.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_a_reading_is_told_in_base_units() -> None:
    found = samples(a_reading(counters=COUNTERS))
    assert found["tunerd_gpu_memory_used_bytes{gpu=0}"] == 8000 * 1024 * 1024
    assert found["tunerd_gpu_power_watts{gpu=0}"] == 14.5
    assert found["tunerd_gpu_sm_clock_hertz{gpu=0}"] == 210e6
    assert found["tunerd_gpu_utilization_ratio{gpu=0}"] == 0
    assert found["tunerd_server_predicted_tokens_total"] == 500
    assert found["tunerd_server_predicted_seconds_total"] == 10.0
    assert found["tunerd_server_ready"] == 1
    assert found["tunerd_host_cpu_ratio"] == pytest.approx(0.03)


def test_what_is_unknown_is_left_out_and_never_zero() -> None:
    blind = replace(a_reading(health=None, slots_busy=None, n_restarts=None), gpus=None)
    assert samples(a_reading())["tunerd_gpu_problem"] == 0
    found = samples(replace(blind, gpu_problem="the GPU is lost"))
    assert found["tunerd_gpu_problem"] == 1
    assert not [name for name in found if name.startswith(("tunerd_gpu_memory", "tunerd_gpus"))]
    for name in ("ready", "slots_busy", "restarts_total", "predicted_tokens_total"):
        assert f"tunerd_server_{name}" not in found
    assert found["tunerd_server_active"] == 1
    assert set(samples(None)) == {name for name in samples(None) if name.startswith("tunerd_info")}


@pytest.mark.parametrize(
    ("engine", "active", "ready"),
    [
        ({"active_state": "inactive", "health": None}, 0, 0),
        ({"active_state": "failed", "health": None}, 0, 0),
        ({"active_state": "inactive", "health": None, "is_expected": False}, 0, None),
        ({"is_expected": False}, 1, 1),
        # A service manager that does not answer is no server that is down.
        ({"active_state": "unknown", "sub_state": "unknown", "health": None}, None, None),
    ],
)
def test_a_server_that_nobody_expects_or_knows_of_is_not_down(
    engine: dict[str, Any], active: int | None, ready: int | None
) -> None:
    found = samples(a_reading(**engine))
    assert found.get("tunerd_server_active") == active
    assert found.get("tunerd_server_ready") == ready


def test_rules_and_dashboard_ask_for_what_there_is() -> None:
    told = {name.partition("{")[0] for name in samples(a_reading(counters=COUNTERS))}
    asked = "\n".join([*expressions(), (FOLDER / "alerts.yml").read_text()])
    names = set(re.findall(r"\btunerd_[a-z0-9_]+", asked))
    assert names - told == set()
    assert len(names) > 20


def test_promtool_is_content_with_rules_and_dashboard(tmp_path: Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        missing("prometheus", "no promtool", "apt-get install prometheus")
    asked = [{"record": f"panel:{at}", "expr": one.replace("$instance", ".*")}
             for at, one in enumerate(expressions())]  # fmt: skip
    panels = tmp_path / "panels.yml"
    panels.write_text(json.dumps({"groups": [{"name": "panels", "rules": asked}]}))
    for words in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("check", "rules", str(panels)),
        ("test", "rules", "alerts_test.yml"),
    ):
        done = subprocess.run(
            [tool, *words], cwd=FOLDER, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
