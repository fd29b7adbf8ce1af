"""What a profile file may say: the operator's intent for a class of hardware and a model.

Every key is optional in a file; what a whole profile must have after all layers are merged is
checked by `resolve`. Names of llama.cpp's things are llama.cpp's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, ValidationError

from tunerd.profile.workload import Table, Text, WorkloadTable
from tunerd.words import (
    NAME_PATTERN,
    NAME_WORDS,
    Problem,
    innermost,
    nearest_name,
    of_form,
    problem_of,
    shown,
    table_in,
)

Name = Annotated[str, of_form(NAME_PATTERN, NAME_WORDS)]
KvType = Annotated[
    str, of_form(r"[A-Za-z0-9_]{1,20}", "a type as the build calls it, such as q8_0")
]
# Kinds that draft by a model, and what builds call them, the newest word first; a new kind is a row here.
SPEC_WORDS: Mapping[str, tuple[str, ...]] = {
    "mtp": ("draft-mtp", "mtp"),
    "dflash": ("draft-dflash", "dflash"),
    "eagle3": ("draft-eagle3", "eagle3"),
    "dspark": ("draft-dspark", "dspark"),
    "draft": ("draft-simple", "draft"),
}
_KIND_OF_WORD = {word: kind for kind, words in SPEC_WORDS.items() for word in words}


def own_kinds(words: str) -> str:
    """One name for one thing: what a build calls a kind of ours is ours."""
    return ",".join(_KIND_OF_WORD.get(word, word) for word in words.split(","))


# A chain of kinds, or a kind that only the build knows: its own words, separated by commas.
BuildsWords = Annotated[
    str,
    StringConstraints(max_length=200),
    of_form(r"[a-z0-9]+(?:[-,][a-z0-9]+)+", "the build's own words, such as draft-mtp,ngram-mod"),
    AfterValidator(own_kinds),
]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
FromMinusOne = Annotated[int, Field(ge=-1)]
Port = Annotated[int, Field(ge=1, le=65535)]
# Some builds take a list; a socket's path is refused with a reason where it is planned.
Host = Annotated[
    str,
    StringConstraints(max_length=1000),
    of_form(r"[^\s,-][^\s,]*(, *[^\s,-][^\s,]*)*", "an address or a name, or several with commas"),
]
NotNegative = Annotated[float, Field(ge=0)]
_Json = TypeVar("_Json", dict[str, Any], tuple[Any, ...])
Variable = Annotated[str, of_form(r"[^\x00]*", "text without a zero byte")]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]


def _optional(description: str) -> Any:
    """A key that a file may leave out; what is not there is None."""
    return Field(None, description=description)


def _only_json(value: _Json) -> _Json:
    """TOML has dates and infinities, JSON has not."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        message = "values that JSON knows (text, numbers, booleans, lists, tables)"
        raise ValueError(message) from error
    return value


class Match(Table):
    """Which machines the profile is meant for. A mismatch is a warning; nothing is refused for it."""

    gpu: Text | None = _optional("glob for NVML's name of the GPU; `none` if there is no GPU")
    vram_min_mib: Count | None = _optional("least total VRAM of the card in MiB")
    vram_max_mib: Count | None = _optional("most total VRAM of the card in MiB")


class Model(Table):
    """Which weights are served."""

    path: Text | None = _optional("GGUF file; a bare name or glob is searched for in `models.dirs`")
    name: Text | None = _optional(
        "glob for the name in the file's metadata; used if no file has that path"
    )
    hf_repo: Text | None = _optional(
        "Hugging Face repository of the file (`user/repo` or `user/repo:QUANT`); a file in its "
        "cache is found; tunerd downloads nothing"
    )
    hf_file: Text | None = _optional("name of the file in that repository")
    source: Text | None = _optional("where the file comes from, in your words")
    mmproj: Text | None = _optional("multimodal projector file")
    chat_template_file: Text | None = _optional("Jinja chat template file")


class EnginePreference(Table):
    """Which engine is wanted."""

    prefer: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None = _optional(
        "families (mainline, ik, bee), `embedded`, engine names or paths, in order; the first usable one wins"
    )


