"""How profile keys become llama-server flags: one table for every dialect, and the command line that it gives.

A row names the spellings in order of preference; the first that the build takes is used, so an
unknown build is served by its flags and never by its name. There is one row a key but for n-gram kinds. What needs
more than a spelling (load mode, fit, the kind of speculation) is in the renderer; the same rows are read backwards
by `importer`. A flag that needs nothing but a spelling is one row here and one key of the schema.

Source: captured help texts of seven builds, and a dry run of each flag on each of them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tunerd.engine.capabilities import Capabilities, FitStyle, SpecStyle
from tunerd.profile.layers import Layer, Origin, Resolved, Setting
from tunerd.profile.schema import SPEC_WORDS
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
        "--spec-draft-cpu-moe -cmoed",
        "--cpu-moe-draft",
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


# Until builds had a depth for each kind, this one bounded the drafts of every kind.
# Source: ngram-simple and ngram-map-k on the builds of April (mainline) and June 2026 (ik).
_DEPTH_OF_ALL = (
    _flag("speculation.n_max", "--draft-max"),
    _flag("speculation.n_min", "--draft-min"),
)


def ngram_flags(kind: str) -> tuple[KeyFlag, ...]:
    """Sizes of an n-gram kind; the older builds have one set of flags for all of them."""
    if kind == "ngram-mod":
        return (
            _flag("speculation.n_max", "--spec-ngram-mod-n-max", "--draft-max"),
            _flag("speculation.n_min", "--spec-ngram-mod-n-min", "--draft-min"),
            _flag("speculation.ngram_size_n", "--spec-ngram-mod-n-match", "--spec-ngram-size-n"),
        )
    if kind == "ngram-cache":  # takes the sizes of the others, and drafts the same
        return _DEPTH_OF_ALL
    sizes = tuple(
        _flag(f"speculation.ngram_{name}", f"--spec-{kind}-{word}", f"--spec-ngram-{word}")
        for name, word in (("size_n", "size-n"), ("size_m", "size-m"), ("min_hits", "min-hits"))
    )
    return (*_DEPTH_OF_ALL, *sizes)


# Flags that need more than a spelling, by the key that owns them: `extra_args` may not repeat them.
RENDERED_ELSEWHERE: Mapping[str, str] = {
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
    **{word: key for key, words in RENDERED_ELSEWHERE.items() for word in words.split()},
    **{word: row.key for row in FLAG_ROWS for word in (*row.spellings, *dict(row.shorts))},
}
# Known for what they mean, and compared as they stand, as evidence of units that have them was.
_AS_THEY_STAND = frozenset({"--draft", "--draft-n", "--draft-n-min"})
_SPELLINGS = {row.key: frozenset(row.spellings) for row in PLAIN_FLAGS}
_MODEL = "model.path"
REACHES = {_MODEL: Reach.TEXT, **{row.key: row.reach for row in PLAIN_FLAGS if row.reach}}
NOT_COMPARED = frozenset({_MODEL, *(row.key for row in PLAIN_FLAGS if not row.is_compared)})

_SECRET_VARIABLE = re.compile(
    r"(^|_)(API_?KEYS?|ACCESS_KEY|TOKENS?|PASSWORD|PASSWD|PASSPHRASE|SECRETS?|CREDENTIALS?)(?!_FILE$)($|_)",
    re.IGNORECASE,
)
_FLAG = re.compile(r"-+[^\W\d_]")
_BETWEEN_WORDS = re.compile(r"[\s=,\"']+")
SECRET_FLAGS = frozenset({"--api-key", "--hf-token", "-hft", "--hf-token-draft"})


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name holds something that nobody may see."""
    return _SECRET_VARIABLE.search(name) is not None


def secrets_in(words: Sequence[str]) -> frozenset[str]:
    """The keys and tokens that arguments give in plain text."""
    pairs = itertools.pairwise(words)
    return frozenset(
        value for flag, value in pairs if value and normal_spelling(flag) in SECRET_FLAGS
    )


def has_a_word_of(value: str, secrets: frozenset[str]) -> bool:
    """Whether one of these stands in a variable as a word: `local` does not in `/usr/local/bin`."""
    return not secrets.isdisjoint(_BETWEEN_WORDS.split(value))


