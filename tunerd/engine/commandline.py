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
    KeyFlag,
    is_flag,
    ngram_flags,
    normal_spelling,
    number,
    owner_of,
)
from tunerd.engine.help import Capabilities, FitStyle, SpecStyle
from tunerd.profile.layers import Layer, Origin, Resolved, Setting


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
    subcommand: tuple[str, ...] = ()

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
KINDS_WITH_DRAFT_FILE = frozenset({"dflash", "dspark", "eagle3", "draft"})
KINDS_WITH_PROBABILITY = KINDS_WITH_DRAFT_FILE | {"mtp"}
_TYPE = "speculation.type"
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


def by_hand(resolved: Resolved) -> list[str]:
    """The keys that place the model by hand, where a margin means nothing; empty where fit does.

    `cpu_moe = false` and an empty list place nothing.
    """
    settings = (resolved.settings.get(row.key) for row in PLACEMENT_FLAGS)
    return [one.key for one in settings if one and one.value is not False and one.value != []]


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
        if setting is None:
            return
        flags = self.capabilities
        if row.off is None:
            flag, value = flags.first_of(*row.on), setting.value
            value = self.context.substitute(row.key, value)
            if flag is None:
                yield self.missing(setting, row.on)
            elif value is None:
                why = "the number of physical cores could not be told"
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

        A GPU flag on a machine without one is at best ignored; ik's `--fit` crashes there.
        """
        if not self.context.has_gpu:
            rows = (*PLACEMENT_FLAGS, *GPU_FLAGS)
            for key in (*(row.key for row in rows), "memory.fit", "memory.fit_mib"):
                if self.setting(key) is not None:
                    yield Note(key, "left out: no usable GPU")
            return
        for row in GPU_FLAGS:
            yield from self.row(row)
        switch, target = self.setting("memory.fit"), self.setting("memory.fit_mib")
        placing = by_hand(self.resolved)
        yield from self.explicit(switch, target, placing) if placing else self.fit(switch, target)

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
            yield _said(owner, "--fit", "off")
        for setting in (switch, target):
            is_on = setting is not None and setting.value is not False
            if setting is not None and is_on and setting.origin.layer is not Layer.TUNERD:
                yield Note(setting.key, f"left out: {', '.join(placing)} place the model by hand")
        for row in PLACEMENT_FLAGS:
            if row.key in placing:
                yield from self.row(row)

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
        needs_file = bool(wanted.kinds & KINDS_WITH_DRAFT_FILE)
        if needs_file and wanted.draft_model is None:
            why = f"{wanted.type} needs a draft model"
            yield _refused(setting, why, "set speculation.draft_model")
            return
        by_model = drafts_with_probability(wanted.kinds)
        if capabilities.spec_style is SpecStyle.STAGE:
            yield from self.stage(setting, wanted.type, word)
        else:
            yield self.kind(setting, wanted.type, word)
            for row in DEPTH_FLAGS if by_model else ngram_flags(wanted.type):
                yield from self.row(row)
            yield from self.adaptive()
        on_gpu = DRAFT_GPU_FLAGS if self.context.has_gpu else ()
        for draft_row in (*DRAFT_FLAGS, *on_gpu) if by_model else ():
            if draft_row.key != "speculation.draft_model" or needs_file:
                yield from self.row(draft_row)

    def kind(self, setting: Setting, kind: str, word: str) -> Part:
        if self.capabilities.spec_style is SpecStyle.IK_LEGACY and kind == "mtp":
            return _said(setting, "--multi-token-prediction")
        if kind == "draft" and "draft" not in self.capabilities.spec_types and word == "draft":
            return Note(setting.key, "the draft model alone switches it on")
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
        names = [name for name in _IN_STAGES if name != "p_min" or kind in KINDS_WITH_PROBABILITY]
        found = {name: self.setting(f"speculation.{name}") for name in names}
        given = {name: one for name, one in found.items() if one is not None}
        words = {name: f"{name}={number(one.value)}" for name, one in given.items()}
        origins = [one.origin for one in (setting, *given.values())]
        strongest = max(origins, key=lambda origin: _WEAKEST_FIRST.index(origin.layer))
        value = f"{word}:{','.join(words.values())}" if words else word
        yield Argument("--spec-type", value, _TYPE, strongest)
        for name, pair in words.items():
            yield Note(given[name].key, f"`{pair}` inside `--spec-type`")
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
            owner = None
            if word.startswith("-"):
                owner = owner_of(word, flags) or owners.get(word)
            if owner == _TYPE and self.setting(_TYPE) is None:
                owner = None
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
                why = "its value would stand in the unit and in the process list"
                hint = "serving.api_key_file keeps keys in a file"
            elif owner is not None:
                why, hint = f"the key {owner} renders this flag", f"set {owner} instead"
            elif is_unlisted:
                why = f"{self.build} does not list this flag"
                hint = "`tunerd engines` shows which builds there are"
            origin = self.resolved.settings["extra_args"].origin
            if why is None:
                yield Argument(word, None, "extra_args", origin)
            else:
                yield Refusal("extra_args", shown, origin, why, hint)
