"""The options of the embedded server: one table for reading a command line and for `--help`.

They are llama-server's own, spelled as since September 2026, each bound to the field of the
engine's parameters that it sets. An option that the engine library has no field for is not here,
and so is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from tunerd.core import embedded_values as values
from tunerd.core.embedded_values import Member, Setting, Value

DEFAULT_PORT = 8080
_ENABLED = "(default: enabled)"
_KV_TYPES = ", ".join(values.KV_TYPES)
_KV_NOTE = f"allowed values: {_KV_TYPES}\n(default: f16)"

Apply: TypeAlias = Callable[[Value], Iterable[Setting]]


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    `argument` is None for a switch. `negations` are the spellings that switch it off. A removed
    option is listed and refused with its description, as llama-server does. `warning` is printed
    whenever the option is given.
    """

    spellings: tuple[str, ...]
    argument: str | None
    description: str
    apply: Apply
    read: values.Reader = values.text
    negations: tuple[str, ...] = ()
    is_removed: bool = False
    warning: str = ""
    is_file: bool = False
    is_folder: bool = False
    may_repeat: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Options under one heading of the help text."""

    title: str
    options: tuple[Option, ...]


def _sets(*fields: str) -> Apply:
    return lambda value: (Setting(field, value) for field in fields)


def _adds(field: str) -> Apply:
    def apply(value: Value) -> Iterator[Setting]:
        for part in value if isinstance(value, tuple) else (value,):
            yield Setting(field, part, is_added=True)

    return apply


def _sampling(field: str, bit: str | None = None) -> Apply:
    """A sampling default; the bit keeps the model's own recommendation from replacing it."""

    def apply(value: Value) -> Iterator[Setting]:
        yield Setting(f"sampling.{field}", value)
        if bit is not None:
            name = f"COMMON_PARAMS_SAMPLING_CONFIG_{bit}"
            member = Member("common_params_sampling_config", name)
            yield Setting("sampling.user_sampling_config", member, is_bit=True)

    return apply


def _reasoning(value: Value) -> Iterator[Setting]:
    """Templates look at `enable_thinking`, the parser of answers at the field."""
    yield Setting("enable_reasoning", value)
    if value != -1:
        wanted = {"enable_thinking": "true" if value == 1 else "false"}
        yield Setting("default_template_kwargs", MappingProxyType(wanted), is_added=True)


def _lines_of_keys(value: Value) -> Iterator[Setting]:
    for line in str(value).splitlines():
        if line.strip() and not line.startswith("#"):
            yield Setting("api_keys", line, is_added=True)


def _folder(value: Value) -> Iterator[Setting]:
    yield Setting("slot_save_path", str(value).rstrip("/") + "/")


def _removed(spellings: str, replacement: str) -> Option:
    return Option(
        tuple(spellings.split()),
        "N",
        f"the argument has been removed. {replacement}",
        _sets(),
        is_removed=True,
    )


def _number(spellings: str, description: str, *fields: str) -> Option:
    return Option(tuple(spellings.split()), "N", description, _sets(*fields), values.whole)


def _switch(spellings: str, negations: str, description: str, field: str) -> Option:
    return Option(
        tuple(spellings.split()),
        None,
        description,
        _sets(field),
        negations=tuple(negations.split()),
    )


def _ngram(kind: str) -> tuple[Option, ...]:
    prefix, field = f"--spec-{kind}", "speculative." + kind.replace("-", "_")
    return (
        _number(f"{prefix}-size-n", f"{kind}: tokens to look up (default: 12)", f"{field}.size_n"),
        _number(f"{prefix}-size-m", f"{kind}: tokens to draft (default: 48)", f"{field}.size_m"),
        _number(
            f"{prefix}-min-hits",
            f"{kind}: times that a draft must have been seen (default: 1)",
            f"{field}.min_hits",
        ),
    )


