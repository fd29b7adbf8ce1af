"""What Prometheus gets, and whether rules and dashboard ask for what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.folders import ROOT
from tests.support.needs import missing
from tests.support.readings import a_reading
from tests.support.transcripts import transcript
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


def told_of(engine: dict[str, Any], **changed: Any) -> list[str]:
    """What is told of a server in this state."""
    lines = exposition(replace(a_reading(**engine), **changed)).decode().splitlines()
    return [one for one in lines if not one.startswith(("#", "tunerd_info", "tunerd_gpu_info"))]


def test_what_is_told_in_base_units_and_what_is_unknown_and_left_out_is_the_golden_text() -> None:
    blind = {"health": None, "slots_busy": None, "n_restarts": None}
    down = {"active_state": "failed", "health": None}
    deaf = {"active_state": "unknown", "sub_state": "unknown", "health": None}
    cases = {
        "A server at work": told_of({"counters": COUNTERS}),
        "Nothing is known of its health, and no card can be read": told_of(
            blind, gpus=None, gpu_problem="the GPU is lost"
        ),
    }
    for heading, engine in (
        ("A server that failed", down),
        ("One that was stopped", down | {"active_state": "inactive"}),
        ("One that is down and that nobody expects", down | {"is_expected": False}),
        ("One that runs and that nobody expects", {"is_expected": False}),
        ("A service manager that does not answer, which is no server that is down", deaf),
    ):
        cases[heading] = [one for one in told_of(engine) if re.search("active|ready", one)]
    transcript("metrics", cases.items())
    assert {name for name in samples(None) if not name.startswith("tunerd_info")} == set()


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
