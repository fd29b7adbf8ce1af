"""What the page says of a server, from what the API says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.fake_gpu import a_card
from tests.support.readings import a_reading
from tests.support.transcripts import transcript
from tunerd.watch.figures import Reading, gpu_now
from tunerd.web.charts import in_words
from tunerd.web.page import health_of, overview
from tunerd.web.view import workload_section

WELL: dict[str, Any] = {
    "unit": "llama-server.service", "exists": True, "active": "active", "sub_state": "running",
    "since_s": 1.0, "restarts": 0, "enabled": True, "lingers": None, "health": "ready", "healthy": True,
    "asleep": False, "router": False,
    "address": "http://127.0.0.1:8080", "alias": "qwen", "model": "/models/qwen.gguf", "generation": 3, "profile": "mine",
    "engine": "ik", "last_swap": None, "change_under_way": False, "measurement": None, "vram": [],
    "drift": [], "messages": [], "mode": "system", "outcome": "serving",
}  # fmt: skip
DRIFT = {"code": "unit-changed", "text": "the unit was edited", "hint": "tunerd verify"}
NOTHING: dict[str, Any] = {"speeds": None, "gpus": None}


def history(*points: Any) -> dict[str, Any]:
    return {"points": points, "gpus": [], "events": []}


STATES: dict[str, dict[str, Any]] = {
    "It serves": {},
    "It serves otherwise than was deployed": {"drift": [DRIFT]},
    "It sleeps": {"asleep": True},
    "It loads": {"healthy": False, "health": "loading"},
    "Nobody knows whether it answers": {"healthy": None, "health": None},
    "It failed": {"active": "failed", "sub_state": "failed"},
    "There is none": {"exists": False, "active": "inactive"},
    "It is being changed": {"change_under_way": True, "active": "activating"},
    "Something is measured in its place": {"active": "inactive", "measurement": {"purpose": "sweep 3"}},
}  # fmt: skip


def test_whether_the_server_is_well_is_said_as_in_the_golden_text() -> None:
    cases = ((told, health_of(WELL | changed)) for told, changed in STATES.items())
    transcript("page/health", ((told, [f"{one.level}: {one.sentence}", one.detail]) for told, one in cases))  # fmt: skip


def test_what_is_not_known_is_never_shown_as_zero() -> None:
    card = {"index": 0, "name": "RTX 3090", "used_mib": None, "total_mib": 24576}
    made = overview(WELL | {"vram": [card], "since_s": None}, NOTHING, history())

    assert [value for _, value, _ in made["figures"]] == ["not seen", "not seen", "unknown"]
    assert "since" not in (dict(made["facts"])["unit"] or "")
    assert made["charts"] == []


def test_idle_stretches_are_gaps_in_a_chart_and_said_so() -> None:
    idle = {"n": 6, "n_ready": 6, "decode_tok_s": None, "acceptance_ratio": None}
    points = [idle | {"begin_s": at_s} for at_s in (0, 60, 120)]
    for one in (points[0], points[2]):
        one["decode_tok_s"] = 50
    (chart,) = overview(WELL, NOTHING, history(*points))["charts"]

    assert [[point.y for point in line.points] for line in chart.plot.lines] == [[50, None, 50]]
    assert chart.note == "Gaps: the server was idle or away."
    assert "Generation 50.0 tok/s" in in_words(chart.plot, chart.title)
    assert chart.name == "speed"


def test_a_card_that_says_nothing_of_itself_has_no_figures_and_none_are_made_up() -> None:
    blank = replace(a_card(), total_mib=None, used_mib=None, free_mib=None, reserved_mib=None,
                    processes=None, power_w=None, power_limit_w=None, utilisation_percent=None,
                    temperature_c=None, throttle_reasons=None, is_mig=None)  # fmt: skip
    blind = replace(a_reading(), gpus=(gpu_now(blank, []),))

    def cards(reading: Reading) -> Any:
        return overview(WELL, NOTHING | reading.to_json(), history())["cards"]

    assert cards(blind).rows[0][1:] == (None,) * 8
    for gpus in (None, ()):
        assert cards(replace(blind, gpus=gpus)) is None


def test_each_chart_of_a_workload_has_its_figures_in_a_table() -> None:
    turn = {"prefill_s": 1.25, "reasoning_s": None, "decode_s": 3.5, "total_s": 4.75}
    mean = {"cached_tokens": 10, "new_tokens": 1012, "reasoning_tokens": None, "answer_tokens": 157}
    one = {
        "name": "edit",
        "share": 1.0,
        "kind": "code",
        "concurrency": 1,
        "mean": mean,
        "turn": turn,
    }
    rates = {"prompt_tok_s": 810.0, "decode_tok_s": 45.0}
    shown = workload_section(
        {"name": "mine", "learned": None, "rates": rates, "turn": turn, "classes": [one]}
    )

    assert len(shown.charts) == len(shown.tables) == 2
    assert shown.tables[1].rows[-1] == ("expected", "1.2", "in the answer", "3.5", "4.8")
