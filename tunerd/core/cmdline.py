"""Renders a resolved profile as the command line of one engine build, with the origin of every flag.

What this build cannot do is refused with the key, the build and the way out, unless tunerd itself
only suggested it: then it is left out with a note.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from tunerd.core.cmdline_flags import OURS, on_off, plain
from tunerd.core.cmdline_memory import load_mode, placement
from tunerd.core.cmdline_parts import Argument, Note, Part, Refusal, RenderContext
from tunerd.core.cmdline_speculation import speculation
from tunerd.core.engine import Capabilities
from tunerd.core.flags import CONTEXT_SHIFT, SECRET_FLAGS, SERVING_FLAGS, normal_spelling, owner_of
from tunerd.core.resolve import Layer, Resolved

_FLAG_STARTS = "-"
# Where a file comes from, for people.
_NO_FLAG = frozenset({"speculation.draft_hf_repo"})


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A program and its arguments; `notes` says what needed no flag and what was left out."""

    program: str
    arguments: tuple[Argument, ...]
    notes: tuple[Note, ...] = field(default=())

    @property
    def argv(self) -> tuple[str, ...]:
        """The argument vector, program first."""
        return (self.program, *(word for argument in self.arguments for word in argument.words))


def render(
    resolved: Resolved, capabilities: Capabilities, context: RenderContext
) -> CommandLine | tuple[Refusal, ...]:
    """The command line, or everything that stands against it."""
    parts = list(_parts(resolved, capabilities, context))
    parts += list(_extra(resolved, capabilities, parts))
    parts += _without_trace(resolved, {part.key for part in parts})
    refusals = tuple(part for part in parts if isinstance(part, Refusal))
    if refusals:
        return refusals
    return CommandLine(
        program=context.program,
        arguments=tuple(part for part in parts if isinstance(part, Argument)),
        notes=tuple(part for part in parts if isinstance(part, Note)),
    )


def _parts(
    resolved: Resolved, capabilities: Capabilities, context: RenderContext
) -> Iterator[Part]:
    model_origin = resolved.origin("model.path") or resolved.origin("model.hf_repo")
    yield Argument("--model", context.model_path, "model.path", model_origin or OURS)
    for row in SERVING_FLAGS:
        yield from plain(row, resolved, capabilities, context)
        if row.key == "serving.threads_http":
            yield from load_mode(resolved, capabilities)
        if row.key == "serving.cache_reuse":
            yield from on_off(CONTEXT_SHIFT, resolved, capabilities)
    yield from placement(resolved, capabilities, context)
    yield from speculation(resolved, capabilities, context)


def _without_trace(resolved: Resolved, seen: Collection[str]) -> Iterator[Note]:
    """A note for each key that somebody set and that changes nothing."""
    kind = resolved.profile.speculation.type or "off"
    for key, setting in resolved.settings.items():
        section = key.partition(".")[0]
        if key in seen or key in _NO_FLAG or setting.origin.layer is Layer.TUNERD:
            continue
        if section == "speculation":
            yield Note(key, f"left out: no effect with speculation.type = {kind}")
        elif section in {"serving", "memory"}:
            yield Note(key, "left out: no effect here")


def _extra(
    resolved: Resolved, capabilities: Capabilities, rendered: Sequence[Part]
) -> Iterator[Part]:
    setting = resolved.settings.get("extra_args")
    if setting is None:
        return
    owners = {part.flag: part.key for part in rendered if isinstance(part, Argument)}
    for word in setting.value:
        is_flag = word.startswith(_FLAG_STARTS)
        owner = owner_of(word, capabilities.flags) or owners.get(word) if is_flag else None
        if any(ord(letter) < ord(" ") or letter == "\x7f" for letter in word):
            yield Refusal("extra_args", repr(word), setting.origin, "it has a control character",
                          "write the text into a file and pass the file")  # fmt: skip
        elif normal_spelling(word) in SECRET_FLAGS:
            yield Refusal("extra_args", word, setting.origin,
                          "its value would stand in the unit and in the process list",
                          "serving.api_key_file keeps keys in a file")  # fmt: skip
        elif owner is not None:
            yield Refusal("extra_args", word, setting.origin, f"the key {owner} renders this flag",
                          f"set {owner} instead")  # fmt: skip
        elif _looks_like_flag(word) and word not in capabilities.flags:
            yield Refusal("extra_args", word, setting.origin,
                          f"this build ({capabilities.dialect}) does not list this flag",
                          "`tunerd engines` shows which builds there are")  # fmt: skip
        else:
            yield Argument(word, None, "extra_args", setting.origin)


def _looks_like_flag(word: str) -> bool:
    rest = word.lstrip("-")
    return word.startswith("-") and bool(rest) and rest[0].isalpha()
