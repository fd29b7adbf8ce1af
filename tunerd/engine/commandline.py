"""Renders a resolved profile into the command line of one build: every flag with its origin, or a refusal."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tunerd.engine.flags import (
    DEPTH_FLAGS,
    DRAFT_FLAGS,
    DRAFT_GPU_FLAGS,
    GPU_FLAGS,
    PLACEMENT_FLAGS,
    SECRET_FLAGS,
    SERVING_FLAGS,
    SwitchFlag,
    ValueFlag,
    ngram_flags,
    normal_spelling,
    number,
    owner_of,
)
from tunerd.engine.help import Capabilities, FitStyle, SpecStyle
from tunerd.profile.layers import Layer, Origin, Resolved


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


_COUNTS_OF_CORES = frozenset({"serving.threads", "serving.threads_batch"})


@dataclass(frozen=True, slots=True)
class RenderContext:
    """What a command line takes from the machine.

    `paths` are files and folders found for keys that name them (`model.path` has its own field);
    `physical_cores` is None when unknown.
    """

    program: str
    model_path: str
    has_gpu: bool
    physical_cores: int | None
    paths: Mapping[str, str] = field(default_factory=dict)

    def substitute(self, key: str, value: object) -> object | None:
        """The value as this machine has it: files by their path, `physical` as a number.

        None where the machine's value is not known.
        """
        if key in self.paths:
            return self.paths[key]
        if key in _COUNTS_OF_CORES and value == "physical":
            return self.physical_cores
        return value


NO_FLAG_NEEDED = "this is what the engine does without a flag"
OURS = Origin(Layer.TUNERD, "tunerd")


def plain(
    row: ValueFlag | SwitchFlag,
    resolved: Resolved,
    capabilities: Capabilities,
    context: RenderContext,
) -> Iterator[Part]:
    """The flag of a key that needs nothing but a spelling."""
    setting = resolved.settings.get(row.key)
    if setting is None:
        return
    if isinstance(row, ValueFlag):
        flag = capabilities.first_of(*row.spellings)
        value = context.substitute(row.key, setting.value)
        if flag is None:
            yield missing(row.key, setting.value, setting.origin, row.spellings, capabilities)
        elif value is None:
            yield Refusal(row.key, str(setting.value), setting.origin,
                          "the number of physical cores could not be told",
                          f"set {row.key} to a number")  # fmt: skip
        else:
            yield Argument(flag, row.show(value), row.key, setting.origin)
        return
    spellings = row.on if setting.value else row.off
    flag = capabilities.first_of(*spellings)
    word = capabilities.first_of(*row.on)
    if word in capabilities.on_off_flags:
        yield Argument(word, "on" if setting.value else "off", row.key, setting.origin)
    elif flag is not None:
        yield Argument(flag, None, row.key, setting.origin)
    elif row.default is bool(setting.value) or _only_this_way(row, setting.value, capabilities):
        yield Note(row.key, NO_FLAG_NEEDED)
    else:
        yield missing(row.key, setting.value, setting.origin, spellings, capabilities)


def missing(
    key: str, value: object, origin: Origin, spellings: Sequence[str], capabilities: Capabilities
) -> Part:
    """A refusal for what somebody asked for, a note for what only tunerd suggested."""
    wanted = " or ".join(f"`{spelling}`" for spelling in spellings) or "a flag for it"
    if origin.layer is Layer.TUNERD:
        return Note(key, f"left out: {capabilities.dialect} has no {wanted}")
    return Refusal(
        key=key,
        value=str(value),
        origin=origin,
        reason=f"this build ({capabilities.dialect}) has no {wanted}",
        hint=(
            f'set {key} = "default" (in [engines.{capabilities.family}], or with --set), '
            "or choose another engine"
        ),
    )


def _only_this_way(row: SwitchFlag, value: object, capabilities: Capabilities) -> bool:
    """Whether the build has only the opposite switch, so that without it this value holds."""
    opposite = row.off if value else row.on
    return row.default is None and capabilities.first_of(*opposite) is not None


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
_PLACEMENT_KEYS = tuple(row.key for row in PLACEMENT_FLAGS)
_GPU_KEYS = tuple(row.key for row in GPU_FLAGS)


def load_mode(resolved: Resolved, capabilities: Capabilities) -> Iterator[Part]:
    """How weights come into memory: `--load-mode`, or the switches that it replaced."""
    setting = resolved.settings.get("serving.load_mode")
    if setting is None:
        return
    mode = str(setting.value)
    if capabilities.has_load_mode:
        yield Argument("--load-mode", mode, setting.key, setting.origin)
        return
    switches = LEGACY_LOAD[mode]
    lacking = [switch for switch in switches if switch not in capabilities.flags]
    if lacking:
        yield Refusal(setting.key, mode, setting.origin,
                      f"this build ({capabilities.dialect}) has neither `--load-mode` nor `{lacking[0]}`",
                      "choose another load mode or another engine")  # fmt: skip
    elif not switches:
        yield Note(setting.key, NO_FLAG_NEEDED)
    for switch in switches if not lacking else ():
        yield Argument(switch, None, setting.key, setting.origin)


def placement(
    resolved: Resolved, capabilities: Capabilities, context: RenderContext
) -> Iterator[Part]:
    """Fit, or explicit layers; nothing at all where no GPU can be used.

    A GPU flag on a machine without one is at best ignored; ik's `--fit` crashes there.
    """
    if not context.has_gpu:
        for key in (*_PLACEMENT_KEYS, *_GPU_KEYS, "memory.fit", "memory.fit_mib"):
            if key in resolved.settings:
                yield Note(key, "left out: no usable GPU")
        return
    for row in GPU_FLAGS:
        yield from plain(row, resolved, capabilities, context)
    explicit = by_hand(resolved)
    if explicit:
        yield from _explicit(resolved, capabilities, context, explicit)
    else:
        yield from _fit(resolved, capabilities)


def by_hand(resolved: Resolved) -> list[str]:
    """The keys that place the model by hand, where a margin means nothing; empty where fit does."""
    return [key for key in _PLACEMENT_KEYS if _places(key, resolved)]


def _places(key: str, resolved: Resolved) -> bool:
    """Whether a key places something by hand; `cpu_moe = false` and an empty list place nothing."""
    setting = resolved.settings.get(key)
    return setting is not None and setting.value is not False and setting.value != []


def _fit(resolved: Resolved, capabilities: Capabilities) -> Iterator[Part]:
    switch, target = (resolved.settings.get(f"memory.{name}") for name in ("fit", "fit_mib"))
    is_on_off = capabilities.fit is FitStyle.ON_OFF
    if switch is not None and not switch.value:
        if is_on_off:
            yield Argument("--fit", "off", switch.key, switch.origin)
        else:
            yield Note(switch.key, NO_FLAG_NEEDED)
        if target is not None and target.origin.layer is not Layer.TUNERD:
            yield Note(target.key, "left out: no effect without --fit")
        return
    if switch is not None and capabilities.fit is FitStyle.NONE:
        yield missing(switch.key, switch.value, switch.origin, ("--fit",), capabilities)
        return
    spellings = ("--fit-target", "--fit-margin")
    margin = capabilities.first_of(*spellings)
    if target is not None and (capabilities.fit is FitStyle.NONE or margin is None):
        yield missing(target.key, target.value, target.origin, spellings, capabilities)
        return
    owner = switch or target
    if owner is not None:
        yield Argument("--fit", "on" if is_on_off else None, owner.key, owner.origin)
    if target is not None and margin is not None:
        yield Argument(margin, str(target.value), target.key, target.origin)


def _explicit(
    resolved: Resolved, capabilities: Capabilities, context: RenderContext, explicit: list[str]
) -> Iterator[Part]:
    switch, target = (resolved.settings.get(f"memory.{name}") for name in ("fit", "fit_mib"))
    if capabilities.fit is FitStyle.ON_OFF:
        owner = (
            switch if switch is not None and not switch.value else resolved.settings[explicit[0]]
        )
        yield Argument("--fit", "off", owner.key, owner.origin)
    for setting in (switch, target):
        is_on = setting is not None and setting.value is not False
        if setting is not None and is_on and setting.origin.layer is not Layer.TUNERD:
            yield Note(setting.key, f"left out: {', '.join(explicit)} place the model by hand")
    for row in PLACEMENT_FLAGS:
        if _places(row.key, resolved):
            yield from plain(row, resolved, capabilities, context)


KINDS_WITH_DRAFT_FILE = frozenset({"dflash", "dspark", "eagle3", "draft"})
KINDS_WITH_PROBABILITY = KINDS_WITH_DRAFT_FILE | {"mtp"}
_DEFAULT_TYPE = "off"
_DRAFTS = "draft-"
_WEAKEST_FIRST = tuple(Layer)


def speculation(
    resolved: Resolved, capabilities: Capabilities, context: RenderContext
) -> Iterator[Part]:
    """All flags of the kind of speculation that the profile wants, or a refusal."""
    wanted = resolved.profile.speculation
    kind = wanted.type or _DEFAULT_TYPE
    if kind == "off":
        said = "off: no flag" if wanted.type else "no flag of its own"
        yield Note("speculation.type", f"{said}, since every build is off without one")
        return
    word = capabilities.spec_word(kind)
    setting = resolved.settings["speculation.type"]
    if word is None:
        types = ", ".join(word for word in capabilities.spec_types if word != "none") or "none"
        yield Refusal(setting.key, kind, setting.origin,
                      f"this build ({capabilities.dialect}) cannot speculate with {kind}; it has: {types}",
                      'choose another engine, or set speculation.type = "off"')  # fmt: skip
        return
    needs_file = bool(wanted.kinds & KINDS_WITH_DRAFT_FILE)
    if needs_file and wanted.draft_model is None:
        yield Refusal(setting.key, kind, setting.origin, f"{kind} needs a draft model",
                      "set speculation.draft_model")  # fmt: skip
        return
    yield from _kind(resolved, capabilities, context, kind, word)
    if drafts_with_probability(wanted.kinds):
        for row in DRAFT_FLAGS:
            if row.key != "speculation.draft_model" or needs_file:
                yield from plain(row, resolved, capabilities, context)
        if context.has_gpu:
            for row in DRAFT_GPU_FLAGS:
                yield from plain(row, resolved, capabilities, context)


def drafts_with_probability(kinds: Collection[str]) -> bool:
    """Whether something among them drafts by a model, so that n-max and p-min mean something.

    Of kinds that only the build knows those count that it calls drafts.
    """
    return any(kind in KINDS_WITH_PROBABILITY or kind.startswith(_DRAFTS) for kind in kinds)


def _kind(
    resolved: Resolved, capabilities: Capabilities, context: RenderContext, kind: str, word: str
) -> Iterator[Part]:
    if capabilities.spec_style is SpecStyle.STAGE:
        yield from _stage(resolved, kind, word)
        return
    setting = resolved.settings["speculation.type"]
    if capabilities.spec_style is SpecStyle.IK_LEGACY and kind == "mtp":
        yield Argument("--multi-token-prediction", None, setting.key, setting.origin)
    elif kind == "draft" and "draft" not in capabilities.spec_types and word == "draft":
        yield Note(setting.key, "the draft model alone switches it on")
    else:
        yield Argument("--spec-type", word, setting.key, setting.origin)
    kinds = resolved.profile.speculation.kinds
    for row in DEPTH_FLAGS if drafts_with_probability(kinds) else ngram_flags(kind):
        yield from plain(row, resolved, capabilities, context)
    yield from _adaptive(resolved, capabilities)


def _adaptive(resolved: Resolved, capabilities: Capabilities) -> Iterator[Part]:
    setting = resolved.settings.get("speculation.adaptive")
    if setting is None:
        return
    flag = capabilities.first_of("--spec-dm-adaptive" if setting.value else "--no-spec-dm-adaptive")
    if flag is not None:
        yield Argument(flag, None, setting.key, setting.origin)
    elif "--spec-dm-controller" in capabilities.flags:
        mode = "profit" if setting.value else "off"
        yield Argument("--spec-dm-controller", mode, setting.key, setting.origin)
    elif not setting.value:
        yield Note(setting.key, "this build never changes the depth by itself")
    else:
        yield Refusal(setting.key, "true", setting.origin,
                      f"this build ({capabilities.dialect}) has no adaptive depth",
                      "set speculation.adaptive = false")  # fmt: skip


_IN_STAGES = (
    "n_max", "n_min", "p_min", "cross_ctx", "ngram_size_n", "ngram_size_m", "ngram_min_hits",
)  # fmt: skip


def _stage(resolved: Resolved, kind: str, word: str) -> Iterator[Part]:
    """Ik since June 2026: everything about a stage is inside one value."""
    present = [
        key
        for key in (f"speculation.{name}" for name in _IN_STAGES)
        if key in resolved.settings
        and (key != "speculation.p_min" or kind in KINDS_WITH_PROBABILITY)
    ]
    words = {
        key: f"{key.removeprefix('speculation.')}={number(resolved.settings[key].value)}"
        for key in present
    }
    pairs = ",".join(words.values())
    origins = [resolved.settings[key].origin for key in ("speculation.type", *present)]
    strongest = max(origins, key=lambda origin: _WEAKEST_FIRST.index(origin.layer))
    yield Argument(
        "--spec-type",
        f"{word}:{pairs}" if pairs else word,
        "speculation.type",
        strongest,
    )
    for key, pair in words.items():
        yield Note(key, f"`{pair}` inside `--spec-type`")
    adaptive = resolved.settings.get("speculation.adaptive")
    if adaptive is not None and not adaptive.value:
        yield Note(adaptive.key, "this build never changes the depth by itself")


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
    for before, word in itertools.pairwise(("", *setting.value)):
        is_value = normal_spelling(before) in capabilities.value_flags
        is_flag = word.startswith(_FLAG_STARTS)
        owner = owner_of(word, capabilities.flags) or owners.get(word) if is_flag else None
        if owner == "speculation.type" and "speculation.type" not in resolved.settings:
            owner = None
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
        elif (
            _looks_like_flag(word)
            and not is_value
            and capabilities.flags.isdisjoint((word, normal_spelling(word)))
        ):
            yield Refusal("extra_args", word, setting.origin,
                          f"this build ({capabilities.dialect}) does not list this flag",
                          "`tunerd engines` shows which builds there are")  # fmt: skip
        else:
            yield Argument(word, None, "extra_args", setting.origin)


def _looks_like_flag(word: str) -> bool:
    rest = word.lstrip("-")
    return word.startswith("-") and bool(rest) and rest[0].isalpha()
