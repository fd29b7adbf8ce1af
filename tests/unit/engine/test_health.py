"""Whether a server that was just started is on its way, ready, or lost."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import DATA
from tests.support.transcripts import inputs_of, transcript
from tunerd.engine.health import (
    WHOLLY_REPEATED,
    Completion,
    Expectation,
    Failure,
    FailureKind,
    HttpState,
    Lost,
    Observation,
    argument_error,
    classify,
    clean_line,
    judge_generation,
    judge_settled,
    judge_speculation,
    judge_start,
    repeated_ratio,
)
from tunerd.units.manager import UnitState

RUNNING = UnitState(
    unit="llama-server.service", load_state="loaded", active_state="active", sub_state="running",
    result="success", main_pid=100, exit_kind=None, exit_status=None, n_restarts=0, invocation_id="new",
    fragment_path=None, drop_ins=(), needs_reload=False, unit_file_state="enabled", active_since_s=None,
)  # fmt: skip
EXPECTED = Expectation(old_invocation="old", alias="qwen", expects_draft=True)
NOW = Observation(at_s=10.0, unit=RUNNING, http=HttpState.READY, listener_pid=100, alias="qwen")


def judged(
    now: Observation, *, expected: Expectation = EXPECTED, moved_s: float = 0.0
) -> Lost | str | None:
    return judge_start(
        now, first_s=0.0, moved_s=moved_s, expected=expected, stall_s=120, limit_s=1800
    )


def unit(**changes: Any) -> Observation:
    return replace(NOW, unit=replace(RUNNING, **changes))


LOADING = replace(NOW, http=HttpState.LOADING)
WAITING = "waiting for the process"


@pytest.mark.parametrize(
    ("now", "more", "meaning"),
    [
        (NOW, {}, None),
        (replace(NOW, listener_pid=None), {}, None),  # who listens could not be told
        (replace(NOW, alias=None), {}, None),
        (unit(n_restarts=None), {}, None),
        (LOADING, {"expected": replace(EXPECTED, is_asked=False)}, None),  # nobody can ask it
        (replace(NOW, at_s=1800.1), {}, None),  # one that answers is in time
        (unit(invocation_id=None), {"expected": replace(EXPECTED, old_invocation=None)}, None),
        # Of `--alias one,two` mainline tells `one`, ik `one,two`.
        *((replace(NOW, alias=alias), {"expected": replace(EXPECTED, alias="one,two")}, None)
          for alias in ("one", "two", "one,two")),
        # It sorts them, and takes blanks away: this was judged another model, of the server that stood before too.
        (replace(NOW, alias="one"), {"expected": replace(EXPECTED, alias="two, one")}, None),
        (replace(NOW, alias="two, one"), {"expected": replace(EXPECTED, alias="zero,two, one")}, None),
        # It is on its way.
        (replace(NOW, http=HttpState.REFUSED), {}, "starting"),
        (replace(NOW, http=HttpState.SILENT), {}, "starting"),
        (LOADING, {}, "loading the model"),
        (replace(LOADING, at_s=120.0), {}, "loading the model"),
        (replace(LOADING, at_s=1800.0), {"moved_s": 1790.0}, "loading the model"),
        (unit(invocation_id="old"), {}, WAITING),
        (unit(active_state="activating", sub_state="start", main_pid=None), {}, WAITING),
        (unit(main_pid=None), {}, WAITING),
        # It is lost; where its unit ended the log has to tell why.
        (replace(NOW, listener_pid=99), {}, Lost(FailureKind.PORT_TAKEN, "process 99")),
        (replace(NOW, http=HttpState.WRONG), {}, Lost(FailureKind.WRONG_MODEL, "not a llama")),
        (replace(NOW, alias="gemma" * 50), {}, Lost(FailureKind.WRONG_MODEL, "gemma")),
        (replace(NOW, alias="three"), {"expected": replace(EXPECTED, alias="one,two")},
         Lost(FailureKind.WRONG_MODEL, "three")),
        (replace(LOADING, at_s=120.1), {}, Lost(FailureKind.HANG, "120 s")),
        (replace(LOADING, at_s=1800.1), {"moved_s": 1800.0}, Lost(FailureKind.HANG, "1800 s")),
        (unit(active_state="failed", result="exit-code"), {}, Lost(None, "exit-code")),
        (unit(active_state="activating", sub_state="auto-restart", result="signal"), {},
         Lost(None, "signal")),
        (unit(active_state="inactive", sub_state="dead"), {}, Lost(None, "success")),
        (unit(n_restarts=1), {}, Lost(None, "1 times")),
    ],
)  # fmt: skip
def test_a_look_at_a_starting_server_means_ready_wait_or_lost(
    now: Observation, more: dict[str, Any], meaning: Lost | str | None
) -> None:
    found = judged(now, **more)

    if not isinstance(meaning, Lost):
        assert found == meaning
        return
    assert isinstance(found, Lost)
    assert found.kind is meaning.kind
    assert meaning.text in found.text
    assert len(found.text) < 200


GOOD = Completion("one two three", 24, 12, None)


def test_garbage_is_told_from_odd_text() -> None:
    garbage: list[dict[str, Any]] = [
        {"problem": "status 500: x"}, {"n_predicted": 0}, {"n_predicted": None},
        {"text": "\ufffd\ufffd\ufffda"}, {"text": "@" * 24}, {"text": " \n" + "?" * 20 + "\n"},
        {"text": "<pad>" * 24}, {"text": " Manneur" * 24}, {"text": "<unused49>" * 24 + "<un"},
    ]  # fmt: skip
    odd: list[dict[str, Any]] = [
        {}, {"text": "", "n_predicted": 1},  # a model may say nothing but its end
        {"text": "aaaa", "n_predicted": 4}, {"text": "=" * 24 + "x"}, {"text": "a\ufffdbc"},
        {"text": "ababababababababab"}, {"n_drafted": None}, {"text": "ho " * 8 + "ha " * 16},
        {"text": "the same sentence, " * 24},
    ]  # fmt: skip
    for change in odd:
        assert judge_generation(replace(GOOD, **change)) is None, change
    for change in garbage:
        lost = judge_generation(replace(GOOD, **change))
        assert lost is not None, change
        assert lost.kind is FailureKind.GARBAGE


PROSE = (
    "The server reads a request, looks for a free slot, and begins to answer as soon as the prompt is read. Whatever it "
    "has cached of an earlier one is not read again, so that a conversation goes on at once; a new one begins cold. "
)
TABLE = "".join(
    f"| {number} | {number * 37 % 101} tok/s | {number * number} MiB |\n" for number in range(12)
)


@pytest.mark.parametrize("begin", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("loop", ["<", "ha ", " and so on,", PROSE[40:110]])
def test_an_answer_that_begins_well_is_told_from_where_it_only_repeats_itself(
    begin: float, loop: str
) -> None:
    sane = (PROSE + TABLE)[: int(begin * 600)]
    found = repeated_ratio((sane + loop * 600)[:600], 150)
    assert found == pytest.approx(1 - begin, abs=0.2)


@pytest.mark.parametrize("begin", [0.1, 0.3])
@pytest.mark.parametrize("loop", [" and so on,", " over and over again"])
def test_a_short_answer_is_told_from_where_it_only_repeats_itself_too(
    begin: float, loop: str
) -> None:
    """Of 25 tokens a loop that began after three was none, for it had fewer than 80 letters."""
    n = 110
    found = repeated_ratio((PROSE[: int(begin * n)] + loop * n)[:n], 26)
    assert found == pytest.approx(1 - begin - len(loop) / n, abs=0.05)
    assert repeated_ratio(PROSE[:n], 26) == repeated_ratio(TABLE[:n], 26) == 0.0


def test_texts_that_repeat_little_or_say_too_little_are_no_loop() -> None:
    sane = [
        PROSE,
        TABLE,
        PROSE + "ha " * 20,
        "0, 0, 0, 1",
        "ha " * 6 + PROSE,
        inspect.getsource(GOOD.__class__),
    ]
    assert [repeated_ratio(text, 150) for text in sane] == [0.0] * len(sane)
    assert repeated_ratio("0, " * 40, 120) == WHOLLY_REPEATED
    assert repeated_ratio("ha " * 40, 15) is None
    assert repeated_ratio(" ", 40) is None
    slips = "".join(f" {number}. say the same thing once more," for number in range(20))
    assert repeated_ratio(PROSE + slips, 300) == pytest.approx(
        len(slips) / len(PROSE + slips), abs=0.1
    )


def test_speculation_that_was_asked_for_must_run() -> None:
    def is_lost(speculative: bool | None, drafted: int | None, *, must: bool) -> bool:
        done, expected = replace(GOOD, n_drafted=drafted), replace(EXPECTED, must_draft=must)
        return judge_speculation(done, speculative=speculative, expected=expected) is not None

    assert not is_lost(True, None, must=True)
    assert is_lost(False, 12, must=False)
    assert [is_lost(None, drafted, must=True) for drafted in (12, 0, None)] == [False, True, True]
    assert not is_lost(None, 0, must=False)
    off = replace(EXPECTED, expects_draft=False)
    assert judge_speculation(GOOD, speculative=False, expected=off) is None


def test_a_server_that_dies_after_its_first_answer_is_lost() -> None:
    assert judge_settled(RUNNING, main_pid=100, invocation="new") is None
    assert judge_settled(RUNNING, main_pid=101, invocation="new") is not None
    assert judge_settled(RUNNING, main_pid=100, invocation="other") is not None
    ended = replace(RUNNING, active_state="failed", result="core-dump")
    lost = judge_settled(ended, main_pid=100, invocation="new")
    assert "core-dump" in str(lost)


# Why an engine failed, from what real builds wrote when they did.

LOGS = DATA / "logs"

FILES = sorted(LOGS.rglob("*.txt"))


def read(path: Path) -> tuple[str, int, list[str]]:
    ended, *lines = path.read_text(encoding="utf-8").splitlines()
    kind, _, status = ended.partition(" ")
    return kind, int(status), lines


def told(failure: Failure) -> list[str]:
    return [f"{failure.kind}: {failure.words}", f"hint: {failure.hint}"]


def test_a_real_failure_is_told_as_in_the_golden_text_whatever_the_journal_has_around_it() -> None:
    """By one line of its log, without mainline's time stamp; of a refused argument a dry run has the same one."""
    before = ["Starting llama-server.service...", "Started llama-server.service."]
    after = [
        "llama-server.service: Main process exited, code=exited, status=1/FAILURE",
        "llama-server.service: Failed with result 'exit-code'.",
        "llama-server.service: Scheduled restart job, restart counter is at 1.",
    ]
    cases: list[tuple[str, list[str]]] = []
    for path in FILES:
        ended, status, lines = read(path)
        failure = classify(lines, exit_kind=ended, exit_status=status)
        assert failure.hint or failure.kind is FailureKind.CRASH
        words = failure.words.removeprefix(f"signal {status}; ")
        assert any(words in clean_line(line) for line in lines)
        around = classify([*before, *lines, *after], exit_kind=ended, exit_status=status)
        assert around == failure, path
        refused = argument_error(status if ended == "exited" else -status, "\n".join(lines))
        assert refused == (failure.words if failure.kind is FailureKind.BAD_ARGUMENT else None)
        cases.append((f"What {path.parent.name} wrote of {path.stem}", told(failure)))
    transcript("failures/seen", cases)