class Serving(Table):
    """How the server answers: address, context, caches, batches, threads, sampling defaults."""

    host: Host | None = _optional("address to listen on")
    port: Port | None = _optional("TCP port")
    alias: Text | None = _optional("model name that clients see")
    ctx_size: Count | None = _optional("context in tokens; 0 = as trained")
    n_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = _optional(
        "most tokens generated for one request; -1 = no limit"
    )
    n_parallel: Positive | None = _optional("slots")
    kv_unified: bool | None = _optional("one KV pool for all slots")
    cache_type_k: KvType | None = _optional("KV cache type of K")
    cache_type_v: KvType | None = _optional("KV cache type of V")
    n_batch: Positive | None = _optional("logical batch in tokens")
    n_ubatch: Positive | None = _optional("physical batch in tokens")
    threads: Positive | Literal["physical"] | None = _optional(
        "generation threads; `physical` = one per physical core"
    )
    threads_batch: Positive | Literal["physical"] | None = _optional("prompt threads")
    threads_http: Positive | None = _optional("HTTP threads")
    poll: Annotated[int, Field(ge=0, le=100)] | None = _optional(
        "busy waiting of threads, 0 to 100"
    )
    load_mode: Literal["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"] | None = _optional(
        "how weights get into memory; `mlock` means locked and not mapped"
    )
    flash_attn: Literal["on", "off", "auto"] | None = _optional("flash attention")
    ctx_checkpoints: Count | None = _optional("context snapshots per slot, in RAM")
    checkpoint_spacing: Count | None = _optional("least tokens between two snapshots")
    cache_ram_mib: FromMinusOne | None = _optional("host prompt cache in MiB; 0 off, -1 no limit")
    cache_reuse: Count | None = _optional("smallest chunk that is reused by shifting, in tokens")
    cache_prompt: bool | None = _optional("keep prompts for later requests")
    context_shift: bool | None = _optional("drop old tokens when the context is full")
    reasoning: Literal["on", "off", "auto"] | None = _optional("thinking in chats")
    reasoning_format: Literal["none", "deepseek", "deepseek-legacy", "auto"] | None = _optional(
        "how thoughts are returned"
    )
    reasoning_budget: FromMinusOne | None = _optional("thinking tokens; -1 no limit, 0 none")
    reasoning_effort: Text | None = _optional(
        "effort passed to the chat template: `low`, `medium`, `high`"
    )
    reasoning_budget_message: Text | None = _optional("text inserted when the budget is spent")
    jinja: bool | None = _optional("Jinja chat templates (tool calls need it)")
    chat_template: Text | None = _optional("name of a built-in chat template")
    chat_template_kwargs: Annotated[dict[Name, Any], AfterValidator(_only_json)] | None = _optional(
        "arguments given to the chat template"
    )
    metrics: bool | None = _optional("Prometheus endpoint of the server")
    slots: bool | None = _optional("slots endpoint")
    warmup: bool | None = _optional("empty run before the first request")
    temp: Annotated[float, Field(ge=0.0, le=10.0)] | None = _optional("temperature")
    top_k: Count | None = _optional("top-k; 0 off")
    top_p: Probability | None = _optional("top-p; 1.0 off")
    min_p: Probability | None = _optional("min-p; 0.0 off")
    repeat_penalty: Annotated[float, Field(ge=0.0, le=10.0)] | None = _optional(
        "repeat penalty; 1.0 off"
    )
    presence_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] | None = _optional(
        "presence penalty; 0.0 off"
    )
    seed: FromMinusOne | None = _optional("sampling seed; -1 random")
    timeout_s: Positive | None = _optional("read and write timeout of the server")
    sleep_idle_s: Positive | None = _optional(
        "unload the model after so many seconds without a request"
    )
    api_key_file: Text | None = _optional(
        "file with API keys; passed as a credential, never written into the unit"
    )
    log_verbosity: Annotated[int, Field(ge=0, le=5)] | None = _optional(
        "0 to 5; 4 shows memory and placement"
    )
    slot_save_path: Text | None = _optional("folder for saved slots")


