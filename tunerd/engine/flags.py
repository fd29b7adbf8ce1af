"""How profile keys are spelled as llama-server flags: one table for every dialect, with one row a key but for n-gram kinds.

A row names the spellings in order of preference; the first that the build takes is used, so an
unknown build is served by its flags and never by its name. What needs more than a spelling
(load mode, fit, the kind of speculation) is in `commandline`; the same rows are read backwards by
`importer`. A flag that needs nothing but a spelling is one row here and one key of the schema.

Source: captured help texts of seven builds, and a dry run of each flag on each of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tunerd.words import digest


class Reach(StrEnum):
    """What a difference of two servers reaches.

    SAMPLING shows only where a request leaves the choice of tokens to the server. UNKNOWN is a flag or variable
    that tunerd knows nothing of.
    """

    TEXT = "text"
    SAMPLING = "sampling"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KeyFlag:
    """How one key is spelled: a flag with a value behind it, or a switch with what switches it off.

    `off` is None where a value follows, and empty of a switch that no build has an opposite of; a switch's
    `default` is what every known build does without any flag, None where builds differ, so that a missing
    spelling is an error and not an assumption. Where a build wants `on` or `off` behind a switch, that is what
    it gets. `shorts` are other spellings, each with the one that stands for it. `reach` says what of an answer
    another value may change, None for nothing but speed; not `is_compared` is how a server is reached and where
    files lie, which have an identity of their own.
    """

    key: str
    on: tuple[str, ...]
    off: tuple[str, ...] | None
    default: bool | None
    shorts: tuple[tuple[str, str], ...]
    show: Callable[[object], str]
    reach: Reach | None
    is_compared: bool

    @property
    def spellings(self) -> tuple[str, ...]:
        """All of them but the short ones."""
        return (*self.on, *(self.off or ()))


def number(value: object) -> str:
    """Without an exponent, which not every build reads."""
    text = str(value)
    return f"{value:.12f}".rstrip("0") if isinstance(value, float) and "e" in text else text


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _comma_list(value: object) -> str:
    return ",".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)


def _flag(
    key: str,
    *words: str,
    off: str | None = None,
    default: bool | None = None,
    show: Callable[[object], str] = str,
    reach: Reach | None = None,
    is_compared: bool = True,
) -> KeyFlag:
    """A row; each of `words` is a spelling, with the shorter ones that stand for it behind it."""
    split = [one.split() for one in (*words, off or "")]
    shorts = tuple((short, one[0]) for one in split for short in one[1:])
    *ons, offs = (tuple(one[:1]) for one in split)
    on = tuple(word for one in ons for word in one)
    return KeyFlag(
        key, on, None if off is None else offs, default, shorts, show, reach, is_compared
    )


# In the order in which an administrator reads a command line: what, where, how big, how fast.
SERVING_FLAGS: tuple[KeyFlag, ...] = (
    _flag("serving.alias", "--alias -a", is_compared=False),
    _flag("serving.host", "--host", is_compared=False),
    _flag("serving.port", "--port", is_compared=False),
    _flag("serving.ctx_size", "--ctx-size -c"),
    _flag("serving.n_predict", "--predict -n", "--n-predict", reach=Reach.TEXT),
    _flag("serving.n_parallel", "--parallel -np"),
    _flag("serving.kv_unified", "--kv-unified -kvu", off="--no-kv-unified -no-kvu", default=None),
    _flag("serving.flash_attn", "--flash-attn -fa"),
    _flag("serving.cache_type_k", "--cache-type-k -ctk", reach=Reach.TEXT),
    _flag("serving.cache_type_v", "--cache-type-v -ctv", reach=Reach.TEXT),
    _flag("serving.n_batch", "--batch-size -b"),
    _flag("serving.n_ubatch", "--ubatch-size -ub"),
    _flag("serving.threads", "--threads -t"),
    _flag("serving.threads_batch", "--threads-batch -tb"),
    _flag("serving.threads_http", "--threads-http"),
    _flag("serving.poll", "--poll"),
    _flag("serving.ctx_checkpoints", "--ctx-checkpoints -ctxcp --swa-checkpoints -ctx-ckpt"),
    _flag(
        "serving.checkpoint_spacing",
        "--checkpoint-min-step -cms",
        "--checkpoint-every-n-tokens -cpent",
        "--ctx-checkpoints-interval -ctx-ckpt-i",
    ),
    _flag("serving.cache_ram_mib", "--cache-ram -cram"),
    _flag("serving.cache_reuse", "--cache-reuse"),
    _flag("serving.context_shift", "--context-shift", off="--no-context-shift", default=None),
    _flag("serving.cache_prompt", "--cache-prompt", off="--no-cache-prompt", default=True),
    _flag("serving.warmup", "--warmup", off="--no-warmup", default=True),
    _flag("serving.jinja", "--jinja", off="--no-jinja", default=None, reach=Reach.TEXT),
    _flag("serving.chat_template", "--chat-template", reach=Reach.TEXT),
    _flag("model.chat_template_file", "--chat-template-file", reach=Reach.TEXT, is_compared=False),
    _flag("serving.chat_template_kwargs", "--chat-template-kwargs", show=_json, reach=Reach.TEXT),
    _flag("model.mmproj", "--mmproj -mm", reach=Reach.TEXT, is_compared=False),
    _flag("serving.reasoning", "--reasoning -rea", reach=Reach.TEXT),
    _flag("serving.reasoning_format", "--reasoning-format", reach=Reach.TEXT),
    _flag("serving.reasoning_budget", "--reasoning-budget", reach=Reach.TEXT),
    _flag("serving.reasoning_effort", "--reasoning-effort", reach=Reach.TEXT),
    _flag("serving.reasoning_budget_message", "--reasoning-budget-message", reach=Reach.TEXT),
    _flag("serving.temp", "--temp --temperature", show=number, reach=Reach.SAMPLING),
    _flag("serving.top_k", "--top-k", reach=Reach.SAMPLING),
    _flag("serving.top_p", "--top-p", show=number, reach=Reach.SAMPLING),
    _flag("serving.min_p", "--min-p", show=number, reach=Reach.SAMPLING),
    _flag("serving.repeat_penalty", "--repeat-penalty", show=number, reach=Reach.SAMPLING),
    _flag("serving.presence_penalty", "--presence-penalty", show=number, reach=Reach.SAMPLING),
    _flag("serving.seed", "--seed -s", reach=Reach.SAMPLING),
    _flag("serving.timeout_s", "--timeout -to"),
    _flag("serving.sleep_idle_s", "--sleep-idle-seconds", is_compared=False),
    _flag("serving.api_key_file", "--api-key-file", is_compared=False),
    _flag("serving.slot_save_path", "--slot-save-path"),
    _flag("serving.metrics", "--metrics", off="", default=False),
    _flag("serving.slots", "--slots", off="--no-slots", default=True),
    _flag("serving.log_verbosity", "--log-verbosity -lv --verbosity"),
)

PLACEMENT_FLAGS: tuple[KeyFlag, ...] = (
    _flag("memory.n_gpu_layers", "--n-gpu-layers -ngl", "--gpu-layers"),
    _flag("memory.cpu_moe", "--cpu-moe -cmoe", off="", default=False),
    _flag("memory.n_cpu_moe", "--n-cpu-moe -ncmoe"),
    _flag("memory.n_cpu_ffn", "--n-cpu-ffn -ncffn"),
    _flag("memory.override_tensor", "--override-tensor -ot", show=_comma_list),
)

GPU_FLAGS: tuple[KeyFlag, ...] = (
    _flag("memory.device", "--device -dev"),
    _flag("memory.main_gpu", "--main-gpu -mg"),
    _flag("memory.split_mode", "--split-mode -sm"),
    _flag("memory.moe_cache_mib", "--moe-cache-mib"),
    _flag("memory.kv_offload", "--kv-offload -kvo", off="--no-kv-offload -nkvo", default=True),
)

DRAFT_FLAGS: tuple[KeyFlag, ...] = (
    _flag("speculation.draft_model", "--model-draft -md --spec-draft-model", is_compared=False),
    _flag("speculation.cache_type_k", "--cache-type-k-draft -ctkd", "--spec-draft-type-k"),
    _flag("speculation.cache_type_v", "--cache-type-v-draft -ctvd", "--spec-draft-type-v"),
    _flag("speculation.n_ubatch", "--spec-draft-n-ubatch"),
    _flag("speculation.ctx_size", "--ctx-size-draft -cd", "--spec-draft-ctx-size"),
    _flag("speculation.sampling", "--spec-draft-sampling", reach=Reach.SAMPLING),
    _flag(
        "speculation.backend_sampling",
        "--spec-draft-backend-sampling",
        off="--no-spec-draft-backend-sampling",
        default=None,
    ),
)

DRAFT_GPU_FLAGS: tuple[KeyFlag, ...] = (
    _flag(
        "speculation.n_gpu_layers",
        "--n-gpu-layers-draft -ngld --spec-draft-ngl",
        "--gpu-layers-draft",
    ),
    _flag(
        "speculation.cpu_moe",
        "--spec-draft-cpu-moe -cmoed --cpu-moe-draft",
        off="",
        default=False,
    ),
    _flag(
        "speculation.n_cpu_moe",
        "--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed",
        "--n-cpu-moe-draft",
    ),
    _flag(
        "speculation.override_tensor",
        "--spec-draft-override-tensor -otd",
        "--override-tensor-draft",
        show=_comma_list,
    ),
)

# How deep a drafter goes; where a build has a flag for it at all.
DEPTH_FLAGS: tuple[KeyFlag, ...] = (
    _flag("speculation.n_max", "--spec-draft-n-max", "--draft-max --draft --draft-n", show=number),
    _flag("speculation.n_min", "--spec-draft-n-min", "--draft-min --draft-n-min", show=number),
    _flag("speculation.p_min", "--spec-draft-p-min", "--draft-p-min", show=number),
    _flag("speculation.cross_ctx", "--spec-dflash-cross-ctx", show=number),
)


def ngram_flags(kind: str) -> tuple[KeyFlag, ...]:
    """Sizes of an n-gram kind; the older builds have one set of flags for all of them."""
    if kind == "ngram-mod":
        return (
            _flag("speculation.n_max", "--spec-ngram-mod-n-max", "--draft-max"),
            _flag("speculation.n_min", "--spec-ngram-mod-n-min", "--draft-min"),
            _flag("speculation.ngram_size_n", "--spec-ngram-mod-n-match", "--spec-ngram-size-n"),
        )
    return tuple(
        _flag(f"speculation.ngram_{name}", f"--spec-{kind}-{word}", f"--spec-ngram-{word}")
        for name, word in (("size_n", "size-n"), ("size_m", "size-m"), ("min_hits", "min-hits"))
    )


# Flags that need more than a spelling, by the key that owns them: `extra_args` may not repeat them.
_RENDERED_ELSEWHERE: Mapping[str, str] = {
    "model.path": "-m --model",
    "serving.load_mode": "-lm --load-mode --mlock --mmap --no-mmap -dio --direct-io -ndio --no-direct-io",
    "memory.fit": "-fit --fit",
    "memory.fit_mib": "-fitt --fit-target --fit-margin",
    "speculation.type": "--spec-type -mtp --multi-token-prediction -no-mtp --no-multi-token-prediction",
    "speculation.adaptive": "--spec-dm-adaptive --no-spec-dm-adaptive",
    "serving.api_key_file": "--api-key",
}

PLAIN_FLAGS: tuple[KeyFlag, ...] = (
    *SERVING_FLAGS,
    *PLACEMENT_FLAGS,
    *GPU_FLAGS,
    *DRAFT_FLAGS,
    *DRAFT_GPU_FLAGS,
)
FLAG_ROWS = (*PLAIN_FLAGS, *DEPTH_FLAGS)
_SHORT = {short: long for row in FLAG_ROWS for short, long in row.shorts}
_OWNERS = {
    **{word: key for key, words in _RENDERED_ELSEWHERE.items() for word in words.split()},
    **{word: row.key for row in FLAG_ROWS for word in (*row.spellings, *dict(row.shorts))},
}
_NGRAM_KINDS = ("ngram-mod", "ngram-simple", "ngram-map-k", "ngram-map-k4v")  # others have no sizes
# Known for what they mean, and compared as they stand, as evidence of units that have them was.
_AS_THEY_STAND = frozenset({"--draft", "--draft-n", "--draft-n-min"})
_SPELLINGS = {row.key: frozenset(row.spellings) for row in PLAIN_FLAGS}
_MODEL = "model.path"
REACHES = {_MODEL: Reach.TEXT, **{row.key: row.reach for row in PLAIN_FLAGS if row.reach}}
NOT_COMPARED = frozenset({_MODEL, *(row.key for row in PLAIN_FLAGS if not row.is_compared)})

_SECRET_VARIABLE = re.compile(
    r"(^|_)(API_?KEYS?|ACCESS_KEY|TOKENS?|PASSWORD|PASSWD|PASSPHRASE|SECRETS?|CREDENTIALS?)($|_)",
    re.IGNORECASE,
)
_FLAG = re.compile(r"-+[^\W\d_]")
SECRET_FLAGS = frozenset({"--api-key", "--hf-token", "-hft", "--hf-token-draft"})


def spellings_of_keys() -> dict[str, tuple[str, ...]]:
    """The flags by which builds take a key, or that it stands for."""
    found: dict[str, dict[str, None]] = {}
    for row in (*FLAG_ROWS, *(row for kind in _NGRAM_KINDS for row in ngram_flags(kind))):
        found.setdefault(row.key, {}).update(dict.fromkeys(row.spellings))
    for key, words in _RENDERED_ELSEWHERE.items():
        names = (word for word in words.split() if word not in SECRET_FLAGS)
        found.setdefault(key, {}).update(dict.fromkeys(names))
    return {key: tuple(spellings) for key, spellings in found.items()}


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name holds something that nobody may see."""
    return _SECRET_VARIABLE.search(name) is not None