def classified(lines: Iterable[str]) -> Iterator[str]:
    """What was written until an ending in parentheses, that, and what is told of both."""
    said: list[str] = []
    for line in lines:
        if not line.startswith("("):
            said.append(line)
            continue
        ended = () if line == "(ending unknown)" else line[1:-1].split()
        kind, status, result = (*ended, None, None, None)[:3]
        failure = classify(said, exit_kind=kind, exit_status=status and int(status), result=result)
        yield from (*said, line, *(f"    {one}" for one in told(failure)))
        said = []


@pytest.mark.parametrize(("name", "least"), [("decided", 35), ("reported", 33)])
def test_the_most_telling_line_decides_as_in_the_golden_text_and_else_the_ending(
    name: str, least: int
) -> None:
    """Whoever adds lines and their ending there has what is told of them from `make golden`.

    Of what was reported no build was seen to print it here: a card decides, or a fault that cannot be made; it is from
    public reports and from sources, which stand above each. Anybody may have sent signal 9: only the kernel's own word is
    one of memory. A driver that fails is no lack of memory, which a larger margin would help; and much is said to nobody's
    harm right before an end of another kind, memory that was asked for, not given and done without among it.
    """
    cases = [(heading, [*classified(lines)]) for heading, lines in inputs_of(f"failures/{name}")]
    assert sum(line.startswith("(") for _, lines in cases for line in lines) >= least
    transcript(f"failures/{name}", cases)


