"""Turns the command line that serves today into profile keys that render to the same list.

Every flag ends in one of three places: a key, `extra_args` (the build lists it but no key knows it),
or the list of what could not be placed. Keys that tunerd would set by itself and the command line
does not are left to the engine.
"""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from tunerd.engine.commandline import CommandLine, RenderContext, render
from tunerd.engine.flags import (
    ALL_FLAGS,
    PLACEMENT_FLAGS,
    SECRET_FLAGS,
    SwitchFlag,
    is_secret_variable,
    normal_spelling,
    owner_of,
)
from tunerd.engine.help import SPEC_WORDS, Capabilities, FitStyle, HelpText, Option, SpecStyle
from tunerd.profile.layers import Layer, LayerFile, Resolved, default_layer, resolve
from tunerd.profile.schema import LEAVE_TO_ENGINE, ProfileFile, flatten, nest, validate
from tunerd.words import Family

_SWITCHES = frozenset(
    {
        *(word for row in ALL_FLAGS if isinstance(row, SwitchFlag) for word in (*row.on, *row.off)),
        "--mlock",
        "--no-mmap",
        "--mmap",
        "--direct-io",
        "--no-direct-io",
        "--multi-token-prediction",
        "-mtp",
    }
)
# They take a value, but ik's help shows no placeholder.
_WITH_VALUE = frozenset({"--reasoning", "-rea", "--reasoning-budget-message"})


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with its values, as it stood on the command line or in the environment."""

    word: str
    values: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """As typed."""
        return (self.word, *self.values)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A flag that no profile can hold, and why."""

    words: tuple[str, ...]
    reason: str