def is_flag(word: str) -> bool:
    """Whether it begins with dashes and a letter: `-1` and `-.5` are values."""
    return _FLAG.match(word) is not None


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


_HOW_REACHED = frozenset(
    {"LLAMA_ARG_HOST", "LLAMA_ARG_PORT", "LLAMA_ARG_ALIAS", "LLAMA_ARG_MODEL_ALIAS",
     "LLAMA_ARG_API_KEY", "LLAMA_API_KEY"}
)  # fmt: skip
_VARIABLES_NOT_COMPARED = _HOW_REACHED | {"GGML_NO_BACKTRACE", "LLAMA_ARG_MODEL", "HF_TOKEN"}
# Variables that engines, their libraries and drivers read; only these are kept as they are.
_ENGINE_VARIABLES = ("CUDA_", "GGML_", "GOMP_", "HIP_", "KMP_", "LLAMA_", "OMP_", "VK_")
_HASHED = "sha256:"
_HASH_DIGITS = 16


def arguments_sha256(
    argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> str | None:
    """One hash over the arguments and variables that change what a server does.

    Left out are the program itself (its identity is a part of its own), the address, port and alias
    (how it is reached), API keys (they are secrets, and change nothing), and the paths of model
    and template files (their contents are parts of their own). The order of flags does not matter, that of
    values of one flag does.

    Args:
        argv: The whole argument vector, program first.
        environment: The variables that the unit sets; None or empty where it sets none.

    Returns:
        None for an empty vector: nothing is known about the arguments.
    """
    if not argv:
        return None
    variables = sorted(compared_environment(environment or {}).items())
    return digest({"arguments": compared_arguments(argv), "environment": variables})


def compared_arguments(argv: Sequence[str]) -> list[list[str]]:
    """The arguments that count, in a normal spelling: each flag with its values, flags in order."""
    kept = [group for group in argument_groups(argv) if _matters(group[0])]
    return sorted(kept, key=lambda group: group[0])


def argument_groups(argv: Sequence[str]) -> list[list[str]]:
    """All arguments as they come, in a normal spelling: each flag with its values."""
    groups: list[list[str]] = []
    for word in argv[1:]:
        if is_flag(word) or not groups:
            groups.append([word if word in _AS_THEY_STAND else normal_spelling(word)])
        else:
            groups[-1].append(word)
    return groups


def compared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that count, as they may be kept: values that may be secrets as their hash."""
    return {
        name: value
        if name.startswith(_ENGINE_VARIABLES) or value.startswith(_HASHED)
        else _HASHED + digest(value)[:_HASH_DIGITS]
        for name, value in environment.items()
        if name not in _VARIABLES_NOT_COMPARED
    }


def without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """Arguments as they may be kept and shown: keys and tokens given in plain text are left out."""
    flags = ("", *(normal_spelling(word) for word in words))
    return tuple(
        "[secret]" if flag in SECRET_FLAGS else word
        for flag, word in zip(flags, words, strict=False)
    )


def argument_changes(then: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """What differs between the arguments of two command lines, in words: `--ctx-size 8192 -> 16384`."""
    old, new = _by_flag(then), _by_flag(now)
    return tuple(
        f"{flag} {old[flag]} -> {new[flag]}"
        if flag in old and flag in new
        else f"{flag} {(old.get(flag) or new.get(flag, ''))}".strip()
        + (" added" if flag in new else " removed")
        for flag in sorted({*old, *new})
        if old.get(flag) != new.get(flag)
    )


def _matters(flag: str) -> bool:
    return flag not in SECRET_FLAGS and owner_of(flag) not in NOT_COMPARED


def _joined(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Values by name, those of a name that comes again behind each other."""
    found: dict[str, str] = {}
    for name, value in pairs:
        found[name] = f"{found[name]}; {value}" if name in found else value
    return found


def _by_flag(argv: Sequence[str]) -> dict[str, str]:
    return _joined((flag, " ".join(values)) for flag, *values in compared_arguments(argv))


# How the flags of samplers begin that no key of a profile renders.
_SAMPLING_FLAGS = (
    "--adaptive-", "--backend-sampling", "--dry-", "--dynatemp-", "--frequency-penalty",
    "--logit-bias", "--mirostat", "--repeat-last-n", "--sampl", "--top-n", "--typical", "--xtc-",
)  # fmt: skip
_DRAFT_FLAGS = ("--draft-", "--spec-")
# By its name a variable of an engine may stand for any flag.
_VARIABLE = "LLAMA_"
_SWITCHES = frozenset(row.key for row in SERVING_FLAGS if row.off is not None)


@dataclass(frozen=True, slots=True)
class OutputChange:
    """One difference that may change answers; `before` and `after` are None for the engine's default."""

    what: str
    before: str | None
    after: str | None
    reach: Reach = Reach.TEXT

    @property
    def text(self) -> str:
        """In words: `serving.cache_type_k q8_0 -> q4_0`."""
        before, after = (value if value is not None else "(not set)"
                         for value in (self.before, self.after))  # fmt: skip
        return f"{self.what} {before} -> {after}"


@dataclass(frozen=True, slots=True)
class Answering:
    """What decides how a server answers: its engine's name, its arguments, program first, and variables."""

    engine: str
    argv: Sequence[str]
    environment: Mapping[str, str]


def output_changes(one: Answering, other: Answering) -> tuple[OutputChange, ...]:
    """Every difference that may change answers, in order of its name.

    Builds differ in templates and in how they read calls of tools, so another engine is one. What no
    table knows (`extra_args`) counts as one too, since nobody said that it is harmless.
    """
    found = []
    if one.engine != other.engine:
        found.append(OutputChange("engine", one.engine, other.engine))
    for then, now, reach_of in (
        (_by_key(one.argv), _by_key(other.argv), _reach),
        (_variables(one.environment), _variables(other.environment), lambda _: Reach.UNKNOWN),
    ):
        for what in sorted({*then, *now}):
            reach = reach_of(what)
            if reach is not None and then.get(what) != now.get(what):
                found.append(OutputChange(what, then.get(what), now.get(what), reach))
    return tuple(found)


def changes_sampling(changes: Sequence[OutputChange]) -> bool:
    """Whether one of them shows only where the server chooses tokens by its own settings."""
    return any(change.reach is Reach.SAMPLING for change in changes)


def change_words(changes: Sequence[OutputChange]) -> str:
    """The differences in words."""
    return "; ".join(change.text for change in changes)


def _by_key(argv: Sequence[str]) -> dict[str, str]:
    """Values by profile key, or by flag where no key renders it: builds spell a key differently."""
    groups = ((owner_of(flag) or flag, flag, values) for flag, *values in argument_groups(argv))
    return _joined(
        (key, flag if key in _SWITCHES else " ".join(values) or "on")
        for key, flag, values in groups
    )


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_VARIABLE) and name not in _HOW_REACHED
    }


def _reach(key: str) -> Reach | None:
    # Of speculation nothing counts: a draft is kept only where the model itself says the same.
    if key in REACHES:
        return REACHES[key]
    if key.startswith(_SAMPLING_FLAGS):
        return Reach.SAMPLING
    is_flag = key.startswith("-")
    is_harmless = not is_flag or key in SECRET_FLAGS or key.startswith(_DRAFT_FLAGS)
    return None if is_harmless else Reach.UNKNOWN
