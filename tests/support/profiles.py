"""Random profiles: every key that leaves a flag, with every kind of value that its schema takes."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tunerd.engine.commandline import RenderContext
from tunerd.profile.layers import Layer, LayerFile, Resolved, default_layer, resolve
from tunerd.profile.schema import Serving, Speculation, nest


def choices(model: type[BaseModel], key: str) -> tuple[str, ...]:
    """The words that a key of the schema takes."""
    try:
        model.model_validate({key: "nonsense"})
    except ValidationError as error:
        return tuple(re.findall(r"'([^']+)'", error.errors()[0]["msg"]))
    raise AssertionError(f"{key} takes anything")


SPECULATION_TYPES = choices(Speculation, "type")
LOAD_MODES = choices(Serving, "load_mode")

# Letters that mean something to a shell, to systemd, to TOML or to a template.
HOSTILE = st.sampled_from(
    [" ", '"', "'", "\\", "$", "%", "@", "#", ";", "=", ",", "-", "--port", "%d/api-key", "@UNIT@",
     "#@end", "#@if system", "[Service]", "ExecStartPre=/bin/true", "${HOME}", "$$", "é", "日本",
     "\u2028", "\u00a0", "a"]
)  # fmt: skip
TEXT = st.lists(HOSTILE, min_size=1, max_size=6).map("".join)
COUNT = st.integers(0, 200_000)
POSITIVE = st.integers(1, 200_000)
SMALL = st.integers(1, 64)
TENSORS = st.lists(st.sampled_from(["blk\\.1\\..*=CPU", r"exps=CPU", "a b=CUDA0"]), max_size=2)
KV = st.sampled_from(["f16", "q8_0", "q4_0"])
RATIO = st.floats(0.0, 1.0, allow_nan=False).map(lambda value: round(value, 4))
CORES = st.one_of(SMALL, st.just("physical"))
LAYERS = st.one_of(COUNT, st.sampled_from(["all", "auto"]))
JSON = st.dictionaries(
    st.sampled_from(["a", "enable_thinking", "b.c"]),
    st.one_of(st.booleans(), st.integers(-5, 5), TEXT, st.lists(st.integers(0, 3), max_size=2)),
    max_size=3,
)

KEYS: dict[str, st.SearchStrategy[Any]] = {
    "model.mmproj": TEXT,
    "model.chat_template_file": TEXT,
    "serving.host": st.sampled_from(["127.0.0.1", "0.0.0.0", "::1", "localhost"]),  # noqa: S104
    "serving.port": st.integers(1, 65535),
    "serving.alias": TEXT,
    "serving.ctx_size": COUNT,
    "serving.n_predict": st.integers(-2, 5000),
    "serving.n_parallel": SMALL,
    "serving.kv_unified": st.booleans(),
    "serving.cache_type_k": KV,
    "serving.cache_type_v": KV,
    "serving.n_batch": POSITIVE,
    "serving.n_ubatch": POSITIVE,
    "serving.threads": CORES,
    "serving.threads_batch": CORES,
    "serving.threads_http": SMALL,
    "serving.poll": st.integers(0, 100),
    "serving.load_mode": st.sampled_from(LOAD_MODES),
    "serving.flash_attn": st.sampled_from(["on", "off", "auto"]),
    "serving.ctx_checkpoints": COUNT,
    "serving.checkpoint_spacing": COUNT,
    "serving.cache_ram_mib": st.integers(-1, 9000),
    "serving.cache_reuse": COUNT,
    "serving.cache_prompt": st.booleans(),
    "serving.context_shift": st.booleans(),
    "serving.reasoning": st.sampled_from(["on", "off", "auto"]),
    "serving.reasoning_format": st.sampled_from(["none", "deepseek", "deepseek-legacy", "auto"]),
    "serving.reasoning_budget": st.integers(-1, 4000),
    "serving.reasoning_budget_message": TEXT,
    "serving.reasoning_effort": st.sampled_from(["low", "medium", "high"]),
    "serving.sleep_idle_s": POSITIVE,
    "serving.jinja": st.booleans(),
    "serving.chat_template": TEXT,
    "serving.chat_template_kwargs": JSON,
    "serving.metrics": st.booleans(),
    "serving.slots": st.booleans(),
    "serving.warmup": st.booleans(),
    "serving.temp": st.floats(0.0, 10.0).map(lambda value: round(value, 6)),
    "serving.top_k": COUNT,
    "serving.top_p": RATIO,
    "serving.min_p": RATIO,
    "serving.repeat_penalty": st.floats(0.0, 10.0).map(lambda value: round(value, 3)),
    "serving.presence_penalty": st.floats(-10.0, 10.0).map(lambda value: round(value, 3)),
    "serving.seed": st.integers(-1, 2**31),
    "serving.timeout_s": POSITIVE,
    "serving.log_verbosity": st.integers(0, 5),
    "serving.slot_save_path": TEXT,
    "speculation.type": st.sampled_from(SPECULATION_TYPES),
    "speculation.n_max": SMALL,
    "speculation.n_min": st.integers(0, 64),
    "speculation.p_min": RATIO,
    "speculation.draft_model": TEXT,
    "speculation.cache_type_k": KV,
    "speculation.cache_type_v": KV,
    "speculation.n_gpu_layers": LAYERS,
    "speculation.n_ubatch": POSITIVE,
    "speculation.ctx_size": COUNT,
    "speculation.cross_ctx": POSITIVE,
    "speculation.adaptive": st.booleans(),
    "speculation.backend_sampling": st.booleans(),
    "speculation.sampling": st.sampled_from(["greedy", "probabilistic"]),
    "speculation.cpu_moe": st.booleans(),
    "speculation.n_cpu_moe": COUNT,
    "speculation.override_tensor": TENSORS,
    "speculation.ngram_size_n": SMALL,
    "speculation.ngram_size_m": SMALL,
    "speculation.ngram_min_hits": SMALL,
    "memory.fit_mib": COUNT,
    "memory.fit": st.booleans(),
    "memory.n_gpu_layers": LAYERS,
    "memory.n_cpu_moe": COUNT,
    "memory.cpu_moe": st.booleans(),
    "memory.n_cpu_ffn": COUNT,
    "memory.moe_cache_mib": COUNT,
    "memory.override_tensor": TENSORS,
    "memory.device": st.sampled_from(["CUDA0", "none"]),
    "memory.main_gpu": st.integers(0, 7),
    "memory.split_mode": st.sampled_from(["none", "layer", "row", "tensor", "attn", "graph"]),
    "memory.kv_offload": st.booleans(),
}
PROFILE_DATA = st.lists(st.sampled_from(sorted(KEYS)), max_size=14, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: KEYS[key] for key in keys})
)


def profile_of(data: dict[str, Any]) -> Resolved:
    """A profile with these keys over tunerd's defaults, as a site's file would have them."""
    layers = (default_layer(), LayerFile(Layer.SITE, "site.toml", nest(data)))
    result = resolve("random", layers)
    assert isinstance(result, Resolved), [str(problem) for problem in result]
    return result


def context(*, has_gpu: bool, cores: int | None = 8) -> RenderContext:
    """A machine for which random profiles are rendered."""
    return RenderContext("/usr/bin/llama-server", "/models/m.gguf", has_gpu, cores)
