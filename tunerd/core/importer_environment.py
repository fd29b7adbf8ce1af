"""Options from a server's environment: `LLAMA_ARG_*` as each family reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunerd.core.engine import Capabilities, Family
from tunerd.core.flags import is_secret_variable, owner_of
from tunerd.core.help_text import HelpText, Option
from tunerd.core.importer_flags import Flag, Unplaced

PREFIX = "LLAMA_ARG_"
TRUE = frozenset({"on", "enabled", "true", "1"})
FALSE = frozenset({"off", "disabled", "false", "0"})

# ik prints no names of variables; these it reads. Source: its argument parser; switches tried on the
# build of August 2026: `1` and `true` mean on, everything else off, also the word `on`.
_IK_VARIABLES = {
    "MODEL": "--model",
    "MODEL_URL": "--model-url",
    "MODEL_ALIAS": "--alias",
    "HF_REPO": "--hf-repo",
    "HF_FILE": "--hf-file",
    "THREADS": "--threads",
    "CTX_SIZE": "--ctx-size",
    "N_PARALLEL": "--parallel",
    "BATCH": "--batch-size",
    "UBATCH": "--ubatch-size",
    "N_GPU_LAYERS": "--n-gpu-layers",
    "THREADS_HTTP": "--threads-http",
    "CHAT_TEMPLATE": "--chat-template",
    "N_PREDICT": "--predict",
    "DEFRAG_THOLD": "--defrag-thold",
    "HOST": "--host",
    "PORT": "--port",
    "CACHE_TYPE_K": "--cache-type-k",
    "CACHE_TYPE_V": "--cache-type-v",
}
# What a variable means when it is on, and when it is off; an empty flag is the engine's default.
_IK_SWITCHES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ENDPOINT_METRICS": (("--metrics",), ()),
    "ENDPOINT_SLOTS": ((), ("--no-slots",)),
    "MLOCK": (("--mlock",), ()),
    "FLASH_ATTN": (("--flash-attn", "on"), ("--flash-attn", "off")),
    "K_CACHE_HADAMARD": (("-khad",), ()),
    "V_CACHE_HADAMARD": (("-vhad",), ()),
}


@dataclass(slots=True)
class FromEnvironment:
    """What the environment says: options, other variables, and what is not taken over."""

    flags: list[Flag] = field(default_factory=list)
    rest: dict[str, str] = field(default_factory=dict)
    overridden: list[str] = field(default_factory=list)
    unplaced: list[Unplaced] = field(default_factory=list)


def read_environment(
    environment: Mapping[str, str],
    typed: Sequence[Flag],
    help_text: HelpText,
    capabilities: Capabilities,
) -> FromEnvironment:
    """The options of an environment; on mainline the command line wins, on ik the environment."""
    result = FromEnvironment()
    typed_owners = {owner_of(flag.word) for flag in typed} - {None}
    typed_words = {flag.word for flag in typed}
    # `LLAMA_LOG_VERBOSITY` and the like are options too.
    other_names = {option.env for option in help_text.options}
    for name, value in environment.items():
        if is_secret_variable(name):
            reason = "a secret: put it into a file and set serving.api_key_file"
            result.unplaced.append(Unplaced((f"{name}=...",), reason))
            continue
        if not name.startswith(PREFIX) and name not in other_names:
            result.rest[name] = value
            continue
        flags = _options(name, value, help_text, capabilities)
        if flags is None:
            result.unplaced.append(
                Unplaced((f"{name}={value}",), "the engine does not read it, or not this value")
            )
            continue
        for flag in flags:
            is_typed = owner_of(flag.word) in typed_owners or flag.word in typed_words
            if is_typed and capabilities.family is not Family.IK:
                result.overridden.append(name)
            else:
                result.flags.append(flag)
    return result


def _options(
    name: str, value: str, help_text: HelpText, capabilities: Capabilities
) -> tuple[Flag, ...] | None:
    """The flags that a variable stands for, none if it asks for the default; None if unread."""
    if capabilities.family is Family.IK:
        return _ik_options(name.removeprefix(PREFIX), value)
    negative = name.replace(f"{PREFIX}NO_", PREFIX, 1)
    for option in help_text.options:
        if option.env == name and not option.is_removed:
            return _mainline_options(option, value)
        if option.env == negative and not option.is_removed and not option.argument:
            _, off = _sides(option)
            return None if off is None else (Flag(off, ()),)  # any value means off
    return None


def _ik_options(name: str, value: str) -> tuple[Flag, ...] | None:
    word = _IK_VARIABLES.get(name)
    if word is not None:
        return (Flag(word, (value,)),)
    sides = _IK_SWITCHES.get(name)
    if sides is None:
        return None
    words = sides[0] if value in {"1", "true"} else sides[1]
    return (Flag(words[0], words[1:]),) if words else ()


def _mainline_options(option: Option, value: str) -> tuple[Flag, ...] | None:
    on, off = _sides(option)
    if on is None:  # `--no-host` has no other side, and its variable says NO_ too
        on, off = off, None
    if option.argument and on is not None:
        return (Flag(on, (value,)),)
    if value.lower() in TRUE:
        return None if on is None else (Flag(on, ()),)
    if value.lower() in FALSE:
        return () if off is None else (Flag(off, ()),)
    return None


def _sides(option: Option) -> tuple[str | None, str | None]:
    """The first long spelling that switches on, and the first that switches off."""
    long = [word for word in option.spellings if word.startswith("--")] or list(option.spellings)
    on = next((word for word in long if not word.startswith("--no-")), None)
    off = next((word for word in long if word.startswith("--no-")), None)
    return on, off
