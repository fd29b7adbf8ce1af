"""Whether a server that was just started is on its way, ready, or lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.folders import DATA
from tunerd.engine.health import (
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
)
from tunerd.units.manager import UnitState

RUNNING = UnitState(
    unit="llama-server.service",
    load_state="loaded",
    active_state="active",
    sub_state="running",
    result="success",
    main_pid=100,
    exit_kind=None,
    exit_status=None,
    n_restarts=0,
    invocation_id="new",
    fragment_path=None,
    drop_ins=(),
    needs_reload=False,
    unit_file_state="enabled",
    active_since_s=None,
)
EXPECTED = Expectation(old_invocation="old", alias="qwen", expects_draft=True)
NOW = Observation(
    at_s=10.0, unit=RUNNING, http=HttpState.READY, listener_pid=100, alias="qwen", progress=None
)


def judged(
    now: Observation,
    *,
    expected: Expectation = EXPECTED,
    first_s: float = 0.0,
    moved_s: float = 0.0,
) -> Lost | str | None:
    return judge_start(
        now, first_s=first_s, moved_s=moved_s, expected=expected, stall_s=120, limit_s=1800
    )


def unit(**changes: Any) -> Observation:
    return replace(NOW, unit=replace(RUNNING, **changes))


def lost(result: Lost | str | None) -> Lost:
    assert isinstance(result, Lost), result
    return result


def test_its_own_process_with_the_right_name_is_ready() -> None:
    assert judged(NOW) is None
    assert judged(replace(NOW, listener_pid=None)) is None  # who listens could not be told
    fresh = replace(EXPECTED, old_invocation=None)
    assert judged(unit(invocation_id=None), expected=fresh) is None


def test_the_old_invocation_still_answers_and_is_not_taken_for_the_new_one() -> None:
    assert isinstance(judged(unit(invocation_id="old")), str)


def test_another_process_on_the_port_is_another_server() -> None:
    result = lost(judged(replace(NOW, listener_pid=99)))
    assert result.kind is FailureKind.PORT_TAKEN
    assert "99" in result.text


@pytest.mark.parametrize("alias", ["qwen", None])
def test_the_name_it_serves_under_must_be_the_one_that_was_asked_for(alias: str | None) -> None:
    assert judged(replace(NOW, alias=alias)) is None
    wrong = lost(judged(replace(NOW, alias="gemma" * 50)))
    assert wrong.kind is FailureKind.WRONG_MODEL
    assert len(wrong.text) < 200


@pytest.mark.parametrize("alias", ["one", "two", "one,two"])
def test_one_of_several_names_is_enough(alias: str) -> None:
    """Of `--alias one,two` mainline tells `one`, ik `one,two`."""
    several = replace(EXPECTED, alias="one,two")
    assert judged(replace(NOW, alias=alias), expected=several) is None
    assert lost(judged(replace(NOW, alias="three"), expected=several))


@pytest.mark.parametrize(
    ("http", "text"),
    [
        (HttpState.REFUSED, "starting"),
        (HttpState.SILENT, "starting"),
        (HttpState.LOADING, "loading the model"),
    ],
)
def test_a_server_that_does_not_answer_yet_is_waited_for(http: HttpState, text: str) -> None:
    assert judged(replace(NOW, http=http)) == text


def test_something_else_on_the_port_is_no_server() -> None:
    assert lost(judged(replace(NOW, http=HttpState.WRONG))).kind is FailureKind.WRONG_MODEL


@pytest.mark.parametrize(
    "changes",
    [
        {"active_state": "failed", "result": "exit-code"},
        {"active_state": "activating", "sub_state": "auto-restart", "result": "signal"},
        {"active_state": "inactive", "sub_state": "dead", "result": "exit-code"},
        {"active_state": "inactive", "sub_state": "dead", "result": "success"},
        {"n_restarts": 1},
    ],
)
def test_a_unit_that_ended_is_lost_and_its_log_has_to_tell(changes: dict[str, Any]) -> None:
    assert lost(judged(unit(**changes))).kind is None


def test_a_unit_on_its_way_is_waited_for() -> None:
    starting = unit(active_state="activating", sub_state="start", main_pid=None)
    assert isinstance(judged(starting), str)
    assert isinstance(judged(unit(main_pid=None)), str)
    assert judged(unit(n_restarts=None)) is None


def test_waiting_ends_where_nothing_moves() -> None:
    loading = replace(NOW, http=HttpState.LOADING)
    assert isinstance(judged(replace(loading, at_s=120.0)), str)
    stalled = lost(judged(replace(loading, at_s=120.1)))
    assert stalled.kind is FailureKind.HANG
    assert "120 s" in stalled.text
    assert isinstance(judged(replace(loading, at_s=1800.0), moved_s=1790.0), str)
    assert lost(judged(replace(loading, at_s=1800.1), moved_s=1800.0)).kind is FailureKind.HANG


GOOD = Completion("one two three", 24, 12, None)


@pytest.mark.parametrize(
    "change",
    [
        {"problem": "status 500: x"},
        {"n_predicted": 0},
        {"n_predicted": None},
        {"text": "\ufffd\ufffd\ufffda"},
        {"text": "@" * 24},
        {"text": " \n" + "?" * 20 + "\n"},
    ],
)
def test_garbage_is_not_a_generation(change: dict[str, Any]) -> None:
    result = judge_generation(replace(GOOD, **change), wanted=24)
    assert result is not None
    assert result.kind is FailureKind.GARBAGE


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"text": "", "n_predicted": 1},  # a model may say nothing but its end
        {"text": "aaaa", "n_predicted": 4},
        {"text": "=" * 24 + "x"},
        {"text": "a\ufffdbc"},
        {"text": "ababababababababab"},
        {"n_drafted": None},
    ],
)
def test_odd_text_is_still_a_generation(change: dict[str, Any]) -> None:
    assert judge_generation(replace(GOOD, **change), wanted=24) is None


@pytest.mark.parametrize(
    ("speculative", "drafted", "must", "is_lost"),
    [
        (True, None, True, False),
        (False, 12, False, True),
        (None, 12, True, False),
        (None, 0, True, True),
        (None, None, True, True),
        (None, 0, False, False),
    ],
)
def test_speculation_that_was_asked_for_must_run(
    speculative: bool | None, drafted: int | None, must: bool, is_lost: bool
) -> None:
    expected = replace(EXPECTED, must_draft=must)
    result = judge_speculation(
        replace(GOOD, n_drafted=drafted), speculative=speculative, expected=expected
    )
    assert (result is not None) is is_lost
    off = replace(expected, expects_draft=False)
    assert judge_speculation(GOOD, speculative=False, expected=off) is None


def test_a_server_that_dies_after_its_first_answer_is_lost() -> None:
    assert judge_settled(RUNNING, main_pid=100, invocation="new") is None
    assert judge_settled(RUNNING, main_pid=101, invocation="new") is not None
    assert judge_settled(RUNNING, main_pid=100, invocation="other") is not None
    ended = replace(RUNNING, active_state="failed", result="core-dump")
    result = judge_settled(ended, main_pid=100, invocation="new")
    assert result is not None
    assert "core-dump" in result.text


# Why an engine failed, from what real builds wrote when they did.

LOGS = DATA / "logs"

# Case to kind and a part of the line that tells it.
CAUSES: dict[str, tuple[FailureKind, str]] = {
    "missing-file": (FailureKind.MODEL_MISSING, "No such file or directory"),
    "folder-as-file": (FailureKind.MODEL_DAMAGED, "magic"),
    "unreadable-file": (FailureKind.MODEL_UNREADABLE, "Permission denied"),
    "wrong-magic": (FailureKind.MODEL_DAMAGED, "FUGG"),
    "empty-file": (FailureKind.MODEL_DAMAGED, "magic"),
    "truncated-data": (FailureKind.MODEL_DAMAGED, "not within the file bounds"),
    "truncated-header": (FailureKind.MODEL_DAMAGED, "failed to read key-value pairs"),
    "unknown-architecture": (FailureKind.MODEL_UNSUPPORTED, "qwen99"),
    "no-mtp-block": (FailureKind.NO_MTP_BLOCK, "MTP"),
    "mtp-file-without-mtp-engine": (FailureKind.MODEL_UNSUPPORTED, "tensor"),
    "port-taken": (FailureKind.PORT_TAKEN, "couldn't bind"),
    "bad-host": (FailureKind.PORT_TAKEN, "203.0.113.7"),
    "unknown-flag": (FailureKind.BAD_ARGUMENT, "--no-such-flag"),
    "removed-flag": (FailureKind.BAD_ARGUMENT, "-"),
    "bad-number": (FailureKind.BAD_ARGUMENT, "stoi"),
    "missing-value": (FailureKind.BAD_ARGUMENT, ""),
    "bad-kv-type": (FailureKind.BAD_ARGUMENT, "q9_9"),
    "unknown-speculation": (FailureKind.BAD_ARGUMENT, "unknown speculative"),
    "quantised-v-without-flash-attention": (FailureKind.BAD_ARGUMENT, "flash"),
    "two-slots-with-mtp": (FailureKind.BAD_ARGUMENT, "single server slot"),
    "out-of-memory": (FailureKind.OUT_OF_MEMORY, "allocate"),
    "out-of-threads": (FailureKind.OUT_OF_MEMORY, ""),
    "mlock-refused-and-no-mtp-block": (FailureKind.NO_MTP_BLOCK, "MTP"),
    "fit-without-gpu-moe": (FailureKind.OUT_OF_VRAM, "Unable to auto-fit model"),
    "fit-without-gpu-dense": (FailureKind.CRASH, "double free or corruption"),
    "cuda-weights": (FailureKind.OUT_OF_VRAM, "allocating 8053.00 MiB"),
    "cuda-kv-cache": (FailureKind.OUT_OF_VRAM, "allocating 1360.00 MiB"),
    "cuda-compute-buffer": (FailureKind.OUT_OF_VRAM, "allocating 497.00 MiB"),
    "cuda-compute-buffer-at-first-request": (FailureKind.OUT_OF_VRAM, "CUDA0 buffer of size"),
    "cuda-pool-vmm": (FailureKind.OUT_OF_VRAM, "CUDA error: out of memory"),
    "cuda-pool-legacy": (FailureKind.OUT_OF_VRAM, "CUDA error: out of memory"),
    "cuda-illegal-access": (FailureKind.DRIVER, "illegal memory access"),
    "cuda-launch-failure": (FailureKind.DRIVER, "unspecified launch failure"),
    "cuda-no-kernel-image": (FailureKind.DRIVER, "no kernel image"),
    "mlock-refused-then-illegal-access": (FailureKind.DRIVER, "illegal memory access"),
    "vulkan-weights": (FailureKind.OUT_OF_VRAM, "OutOfDeviceMemory"),
    "ik-cuda-weights": (FailureKind.OUT_OF_VRAM, "allocating 9216.00 MiB"),
    "killed-by-the-kernel": (FailureKind.OUT_OF_MEMORY, "loading model"),
}
# What a build did differently, for good reasons of its own.
EXCEPTIONS = {
    # It aborts without a word about threads or memory.
    ("ik-2026-08", "out-of-threads"): (FailureKind.CRASH, "terminate called"),
}
FILES = sorted(LOGS.rglob("*.txt"))


def read(path: Path) -> tuple[str, int, list[str]]:
    ended, *lines = path.read_text(encoding="utf-8").splitlines()
    kind, _, status = ended.partition(" ")
    return kind, int(status), lines


def found(path: Path) -> Failure:
    kind, status, lines = read(path)
    return classify(lines, exit_kind=kind, exit_status=status)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_real_failure_is_told_by_its_telling_line(path: Path) -> None:
    default = CAUSES[path.stem]
    kind, words = EXCEPTIONS.get((path.parent.name, path.stem), default)
    failure = found(path)
    assert failure.kind is kind, failure
    assert words in failure.words
    _, status, lines = read(path)
    told = failure.words.removeprefix(f"signal {status}; ")
    assert any(told in clean_line(line) for line in lines)
    assert not told.startswith("0.")  # mainline's time stamp says nothing
    assert failure.hint or failure.kind is FailureKind.CRASH


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_journal_around_it_changes_nothing(path: Path) -> None:
    kind, status, lines = read(path)
    before = ["Starting llama-server.service...", "Started llama-server.service."]
    after = [
        "llama-server.service: Main process exited, code=exited, status=1/FAILURE",
        "llama-server.service: Failed with result 'exit-code'.",
        "llama-server.service: Scheduled restart job, restart counter is at 1.",
    ]
    around = classify([*before, *lines, *after], exit_kind=kind, exit_status=status)
    assert (around.kind, around.words) == (found(path).kind, found(path).words)


@pytest.mark.parametrize(
    ("ending", "kind", "words"),
    [
        ({"exit_kind": "killed", "exit_status": 9}, FailureKind.OUT_OF_MEMORY, "last line"),
        ({"exit_kind": "killed", "exit_status": 9, "result": "oom-kill"}, FailureKind.OUT_OF_MEMORY,
         "killed by the kernel"),
        ({"exit_kind": "dumped", "exit_status": 11}, FailureKind.CRASH, "signal 11"),
        ({"exit_kind": "killed", "exit_status": 6}, FailureKind.CRASH, "signal 6; last line"),
        ({"exit_kind": "exited", "exit_status": 203}, FailureKind.CANNOT_START, "last line"),
        ({"exit_kind": "exited", "exit_status": 217}, FailureKind.CANNOT_START, "last line"),
        ({"exit_kind": "exited", "exit_status": 1}, FailureKind.UNKNOWN, "last line"),
        ({"exit_kind": "exited", "exit_status": 126}, FailureKind.CANNOT_START, "last line"),
        ({"exit_kind": "exited", "exit_status": 127}, FailureKind.CANNOT_START, "last line"),
        ({}, FailureKind.UNKNOWN, "last line"),
    ],
)  # fmt: skip
def test_where_the_log_tells_nothing_the_ending_does(
    ending: dict[str, object], kind: FailureKind, words: str
) -> None:
    failure = classify(["first line", "last line"], **ending)  # type: ignore[arg-type]
    assert failure.kind is kind
    assert words in failure.words


BACKTRACE = "30\t../sysdeps/unix/sysv/linux/wait4.c: No such file or directory."
NO_BACKEND = (
    "ggml_backend_load: failed to load libggml-cuda.so: libcudart.so.12: cannot open shared object "
    "file: No such file or directory"
)
NO_LIBRARY = (
    "/srv/llama-server: error while loading shared libraries: libcudart.so.12: cannot open shared "
    "object file: No such file or directory"
)
ABORTED = {"exit_kind": "dumped", "exit_status": 6}


@pytest.mark.parametrize(
    ("lines", "ending", "kind", "words"),
    [
        (["CUDA error: an illegal memory access", BACKTRACE], ABORTED, FailureKind.DRIVER, "illegal"),
        (["GGML_ASSERT(n > 0) failed", BACKTRACE], ABORTED, FailureKind.CRASH, "GGML_ASSERT"),
        (["GGML_ASSERT(ctx->mem_buffer != NULL) failed", BACKTRACE], ABORTED,
         FailureKind.OUT_OF_MEMORY, "mem_buffer"),
        ([NO_BACKEND, "CUDA error: an illegal memory access"], ABORTED, FailureKind.DRIVER, "illegal"),
        (["CUDA error: out of memory", BACKTRACE], ABORTED, FailureKind.OUT_OF_VRAM, "out of memory"),
        ([NO_LIBRARY], {"exit_kind": "exited", "exit_status": 127}, FailureKind.CANNOT_START,
         "libcudart.so.12"),
        (["To enable q4_0, q4_1, and iq4_nl KV cache types, recompile with -DGGML_IQK_FA_ALL_QUANTS=ON",
          BACKTRACE], ABORTED, FailureKind.BAD_ARGUMENT, "KV cache types"),
        (["llama_model_load: error loading model: key not found in model: qwen35.block_count"],
         {"exit_kind": "exited", "exit_status": 1}, FailureKind.MODEL_UNSUPPORTED, "block_count"),
        (["the target and draft vocabs are not compatible - tokens will be translated between the two",
          "last line"], {"exit_kind": "exited", "exit_status": 1}, FailureKind.UNKNOWN, "last line"),
    ],
)  # fmt: skip
def test_a_file_that_is_missing_elsewhere_is_not_the_models(
    lines: list[str], ending: dict[str, object], kind: FailureKind, words: str
) -> None:
    failure = classify(lines, **ending)  # type: ignore[arg-type]
    assert failure.kind is kind
    assert words in failure.words


@pytest.mark.parametrize(
    "line",
    [
        "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 521142272",
        "alloc_tensor_range: failed to allocate Vulkan0 buffer of size 1",
        "llama_kv_cache: unable to allocate CUDA0 buffer",
        "CUDA error: out of memory",
        "ROCm error: out of memory",
        "CUDA0: device 0 is out of memory",
    ],
)
def test_memory_of_a_card_is_not_taken_for_the_machines_or_for_a_fault(line: str) -> None:
    assert classify([line]).kind is FailureKind.OUT_OF_VRAM
    after = ["CUDA error: an illegal memory access was encountered", "std::bad_alloc"]
    assert classify([*after, line]).kind is FailureKind.OUT_OF_VRAM


# Dry runs.


def output(engine: str, case: str) -> tuple[int, str]:
    kind, status, lines = read(LOGS / engine / f"{case}.txt")
    return (status if kind == "exited" else -status), "\n".join(lines)


ENGINES = sorted(p.name for p in LOGS.iterdir() if p.is_dir() and p.name != "synthetic")


@pytest.mark.parametrize(
    "case", ["unknown-flag", "bad-number", "bad-kv-type", "unknown-speculation"]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_bad_arguments_are_named(engine: str, case: str) -> None:
    words = argument_error(*output(engine, case))
    assert words is not None
    assert CAUSES[case][1] in words


@pytest.mark.parametrize("engine", ENGINES)
def test_good_arguments_are_good_wherever_the_log_was_cut(engine: str) -> None:
    status, text = output(engine, "missing-file")
    refused = {cut: argument_error(status, text[:cut]) for cut in range(len(text) + 1)}
    assert {cut: words for cut, words in refused.items() if words is not None} == {}


@pytest.mark.parametrize(
    "said",
    [
        "error: invalid value for n_parallel",
        "Available buffer types:\n  CPU",
        "cannot do that\nusage: llama-server [options]",
        "\x1b[0merror: either --embedding or --reranking can be specified, but not both",
    ],
)
def test_other_ways_of_refusing_an_argument_are_known(said: str) -> None:
    assert argument_error(1, said) is not None


def test_what_a_log_says_of_arguments_is_no_refusal() -> None:
    assert argument_error(1, "0.00.014.560 W srv  mlock: Invalid argument") is None
    assert argument_error(1, "warning: failed to mlock: Invalid argument") is None


ANY_LOG = st.lists(
    st.one_of(
        st.text(max_size=80),
        st.sampled_from(["error", "out of memory", "CUDA error: x", "couldn't bind to server socket"]),
    ),
    max_size=20,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(ANY_LOG, st.sampled_from([None, "exited", "killed", "dumped"]), st.integers(0, 255))
def test_any_log_has_some_cause(lines: Sequence[str], kind: str | None, status: int) -> None:
    failure = classify(lines, exit_kind=kind, exit_status=status)
    assert failure.words
    assert len(failure.words) <= 420
    argument_error(status, "\n".join(lines))