_COMMON = Section(
    "common params",
    (
        Option(("-h", "--help", "--usage"), None, "print this text and exit", _sets()),
        Option(("--version",), None, "print the version of the engine library and exit", _sets()),
        Option(
            ("-t", "--threads"),
            "N",
            "threads that generate (default: all processors that this process may use)",
            _sets("cpuparams.n_threads"),
            values.whole,
        ),
        Option(
            ("-tb", "--threads-batch"),
            "N",
            "threads that process prompts (default: same as --threads)",
            _sets("cpuparams_batch.n_threads"),
            values.whole,
        ),
        Option(
            ("--poll",),
            "<0...100>",
            "how eagerly threads spin while they wait for work (0: not at all, default: 50)",
            _sets("cpuparams.poll", "cpuparams_batch.poll"),
            values.whole,
        ),
        _number("-c --ctx-size", "context in tokens (default: 0, 0 = the model's own)", "n_ctx"),
        _number(
            "-n --predict --n-predict",
            "most tokens of an answer (default: -1, -1 = no limit)",
            "n_predict",
        ),
        _number("-b --batch-size", "most tokens in a logical batch (default: 2048)", "n_batch"),
        _number("-ub --ubatch-size", "most tokens in a physical batch (default: 512)", "n_ubatch"),
        Option(
            ("-fa", "--flash-attn"),
            "[on|off|auto]",
            "flash attention ('on', 'off', or 'auto', default: 'auto')",
            _sets("flash_attn_type"),
            values.on_off(
                "--flash-attn",
                Member("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_ENABLED"),
                Member("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_DISABLED"),
                Member("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_AUTO"),
            ),
        ),
        Option(
            ("-ctk", "--cache-type-k"),
            "TYPE",
            f"type of the keys in the KV cache\n{_KV_NOTE}",
            _sets("cache_type_k"),
            values.kv_type,
        ),
        Option(
            ("-ctv", "--cache-type-v"),
            "TYPE",
            f"type of the values in the KV cache\n{_KV_NOTE}",
            _sets("cache_type_v"),
            values.kv_type,
        ),
        Option(
            ("-lm", "--load-mode"),
            "MODE",
            "how the model comes into memory (default: auto)\n"
            "- auto: mmap where the device supports it\n"
            "- none: read into anonymous memory\n"
            "- mmap: map the file\n"
            "- mlock: read it and lock it in memory\n"
            "- mmap+mlock: map it and lock it in memory\n"
            "- dio: read it past the page cache",
            _sets("load_mode"),
            values.choice(
                {
                    word: Member("llama_load_mode", f"LLAMA_LOAD_MODE_{name}")
                    for word, name in (
                        ("auto", "AUTO"),
                        ("none", "NONE"),
                        ("mmap", "MMAP"),
                        ("mlock", "MLOCK"),
                        ("mmap+mlock", "MMAP_MLOCK"),
                        ("dio", "DIRECT_IO"),
                    )
                },
                "invalid value",
            ),
        ),
        Option(
            ("-ngl", "--gpu-layers", "--n-gpu-layers"),
            "N",
            "layers to keep in VRAM: a number, 'auto', or 'all'; this build has no GPU backend, so "
            "they stay in memory (default: auto)",
            _sets("n_gpu_layers"),
            values.layers,
            warning="warning: no usable GPU found, --gpu-layers option will be ignored",
        ),
        Option(
            ("-fit", "--fit"),
            "[on|off]",
            "make what was not given fit into memory ('on' or 'off', default: 'on')",
            _sets("fit_params"),
            values.on_off("--fit", on=True, off=False),
        ),
        Option(
            ("-fitt", "--fit-target"),
            "MiB0,MiB1,...",
            "memory that --fit leaves free on each device (default: 1024)",
            _sets("fit_params_target"),
            values.margins,
        ),
        _number(
            "-fitc --fit-ctx",
            "least context that --fit may choose (default: 4096)",
            "fit_params_min_ctx",
        ),
        Option(("-m", "--model"), "FNAME", "model file to serve", _sets("model.path")),
        Option(
            ("-v", "--verbose", "--log-verbose"),
            None,
            "log everything",
            lambda _: (Setting("verbosity", 2**31 - 1),),
        ),
        Option(
            ("-lv", "--verbosity", "--log-verbosity"),
            "N",
            "log up to this level: 0 generic output, 1 errors, 2 warnings, 3 information, 4 details, "
            "5 debugging (default: 3)",
            _sets("verbosity"),
            values.whole,
        ),
        Option(
            ("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"),
            "TYPE",
            f"type of the keys in the draft's KV cache\n{_KV_NOTE}",
            _sets("speculative.draft.cache_type_k"),
            values.kv_type,
        ),
        Option(
            ("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"),
            "TYPE",
            f"type of the values in the draft's KV cache\n{_KV_NOTE}",
            _sets("speculative.draft.cache_type_v"),
            values.kv_type,
        ),
    ),
)

