"""Which differences of two servers may change what they answer, and not only how fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tunerd.core.fingerprint_arguments import argument_groups
from tunerd.core.flags import SECRET_FLAGS, SERVING_FLAGS, SwitchFlag, owner_of

# Speculation is not among them: a draft is kept only where the model itself says the same.
_TEXT_KEYS = frozenset(
    {
        "model.path",
        "model.mmproj",
        "model.chat_template_file",
        "serving.cache_type_k",
        "serving.cache_type_v",
        "serving.chat_template",
        "serving.chat_template_kwargs",
        "serving.jinja",
        "serving.n_predict",
        "serving.reasoning",
        "serving.reasoning_budget",
        "serving.reasoning_budget_message",
        "serving.reasoning_format",
    }
)
_SAMPLING_KEYS = frozenset(
    {
        "serving.min_p",
        "serving.presence_penalty",
        "serving.repeat_penalty",
        "serving.seed",
        "serving.temp",
        "serving.top_k",
        "serving.top_p",
    }
)
# How the flags of samplers begin that no key of a profile renders.
_SAMPLING_FLAGS = (
    "--adaptive-", "--backend-sampling", "--dry-", "--dynatemp-", "--frequency-penalty",
    "--logit-bias", "--mirostat", "--repeat-last-n", "--sampl", "--top-n", "--typical", "--xtc-",
)  # fmt: skip
_DRAFT_FLAGS = ("--draft-", "--spec-")
# By its name a variable of an engine may stand for any flag.
_VARIABLE = "LLAMA_"
_HOW_REACHED = frozenset(
    {"LLAMA_ARG_HOST", "LLAMA_ARG_PORT", "LLAMA_ARG_ALIAS", "LLAMA_ARG_MODEL_ALIAS",
     "LLAMA_ARG_API_KEY", "LLAMA_API_KEY"}
)  # fmt: skip
_SWITCHES = frozenset(row.key for row in SERVING_FLAGS if isinstance(row, SwitchFlag))


class Reach(StrEnum):
    """What a difference reaches.

    SAMPLING shows only where a request leaves the choice of tokens to the server. UNKNOWN is a flag or variable
    that tunerd knows nothing of.
    """

    TEXT = "text"
    SAMPLING = "sampling"
    UNKNOWN = "unknown"


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
    found: dict[str, str] = {}
    for flag, *values in argument_groups(argv):
        key = owner_of(flag) or flag
        value = flag if key in _SWITCHES else " ".join(values) or "on"
        found[key] = f"{found[key]}; {value}" if key in found else value
    return found


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_VARIABLE) and name not in _HOW_REACHED
    }


def _reach(key: str) -> Reach | None:
    if key in _TEXT_KEYS:
        return Reach.TEXT
    if key in _SAMPLING_KEYS or key.startswith(_SAMPLING_FLAGS):
        return Reach.SAMPLING
    is_flag = key.startswith("-")
    is_harmless = not is_flag or key in SECRET_FLAGS or key.startswith(_DRAFT_FLAGS)
    return None if is_harmless else Reach.UNKNOWN