# Dry runs.

ENGINES = sorted(p.name for p in LOGS.iterdir() if p.is_dir() and p.name != "synthetic")


@pytest.mark.parametrize("engine", ENGINES)
def test_good_arguments_are_good_wherever_the_log_was_cut(engine: str) -> None:
    _, status, lines = read(LOGS / engine / "missing-file.txt")
    text = "\n".join(lines)
    refused = {cut: argument_error(status, text[:cut]) for cut in range(len(text) + 1)}
    assert {cut: words for cut, words in refused.items() if words is not None} == {}


def test_colours_are_no_part_of_what_was_said() -> None:
    """With `--log-colors on`; from d32676d77."""
    line = "\x1b[0m\x1b[34m0.00.018.688\x1b[0m \x1b[31mE srv    load_model: failed to load model\x1b[0m"
    assert clean_line(line) == "srv    load_model: failed to load model"


def test_other_ways_of_refusing_an_argument_are_known() -> None:
    refusals = {
        "error: invalid value for n_parallel": True,
        "Available buffer types:\n  CPU": True,
        "cannot do that\nusage: llama-server [options]": True,
        "\x1b[0merror: either --embedding or --reranking can be specified, but not both": True,
        "0.00.014.560 W srv  mlock: Invalid argument": False,
        "\x1b[34m0.00.014.560\x1b[0m \x1b[35mW srv  mlock: Invalid argument\x1b[0m": False,
        "warning: failed to mlock: Invalid argument": False,
    }
    assert {said: argument_error(1, said) is not None for said in refusals} == refusals