def split_flags(
    arguments: Sequence[str], help_text: HelpText, unplaced: list[Unplaced]
) -> Iterator[Flag]:
    """The flags of an argument vector; what the build does not list goes to `unplaced`."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        takes = _n_values(word, help_text)
        values = list(arguments[position : position + (takes or 0)])
        position += len(values)
        # There are no positional arguments, and ik's help leaves some placeholders out.
        while owner_of(word) is None and position < len(arguments):
            if _is_flag(arguments[position]):
                break
            values.append(arguments[position])
            position += 1
        if takes is None:
            unplaced.append(Unplaced((word, *values), "this build does not list it"))
        elif len(values) < takes:
            unplaced.append(Unplaced((word, *values), "its value is missing"))
        else:
            yield Flag(word, tuple(values))


def unlisted_flags(
    arguments: Sequence[str], help_text: HelpText, capabilities: Capabilities
) -> tuple[str, ...]:
    """The flags among arguments that a build does not list as working, each once, as typed."""
    unplaced: list[Unplaced] = []
    words = [flag.word for flag in split_flags(arguments, help_text, unplaced)]
    words += [one.words[0] for one in unplaced if _is_flag(one.words[0])]
    listed = capabilities.flags
    return tuple(
        dict.fromkeys(
            word for word in words if word not in listed and _with_dashes(word) not in listed
        )
    )


def _with_dashes(word: str) -> str:
    """Long flags take `_` for `-` in every build."""
    return "--" + word[2:].replace("_", "-") if word.startswith("--") else word


def is_switch(word: str) -> bool:
    """Whether a flag that a key renders stands alone."""
    return normal_spelling(word) in _SWITCHES


def _n_values(word: str, help_text: HelpText) -> int | None:
    """How many values a flag takes; None if neither the help nor any key knows it."""
    option = help_text.option(word) or help_text.option(normal_spelling(word))
    if option is None and word.startswith("--"):
        option = help_text.option(_with_dashes(word))
    if option is None:
        return None if owner_of(word) is None else int(not is_switch(word))
    if not option.argument:
        return int(word in _WITH_VALUE)
    return 2 if re.fullmatch(r"[A-Z]+ [A-Z]+", option.argument) else 1


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


PREFIX = "LLAMA_ARG_"
TRUE = frozenset({"on", "enabled", "true", "1"})
FALSE = frozenset({"off", "disabled", "false", "0"})

# ik prints no names of variables; these it reads. Source: its argument parser; switches tried on the
# build of August 2026: `1` and `true` mean on, everything else off, also the word `on`.
_IK_VARIABLES = {
    *("MODEL", "MODEL_URL", "MODEL_ALIAS", "HF_REPO", "HF_FILE", "CHAT_TEMPLATE", "HOST", "PORT"),
    *("THREADS", "THREADS_HTTP", "N_PARALLEL", "BATCH", "UBATCH", "CTX_SIZE", "N_PREDICT"),
    *("N_GPU_LAYERS", "CACHE_TYPE_K", "CACHE_TYPE_V", "DEFRAG_THOLD"),
}
# Variables whose flag has another name.
_NAMED_OTHERWISE = {
    "N_PARALLEL": "--parallel",
    "N_PREDICT": "--predict",
    "BATCH": "--batch-size",
    "UBATCH": "--ubatch-size",
    "MODEL_ALIAS": "--alias",
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


def flag_of(variable: str) -> str:
    """The flag that a variable stands for, by its name without `LLAMA_ARG_`."""
    return _NAMED_OTHERWISE.get(variable, "--" + variable.lower().replace("_", "-"))


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
    if name in _IK_VARIABLES:
        return (Flag(flag_of(name), (value,)),)
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


# These change their spelling on the way: several switches become one key, or the other way round.
_RESPELLED = frozenset(
    {
        "memory.fit",
        "memory.fit_mib",
        "memory.override_tensor",
        "serving.load_mode",
        "speculation.type",
    }
)
_DEFAULT_KEYS = frozenset(flatten(default_layer().data))


@dataclass(frozen=True, slots=True)
class _Lost:
    """A key, or a flag without one, that does not render as it was, and why."""

    what: str | Flag
    reason: str


def settle(
    keys: dict[str, Any],
    extra: list[Flag],
    flags: Sequence[Flag],
    help_text: HelpText,
    capabilities: Capabilities,
) -> tuple[Unplaced, ...]:
    """Take back everything that does not render to the flag that it came from.

    Args:
        keys: What the flags were placed as, by dotted key; changed.
        extra: Flags without a key; changed.
        flags: Those in effect that were placed.
        help_text: Of the build.
        capabilities: Of the same build.
    """
    unplaced: list[Unplaced] = []
    while (lost := next(_lost(keys, extra, flags, help_text, capabilities), None)) is not None:
        if isinstance(lost.what, Flag):
            extra.remove(lost.what)
            unplaced.append(Unplaced(lost.what.words, lost.reason))
            continue
        unplaced.extend(
            Unplaced(flag.words, lost.reason)
            for flag in flags
            if owner_of(flag.word, capabilities.flags) == lost.what
        )
        if lost.what in _DEFAULT_KEYS:
            keys[lost.what] = "off" if lost.what == "speculation.type" else LEAVE_TO_ENGINE
        else:
            del keys[lost.what]
    return tuple(unplaced)


def _lost(
    keys: Mapping[str, Any],
    extra: Sequence[Flag],
    flags: Sequence[Flag],
    help_text: HelpText,
    capabilities: Capabilities,
) -> Iterator[_Lost]:
    words = [word for flag in extra for word in flag.words]
    data = {**nest(keys), "extra_args": words}
    resolved = resolve("imported", (LayerFile(Layer.SITE, "imported", data),))
    if not isinstance(resolved, Resolved):
        yield from (_Lost(p.key, f"allowed: {p.allowed}") for p in resolved if p.key in keys)
        return
    model = str(keys.get("model.path", ""))
    context = RenderContext("", model, has_gpu=True, physical_cores=None)
    command = render(resolved, capabilities, context)
    if not isinstance(command, CommandLine):
        yield from (
            _Lost(refusal.key, refusal.reason) for refusal in command if refusal.key in keys
        )
        refused = {refusal.value: refusal.reason for refusal in command}
        for flag in extra:
            word = next((w for w in flag.words if w in refused or repr(w) in refused), None)
            if word is not None:
                yield _Lost(flag, refused.get(word) or refused[repr(word)])
        return
    on_off = capabilities.on_off_flags
    said = split_flags(command.argv[1:], help_text, [])
    rendered = {_normal(flag, help_text, on_off) for flag in said}
    notes = {note.key: note.text for note in command.notes}
    for flag in flags:
        key = owner_of(flag.word, capabilities.flags)
        if key is None or key in _RESPELLED or keys.get(key, LEAVE_TO_ENGINE) == LEAVE_TO_ENGINE:
            continue
        if _normal(flag, help_text, on_off) not in rendered:
            reason = notes.get(key, "it cannot be said beside the rest").removeprefix("left out: ")
            if reason != "this is what the engine does without a flag":
                yield _Lost(key, reason)


def flag_changes(
    before: Sequence[str], after: Sequence[str], help_text: HelpText, on_off: Collection[str]
) -> tuple[tuple[Flag, ...], tuple[Flag, ...]]:
    """Flags that only the first, and that only the second of two lists of arguments has.

    Two spellings of an option are the same flag, and so are two of a number.
    """
    old = {_normal(flag, help_text, on_off): flag for flag in split_flags(before, help_text, [])}
    new = {_normal(flag, help_text, on_off): flag for flag in split_flags(after, help_text, [])}
    return (
        tuple(flag for form, flag in old.items() if form not in new),
        tuple(flag for form, flag in new.items() if form not in old),
    )


def _normal(flag: Flag, help_text: HelpText, on_off: Collection[str]) -> tuple[object, ...]:
    """A flag so that two spellings of the same thing are equal."""
    word = normal_spelling(flag.word)
    option = help_text.option(flag.word) or help_text.option(word)
    name = option.spellings if option is not None else (word,)
    is_negative = not flag.values and "-no-" in word.replace("--no-", "-no-")
    is_choice = flag.word in on_off or word in on_off
    values = (_choice(value) if is_choice else _normal_value(value) for value in flag.values)
    return (name, is_negative, *values)


def _choice(value: str) -> str:
    text = value.lower()
    return "on" if text in TRUE else "off" if text in FALSE else text


def _normal_value(value: str) -> object:
    if re.fullmatch(r"-?\d{0,20}(\.\d{1,20})?(e-?\d{1,2})?", value) and value not in {"", "-"}:
        try:
            return float(value)
        except ValueError:
            return value
    if value.startswith("{"):
        try:
            return json.dumps(json.loads(value), sort_keys=True)
        except (ValueError, RecursionError):
            return value
    return value


_DRAFT_OF_WORD = {word: kind for kind, words in SPEC_WORDS.items() for word in words}
_STAGE_KEYS = tuple(f"speculation.{name}" for name in ("type", "n_max", "n_min", "p_min"))
_ADDING = frozenset({"memory.override_tensor", "serving.load_mode", "speculation.type", None})
_IN_PARTS = frozenset({"serving.load_mode", "memory.fit_mib"})
_WORDS = frozenset({"serving.flash_attn", "serving.reasoning"})
_MAX_DIGITS = 20
_BY_HAND = "a placement by hand switches fit off"


@dataclass(frozen=True, slots=True)
class Imported:
    """The profile data of a command line, and what is not in it."""

    data: Mapping[str, Any]
    unplaced: tuple[Unplaced, ...]
    overridden: tuple[str, ...] = ()


@dataclass(slots=True)
class _Draft:
    """What has been placed so far; `parts` are flags that together make one key."""

    capabilities: Capabilities
    keys: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, list[Flag]] = field(default_factory=dict)
    extra: list[Flag] = field(default_factory=list)
    unplaced: list[Unplaced] = field(default_factory=list)


def import_command_line(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    help_text: HelpText,
    capabilities: Capabilities,
) -> Imported:
    """The profile of a command line.

    Args:
        arguments: Without the program.
        environment: The server's environment; `LLAMA_ARG_*` are options.
        help_text: The build's help, which says how many values a flag takes.
        capabilities: Of the same build.
    """
    draft = _Draft(capabilities)
    typed = list(split_flags(arguments, help_text, draft.unplaced))
    said = read_environment(environment, typed, help_text, capabilities)
    draft.unplaced += said.unplaced
    # ik applies its environment after the command line.
    is_ik = capabilities.family is Family.IK
    flags = [*typed, *said.flags] if is_ik else [*said.flags, *typed]
    in_effect = list(_in_effect(flags, capabilities))
    for flag in in_effect:
        _place(flag, draft)
    _finish_load_mode(draft)
    _finish_fit(draft)
    _finish_type(draft)
    for key in flatten(default_layer().data):
        draft.keys.setdefault(key, LEAVE_TO_ENGINE)
    placed = [flag for flag in in_effect if flag.words not in {u.words for u in draft.unplaced}]
    draft.unplaced += settle(draft.keys, draft.extra, placed, help_text, capabilities)
    data = nest(draft.keys)
    if draft.extra:
        data["extra_args"] = [word for flag in draft.extra for word in flag.words]
    if said.rest:
        data["environment"] = said.rest
    return Imported(data, tuple(draft.unplaced), tuple(said.overridden))


def _in_effect(flags: Sequence[Flag], capabilities: Capabilities) -> Iterator[Flag]:
    """Each flag once: where one is repeated the last wins, but for flags that add up."""
    last: dict[str, Flag] = {}
    for flag in flags:
        owner = owner_of(flag.word, capabilities.flags)
        if owner in _ADDING:
            yield flag
        elif owner is not None:
            # on and off spellings of one switch share the key, values of one key too
            is_part = owner in _IN_PARTS
            last[f"{owner} {normal_spelling(flag.word)}" if is_part else owner] = flag
    yield from last.values()


def _place(flag: Flag, draft: _Draft) -> None:
    spelling = normal_spelling(flag.word)
    owner = owner_of(flag.word, draft.capabilities.flags)
    if spelling in SECRET_FLAGS:
        reason = "a secret: put it into a file and set serving.api_key_file"
        draft.unplaced.append(Unplaced((flag.word, "..."), reason))
    elif owner is None:
        is_listed = flag.word in draft.capabilities.flags
        draft.extra.append(flag if is_listed else Flag(spelling, flag.values))
    elif owner in _IN_PARTS:
        draft.parts.setdefault(owner, []).append(Flag(spelling, flag.values))
    elif owner == "speculation.type":
        _place_type(flag, draft)
    else:
        is_list = owner == "memory.override_tensor"
        value = flag.values[0].split(",") if is_list else _value(owner, spelling, flag)
        problems = list(validate("", nest({owner: value})))
        if problems:
            draft.unplaced.append(Unplaced(flag.words, f"allowed: {problems[0].allowed}"))
        elif is_list:
            draft.keys.setdefault(owner, []).extend(value)
        else:
            draft.keys[owner] = value


def _value(owner: str, spelling: str, flag: Flag) -> Any:
    if not flag.values:
        return not spelling.startswith("--no-")
    text = flag.values[0]
    if owner == "serving.chat_template_kwargs":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    if owner in _WORDS and text.lower() in TRUE | FALSE:
        return "on" if text.lower() in TRUE else "off"
    kinds = _kinds(owner)
    if bool in kinds and text.lower() in TRUE | FALSE:
        return text.lower() in TRUE
    number = _number(text) if kinds & {int, float} else None
    if number is not None and (float in kinds or isinstance(number, int)):
        return number
    return text


def _number(text: str) -> int | float | None:
    """A number as the engines read it; None for any other text."""
    if len(text) > _MAX_DIGITS or not text.isascii() or "_" in text:
        return None
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None


def _kinds(key: str) -> set[object]:
    """The plain types that a key takes."""
    section, _, name = key.partition(".")
    table = ProfileFile.model_fields[section].annotation
    if not (isinstance(table, type) and issubclass(table, BaseModel)):
        return set()
    return _plain_types(table.model_fields[name].annotation)


def _plain_types(annotation: object) -> set[object]:
    parts = typing.get_args(annotation)
    if not parts:
        return {annotation}
    return {kind for part in parts for kind in _plain_types(part)}


def _place_type(flag: Flag, draft: _Draft) -> None:
    """`--spec-type draft-mtp`, `--spec-type mtp:n_max=3,p_min=0.75`, `--multi-token-prediction`."""
    if flag.values:
        word, _, pairs = flag.values[0].partition(":")
    else:
        word, pairs = "none" if "-no-" in flag.word else "mtp", ""
    kind = ",".join(_DRAFT_OF_WORD.get(link, link) for link in word.split(","))
    keys: dict[str, Any] = {"speculation.type": "off" if kind == "none" else kind}
    for pair in filter(None, pairs.split(",")):
        name, _, text = pair.partition("=")
        number = _number(text)
        keys[f"speculation.{name}"] = text if number is None else number
    stages = draft.parts.setdefault("speculation.type", [])
    stages.append(flag)
    is_last = draft.capabilities.takes_chains  # there the last one counts
    if not list(validate("", nest(keys))) and (is_last or _is_alone(draft, keys)):
        draft.keys.update(keys)
    elif flag.values:
        # Whole stages say all of themselves, so they can stand as they are.
        draft.keys.update(dict.fromkeys(_STAGE_KEYS, LEAVE_TO_ENGINE))
        draft.extra[:] = [one for one in draft.extra if one not in stages] + stages
    else:
        draft.unplaced.append(Unplaced(flag.words, "a profile has one kind of speculation"))


def _is_alone(draft: _Draft, keys: Mapping[str, Any]) -> bool:
    """Whether no other kind was placed before."""
    return draft.keys.get("speculation.type") in {None, keys["speculation.type"]}


def _finish_type(draft: _Draft) -> None:
    """Older builds speculate as soon as they are given a draft model."""
    is_ready_made = any(flag.word == "--spec-default" for flag in draft.extra)
    draft.keys.setdefault("speculation.type", LEAVE_TO_ENGINE if is_ready_made else "off")
    by_model = draft.capabilities.spec_style in {SpecStyle.LEGACY, SpecStyle.IK_LEGACY}
    is_off = draft.keys["speculation.type"] == "off"
    if by_model and is_off and "speculation.draft_model" in draft.keys:
        draft.keys["speculation.type"] = "draft"


def _finish_load_mode(draft: _Draft) -> None:
    flags = draft.parts.pop("serving.load_mode", [])
    if not flags:
        return
    if draft.capabilities.has_load_mode:
        # Each of the old switches is a mode there, and the last one counts.
        # Source: the build of August 2026, tried in pairs.
        last = flags[-1]
        modes = {"--mlock": "mlock", "--no-mmap": "none", "--mmap": "mmap", "-dio": "dio",
                 "--direct-io": "dio", "-ndio": "none", "--no-direct-io": "none"}  # fmt: skip
        draft.keys["serving.load_mode"] = last.values[0] if last.values else modes[last.word]
        return
    is_locked, is_mapped, is_direct = False, True, False
    for flag in flags:
        is_locked |= flag.word == "--mlock"
        is_mapped = flag.word == "--mmap" or (is_mapped and flag.word != "--no-mmap")
        is_direct = flag.word in {"-dio", "--direct-io"} or (
            is_direct and flag.word not in {"-ndio", "--no-direct-io"}
        )
    if is_direct and is_locked:
        words = tuple(flag.word for flag in flags)
        draft.unplaced.append(Unplaced(words, "a profile has one load mode"))
        return
    modes_of_three = {(True, True): "mmap+mlock", (True, False): "mlock", (False, False): "none"}
    mode = "dio" if is_direct else modes_of_three.get((is_locked, is_mapped), "mmap")
    draft.keys["serving.load_mode"] = mode


def _finish_fit(draft: _Draft) -> None:
    """The margin, and whether fit is on; ik's is off unless it is asked for."""
    margin: Flag | None = None
    is_on = False if draft.capabilities.fit is FitStyle.SWITCH else None
    for flag in draft.parts.pop("memory.fit_mib", []):
        if flag.word in {"--fit-target", "-fitt", "--fit-margin"}:
            margin = flag
            continue
        is_on = not (flag.values and flag.values[0].lower() in FALSE)
        if not _has_placement(draft):
            draft.keys["memory.fit"] = is_on
        elif is_on:
            draft.unplaced.append(Unplaced(flag.words, _BY_HAND))
    if margin is None:
        return
    number = _number(margin.values[0])
    if is_on is False:
        draft.unplaced.append(Unplaced(margin.words, "no effect without --fit"))
    elif _has_placement(draft):
        draft.unplaced.append(Unplaced(margin.words, _BY_HAND))
    elif isinstance(number, int) and number >= 0:
        draft.keys["memory.fit_mib"] = number
    else:
        draft.unplaced.append(Unplaced(margin.words, "a profile has one margin for all devices"))


def _has_placement(draft: _Draft) -> bool:
    return any(draft.keys.get(row.key) for row in PLACEMENT_FLAGS)
