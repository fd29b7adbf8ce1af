"""Renders an imported profile again: what does not come back as it was is not taken over."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.core.cmdline import CommandLine, render
from tunerd.core.cmdline_parts import RenderContext
from tunerd.core.defaults import default_layer
from tunerd.core.engine import Capabilities
from tunerd.core.flags import normal_spelling, owner_of
from tunerd.core.help_text import HelpText
from tunerd.core.importer_environment import FALSE, TRUE
from tunerd.core.importer_flags import Flag, Unplaced, split_flags
from tunerd.core.profile_check import LEAVE_TO_ENGINE, flatten, nest
from tunerd.core.resolve import Layer, LayerFile, Resolved, resolve

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
