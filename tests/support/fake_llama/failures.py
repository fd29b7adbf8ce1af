"""How engines die: their last words and their exit."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """How an engine dies: what it writes (level and text), and how it ends.

    `at` is `load` or `request`; `ends` is an exit status, or minus a signal number.
    """

    at: str
    ends: int
    lines: tuple[str, ...]
    ik_lines: tuple[str, ...] | None = None


_MALLOC = (
    "E ggml_backend_cuda_buffer_type_alloc_buffer: allocating {mib} MiB on device 0: "
    "cudaMalloc failed: out of memory"
)
_LOAD_TAIL = (
    "E srv    load_model: failed to load model, '{model}'",
    "I srv    operator(): operator(): cleaning up before exit...",
    "E srv  llama_server: exiting due to model loading error",
)
_IK_LOADER = (
    "llama_model_load: error loading model: llama_model_loader: failed to load model from {model}"
)
_IK_TAIL = (
    "llama_init_from_gpt_params: error: failed to load model '{model}'",
    '> ERR [              load_model] unable to load model | model="{model}"',
)


def _load_error(*lines: str, ik: tuple[str, ...] | None = None) -> Failure:
    ik_lines = tuple(line.removeprefix("E ").removeprefix("W ") for line in ik or lines)
    return Failure("load", 1, (*lines, *_LOAD_TAIL), (*ik_lines, *_IK_TAIL))


def _abort(error: str, statement: str) -> Failure:
    place = "ggml-cuda/ggml-cuda.cu"
    lines = (
        f"E CUDA error: {error}",
        f"E   current device: 0, in function alloc at {place}:552",
        f"E   {statement}",
    )
    return Failure("request", -signal.SIGABRT, (*lines, f"{place}:98: CUDA error"))


# Source: engines of 2026 on the CPU, and for CUDA's own texts their sources and public reports.
FAILURES: dict[str, Failure] = {
    "oom-weights": _load_error(
        _MALLOC.replace("{mib}", "8053.00"),
        "E alloc_tensor_range: failed to allocate CUDA0 buffer of size 8444182528",
        "E llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "E llama_model_load_from_file_impl: failed to load model",
    ),
    "oom-first-request": _abort("out of memory", "cuMemCreate(&handle, reserve_size, &prop, 0)"),
    "missing-model": _load_error(
        "E gguf_init_from_file: failed to open GGUF file '{model}' (No such file or directory)",
        "E llama_model_load: error loading model: llama_model_loader: failed to load model from "
        "{model}",
        "E llama_model_load_from_file_impl: failed to load model",
        "E common_fit_params: encountered an error while trying to fit params to free device "
        "memory: failed to load model",
        ik=(
            "gguf_init_from_file: failed to open '{model}': 'No such file or directory'",
            _IK_LOADER,
            "",
            "llama_model_load_from_file: failed to load model",
        ),
    ),
    "killed": Failure("load", -signal.SIGKILL, ()),
    "segfault": Failure("load", -signal.SIGSEGV, ()),
    "assert": Failure(
        "load", -signal.SIGABRT, ("src/llama-model.cpp:3501: GGML_ASSERT(ok) failed",)
    ),
}


def port_taken(host: str, port: int) -> Failure:
    """Another program listens there; found before anything is loaded."""
    place = f"hostname: {host}, port: {port}"
    return Failure(
        "load",
        1,
        (
            f"E srv         start: couldn't bind HTTP server socket, {place}",
            "I srv    operator(): operator(): cleaning up before exit...",
            "E srv  llama_server: exiting due to HTTP server error",
        ),
        (f"couldn't bind to server socket: hostname={host} port={port}",),
    )