def holds_secret(name: str, value: str, secrets: frozenset[str]) -> bool:
    """Whether a variable holds something that nobody may see, by its name, or because arguments give it as a key."""
    return is_secret_variable(name) or has_a_word_of(value, secrets)


def is_flag(word: str) -> bool:
    """Whether it begins with dashes and a letter: `-1` and `-.5` are values."""
    return _FLAG.match(word) is not None


def with_dashes(word: str) -> str:
    """Long flags take `_` for `-` in every build."""
    return "--" + word[2:].replace("_", "-") if word.startswith("--") else word


def normal_spelling(word: str) -> str:
    """A flag as the tables spell it."""
    word = with_dashes(word)
    return _SHORT.get(word, word)


_FILES = {"model.path", "speculation.draft_model", "model.mmproj", "model.chat_template_file"}
# Of flags that no key renders: the first take several with commas, on most builds with a scale behind each.
_SEVERAL_FILES = ("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled")
_OTHER_FILES = frozenset({*_SEVERAL_FILES, "--grammar-file", "--json-schema-file", "-jf",
                          "--lookup-cache-static", "-lcs"})  # fmt: skip
_SCALE = re.compile(r":[-+]?[.\d]+$")


def words_behind(word: str, value: str) -> list[str]:
    """What stands behind a flag: the files, where it names several."""
    flag = normal_spelling(word)
    names = value.split(",") if flag in _SEVERAL_FILES else [value]
    return [_SCALE.sub("", one) for one in names] if flag.endswith("-scaled") else names


def named_files(argv: Sequence[str]) -> dict[str, str]:
    """The files that a command line has its server read, by the profile key that stands for each, else by its path."""
    found: dict[str, str] = {}
    for word, value in itertools.pairwise(argv[1:]):
        if (key := owner_of(word)) in _FILES:
            found[key] = value
        elif normal_spelling(word) in _OTHER_FILES:
            found |= {name: name for name in words_behind(word, value)}
    return found


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
ENGINE_VARIABLES = ("CUDA_", "GGML_", "GOMP_", "HIP_", "KMP_", "LLAMA_", "OMP_", "VK_")
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
    kept = [group for group in _argument_groups(argv) if _matters(group[0])]
    return sorted(kept, key=lambda group: group[0])


def _argument_groups(argv: Sequence[str]) -> list[list[str]]:
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
        if name.startswith(ENGINE_VARIABLES) or value.startswith(_HASHED)
        else _HASHED + digest(value)[:_HASH_DIGITS]
        for name, value in environment.items()
        if name not in _VARIABLES_NOT_COMPARED
    }


def changed_variables(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of the variables that count and differ."""
    old, new = compared_environment(then), compared_environment(now)
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """Arguments as they may be kept and shown: keys and tokens given in plain text are left out."""
    flags = ("", *(normal_spelling(word) for word in words))
    return tuple(
        "[secret]" if flag in SECRET_FLAGS else word
        for flag, word in zip(flags, words, strict=False)
    )


def argument_changes(
    then: Sequence[str], now: Sequence[str], *, with_uncounted: bool = False
) -> tuple[str, ...]:
    """What differs between the arguments of two command lines, in words: `--ctx-size 8192 -> 16384`.

    `with_uncounted` names those as well that no measurement goes by, such as a port and the model's path.
    """
    groups_of = _argument_groups if with_uncounted else compared_arguments
    old, new = _by_flag(groups_of(then)), _by_flag(groups_of(now))
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


def _by_flag(groups: Iterable[Sequence[str]]) -> dict[str, str]:
    return _joined((flag, " ".join(values)) for flag, *values in groups)


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
    groups = ((owner_of(flag) or flag, flag, values) for flag, *values in _argument_groups(argv))
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


# A resolved profile as the command line of one build: every flag with its origin, or a refusal.


@dataclass(frozen=True, slots=True)
class Argument:
    """One flag with its value, the profile key behind it, and who set that key."""

    flag: str
    value: str | None
    key: str
    origin: Origin

    @property
    def words(self) -> tuple[str, ...]:
        """As it stands in the argument vector."""
        return (self.flag,) if self.value is None else (self.flag, self.value)


@dataclass(frozen=True, slots=True)
class Note:
    """A key that left no trace on the command line, and why."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A key that this build cannot serve: what was asked, by whom, why not, and the way out."""

    key: str
    value: str
    origin: Origin
    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value} (from {self.origin}): {self.reason}; {self.hint}"


