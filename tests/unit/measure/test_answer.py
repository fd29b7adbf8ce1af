"""What a server said: figures of one request, of several, and how they are read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bench_samples import sample, timings
from tunerd.measure.answer import (
    Answer,
    Mark,
    Timings,
    ToolCall,
    gained,
    read_answer,
    read_counters,
    spread,
    summarise,
)

TIMINGS = {"prompt_n": 30, "prompt_ms": 12.5, "predicted_n": 3, "predicted_ms": 40.0}


def native(**last: Any) -> list[tuple[float, dict[str, Any]]]:
    """A stream of llama-server's own route."""
    return [
        (15.0, {"content": " a", "stop": False}),
        (30.0, {"content": " b", "stop": False}),
        (52.0, {"content": "", "stop": True, "tokens_evaluated": 30} | last),
    ]


def chat(*deltas: dict[str, Any], timings: dict[str, Any] | None = None) -> Answer:
    events: list[tuple[float, dict[str, Any]]] = [
        (float(at), {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        for at, delta in enumerate(deltas, start=1)
    ]
    last = {"timings": timings} if timings else {}
    usage = {"prompt_tokens": 30, "completion_tokens": 3}
    events.append((90.0, {"choices": [{"delta": {}, "finish_reason": "stop"}]}))
    events.append((91.0, {"choices": [], "usage": usage} | last))
    return read_answer(events, is_whole=True)


def timed(**said: Any) -> tuple[Answer, Timings]:
    answer = read_answer(native(timings=TIMINGS | said), is_whole=True)
    assert answer.timings is not None
    return answer, answer.timings


def test_a_stream_of_mainline_is_read() -> None:
    answer, times = timed(draft_n=4, draft_n_accepted=1, cache_n=7)

    assert (answer.text, answer.first_ms, answer.last_ms) == (" a b", 15.0, 30.0)
    assert (times.draft_n, times.draft_n_accepted, answer.n_cached) == (4, 1, 7)
    assert not answer.is_cut


def test_what_ik_reused_is_told_by_what_it_evaluated_or_by_its_context() -> None:
    answer, times = timed(prompt_n=25)
    assert answer.n_cached == 5
    assert times.cache_n is None, "what the build does not say stays unsaid"

    events = native(timings=TIMINGS | {"prompt_n": 25, "n_past": 32})
    del events[-1][1]["tokens_evaluated"]
    assert read_answer(events, is_whole=True).n_cached == 5


def test_acceptance_by_depth_of_ik_is_by_position_where_it_makes_sense() -> None:
    deep = {"depth": 2, "draft_n": 5, "draft_n_accepted": 2}
    rows = [deep, {"depth": 1, "draft_n": 9, "draft_n_accepted": 8}]
    assert timed(draft_by_depth=rows)[1].accepted_by_position == (8, 2)
    for wrong in ([], "x", [{"depth": 0, "draft_n_accepted": 1}], [{"depth": 1}], [3]):
        assert timed(draft_by_depth=wrong)[1].accepted_by_position is None


def test_a_stream_without_its_last_event_is_cut() -> None:
    assert read_answer(native()[:2], is_whole=True).is_cut
    assert read_answer(native(), is_whole=False).is_cut


def test_the_first_token_of_a_conversation_is_not_the_role_and_may_be_a_thought() -> None:
    answer = chat({"role": "assistant", "content": None}, {"content": "Hi"}, timings=TIMINGS)
    assert (answer.text, answer.first_ms) == ("Hi", 2.0)

    # Of llama-server, of Ollama, and of a proxy that gives both names.
    for thought in ({"reasoning_content": "hm"}, {"content": "", "reasoning": "hm"}, {"reasoning": "hm", "reasoning_content": "hm"}):  # fmt: skip
        answer = chat(thought, {"content": "Hi"})
        assert (answer.text, answer.reasoning, answer.first_ms) == ("Hi", "hm", 1.0)
        assert answer.timings is None, "the server told none"


def test_tool_calls_are_put_together_from_their_pieces() -> None:
    answer = chat(
        {"tool_calls": [{"index": 0, "function": {"name": "convert", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"value":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 84}"}}]},
        {"tool_calls": [{"index": 1, "function": {"name": "set_timer", "arguments": "{}"}}]},
    )

    assert answer.tool_calls == (ToolCall("convert", '{"value": 84}'), ToolCall("set_timer", "{}"))
    assert answer.first_ms == 1.0


def test_an_event_that_makes_no_sense_gives_nothing_and_does_no_harm() -> None:
    events: list[dict[str, Any]] = [
        {"choices": None},
        {"choices": [None, 3, {"delta": "x"}]},
        {"choices": [{"delta": {"tool_calls": [7, {"function": 3}, {"index": "x"}]}}]},
        {"timings": "fast", "usage": [1]},
        {"content": 7},
        {"stop": True, "timings": {"prompt_n": "x", "predicted_ms": True, "draft_n": None}},
    ]
    for event in events:
        answer = read_answer([(1.0, event)], is_whole=True)
        assert answer.text == ""
        assert answer.first_ms is None or answer.tool_calls == ()


METRICS = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 240
llamacpp:tokens_predicted_total 4.1e+01
llamacpp:requests_processing 0
llamacpp:spec_decode_num_draft_tokens_total 61
llamacpp:spec_decode_num_accepted_tokens_total 17
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 4
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 8
llamacpp:predicted_tokens_seconds NaN
rubbish here 7 x
"""


def test_counters_are_read_from_the_servers_text_and_what_it_lacks_is_unknown() -> None:
    found = read_counters(METRICS)

    assert (found.n_prompt, found.n_predicted, found.n_processing) == (240, 41, 0)
    assert (found.n_drafted, found.n_accepted) == (61, 17)
    assert found.accepted_by_position == (8, 0, 4)
    for position in ("4000000000", "9" * 5000):  # a draft of a length that cannot be
        row = f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} 4\n'
        assert read_counters(METRICS + row).accepted_by_position == (8, 0, 4)
    for much in ("1e20", "1e308", "inf", "nan", "-1"):  # which no store can keep, or nobody counts
        assert read_counters(f"llamacpp:prompt_tokens_total {much}\n").n_prompt is None
    bare = read_counters("llamacpp:prompt_tokens_total 240\n")
    assert (bare.n_predicted, bare.n_drafted, bare.accepted_by_position) == (None, None, None)


def test_what_was_accepted_in_between_is_the_difference_by_position() -> None:
    before = read_counters("llamacpp:spec_decode_num_draft_tokens_total 1\n")
    after = read_counters(METRICS)

    assert gained(before, after) == (8, 0, 4)
    assert gained(after, after) == (0, 0, 0)
    assert gained(after, before) is None, "the server was started again"
    assert gained(read_counters(""), after) is None


def test_an_answer_that_came_in_one_piece_is_read_too() -> None:
    message = {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}
    whole = {"choices": [{"finish_reason": "stop", "message": message}], "timings": TIMINGS}
    answer = read_answer([(70.0, whole)], is_whole=True)

    assert (answer.text, answer.reasoning) == ("Hi", "hm")
    assert answer.timings is not None
    assert not answer.is_cut


HUGE = int("9" * 400)


COUNTS: tuple[Any, ...] = (-1, 2**31, 10**30, HUGE, 1.5, "12", True, [1])
TIMES: tuple[Any, ...] = (-0.5, 5e-324, float("nan"), float("inf"), 1e300, HUGE, "12", False, {})


def test_a_figure_that_cannot_be_is_missing_and_said_to_be() -> None:
    impossible = [
        *((key, {key: value}) for key in ("prompt_n", "predicted_n", "cache_n", "draft_n") for value in COUNTS),
        *((key, {key: value}) for key in ("prompt_ms", "predicted_ms") for value in TIMES),
        # More accepted than drafted or generated.
        *(("draft_n_accepted", {"draft_n": drafted, "draft_n_accepted": accepted})
          for drafted, accepted in ((3, 99999), (3, 4), (99999, 99999), (3, -1))),
    ]  # fmt: skip
    for key, said in impossible:
        answer, times = timed(**said)
        assert (getattr(times, key), answer.has_impossible) == (None, True), said


def test_other_servers_say_in_their_usage_what_was_cached() -> None:
    last = {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}
    for usage in ({"prompt_tokens_details": {"cached_tokens": 12}}, {"cached_tokens": 12}):
        answer = read_answer([(1.0, {**last, "usage": usage})], is_whole=True)
        assert (answer.n_cached, answer.has_impossible) == (12, False)


def test_speed_over_several_requests_is_all_tokens_over_all_time() -> None:
    short = sample(timings=timings(predicted_n=11, predicted_ms=1000.0))
    long = sample(timings=timings(predicted_n=1001, predicted_ms=10_000.0))
    unknown = [sample(timings=None), sample(timings=timings(predicted_ms=None))]
    slow = timings(predicted_ms=99_000.0)
    left_out = [sample(timings=slow, marks=(Mark.THROTTLED,)), sample(timings=slow, problem="x")]

    found = summarise([short, long, *unknown, *left_out])

    assert found.decode.tok_s == pytest.approx(1010 / 11)
    assert (found.decode.n_tokens, found.decode.total_ms) == (1010, 11_000.0)
    assert (found.decode.n, found.decode.n_missing) == (2, 2)
    assert (found.n, found.n_unusable) == (4, 2)


def test_the_spread_counts_what_is_missing() -> None:
    found = spread([4.0, None, 1.0, 2.0, 3.0, None])

    assert (found.n, found.n_missing) == (4, 2)
    assert (found.median, found.least, found.most) == (2.5, 1.0, 4.0)


def test_drafts_are_counted_over_all_steps_and_as_deep_as_the_deepest_draft() -> None:
    one = timings(predicted_n=21, draft_n=30, draft_n_accepted=10, accepted_by_position=(7, 3))
    two = timings(predicted_n=36, draft_n=9, draft_n_accepted=5, accepted_by_position=(5,))

    found = summarise([sample(timings=one), sample(timings=two)])

    assert found.tokens_per_step == pytest.approx(55 / 40)
    assert found.acceptance_by_position == pytest.approx((12 / 40, 3 / 40))


def test_the_figures_of_one_request() -> None:
    # The first token belongs to the prompt, and cached ones to nothing.
    assert timings(predicted_n=193, predicted_ms=2000.0).decode_tok_s == pytest.approx(96.0)
    assert timings(cache_n=900, prompt_n=100, prompt_ms=50.0).prompt_tok_s == pytest.approx(2000.0)
    # A captured request of mainline 0.7.0: 40 tokens, 61 drafted, 17 accepted, 22 steps.
    found = timings(predicted_n=40, draft_n=61, draft_n_accepted=17, predicted_ms=440.0)
    assert found.steps == 22
    assert found.step_ms == pytest.approx(20.0)


def test_steps_of_an_answer_that_ended_within_a_long_draft_are_unknown() -> None:
    """A server counts such a draft whole: a pass took -2.5 ms, and two answers had 1.9 tokens a pass instead of 1."""
    short = timings(predicted_n=4, draft_n=8, draft_n_accepted=7, predicted_ms=10.0)
    assert (short.steps, short.step_ms) == (None, None)
    assert timings(predicted_n=1).steps == 0

    plain = timings(predicted_n=13, draft_n=12, draft_n_accepted=0)
    held = sample(timings=plain, n_predict=13)
    assert held.steps == 12

    # As mainline reported an answer of six passes that ended behind the first token of its last draft.
    ended = sample(timings=timings(predicted_n=22, draft_n=24, draft_n_accepted=18), n_predict=300)
    assert ended.timings is not None
    assert (ended.timings.steps, ended.steps) == (3, None)

    found = summarise([held, sample(timings=short), ended])
    assert found.tokens_per_step == pytest.approx(1.0)


def test_joules_a_token_are_all_energy_over_all_tokens_of_requests_that_tell_both() -> None:
    short, long = timings(predicted_n=10), timings(predicted_n=90)
    unknown = [sample(timings=long), sample(timings=None, energy_j=50.0)]
    left_out = sample(timings=long, energy_j=9000.0, marks=(Mark.THROTTLED,))
    both = [sample(timings=short, energy_j=100.0), sample(timings=long, energy_j=300.0)]

    found, none = summarise([*both, *unknown, left_out]), summarise([sample()])

    assert (found.joules_per_token, found.n_energy) == (4.0, 2)
    assert (none.joules_per_token, none.n_energy) == (None, 0)
