"""Which differences may change answers, and what becomes of a faster side that answers otherwise."""

from __future__ import annotations

import itertools
from dataclasses import replace

from tests.support.bench_samples import a_request, the_book
from tunerd.engine.flags import Answering, OutputChange, Reach, changes_sampling, output_changes
from tunerd.measure.answer import Answer, ToolCall
from tunerd.measure.findings import SERVING, ArmData, Quality, findings
from tunerd.measure.pairs import Standing, advise
from tunerd.measure.request import (
    BenchRequest,
    Plan,
    Prompt,
    Request,
    Room,
    Route,
    Suite,
    body_of,
    suite_plan,
)

ARGV = ("/bin/server", "--model", "m.gguf", "--port", "8080", "--cache-type-k", "q8_0", "--jinja",
        "--threads", "4", "--temp", "0.6", "--reasoning-budget", "-1")  # fmt: skip
A = Answering("mainline", ARGV, {"GGML_X": "1"})


def questions(*, with_own_sampling: bool = False) -> Plan:
    asked = BenchRequest(Suite.QUALITY, 1, with_own_sampling=with_own_sampling)
    return suite_plan(asked, 1, None, Room(the_book()))[0]


def changed(*argv: str, engine: str = "mainline", **variables: str) -> tuple[OutputChange, ...]:
    return output_changes(A, Answering(engine, argv or ARGV, {"GGML_X": "1", **variables}))


def exchanged(old: str, *new: str) -> tuple[str, ...]:
    at = ARGV.index(old)
    return (*ARGV[:at], *new, *ARGV[at + len(new) :])


NAMED = {
    exchanged("--cache-type-k", "-ctk", "q4_0"): "serving.cache_type_k q8_0 -> q4_0",
    exchanged("--model", "-m", "other.gguf"): "model.path m.gguf -> other.gguf",
    exchanged("--reasoning-budget", "--reasoning-budget", "0"): "serving.reasoning_budget -1 -> 0",
    exchanged("--jinja", "--no-jinja"): "serving.jinja --jinja -> --no-jinja",
    (*ARGV, "--chat-template", "chatml"): "serving.chat_template (not set) -> chatml",
    (*ARGV, "--chat-template-file", "t"): "model.chat_template_file (not set) -> t",
    (*ARGV, "--reasoning-format", "none"): "serving.reasoning_format (not set) -> none",
    (*ARGV, "--grammar", "root"): "--grammar (not set) -> root",
}


def test_what_may_change_answers_is_named() -> None:
    assert {argv: ", ".join(one.text for one in changed(*argv)) for argv in NAMED} == NAMED


def test_what_changes_speed_alone_is_not() -> None:
    for argv in (
        exchanged("--port", "--port", "9090"),
        exchanged("--threads", "-t", "8"),
        exchanged("--cache-type-k", "-ctk", "q8_0"),
        (*ARGV, "--spec-type", "draft-mtp", "--spec-draft-n-max", "3", "--cache-type-k-draft", "f16"),
        (*ARGV, "--draft-max", "3", "--spec-ngram-size-n", "5", "--ubatch-size", "256"),
        (*ARGV, "--api-key", "secret"),
    ):  # fmt: skip
        assert changed(*argv) == ()


def test_another_engine_and_an_engines_variable_may_change_answers() -> None:
    assert [one.text for one in changed(engine="ik")] == ["engine mainline -> ik"]
    (found,) = changed(LLAMA_ARG_CACHE_TYPE_V="q4_0")
    assert (found.what, found.reach) == ("LLAMA_ARG_CACHE_TYPE_V", Reach.UNKNOWN)
    assert changed(LLAMA_ARG_PORT="1", CUDA_VISIBLE_DEVICES="0") == ()


def test_settings_of_sampling_are_asked_about_by_the_servers_own_sampling_too() -> None:
    sampling = changed(*exchanged("--temp", "--temperature", "0.9"))
    assert [one.reach for one in sampling] == [Reach.SAMPLING]
    assert changes_sampling(sampling)
    assert not changes_sampling(changed(*exchanged("--model", "-m", "x")))

    def own(requests: list[Request]) -> list[bool]:
        return [one.has_own_sampling for one in requests]

    assert sum(own(list(questions(with_own_sampling=True).requests))) == 3
    assert not any(own(list(questions().requests)))
    assert {one.suite for one in questions().requests} == {Suite.QUALITY}


def test_by_its_own_sampling_a_server_is_told_no_temperature() -> None:
    exact, own = (
        body_of(a_request(has_own_sampling=is_own), Prompt("p", "Why?"), Route.CHAT)
        for is_own in (False, True)
    )
    assert exact["temperature"] == 0.0
    assert "temperature" not in own
    assert own["seed"] == exact["seed"]


def test_b_is_recommended_only_where_it_is_faster_and_passed() -> None:
    changes, passed = (OutputChange("serving.cache_type_k", "f16", "q4_0"),), Quality(True, (), ())
    failed = replace(passed, passes=False, reasons=("short answers: 1 of 3 differ",))
    unknown = replace(passed, passes=None, reasons=("nothing could be compared",))
    for standing, quality in itertools.product(Standing, (passed, failed, unknown, None)):
        advice = advise(standing, changes, quality)
        is_best = standing is Standing.B_FASTER and quality is passed
        assert (advice.recommended == "B") is is_best
        assert (advice.outcome == str(Standing.B_FASTER)) is is_best
        assert (advice.recommended == "A") is (standing is Standing.A_FASTER)
        assert quality is not failed or "short answers: 1 of 3 differ" in (advice.remark or "")


def arm(name: str, plan: Plan, own_text: str | None = None) -> ArmData:
    def said(request: Request) -> Answer:
        shown = own_text if request.has_own_sampling and own_text is not None else "Fe"
        return Answer(shown, "", (ToolCall("convert", "{}"),))

    answers: dict[int, dict[str, Answer | None]] = {
        at: {"p": said(step.requests[0])} for at, step in enumerate(plan.steps)
    }
    return ArmData(name, answers=answers)


def test_speculation_is_judged_exactly_and_what_serves_by_its_own_sampling_too() -> None:
    plan = questions(with_own_sampling=True)
    on = arm("on", plan)
    found = findings(plan, [on, arm("off", plan, "Iron"), arm(SERVING, plan, "Iron")])

    judged = [(one.figures["reference"], one.figures["passes"]) for one in found]
    assert judged == [("off", True), (SERVING, False)]