Part = Argument | Note | Refusal


_NO_CORES = "the number of physical cores is unknown"
_AUTO = "auto"
# Of builds that take no words for it, as ik: any number beyond the last layer means all of them.
_COUNTS_OF_LAYERS = frozenset({"memory.n_gpu_layers", "speculation.n_gpu_layers"})
_EVERY_LAYER = 999
_COUNTS_OF_CORES = frozenset({"serving.threads", "serving.threads_batch"})


@dataclass(frozen=True, slots=True)
class RenderContext:
    """What a command line takes from the machine.

    `paths` are files and folders found for keys that name them (`model.path` has its own field);
    `keeps_off_gpu` where there may be a card that the profile does not want, which builds would use unasked;
    `physical_cores` is None when unknown; `drafts_alone` where the draft model that is named is not asked for.
    """

    program: str
    model_path: str
    has_gpu: bool
    physical_cores: int | None
    paths: Mapping[str, str] = field(default_factory=dict)
    subcommand: tuple[str, ...] = ()
    keeps_off_gpu: bool = False
    drafts_alone: bool = False

    def substitute(self, key: str, value: object) -> object | None:
        """The value as this machine has it: files by their path, `physical` as a number.

        None where the machine's value is not known.
        """
        if key in self.paths:
            return self.paths[key]
        if key in _COUNTS_OF_CORES and value == "physical":
            return self.physical_cores
        return value


IN_STAGE = "inside `--spec-type`"
NO_FLAG_NEEDED = "this is what the engine does without a flag"
NO_GPU = "left out: no usable GPU"
_NEVER_CHANGES = "this build never changes the depth by itself"
# Before `--load-mode` these switches had the same meaning. Order matters to builds that have
# both: the last one wins there (ggml-org/llama.cpp#26133).
LEGACY_LOAD: dict[str, tuple[str, ...]] = {
    "auto": (),
    "mmap": (),
    "none": ("--no-mmap",),
    "mlock": ("--no-mmap", "--mlock"),
    "mmap+mlock": ("--mlock",),
    "dio": ("--direct-io",),
}
KINDS_WITH_PROBABILITY = frozenset(SPEC_WORDS)
KINDS_WITH_DRAFT_FILE = KINDS_WITH_PROBABILITY - {"mtp"}
_TYPE, _DEPTH = "speculation.type", "speculation.n_max"
_OF_DRAFT_FILE = frozenset({"speculation.draft_model", "speculation.ctx_size"})
_DRAFTS = "draft-"
_WEAKEST_FIRST = tuple(Layer)
_IN_STAGES = (
    "n_max", "n_min", "p_min", "cross_ctx", "ngram_size_n", "ngram_size_m", "ngram_min_hits",
)  # fmt: skip
# Where a file comes from, for people.
_NO_FLAG = frozenset({"speculation.draft_hf_repo"})


def drafts_with_probability(kinds: Collection[str]) -> bool:
    """Whether something among them drafts by a model, so that n-max and p-min mean something.

    Of kinds that only the build knows those count that it calls drafts.
    """
    return any(kind in KINDS_WITH_PROBABILITY or kind.startswith(_DRAFTS) for kind in kinds)


def has_depth(resolved: Resolved) -> bool:
    """Whether the profile says how deep to draft: tunerd's own depth is for models, n-grams go far beyond."""
    origin = resolved.origin(_DEPTH)
    by_model = drafts_with_probability(resolved.profile.speculation.kinds)
    return origin is not None and (by_model or origin.layer is not Layer.TUNERD)


def by_hand(resolved: Resolved) -> list[str]:
    """The keys that place the model by hand, where a margin means nothing; empty where fit does.

    `cpu_moe = false`, an empty list and `auto` place nothing.
    """
    settings = (resolved.settings.get(row.key) for row in PLACEMENT_FLAGS)
    return [
        one.key
        for one in settings
        if one and one.value is not False and one.value not in ([], _AUTO)
    ]


USUAL_MARGIN_MIB = 1024
"""What fit leaves free where nobody says how much."""


