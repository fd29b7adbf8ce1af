"""How profile keys are spelled as llama-server flags: one table for every dialect.

A row names the spellings in order of preference; the first that the build takes is used, so an
unknown build is served by its flags and never by its name. What needs more than a spelling
(load mode, fit, speculation) is in `cmdline_memory` and `cmdline_speculation`.

Source: captured help texts of seven builds, and a dry run of each flag on each of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValueFlag:
    """A key whose value follows the flag."""

    key: str
    spellings: tuple[str, ...]
    show: Callable[[object], str] = str


@dataclass(frozen=True, slots=True)
class SwitchFlag:
    """A boolean key: spellings that switch it on, spellings that switch it off.

    `default` is what every known build does without any flag; None where builds differ, so that a
    missing spelling is an error and not an assumption.
    """

    key: str
    on: tuple[str, ...]
    off: tuple[str, ...]
    default: bool | None


@dataclass(frozen=True, slots=True)
class OnOffFlag:
    """A boolean key that some builds spell as `--x on|off` and others as two switches."""

    key: str
    word: str
    off_switch: str


def _number(value: object) -> str:
    """Without an exponent, which not every build reads."""
    text = str(value)
    return f"{value:.12f}".rstrip("0") if isinstance(value, float) and "e" in text else text


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _comma_list(value: object) -> str:
    return ",".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)


# In the order in which an administrator reads a command line: what, where, how big, how fast.
SERVING_FLAGS: tuple[ValueFlag | SwitchFlag, ...] = (
    ValueFlag("serving.alias", ("--alias",)),
    ValueFlag("serving.host", ("--host",)),
    ValueFlag("serving.port", ("--port",)),
    ValueFlag("serving.ctx_size", ("--ctx-size",)),
    ValueFlag("serving.n_predict", ("--predict", "--n-predict")),
    ValueFlag("serving.n_parallel", ("--parallel",)),
    SwitchFlag("serving.kv_unified", ("--kv-unified",), ("--no-kv-unified",), None),
    ValueFlag("serving.flash_attn", ("--flash-attn",)),
    ValueFlag("serving.cache_type_k", ("--cache-type-k",)),
    ValueFlag("serving.cache_type_v", ("--cache-type-v",)),
    ValueFlag("serving.n_batch", ("--batch-size",)),
    ValueFlag("serving.n_ubatch", ("--ubatch-size",)),
    ValueFlag("serving.threads", ("--threads",)),
    ValueFlag("serving.threads_batch", ("--threads-batch",)),
    ValueFlag("serving.threads_http", ("--threads-http",)),
    ValueFlag("serving.poll", ("--poll",)),
    ValueFlag("serving.ctx_checkpoints", ("--ctx-checkpoints",)),
    ValueFlag(
        "serving.checkpoint_spacing",
        ("--checkpoint-min-step", "--checkpoint-every-n-tokens", "--ctx-checkpoints-interval"),
    ),
    ValueFlag("serving.cache_ram_mib", ("--cache-ram",)),
    ValueFlag("serving.cache_reuse", ("--cache-reuse",)),
    SwitchFlag("serving.cache_prompt", ("--cache-prompt",), ("--no-cache-prompt",), True),
    SwitchFlag("serving.warmup", ("--warmup",), ("--no-warmup",), True),
    SwitchFlag("serving.jinja", ("--jinja",), ("--no-jinja",), None),
    ValueFlag("serving.chat_template", ("--chat-template",)),
    ValueFlag("model.chat_template_file", ("--chat-template-file",)),
    ValueFlag("serving.chat_template_kwargs", ("--chat-template-kwargs",), _json),
    ValueFlag("model.mmproj", ("--mmproj",)),
    ValueFlag("serving.reasoning", ("--reasoning",)),
    ValueFlag("serving.reasoning_format", ("--reasoning-format",)),
    ValueFlag("serving.reasoning_budget", ("--reasoning-budget",)),
    ValueFlag("serving.reasoning_budget_message", ("--reasoning-budget-message",)),
    ValueFlag("serving.temp", ("--temp",), _number),
    ValueFlag("serving.top_k", ("--top-k",)),
    ValueFlag("serving.top_p", ("--top-p",), _number),
    ValueFlag("serving.min_p", ("--min-p",), _number),
    ValueFlag("serving.repeat_penalty", ("--repeat-penalty",), _number),
    ValueFlag("serving.presence_penalty", ("--presence-penalty",), _number),
    ValueFlag("serving.seed", ("--seed",)),
    ValueFlag("serving.timeout_s", ("--timeout",)),
    ValueFlag("serving.api_key_file", ("--api-key-file",)),
    ValueFlag("serving.slot_save_path", ("--slot-save-path",)),
    SwitchFlag("serving.metrics", ("--metrics",), (), False),
    SwitchFlag("serving.slots", ("--slots",), ("--no-slots",), True),
    ValueFlag("serving.log_verbosity", ("--log-verbosity",)),
)

CONTEXT_SHIFT = OnOffFlag("serving.context_shift", "--context-shift", "--no-context-shift")

PLACEMENT_FLAGS: tuple[ValueFlag | SwitchFlag, ...] = (
    ValueFlag("memory.n_gpu_layers", ("--n-gpu-layers", "--gpu-layers")),
    SwitchFlag("memory.cpu_moe", ("--cpu-moe",), (), False),
    ValueFlag("memory.n_cpu_moe", ("--n-cpu-moe",)),
    ValueFlag("memory.n_cpu_ffn", ("--n-cpu-ffn",)),
    ValueFlag("memory.override_tensor", ("--override-tensor",), _comma_list),
)

GPU_FLAGS: tuple[ValueFlag | SwitchFlag, ...] = (
    ValueFlag("memory.device", ("--device",)),
    ValueFlag("memory.main_gpu", ("--main-gpu",)),
    ValueFlag("memory.split_mode", ("--split-mode",)),
    ValueFlag("memory.moe_cache_mib", ("--moe-cache-mib",)),
    SwitchFlag("memory.kv_offload", ("--kv-offload",), ("--no-kv-offload",), True),
)

DRAFT_FLAGS: tuple[ValueFlag | SwitchFlag, ...] = (
    ValueFlag("speculation.draft_model", ("--model-draft",)),
    ValueFlag("speculation.cache_type_k", ("--cache-type-k-draft", "--spec-draft-type-k")),
    ValueFlag("speculation.cache_type_v", ("--cache-type-v-draft", "--spec-draft-type-v")),
    ValueFlag("speculation.n_ubatch", ("--spec-draft-n-ubatch",)),
    ValueFlag("speculation.ctx_size", ("--ctx-size-draft", "--spec-draft-ctx-size")),
    SwitchFlag(
        "speculation.backend_sampling",
        ("--spec-draft-backend-sampling",),
        ("--no-spec-draft-backend-sampling",),
        None,
    ),
)

DRAFT_GPU_FLAGS: tuple[ValueFlag | SwitchFlag, ...] = (
    ValueFlag("speculation.n_gpu_layers", ("--n-gpu-layers-draft", "--gpu-layers-draft")),
)

# Flags that other code renders, with the key that owns each: `extra_args` may not repeat them.
_OWNED_ELSEWHERE: Mapping[str, str] = {
    "-m": "model.path",
    "--model": "model.path",
    "-lm": "serving.load_mode",
    "--load-mode": "serving.load_mode",
    "--mlock": "serving.load_mode",
    "--mmap": "serving.load_mode",
    "--no-mmap": "serving.load_mode",
    "-dio": "serving.load_mode",
    "--direct-io": "serving.load_mode",
    "-ndio": "serving.load_mode",
    "--no-direct-io": "serving.load_mode",
    "-fit": "memory.fit_mib",
    "--fit": "memory.fit_mib",
    "-fitt": "memory.fit_mib",
    "--fit-target": "memory.fit_mib",
    "--fit-margin": "memory.fit_mib",
    "--spec-type": "speculation.type",
    "-mtp": "speculation.type",
    "--multi-token-prediction": "speculation.type",
    "-no-mtp": "speculation.type",
    "--no-multi-token-prediction": "speculation.type",
    "--spec-draft-n-max": "speculation.n_max",
    "--draft-max": "speculation.n_max",
    "--draft": "speculation.n_max",
    "--draft-n": "speculation.n_max",
    "--spec-draft-n-min": "speculation.n_min",
    "--draft-min": "speculation.n_min",
    "--draft-n-min": "speculation.n_min",
    "--spec-draft-p-min": "speculation.p_min",
    "--draft-p-min": "speculation.p_min",
    "--spec-dflash-cross-ctx": "speculation.cross_ctx",
    "--spec-dm-adaptive": "speculation.adaptive",
    "--no-spec-dm-adaptive": "speculation.adaptive",
    "--context-shift": "serving.context_shift",
    "--no-context-shift": "serving.context_shift",
    "--api-key": "serving.api_key_file",
}

# Short spellings of flags that the tables name by their long one.
_SHORT: Mapping[str, str] = {
    "-a": "--alias",
    "-c": "--ctx-size",
    "-n": "--predict",
    "-np": "--parallel",
    "-kvu": "--kv-unified",
    "-no-kvu": "--no-kv-unified",
    "-fa": "--flash-attn",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-b": "--batch-size",
    "-ub": "--ubatch-size",
    "-t": "--threads",
    "-tb": "--threads-batch",
    "-ctxcp": "--ctx-checkpoints",
    "--swa-checkpoints": "--ctx-checkpoints",
    "-ctx-ckpt": "--ctx-checkpoints",
    "-ctx-ckpt-i": "--ctx-checkpoints-interval",
    "-cms": "--checkpoint-min-step",
    "-cpent": "--checkpoint-every-n-tokens",
    "-cram": "--cache-ram",
    "-mm": "--mmproj",
    "-rea": "--reasoning",
    "--temperature": "--temp",
    "-s": "--seed",
    "-to": "--timeout",
    "-lv": "--log-verbosity",
    "--verbosity": "--log-verbosity",
    "-ngl": "--n-gpu-layers",
    "-cmoe": "--cpu-moe",
    "-ncmoe": "--n-cpu-moe",
    "-ncffn": "--n-cpu-ffn",
    "-ot": "--override-tensor",
    "-dev": "--device",
    "-mg": "--main-gpu",
    "-sm": "--split-mode",
    "-kvo": "--kv-offload",
    "-nkvo": "--no-kv-offload",
    "-md": "--model-draft",
    "--spec-draft-model": "--model-draft",
    "-ctkd": "--cache-type-k-draft",
    "-ctvd": "--cache-type-v-draft",
    "-cd": "--ctx-size-draft",
    "-ngld": "--n-gpu-layers-draft",
    "--spec-draft-ngl": "--n-gpu-layers-draft",
}

ALL_FLAGS: tuple[ValueFlag | SwitchFlag, ...] = (
    *SERVING_FLAGS,
    *PLACEMENT_FLAGS,
    *GPU_FLAGS,
    *DRAFT_FLAGS,
    *DRAFT_GPU_FLAGS,
)


def _spellings(row: ValueFlag | SwitchFlag) -> tuple[str, ...]:
    return row.spellings if isinstance(row, ValueFlag) else (*row.on, *row.off)


def _owners() -> dict[str, str]:
    owners = dict(_OWNED_ELSEWHERE)
    for row in ALL_FLAGS:
        owners.update(dict.fromkeys(_spellings(row), row.key))
    owners.update({short: owners[long] for short, long in _SHORT.items() if long in owners})
    return owners


_SECRET_VARIABLE = re.compile(r"(^|_)(API_?KEY|TOKEN|PASSWORD|SECRET)($|_)", re.IGNORECASE)
SECRET_FLAGS = frozenset({"--api-key", "--hf-token", "-hft"})
_OWNERS = _owners()
_SPELLINGS = {row.key: frozenset(_spellings(row)) for row in ALL_FLAGS}


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name holds something that nobody may see."""
    return _SECRET_VARIABLE.search(name) is not None


def normal_spelling(word: str) -> str:
    """A flag as the tables spell it; long flags take `_` for `-` in every build."""
    if word.startswith("--"):
        word = "--" + word[2:].replace("_", "-")
    return _SHORT.get(word, word)


def owner_of(word: str, flags: Collection[str] | None = None) -> str | None:
    """The profile key that renders this flag; None for a flag that no key knows.

    Args:
        word: The flag in any spelling.
        flags: What a build takes. A key that this build has no flag for does not own the word there:
            ik's `--verbosity` counts otherwise than `--log-verbosity`, which ik has not.
    """
    key = _OWNERS.get(normal_spelling(word)) or _OWNERS.get(word)
    if key is None or flags is None:
        return key
    spellings = _SPELLINGS.get(key)
    return key if spellings is None or not spellings.isdisjoint(flags) else None
