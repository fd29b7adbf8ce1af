"""Turns the command line that serves today into profile keys that render to the same list.

Every flag ends in one of three places: a key, `extra_args` (the build lists it but no key knows it),
or the list of what could not be placed. Keys that tunerd would set by itself and the command line
does not are left to the engine.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from tunerd.core.defaults import default_layer
from tunerd.core.engine import SPEC_WORDS, Capabilities, Family, FitStyle, SpecStyle
from tunerd.core.flags import PLACEMENT_FLAGS, SECRET_FLAGS, normal_spelling, owner_of
from tunerd.core.help_text import HelpText
from tunerd.core.importer_check import settle
from tunerd.core.importer_environment import FALSE, TRUE, read_environment
from tunerd.core.importer_flags import Flag, Unplaced, split_flags
from tunerd.core.profile import ProfileFile
from tunerd.core.profile_check import LEAVE_TO_ENGINE, flatten, nest, validate

_DRAFT_OF_WORD = {word: kind for kind, words in SPEC_WORDS.items() for word in words}
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
    kind = "off" if word == "none" else _DRAFT_OF_WORD.get(word, word)
    keys: dict[str, Any] = {"speculation.type": kind}
    for pair in filter(None, pairs.split(",")):
        name, _, text = pair.partition("=")
        number = _number(text)
        keys[f"speculation.{name}"] = text if number is None else number
    before = draft.keys.get("speculation.type", kind)
    if before != kind or "," in word or list(validate("", nest(keys))):
        draft.unplaced.append(Unplaced(flag.words, "a profile has one kind of speculation"))
    else:
        draft.keys.update(keys)


def _finish_type(draft: _Draft) -> None:
    """Older builds speculate as soon as they are given a draft model."""
    draft.keys.setdefault("speculation.type", "off")
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