def margin_in_force(resolved: Resolved, capabilities: Capabilities | None = None) -> int | None:
    """The VRAM in MiB that fit is to leave free; None where nothing fits: switched off, or placed by hand.

    With the build's `capabilities` also what it leaves free by itself.
    """
    memory = resolved.profile.memory
    if memory.fit is False or by_hand(resolved):
        return None
    is_on = capabilities is not None and (memory.fit or capabilities.fit_default_on)
    return USUAL_MARGIN_MIB if memory.fit_mib is None and is_on else memory.fit_mib


def fits_context(resolved: Resolved, capabilities: Capabilities) -> bool:
    """Whether fit lowers the context to what there is room for, since none is set; whoever places the model.

    Source: llama.cpp, common/fit.cpp. ik's never does, and 0 asks for all of the context.
    """
    profile = resolved.profile
    is_on = capabilities.fit_default_on and profile.memory.fit is not False
    return bool(is_on) and profile.serving.ctx_size is None


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A program and its arguments; `notes` says what needed no flag and what was left out."""

    program: str
    arguments: tuple[Argument, ...]
    notes: tuple[Note, ...] = field(default=())
    subcommand: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The server's arguments."""
        return tuple(word for argument in self.arguments for word in argument.words)

    @property
    def argv(self) -> tuple[str, ...]:
        """The argument vector, program first."""
        return (self.program, *self.subcommand, *self.words)

    def value_of(self, key: str) -> str | None:
        """What the flag of a profile's key says; None where there is none."""
        return next((one.value for one in self.arguments if one.key == key), None)


def render(
    resolved: Resolved, capabilities: Capabilities, context: RenderContext
) -> CommandLine | tuple[Refusal, ...]:
    """The command line, or everything that stands against it."""
    renderer = _Renderer(resolved, capabilities, context)
    parts = list(renderer.parts())
    parts += list(renderer.own_arguments(parts))
    parts += renderer.without_trace({part.key for part in parts})
    refusals = tuple(part for part in parts if isinstance(part, Refusal))
    if refusals:
        return refusals
    return CommandLine(
        program=context.program,
        arguments=tuple(part for part in parts if isinstance(part, Argument)),
        notes=tuple(part for part in parts if isinstance(part, Note)),
        subcommand=context.subcommand,
    )


def _said(setting: Setting, flag: str, value: str | None = None) -> Argument:
    return Argument(flag, value, setting.key, setting.origin)


def _refused(setting: Setting, reason: str, hint: str) -> Refusal:
    value = str(setting.value)
    shown = value.lower() if isinstance(setting.value, bool) else value
    return Refusal(setting.key, shown, setting.origin, reason, hint)


