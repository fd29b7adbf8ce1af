"""Whether a server that was just started is on its way, ready, or lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import DATA
from tests.support.transcripts import transcript
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
    ]  # fmt: skip
    odd: list[dict[str, Any]] = [
        {}, {"text": "", "n_predicted": 1},  # a model may say nothing but its end
        {"text": "aaaa", "n_predicted": 4}, {"text": "=" * 24 + "x"}, {"text": "a\ufffdbc"},
        {"text": "ababababababababab"}, {"n_drafted": None},
    ]  # fmt: skip
    for change in odd:
        assert judge_generation(replace(GOOD, **change), wanted=24) is None, change
    for change in garbage:
        lost = judge_generation(replace(GOOD, **change), wanted=24)
        assert lost is not None, change
        assert lost.kind is FailureKind.GARBAGE


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


BACKTRACE = "30\t../sysdeps/unix/sysv/linux/wait4.c: No such file or directory."
NO_BACKEND = (
    "ggml_backend_load: failed to load libggml-cuda.so: libcudart.so.12: cannot open shared object "
    "file: No such file or directory"
)
NO_LIBRARY = (
    "/srv/llama-server: error while loading shared libraries: libcudart.so.12: cannot open shared "
    "object file: No such file or directory"
)
UNIT = "llama-server.service"
ABORTED = {"exit_kind": "dumped", "exit_status": 6}
TWO_LINES = ["first line", "last line"]


def exited(status: int) -> dict[str, object]:
    return {"exit_kind": "exited", "exit_status": status}


# What is to be seen, and of which lines and endings.
DECIDED: dict[str, list[tuple[list[str], dict[str, object]]]] = {
    # Anybody may have sent signal 9: only the kernel's own word is one of memory.
    "Where the log tells nothing the ending does": [
        (TWO_LINES, {"exit_kind": "killed", "exit_status": 9}),
        (TWO_LINES, {"exit_kind": "killed", "exit_status": 9, "result": "oom-kill"}),
        (TWO_LINES, {"exit_kind": "dumped", "exit_status": 11}),
        (TWO_LINES, {"exit_kind": "killed", "exit_status": 6}),
        *((TWO_LINES, exited(status)) for status in (1, 126, 127, 203, 217)),
        (TWO_LINES, {}),
    ],
    "What the kernel killed did not end of what it had said before": [
        (["ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 521142272", *lines], ending)
        for lines, ending in (
            ([], {"exit_kind": "killed", "exit_status": 9, "result": "oom-kill"}),
            ([f"{UNIT}: Failed with result 'oom-kill'."], {}))
    ],
    "Of another process of the unit that the kernel killed it did not end": [
        ([f"{UNIT}: A process of this unit has been killed by the OOM killer.", "GGML_ASSERT(ok) failed",
          f"{UNIT}: Main process exited, code={how}"], {}) for how in ("dumped, status=6/ABRT", "killed, status=9/KILL")
    ],
    "A start that took too long is told by what its manager says": [
        ([*TWO_LINES, f"{UNIT}: {what} operation timed out. Terminating.",
          f"{UNIT}: Main process exited, code=killed, status=15/TERM"], {})
        for what in ("start", "start-pre", "start-post")
    ],
    "A file that is missing elsewhere is not the model's": [
        (["CUDA error: an illegal memory access", BACKTRACE], ABORTED),
        (["GGML_ASSERT(n > 0) failed", BACKTRACE], ABORTED),
        (["GGML_ASSERT(ctx->mem_buffer != NULL) failed", BACKTRACE], ABORTED),
        ([NO_BACKEND, "CUDA error: an illegal memory access"], ABORTED),
        (["CUDA error: out of memory", BACKTRACE], ABORTED),
        ([NO_LIBRARY], exited(127)),
        (["To enable q4_0, q4_1, and iq4_nl KV cache types, recompile with -DGGML_IQK_FA_ALL_QUANTS=ON",
          BACKTRACE], ABORTED),
    ],
    "What is wrong with a template or a model is told, and else nothing is known": [
        (["0.00.007.785 E error: the supplied chat template is not supported: {% if %}",
          "0.00.007.790 E common_chat_verify_template: failed to apply template: std::exception"], exited(1)),
        (["llama_model_load: error loading model: key not found in model: qwen35.block_count"], exited(1)),
        *(([f"0.00.020.902 E llama_model_load: error loading model: {why}",
            "0.00.026.412 E srv  llama_server: exiting due to model loading error"], exited(1))
          for why in ("check_tensor_dims: tensor 'blk.4.x' not found", "split state of two models")),
        (["the target and draft vocabs are not compatible - tokens will be translated between the two",
          "last line"], exited(1)),
    ],
    "Memory of a card is not taken for the machine's, nor for a fault that is told before": [
        (["CUDA error: an illegal memory access was encountered", "std::bad_alloc", line], {})
        for line in (
            "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 521142272",
            "alloc_tensor_range: failed to allocate Vulkan0 buffer of size 1",
            "llama_kv_cache: unable to allocate CUDA0 buffer",
            "CUDA error: out of memory",
            "ROCm error: out of memory",
            "CUDA0: device 0 is out of memory")
    ],
}  # fmt: skip


def test_the_most_telling_line_decides_as_in_the_golden_text_and_else_the_ending() -> None:
    cases = []
    for heading, inputs in DECIDED.items():
        shown: list[str] = []
        for lines, ending in inputs:
            failure = classify(lines, **ending)  # type: ignore[arg-type]
            ended = " ".join(str(part) for part in ending.values()) or "ending unknown"
            shown += [*lines, f"({ended})", *(f"    {one}" for one in told(failure))]
        cases.append((heading, shown))
    transcript("failures/decided", cases)


# What no build here can be made to say: from public reports and from sources, which stand beside each.
SEGFAULT = {"exit_kind": "dumped", "exit_status": 11}
ASSERTED = "/src/ggml/src/ggml.c:1808: GGML_ASSERT(obj_new) failed"
ILLEGAL = "9.05.001.004 E CUDA error: an illegal memory access was encountered"
LOADED = "0.05.001.003 I srv  llama_server: model loaded"
LOADED_IK = 'INFO [                    main] model loaded | tid="1" timestamp=1'
RETRIED = (
    "1.06.520.077 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 51748.72 MiB on device 1: cudaMalloc failed: out of memory",
    "1.06.520.086 E graph_reserve: failed to allocate compute buffers",
    "1.06.520.107 W sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism",
)
OTHER_VOCABULARY = (
    "0.05.001.001 E spec          init: the target and draft vocabs are not compatible"
)
NOT_PINNED = (
    "ggml_cuda_host_malloc: failed to allocate 349659.17 MiB of pinned memory: out of memory"
)
REPORTED: dict[str, tuple[list[str], dict[str, object]]] = {
    # cuBLAS has no memory for its handle, which shows at the first request.
    "ggml-org/llama.cpp#25304": (
        ["CUDA error: the resource allocation failed", "  cublasCreate_v2(&cublas_handles[device])"],
        ABORTED),
    "ollama/ollama#6139": (["CUDA error: CUBLAS_STATUS_ALLOC_FAILED"], ABORTED),
    # A driver that fails is no lack of memory: a larger margin would not help.
    "ggml-cuda.cu of b11434, cudaGetErrorString": (
        [("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 8053.00 MiB on device 0: "
         "cudaMalloc failed: unknown error"),
         "llama_model_load: error loading model: unable to allocate CUDA0 buffer"],
        exited(1)),
    "ggml-org/llama.cpp#19955": (
        ["terminate called after throwing an instance of 'vk::DeviceLostError'",
         "  what():  vk::Queue::submit: ErrorDeviceLost"], ABORTED),
    # Memory that was asked for, not given, and done without.
    "ggml-org/llama.cpp#26297, then an assertion": (
        [*RETRIED, ASSERTED], ABORTED),
    "ggml-org/llama.cpp#26297, then nothing": (
        [*RETRIED, "1.07.304.130 I srv    load_model: initializing, n_slots = 1"], SEGFAULT),
    "ggml-org/llama.cpp#16748, without more luck": (
        [*RETRIED, *RETRIED[:2]], exited(1)),
    "ollama/ollama#8964, then an assertion": ([NOT_PINNED, ASSERTED], ABORTED),
    "ggml-cuda.cu of ik_llama.cpp 8337e4cd3, register_host_buffer": (
        [("ggml_backend_cuda_register_host_buffer: failed to register 30735.49 MiB of pinned memory: "
         "out of memory"), ASSERTED], ABORTED),
    "server-task.cpp of b11434": (
        ["3.39.003.983 E srv         alloc: failed to allocate memory for prompt cache state: std::bad_alloc",
         ILLEGAL], ABORTED),
    # What it started in spite of.
    "ggml-org/llama.cpp#18181, other end": (
        ["alloc_tensor_range: failed to allocate CUDA0 buffer of size 1873805312", LOADED], SEGFAULT),
    "server-context.cpp of b11434, draft model left out": (
        [OTHER_VOCABULARY, LOADED, ILLEGAL], ABORTED),
    "ollama/ollama#8964 as ik says it": (
        [NOT_PINNED, LOADED_IK, "CUDA error: out of memory"], ABORTED),
    # Values that a build, a model or a card cannot do.
    "ggml-org/llama.cpp#28524": (
        [("0.00.190.229 E llama_init_from_model: failed to initialize the context: quantized V cache was "
         "requested, but this requires Flash Attention"),
         "0.00.190.310 E srv  llama_server: exiting due to model loading error"],
        exited(1)),
    "Anbeeld/beellama.cpp#95": (
        [("0.01.190.229 E llama_init_from_model: cannot enable kvarn_k4v4_g128: KVarN requires a backend with "
         "native KVarN FlashAttention support"),
         "0.01.190.310 E srv    load_model: failed to load model, '/models/m.gguf'"], exited(1)),
    "Anbeeld/beellama.cpp#60": (
        [("0.01.190.229 E llama_init_from_model: failed to initialize the context: KVarN cache layer 3 is assigned "
         "to backend Meta(), which has no native KVarN operations"),
         "0.01.190.310 E common_init_result: failed to create context"], SEGFAULT),
    "llama-model.cpp of b11434": (
        ["llama_model_load: error loading model: LLAMA_SPLIT_MODE_TENSOR not implemented for architecture 'x'"],
        exited(1)),
    "llama.cpp of b11434": (
        ["0.00.1 E llama_prepare_model_devices: invalid value for main_gpu: 3 (available devices: 1)",
         "0.00.1 E srv    load_model: failed to load model, '/models/m.gguf'"],
        exited(1)),
    "llama.cpp of b11434, a projector": (
        ["llama_model_load: error loading model: CLIP cannot be used as main model, use it with --mmproj instead"],
        exited(1)),
    "llama.cpp of ik_llama.cpp 8337e4cd3": (
        [("llama_model_load: error loading model: MTP companion GGUF cannot be used as the target model, "
         "pass it with -md/--draft")], exited(1)),
    "speculative.cpp of ik_llama.cpp 8337e4cd3": (
        [("common_speculative_prepare_mtp_runtime: target GGUF contains no MTP tail, provide a matching "
         "predictor-only companion with -md"),
         ' ERR [              load_model] unable to load model | tid="1" timestamp=1 model="/models/m.gguf"'],
        exited(1)),
    "ggml-org/llama.cpp#17105": (
        [("gguf_init_from_file_impl: tensor 'blk.0.ffn_down.weight' of type 36 (TYPE_IQ4_NL_4_4 REMOVED, use IQ4_NL "
         "with runtime repacking) has 6912 elements per row, not a multiple of block size (0)"),
         "gguf_init_from_file_impl: failed to read tensor info"], exited(1)),
    "llama-model-loader.cpp of b11434": (
        ["llama_model_load: error loading model: corrupted model: 1147 tensors expected but 800 found"],
        exited(1)),
    # What is said to nobody's harm, right before an end of another kind.
    **{f"{source}, then nothing": ([line], SEGFAULT) for source, line in {
        "lmstudio-ai/lmstudio-bug-tracker#2138": ("0.03.913.323 W common_fit_params: failed to fit params to "
        "free device memory: n_gpu_layers already set by user to 999999, abort"),
        "ggml-org/llama.cpp#14097": ("srv  update_slots: failed to find free space in the KV cache, retrying "
        "with smaller batch size, i = 0, n_batch = 512, ret = 1"),
        "server-context.cpp of ik_llama.cpp 8337e4cd3": ("ERR [process_batch_tokens] failed to decode the "
        "batch: KV cache is full - try increasing it via the context size"),
        "gpustack/gpustack#852": ("9.16.412.167 E srv    send_error: task id = 40, error: request (5000 tokens) "
        "exceeds the available context size (4096 tokens), try increasing it"),
        "ggml-org/llama.cpp#22384": ("slot update_slots: id  0 | task 7 | forcing full prompt re-processing due "
        "to lack of cache data (likely due to SWA or hybrid/recurrent memory)"),
        "ggml-org/llama.cpp#23281": ("0.13.127.894 W llama_context: n_ctx_seq (131072) < n_ctx_train (262144) -- "
        "the full capacity of the model will not be utilized"),
        "ggml-backend-reg.cpp of b11434": NO_BACKEND,
    }.items()},
    # Where the ending is told by the manager's lines alone, as a daemon finds them.
    "ggml-org/llama.cpp#20509": (
        ["srv   prompt_save:  - saving prompt with length 28960, total state size = 3462.850 MiB",
         f"{UNIT}: A process of this unit has been killed by the OOM killer.",
         f"{UNIT}: Main process exited, code=killed, status=9/KILL",
         f"{UNIT}: Failed with result 'oom-kill'."], {}),
    "Anbeeld/beellama.cpp#75": (
        ["0.47.174.111 I srv  params_from_: Chat format: peg-native",
         f"{UNIT}: Main process exited, code=dumped, status=11/SEGV"], {}),
    "systemd 252": (
        ["last line", f"{UNIT}: Main process exited, code=killed, status=9/KILL"], {}),
}  # fmt: skip


def test_what_others_saw_is_told_as_in_the_golden_text() -> None:
    """No build was seen to print these here: a card decides, or a fault that cannot be made."""
    cases = [(source, classify(lines, **ending)) for source, (lines, ending) in REPORTED.items()]  # type: ignore[arg-type]
    transcript(
        "failures/reported", [(f"As in {source}", told(failure)) for source, failure in cases]
    )


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