_SAMPLING = Section(
    "sampling params",
    (
        Option(
            ("-s", "--seed"),
            "SEED",
            "seed of the sampler (default: -1, a random one)",
            _sampling("seed"),
            values.seed,
        ),
        Option(
            ("--temp", "--temperature"),
            "N",
            "temperature (default: 0.80)",
            _sampling("temp", "TEMP"),
            values.real,
        ),
        Option(
            ("--top-k",),
            "N",
            "top-k sampling (default: 40, 0 = disabled)",
            _sampling("top_k", "TOP_K"),
            values.whole,
        ),
        Option(
            ("--top-p",),
            "N",
            "top-p sampling (default: 0.95, 1.0 = disabled)",
            _sampling("top_p", "TOP_P"),
            values.real,
        ),
        Option(
            ("--min-p",),
            "N",
            "min-p sampling (default: 0.05, 0.0 = disabled)",
            _sampling("min_p", "MIN_P"),
            values.real,
        ),
        Option(
            ("--repeat-penalty",),
            "N",
            "penalty on repeated tokens (default: 1.00, 1.0 = disabled)",
            _sampling("penalty_repeat", "PENALTY_REPEAT"),
            values.real,
        ),
        Option(
            ("--presence-penalty",),
            "N",
            "penalty on tokens that are there already (default: 0.00, 0.0 = disabled)",
            _sampling("penalty_present"),
            values.real,
        ),
    ),
)

_SPECULATIVE = Section(
    "speculative params",
    (
        Option(
            ("--spec-type",),
            ",".join(values.SPEC_TYPES),
            "kinds of speculation, with commas between them (default: none)",
            _adds("speculative.types"),
            values.spec_types,
            may_repeat=True,
        ),
        _number(
            "--spec-draft-n-max",
            "most tokens to draft in one step (default: 3)",
            "speculative.draft.n_max",
        ),
        _number(
            "--spec-draft-n-min",
            "fewest tokens that make a draft (default: 0)",
            "speculative.draft.n_min",
        ),
        Option(
            ("--spec-draft-p-min", "--draft-p-min"),
            "P",
            "probability below which a draft ends (default: 0.00)",
            _sets("speculative.draft.p_min"),
            values.real,
        ),
        Option(
            ("--spec-draft-model", "-md", "--model-draft"),
            "FNAME",
            "file of a draft model",
            _sets("speculative.draft.mparams.path"),
        ),
        _switch(
            "--spec-draft-backend-sampling",
            "--no-spec-draft-backend-sampling",
            f"sample drafts in the backend {_ENABLED}",
            "speculative.draft.backend_sampling",
        ),
        Option(
            ("--spec-synth-len",),
            "L",
            "accept at random, so many tokens a step on average, the target's own included; for "
            "benchmarks",
            _sets("speculative.synth_len"),
            values.real,
        ),
        Option(
            ("--spec-synth-rates",),
            "P0,P1,...",
            "accept at random, with these probabilities at each place of a draft; for benchmarks",
            _sets("speculative.synth_rates"),
            values.rates,
        ),
        _number(
            "--spec-ngram-mod-n-match",
            "ngram-mod: tokens to look up (default: 24)",
            "speculative.ngram_mod.n_match",
        ),
        _number(
            "--spec-ngram-mod-n-min",
            "ngram-mod: fewest tokens of a draft (default: 48)",
            "speculative.ngram_mod.n_min",
        ),
        _number(
            "--spec-ngram-mod-n-max",
            "ngram-mod: most tokens of a draft (default: 64)",
            "speculative.ngram_mod.n_max",
        ),
        *_ngram("ngram-simple"),
        *_ngram("ngram-map-k"),
        *_ngram("ngram-map-k4v"),
        _removed(
            "--draft --draft-n --draft-max", "use --spec-draft-n-max or --spec-ngram-mod-n-max"
        ),
        _removed("--draft-min --draft-n-min", "use --spec-draft-n-min or --spec-ngram-mod-n-min"),
        _removed(
            "--spec-ngram-size-n",
            "use the respective --spec-ngram-*-size-n or --spec-ngram-mod-n-match",
        ),
        _removed("--spec-ngram-size-m", "use the respective --spec-ngram-*-size-m"),
        _removed("--spec-ngram-min-hits", "use the respective --spec-ngram-*-min-hits"),
    ),
)