@dataclass(frozen=True, slots=True)
class _Renderer:
    """One profile on one build; every method yields what its keys become."""

    resolved: Resolved
    capabilities: Capabilities
    context: RenderContext

    @property
    def build(self) -> str:
        return f"this build ({self.capabilities.dialect})"

    def setting(self, key: str) -> Setting | None:
        return self.resolved.settings.get(key)

    def parts(self) -> Iterator[Part]:
        resolved = self.resolved
        origin = resolved.origin("model.path") or resolved.origin("model.hf_repo")
        ours = Origin(Layer.TUNERD, "tunerd")
        yield Argument("--model", self.context.model_path, "model.path", origin or ours)
        for row in SERVING_FLAGS:
            yield from self.row(row)
            if row.key == "serving.threads_http":
                yield from self.load_mode()
        yield from self.placement()
        yield from self.speculation()

    def row(self, row: KeyFlag) -> Iterator[Part]:
        """The flag of a key that needs nothing but a spelling."""
        setting = self.setting(row.key)
        if setting is None or setting.value == []:  # which builds refuse as a value
            return
        flags = self.capabilities
        if row.off is None:
            flag, value = flags.first_of(*row.on), setting.value
            value = self.context.substitute(row.key, value)
            if row.key in _COUNTS_OF_LAYERS and isinstance(value, str) and not self.takes_all(flag):
                value = _EVERY_LAYER if value == "all" else None
            if flag is None:
                yield self.missing(setting, row.on)
            elif value is None:
                is_layers = row.key in _COUNTS_OF_LAYERS
                why = f"{self.build} wants a number" if is_layers else _NO_CORES
                yield _refused(setting, why, f"set {row.key} to a number")
            else:
                yield _said(setting, flag, row.show(value))
            return
        spellings, opposite = (row.on, row.off) if setting.value else (row.off, row.on)
        flag, word = flags.first_of(*spellings), flags.first_of(*row.on)
        # Without its opposite switch, where there is only that, this value holds.
        is_only_way = row.default is None and flags.first_of(*opposite) is not None
        if word in flags.on_off_flags:
            yield _said(setting, word, "on" if setting.value else "off")
        elif flag is not None:
            yield _said(setting, flag)
        elif row.default is bool(setting.value) or is_only_way:
            yield Note(row.key, NO_FLAG_NEEDED)
        else:
            yield self.missing(setting, spellings)

    def takes_all(self, flag: str | None) -> bool:
        """Whether a number of layers may be a word, as the help of such builds says."""
        option = self.capabilities.help.option(flag) if flag is not None else None
        return option is not None and "'all'" in option.description

    def missing(self, setting: Setting, spellings: Sequence[str]) -> Part:
        """A refusal for what somebody asked for, a note for what only tunerd suggested."""
        wanted = " or ".join(f"`{spelling}`" for spelling in spellings) or "a flag for it"
        if setting.origin.layer is Layer.TUNERD:
            return Note(setting.key, f"left out: {self.capabilities.dialect} has no {wanted}")
        where = f"(in [engines.{self.capabilities.family}], or with --set)"
        hint = f'set {setting.key} = "default" {where}, or choose another engine'
        return _refused(setting, f"{self.build} has no {wanted}", hint)

    def load_mode(self) -> Iterator[Part]:
        """How weights come into memory: `--load-mode`, or the switches that it replaced."""
        setting = self.setting("serving.load_mode")
        if setting is None:
            return
        if self.capabilities.has_load_mode:
            option = self.capabilities.help.option("--load-mode")
            modes = option.description if option is not None else ""
            if setting.value == "auto" and "- mmap:" in modes and "- auto:" not in modes:
                yield Note(setting.key, NO_FLAG_NEEDED)  # its word for that is the default, `mmap`
                return
            yield _said(setting, "--load-mode", str(setting.value))
            return
        switches = LEGACY_LOAD[str(setting.value)]
        lacking = [switch for switch in switches if switch not in self.capabilities.flags]
        if lacking:
            why = f"{self.build} has neither `--load-mode` nor `{lacking[0]}`"
            yield _refused(setting, why, "choose another load mode or another engine")
            return
        if not switches:
            yield Note(setting.key, NO_FLAG_NEEDED)
        for switch in switches:
            yield _said(setting, switch)

    def placement(self) -> Iterator[Part]:
        """Fit, or explicit layers; nothing at all where no GPU can be used.

        A GPU flag on a machine without one is at best ignored; ik's `--fit` crashes there. mainline's lowers a
        context that is not set there too, to the machine's RAM (common/fit.cpp), unless it is switched off.
        """
        switch, target = self.setting("memory.fit"), self.setting("memory.fit_mib")
        if not self.context.has_gpu:
            rows = (*PLACEMENT_FLAGS, *GPU_FLAGS)
            keys = [*(row.key for row in rows), "memory.fit", "memory.fit_mib"]
            is_on_off = self.capabilities.fit is FitStyle.ON_OFF
            if switch is not None and not switch.value and is_on_off:
                keys.remove(switch.key)
                yield _said(switch, "--fit", "off")
            for key in keys:
                if self.setting(key) is not None:
                    yield Note(key, NO_GPU)
            yield from self.off_gpu(("--device", "none"), ("--n-gpu-layers", "0"))
            return
        for row in GPU_FLAGS:
            yield from self.row(row)
        placing = by_hand(self.resolved)
        yield from self.explicit(switch, target, placing) if placing else self.fit(switch, target)
        for row in PLACEMENT_FLAGS:
            setting = self.setting(row.key)
            if row.key in placing or (setting is not None and setting.value == _AUTO):
                yield from self.row(row)

    def off_gpu(self, *ways: tuple[str, str]) -> Iterator[Part]:
        """The first of these flags that the build has, where a card is to stay idle."""
        wanted = self.setting("match.gpu") if self.context.keeps_off_gpu else None
        known = (way for way in ways if way[0] in self.capabilities.flags)
        if wanted is not None and (found := next(known, None)) is not None:
            yield _said(wanted, *found)

    def fit(self, switch: Setting | None, target: Setting | None) -> Iterator[Part]:
        style = self.capabilities.fit
        if switch is not None and not switch.value:
            is_said = style is FitStyle.ON_OFF
            yield _said(switch, "--fit", "off") if is_said else Note(switch.key, NO_FLAG_NEEDED)
            if target is not None and target.origin.layer is not Layer.TUNERD:
                yield Note(target.key, "left out: no effect without --fit")
            return
        if switch is not None and style is FitStyle.NONE:
            yield self.missing(switch, ("--fit",))
            return
        spellings = ("--fit-target", "--fit-margin")
        margin = self.capabilities.first_of(*spellings)
        if target is not None and (style is FitStyle.NONE or margin is None):
            yield self.missing(target, spellings)
            return
        owner = switch or target
        if owner is not None:
            yield _said(owner, "--fit", "on" if style is FitStyle.ON_OFF else None)
        if target is not None and margin is not None:
            yield _said(target, margin, str(target.value))

    def explicit(
        self, switch: Setting | None, target: Setting | None, placing: Sequence[str]
    ) -> Iterator[Part]:
        if self.capabilities.fit is FitStyle.ON_OFF:
            is_off = switch is not None and not switch.value
            owner = switch if switch is not None and is_off else self.resolved.settings[placing[0]]
            if not fits_context(self.resolved, self.capabilities):
                yield _said(owner, "--fit", "off")
        for setting in (switch, target):
            is_on = setting is not None and setting.value is not False
            if setting is not None and is_on and setting.origin.layer is not Layer.TUNERD:
                yield Note(setting.key, f"left out: {', '.join(placing)} place the model by hand")

    def speculation(self) -> Iterator[Part]:
        """All flags of the kind of speculation that the profile wants, or a refusal."""
        wanted, capabilities = self.resolved.profile.speculation, self.capabilities
        setting = self.setting(_TYPE)
        if setting is None or wanted.type is None or wanted.type == "off":
            said = "off: no flag" if wanted.type else "no flag of its own"
            yield Note(_TYPE, f"{said}, since every build is off without one")
            return
        word = capabilities.spec_word(wanted.type)
        if word is None:
            types = ", ".join(word for word in capabilities.spec_types if word != "none") or "none"
            why = f"{self.build} cannot speculate with {wanted.type}; it has: {types}"
            yield _refused(setting, why, 'choose another engine, or set speculation.type = "off"')
            return
        if wanted.kinds & KINDS_WITH_DRAFT_FILE and wanted.draft_model is None:
            why = f"{wanted.type} needs a draft model"
            yield _refused(setting, why, "set speculation.draft_model")
            return
        by_model = drafts_with_probability(wanted.kinds)
        if capabilities.spec_style is SpecStyle.STAGE:
            yield from self.stage(setting, wanted.type, word)
        else:
            yield self.kind(setting, wanted.type, word)
            for row in DEPTH_FLAGS if by_model else self.ngram_rows(wanted.type):
                yield from self.row(row)
            yield from self.adaptive()
        on_gpu = DRAFT_GPU_FLAGS if self.context.has_gpu else ()
        has_file = wanted.draft_model is not None and not self.context.drafts_alone
        for draft_row in (*DRAFT_FLAGS, *on_gpu) if by_model else ():
            if draft_row.key not in _OF_DRAFT_FILE or has_file:
                yield from self.row(draft_row)
        if by_model and has_file:
            yield from self.off_gpu(
                *((flag, "none") for flag in ("--spec-draft-device", "--device-draft"))
            )

    def ngram_rows(self, kind: str) -> Iterator[KeyFlag]:
        """Those of its rows that mean something here."""
        for row in ngram_flags(kind):
            is_none = row in _DEPTH_OF_ALL and self.capabilities.first_of(*row.on) is None
            if not is_none and (row.key != _DEPTH or has_depth(self.resolved)):
                yield row

    def kind(self, setting: Setting, kind: str, word: str) -> Part:
        if self.capabilities.spec_style is SpecStyle.IK_LEGACY and kind == "mtp":
            return _said(setting, "--multi-token-prediction")
        if kind == "draft" and "draft" not in self.capabilities.spec_types and word == "draft":
            return Note(setting.key, "the draft model alone turns it on")
        return _said(setting, "--spec-type", word)

    def adaptive(self) -> Iterator[Part]:
        setting = self.setting("speculation.adaptive")
        if setting is None:
            return
        spelling = "--spec-dm-adaptive" if setting.value else "--no-spec-dm-adaptive"
        if spelling in self.capabilities.flags:
            yield _said(setting, spelling)
        elif "--spec-dm-controller" in self.capabilities.flags:
            yield _said(setting, "--spec-dm-controller", "profit" if setting.value else "off")
        elif not setting.value:
            yield Note(setting.key, _NEVER_CHANGES)
        else:
            why = f"{self.build} has no adaptive depth"
            yield _refused(setting, why, "set speculation.adaptive = false")

    def stage(self, setting: Setting, kind: str, word: str) -> Iterator[Part]:
        """Ik since June 2026: everything about a stage is inside one value."""
        is_ngram = kind.startswith("ngram-")
        rows = ngram_flags(kind) if is_ngram else DEPTH_FLAGS
        own = {row.key.removeprefix("speculation.") for row in rows}
        if not is_ngram and kind not in KINDS_WITH_PROBABILITY:
            own = {*_IN_STAGES} - {"p_min"}
        own -= set() if has_depth(self.resolved) else {"n_max"}
        found = {name: self.setting(f"speculation.{name}") for name in _IN_STAGES if name in own}
        given = {name: one for name, one in found.items() if one is not None}
        words = {name: f"{name}={number(one.value)}" for name, one in given.items()}
        origins = [one.origin for one in (setting, *given.values())]
        strongest = max(origins, key=lambda origin: _WEAKEST_FIRST.index(origin.layer))
        value = f"{word}:{','.join(words.values())}" if words else word
        yield Argument("--spec-type", value, _TYPE, strongest)
        for name, pair in words.items():
            yield Note(given[name].key, f"`{pair}` {IN_STAGE}")
        adaptive = self.setting("speculation.adaptive")
        if adaptive is not None and not adaptive.value:
            yield Note(adaptive.key, _NEVER_CHANGES)

    def without_trace(self, seen: Collection[str]) -> Iterator[Note]:
        """A note for each key that somebody set and that changes nothing."""
        kind = self.resolved.profile.speculation.type or "off"
        for key, setting in self.resolved.settings.items():
            section = key.partition(".")[0]
            if key in seen or key in _NO_FLAG or setting.origin.layer is Layer.TUNERD:
                continue
            if section == "speculation":
                yield Note(key, f"left out: no effect with speculation.type = {kind}")
            elif section in {"serving", "memory"}:
                yield Note(key, "left out: no effect here")

    def own_arguments(self, rendered: Sequence[Part]) -> Iterator[Part]:
        """The user's own arguments, which may repeat nothing and hide nothing."""
        setting = self.setting("extra_args")
        owners = {part.flag: part.key for part in rendered if isinstance(part, Argument)}
        flags, takes_value = self.capabilities.flags, self.capabilities.value_flags
        words = () if setting is None else setting.value
        for before, word in itertools.pairwise(("", *words)):
            known = owner_of(word, flags) or owners.get(word)
            owner = known if word.startswith("-") else None
            is_left = self.setting(_TYPE) is None and self.setting(owner or "") is None
            if is_left and (owner or "").startswith("speculation."):
                owner = None  # all of it stands here as it is
            is_unlisted = (
                is_flag(word)
                and normal_spelling(before) not in takes_value
                and flags.isdisjoint((word, normal_spelling(word)))
            )
            why, hint, shown = None, "", word
            if any(ord(letter) < ord(" ") or letter == "\x7f" for letter in word):
                why, shown = "it has a control character", repr(word)
                hint = "write the text into a file and pass the file"
            elif normal_spelling(word) in SECRET_FLAGS:
                why = "its value would be visible in the unit and in the process list"
                hint = "put the key into a file, and set serving.api_key_file"
            elif owner is not None:
                why, hint = f"the key {owner} renders this flag", f"set {owner} instead"
            elif is_unlisted:
                why = f"{self.build} does not list this flag"
                hint = "`tunerd engines` lists the builds that are here"
            origin = self.resolved.settings["extra_args"].origin
            if why is None:
                yield Argument(word, None, "extra_args", origin)
            else:
                yield Refusal("extra_args", shown, origin, why, hint)