class Speculation(Table):
    """How tokens are drafted ahead."""

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that draft, each by itself; empty where nothing does or the key is not set."""
        return frozenset((self.type or "off").split(",")) - {"off"}

    type: (
        Literal[
            "off",
            "mtp",
            "dflash",
            "dspark",
            "eagle3",
            "draft",
            "ngram-simple",
            "ngram-map-k",
            "ngram-map-k4v",
            "ngram-mod",
            "ngram-cache",
            "suffix",
            "copyspec",
            "recycle",
        ]
        | BuildsWords
        | None
    ) = _optional(
        "kind of speculation; several separated by commas; a kind that only the build knows "
        "in the build's own words"
    )
    n_max: Annotated[int, Field(ge=1, le=64)] | None = _optional("most tokens drafted per step")
    n_min: Annotated[int, Field(ge=0, le=64)] | None = _optional("shorter drafts are thrown away")
    p_min: Probability | None = _optional(
        "drafting stops below this probability; 0.0 drafts everything"
    )
    draft_model: Text | None = _optional(
        "draft model file, if the kind needs one; with mtp a file that has its block, where the model's own has none"
    )
    draft_hf_repo: Text | None = _optional("where that file can be fetched from")
    cache_type_k: KvType | None = _optional("KV cache type of K of the draft context")
    cache_type_v: KvType | None = _optional("KV cache type of V of the draft context")
    n_gpu_layers: Count | Literal["all", "auto"] | None = _optional(
        "layers of the draft model on the GPU"
    )
    cpu_moe: bool | None = _optional("all experts of the drafter on the CPU")
    n_cpu_moe: Count | None = _optional("layers of the drafter whose experts stay on the CPU")
    override_tensor: Texts | None = _optional("placement rules REGEX=BUFFER of the drafter")
    n_ubatch: Positive | None = _optional("physical batch of the draft context")
    ctx_size: Count | None = _optional("context of the draft model")
    cross_ctx: Positive | None = _optional("hidden states that a DFlash drafter sees")
    adaptive: bool | None = _optional("let the engine adapt the draft depth (BeeLlama)")
    backend_sampling: bool | None = _optional("sample drafts on the GPU")
    sampling: Literal["greedy", "probabilistic"] | None = _optional(
        "how drafts are drawn; probabilistic ones are verified by rejection"
    )
    ngram_size_n: Positive | None = _optional("length of the n-gram that is looked up")
    ngram_size_m: Positive | None = _optional("tokens drafted after a hit")
    ngram_min_hits: Positive | None = _optional("hits needed before drafting")


class Memory(Table):
    """What lives where."""

    fit_mib: Count | None = _optional(
        "VRAM in MiB that the engine's own fit leaves free on each GPU"
    )
    fit: bool | None = _optional("false turns the engine's own fit off")
    n_gpu_layers: Count | Literal["all", "auto"] | None = _optional(
        "layers on the GPU; but for `auto` fit places nothing"
    )
    n_cpu_moe: Count | None = _optional("layers whose experts stay on the CPU; fit places nothing")
    cpu_moe: bool | None = _optional("all experts on the CPU; fit places nothing")
    n_cpu_ffn: Count | None = _optional("layers whose dense FFN stays on the CPU")
    moe_cache_mib: Count | None = _optional("GPU cache for experts on the CPU, MiB")
    override_tensor: Texts | None = _optional("placement rules REGEX=BUFFER; fit places nothing")
    device: Text | None = _optional("devices to use, as the engine names them")
    main_gpu: Count | None = _optional("index of the main GPU")
    split_mode: Literal["none", "layer", "row", "tensor", "attn", "graph"] | None = _optional(
        "how several GPUs share the model"
    )
    kv_offload: bool | None = _optional("KV cache on the GPU")


class Published(Table):
    """Numbers that a write-up claims for this profile, to compare with your own."""

    source: Text | None = _optional("which write-up")
    date: Text | None = _optional("when")
    card: Text | None = _optional("which card")
    engine: Text | None = _optional("which build")
    tok_s: NotNegative | None = _optional("decode, tokens a second")
    tok_s_min: NotNegative | None = _optional("lowest of a range")
    tok_s_max: NotNegative | None = _optional("highest of a range")
    acceptance_ratio: Probability | None = _optional("accepted / drafted")
    wall_s: NotNegative | None = _optional("wall time of the bench")
    prefill_ms: NotNegative | None = _optional("prompt time")
    prefill_tokens: Count | None = _optional("prompt length of `prefill_ms`")
    context: Count | None = _optional("context in tokens")
    vram_mib: Count | None = _optional("VRAM in use")
    by_engine: dict[Name, dict[Name, float]] | None = _optional(
        "the same figures per engine family"
    )
    by_kind: dict[Name, dict[Name, dict[Name, float]]] | None = _optional(
        "per engine family and kind of prompt: predicted, draft, accepted, rate, tok_s"
    )
    by_length: dict[Name, dict[Name, float]] | None = _optional("per output length: tok_s, wall_ms")
    by_depth: dict[Name, dict[Name, float]] | None = _optional(
        "per tokens in the context: tok_s and acceptance_ratio, or tok_s_min and the like"
    )


class EngineOverride(Table):
    """What differs on one engine family or one named engine."""

    model: Model | None = None
    serving: Serving | None = None
    speculation: Speculation | None = None
    memory: Memory | None = None
    environment: dict[Name, Variable] | None = None
    extra_args: Annotated[tuple[str, ...], Field(strict=False)] | None = None


class Range(Table):
    """Values that a sweep may try for one key."""

    values: Annotated[tuple[Any, ...], Field(strict=False), AfterValidator(_only_json)] | None = (
        None
    )
    min: float | None = None
    max: float | None = None
    step: float | None = None


_P_MIN = "speculation.p_min"
_STEPS: Mapping[str, float] = {
    "speculation.n_max": 1,
    _P_MIN: 0.05,
    "memory.fit_mib": 64,
    "serving.threads": 1,
}
_DOUBLING = frozenset({"serving.n_ubatch", "serving.n_batch"})
_MOST_VALUES = 512


def values_of(key: str, given: Range) -> tuple[Any, ...]:
    """The values of a range, ascending where they are numbers.

    Raises:
        ValueError: it names none, or too many.
    """
    if given.values is not None:
        if not given.values:
            raise ValueError("a list with at least one value")
        listed = (tuple(one) if isinstance(one, list) else one for one in given.values)
        return tuple(dict.fromkeys(listed))
    if given.min is None or given.max is None or given.max < given.min:
        raise ValueError("`values`, or `min` and a `max` that is not below it")
    if key in _DOUBLING and given.step is None:
        return tuple(_doubled(given.min, given.max))
    step = given.step if given.step is not None else _STEPS.get(key)
    if not step or step < 0:
        raise ValueError("a range of this key with a `step` above 0")
    count = math.floor((given.max - given.min) / step + 1e-9) + 1
    if count > _MOST_VALUES:
        raise ValueError(f"at most {_MOST_VALUES} values; these are {count}")
    numbers = [given.min + step * at for at in range(count)]
    if all(float(one).is_integer() for one in (given.min, step)) and key != _P_MIN:
        return tuple(int(one) for one in numbers)
    return tuple(round(one, 6) for one in numbers)


def _doubled(least: float, most: float) -> Iterator[int]:
    value = max(1, int(least))
    while value <= most:
        yield value
        value *= 2


def _listed(value: Any) -> Any:
    """A list of values is short for a table with them."""
    return {"values": value} if isinstance(value, list | tuple) else value


class ProfileFile(Table):
    """A whole profile file."""

    description: Text | None = _optional("one line for `profiles list`")
    extends: Name | None = _optional("profile whose values come first")
    match: Match = Match()
    model: Model = Model()
    engine: EnginePreference = EnginePreference()
    serving: Serving = Serving()
    speculation: Speculation = Speculation()
    memory: Memory = Memory()
    engines: dict[Name, EngineOverride] = Field(
        default_factory=dict, description="overrides by engine family or name"
    )
    environment: dict[Name, Variable] = Field(
        default_factory=dict, description="environment of the server"
    )
    extra_args: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="more arguments, passed as they are and marked as the user's own"
    )
    sweep: dict[Text, Annotated[Range, BeforeValidator(_listed)]] = Field(
        default_factory=dict,
        description="values that a sweep may try, by key: a list, or `{ min, max, step }`; `gpu.power_limit_w` is "
        "measured with the winner, and never kept",
    )
    workload: Name | WorkloadTable | None = _optional(
        "name of a workload, or a table with its classes of requests"
    )
    published: Published = Published()
    pin: dict[Text, Any] = Field(
        default_factory=dict,
        description="keys and values that neither the tuned layer nor a sweep may change",
    )


LEAVE_TO_ENGINE = "default"
POWER_LIMIT = "gpu.power_limit_w"
"""What a sweep may try beside the keys of a profile: a setting of the card, which no profile keeps."""
SECTIONS = ("match", "model", "engine", "serving", "speculation", "memory")


def check_file(source: str, data: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Every mistake in one profile file; empty if there is none."""
    problems = list(validate(source, _without_defaults(data)))
    sweep = data.get("sweep", {})
    if isinstance(sweep, Mapping):
        keys = [key for key in sweep if key != POWER_LIMIT]
        problems.extend(_unknown_keys(source, "sweep", keys))
        for key in sweep:
            if key == POWER_LIMIT or key in all_keys():
                problems.extend(wrong_values(source, key, sweep[key]))
    pins = data.get("pin", {})
    if not isinstance(pins, Mapping):
        return (*problems, Problem(source, "pin", shown(pins), "a table of keys"))
    flat = flatten(pins)
    known = {key: value for key, value in flat.items() if key.partition(".")[0] in SECTIONS}
    problems.extend(_unknown_keys(source, "pin", _inner_keys(flat, known)))
    problems.extend(
        Problem(source, f"pin.{problem.key}", problem.found, problem.allowed, problem.nearest)
        for problem in validate(source, _without_defaults(nest(known)))
    )
    return tuple(problems)


