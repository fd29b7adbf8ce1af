"""What Prometheus gets, and whether rules and dashboard ask for what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.folders import ROOT
from tests.support.needs import missing
from tests.support.readings import a_reading
from tunerd.machine.net import free_port
from tunerd.measure.answer import Counters
from tunerd.watch.figures import Reading
from tunerd.web.metrics import exposition

FOLDER = ROOT / "docs/monitoring"
COUNTERS = Counters(1000, 500, 1, 0, 300, 200, None, 50, 2.0, 10.0)
LIMIT_S = 60.0


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
    found = samples(blind)
    assert not [name for name in found if name.startswith(("tunerd_gpu_memory", "tunerd_gpus"))]
    for name in ("ready", "slots_busy", "restarts_total", "predicted_tokens_total"):
        assert f"tunerd_server_{name}" not in found
    assert found["tunerd_server_active"] == 1
    assert set(samples(None)) == {name for name in samples(None) if name.startswith("tunerd_info")}


def test_a_server_that_nobody_expects_is_not_down() -> None:
    absent: dict[str, Any] = {"active_state": "inactive", "health": None}
    assert samples(a_reading(**absent))["tunerd_server_ready"] == 0
    assert "tunerd_server_ready" not in samples(a_reading(**absent, is_expected=False))
    assert samples(a_reading(is_expected=False))["tunerd_server_ready"] == 1


def test_a_service_manager_that_does_not_answer_is_no_server_that_is_down() -> None:
    found = samples(a_reading(active_state="unknown", sub_state="unknown", health=None))
    assert not {"tunerd_server_active", "tunerd_server_ready"} & set(found)
    down = samples(a_reading(active_state="failed", health=None))
    assert (down["tunerd_server_active"], down["tunerd_server_ready"]) == (0, 0)


def test_rules_and_dashboard_ask_for_what_there_is() -> None:
    told = {name.partition("{")[0] for name in samples(a_reading(counters=COUNTERS))}
    asked = "\n".join([*expressions(), (FOLDER / "alerts.yml").read_text()])
    names = set(re.findall(r"\btunerd_[a-z0-9_]+", asked))
    assert names - told == set()
    assert len(names) > 20


def test_promtool_is_content_with_the_rules() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        missing("prometheus", "no promtool", "apt-get install prometheus")
    for words in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run(
            [tool, *words], cwd=FOLDER, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    """A Prometheus that reads two readings of a box again and again; its address."""
    program = shutil.which("prometheus")
    if program is None:
        missing("prometheus", "no Prometheus", "apt-get install prometheus")
    count = iter(range(1_000_000))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            n = next(count)
            grown = replace(
                COUNTERS,
                n_prompt=1000 + 90 * n,
                n_predicted=500 + 50 * n,
                n_drafted=300 + 60 * n,
                n_accepted=200 + 40 * n,
                n_cached=50 + 10 * n,
                prompt_s=2.0 + n,
                predicted_s=10.0 + n,
            )
            self.send_response(200)
            self.end_headers()
            self.wfile.write(exposition(a_reading(at_s=time.time(), counters=grown)))

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    port = free_port()
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target = f"127.0.0.1:{server.server_port}"
        config = f"global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}\nscrape_configs: [{{job_name: t, static_configs: [{{targets: ['{target}']}}]}}]\n"
        (tmp_path / "prometheus.yml").write_text(config)
        words = [
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([program, *words], stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=LIMIT_S)
            server.shutdown()


def ask(address: str, expression: str) -> list[Any]:
    """What a question gives now; empty while Prometheus starts."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        url = f"{address}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310 -- ours
            found: list[Any] = json.load(reply)["data"]["result"]
            return found
    except (ConnectionError, urllib.error.URLError):
        return []


def test_every_question_of_the_dashboard_has_an_answer(prometheus: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    left = [one.replace("$instance", ".*") for one in expressions()]
    while left:
        assert time.monotonic() < end_s, f"no answer: {left}"
        left = [one for one in left if not ask(prometheus, one)]
        time.sleep(0.3)