_SERVER = Section(
    "example-specific params",
    (
        _number(
            "-ctxcp --ctx-checkpoints --swa-checkpoints",
            "most context checkpoints of a slot (default: 32)",
            "n_ctx_checkpoints",
        ),
        _number(
            "-cms --checkpoint-min-step",
            "least tokens between two checkpoints (default: 8192, 0 = no minimum)",
            "checkpoint_min_step",
        ),
        _number(
            "-cram --cache-ram",
            "most MiB of prompts to keep (default: 8192, -1 = no limit, 0 = none)",
            "cache_ram_mib",
        ),
        _switch(
            "-kvu --kv-unified",
            "-no-kvu --no-kv-unified",
            "one KV buffer for all slots (default: enabled if the number of slots is auto)",
            "kv_unified",
        ),
        _switch(
            "--cache-idle-slots",
            "--no-cache-idle-slots",
            f"keep the prompts of idle slots {_ENABLED}",
            "cache_idle_slots",
        ),
        _switch(
            "--context-shift",
            "--no-context-shift",
            "drop the oldest tokens when the context is full (default: disabled)",
            "ctx_shift",
        ),
        _switch(
            "--warmup", "--no-warmup", f"run the model once after loading {_ENABLED}", "warmup"
        ),
        Option(
            ("-np", "--parallel"),
            "N",
            "slots (default: -1, -1 = auto)",
            _sets("n_parallel"),
            values.slots,
        ),
        Option(("-mm", "--mmproj"), "FILE", "multimodal projector", _sets("mmproj.path")),
        Option(
            ("-a", "--alias"),
            "STRING",
            "names that clients may use, with commas between them",
            _adds("model_alias"),
            values.words,
        ),
        Option(
            ("--host",),
            "HOST",
            "addresses to listen on, with commas between them, or a path that ends in .sock "
            "(default: 127.0.0.1)",
            _sets("hostnames"),
            values.words,
        ),
        _number("--port", f"port to listen on (default: {DEFAULT_PORT})", "port"),
        Option(
            ("--api-key",),
            "KEY",
            "keys that clients must show, with commas between them",
            _adds("api_keys"),
            values.words,
        ),
        Option(
            ("--api-key-file",),
            "FNAME",
            "file of such keys, one on each line; lines that begin with a hash are comments",
            _lines_of_keys,
            is_file=True,
        ),
        Option(
            ("--chat-template-kwargs",),
            "STRING",
            "JSON object of arguments for the chat template",
            lambda value: (Setting("default_template_kwargs", value, is_added=True),),
            values.template_arguments,
        ),
        _number(
            "-to --timeout",
            "seconds until a read or write times out (default: 3600)",
            "timeout_read",
            "timeout_write",
        ),
        _number("--threads-http", "threads that answer requests (default: -1)", "n_threads_http"),
        _switch(
            "--cache-prompt",
            "--no-cache-prompt",
            f"reuse what prompts have in common {_ENABLED}",
            "cache_prompt",
        ),
        _number("--cache-reuse", "least tokens to reuse by shifting (default: 0)", "n_cache_reuse"),
        _switch("--metrics", "", "serve /metrics (default: disabled)", "endpoint_metrics"),
        _switch(
            "--props", "", "let POST /props change things (default: disabled)", "endpoint_props"
        ),
        _switch("--slots", "--no-slots", f"serve /slots {_ENABLED}", "endpoint_slots"),
        Option(
            ("--slot-save-path",),
            "PATH",
            "folder for saved slots (default: disabled)",
            _folder,
            is_folder=True,
        ),
        _switch(
            "--jinja", "--no-jinja", f"use the template engine for chats {_ENABLED}", "use_jinja"
        ),
        Option(
            ("--reasoning-format",),
            "FORMAT",
            "where thoughts go: none leaves them in the answer, deepseek puts them into "
            "`reasoning_content`, deepseek-legacy does both (default: auto)",
            _sets("reasoning_format"),
            values.choice(
                {
                    word: Member(
                        "common_reasoning_format",
                        "COMMON_REASONING_FORMAT_" + word.upper().replace("-", "_"),
                    )
                    for word in ("none", "auto", "deepseek", "deepseek-legacy")
                },
                "Unknown reasoning format: {}",
            ),
        ),
        Option(
            ("-rea", "--reasoning"),
            "[on|off|auto]",
            "let the model think ('on', 'off', or 'auto', default: 'auto')",
            _reasoning,
            values.on_off("--reasoning", 1, 0, -1),
        ),
        Option(
            ("--reasoning-budget",),
            "N",
            "tokens to think with: -1 for no limit, 0 to end at once (default: -1)",
            _sets("sampling.reasoning_budget_tokens"),
            values.budget,
        ),
        Option(
            ("--reasoning-budget-message",),
            "MESSAGE",
            "what to say when the budget is spent (default: none)",
            _sets("sampling.reasoning_budget_message"),
        ),
        Option(
            ("--chat-template",),
            "JINJA_TEMPLATE",
            "chat template in place of the model's (default: taken from the model)",
            _sets("chat_template"),
        ),
        Option(
            ("--chat-template-file",),
            "JINJA_TEMPLATE_FILE",
            "file with a chat template in place of the model's (default: taken from the model)",
            _sets("chat_template"),
            is_file=True,
        ),
    ),
)

SECTIONS = (_COMMON, _SAMPLING, _SPECULATIVE, _SERVER)
OPTIONS: tuple[Option, ...] = tuple(option for section in SECTIONS for option in section.options)
BY_SPELLING: Mapping[str, Option] = MappingProxyType(
    {spelling: option for option in OPTIONS for spelling in (*option.spellings, *option.negations)}
)