def wrong_values(source: str, key: str, given: Any) -> Iterator[Problem]:
    """What a range holds that the key cannot have."""
    place = f"sweep.{key}"
    try:
        values = values_of(key, Range.model_validate(_listed(given)))
    except ValidationError:
        return  # told by the schema
    except ValueError as error:
        yield Problem(source, place, shown(given), str(error))
        return
    for value in () if key == POWER_LIMIT else values:  # of which the card decides
        one = [value] if key == "engine.prefer" else value
        for problem in validate(source, _without_defaults(nest({key: one}))):
            yield Problem(source, place, problem.found, problem.allowed, problem.nearest)


def _inner_keys(flat: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are not known, down to those of a table whose name is not."""
    for key, value in flat.items():
        if key not in known and isinstance(value, Mapping) and value:
            yield from (f"{key}.{inner}" for inner in value)
        elif key not in known:
            yield key


def _unknown_keys(source: str, table: str, keys: Iterable[str]) -> Iterator[Problem]:
    """Those of the dotted keys in a table that no profile knows."""
    known = all_keys()
    for key in keys:
        if key not in known:
            yield Problem(source, f"{table}.{key}", "an unknown key",
                          "a dotted key such as speculation.n_max", nearest_name(key, known))  # fmt: skip


def validate(source: str, data: Mapping[str, Any]) -> Iterable[Problem]:
    """The mistakes that the schema sees, one per key."""
    try:
        ProfileFile.model_validate(dict(data))
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for entry in error.errors(include_url=False):
            problem = problem_of(ProfileFile, source, dict(entry), every=all_keys())
            before = found.setdefault(problem.key, problem)
            if problem.allowed not in before.allowed:
                # every branch of a union complains about the same key
                allowed = f"{before.allowed}, or {problem.allowed}"
                found[problem.key] = replace(before, allowed=allowed)
        yield from innermost(found.values())


def _without_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data without pins and without values that are left to the engine."""
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if key == "pin":
            continue
        if key in SECTIONS and isinstance(value, Mapping):
            kept[key] = {k: v for k, v in value.items() if not is_left_to_engine(f"{key}.{k}", v)}
        elif key == "engines" and isinstance(value, Mapping):
            kept[key] = {
                name: _without_defaults(override) if isinstance(override, Mapping) else override
                for name, override in value.items()
            }
        else:
            kept[key] = value
    return kept


def is_left_to_engine(key: str, value: object) -> bool:
    """Whether this value of a known key means that the engine's own default shall hold."""
    return value == LEAVE_TO_ENGINE and key in all_keys()


def flatten(data: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of the sections and of the environment; everything else under its own name.

    A `[pin]` table may be written in both ways: nested, or with quoted dotted keys.
    """
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if key in {*SECTIONS, "environment"} and isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": inner_value for inner, inner_value in value.items()})
        else:
            flat[key] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        head, dot, rest = key.partition(".")
        if dot and head in {*SECTIONS, "environment"}:
            nested.setdefault(head, {})[rest] = value
        else:
            nested[key] = value
    return nested


def all_keys() -> tuple[str, ...]:
    """Every dotted key that a profile may set."""
    return tuple(
        f"{section}.{field}"
        for section in SECTIONS
        for field in (
            table_in(ProfileFile.model_fields[section].annotation) or ProfileFile
        ).model_fields
    )
