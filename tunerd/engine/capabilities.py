"""One build by what it says of itself: its dialect and all that it accepts, from its help text; what it consists of, and what it was seen to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tunerd.model import memory
from tunerd.profile.schema import SPEC_WORDS
from tunerd.words import Family, MiB, PortOption, all_known

# The text comes from a program that is not trusted yet. Real builds print up to 60,000 characters,
# lines of up to 216 and descriptions of up to 993.
MAX_HELP_CHARS = 1_000_000
_MAX_LINE_CHARS = 2_000
_MAX_DESCRIPTION_CHARS = 10_000
_MAX_OPTION_INDENT = 12
_SPELLING = re.compile(r"--?[A-Za-z][A-Za-z0-9_.-]*(?:\(s\))?")
_DEFAULT = re.compile(r"\(default: ([^()]*(?:\([^()]*\)[^()]*)*)\)|, default: ([^\s,;)]+)")
_ENV = re.compile(r"\(env: ([A-Z0-9_]+)\)")
_GAP = re.compile(r",?[ \t]*")
_PLACEHOLDER = re.compile(r"(?:\S| (?! ))+")
# ik prints `-ctx-ckpt N, --ctx-checkpoints N`: a placeholder between two spellings.
_BETWEEN = re.compile(r"([^\s,]+), (?=--?[A-Za-z])")


@dataclass(frozen=True, slots=True)
class Option:
    """One entry of a help text.

    `argument` is the placeholder as printed (`N`, `[on|off|auto]`), empty for a bare switch.
    `default` is None where the text names none. A removed option is listed but refused by the
    program; a deprecated one still works.
    """

    spellings: tuple[str, ...]
    argument: str
    description: str
    default: str | None
    env: str | None
    is_removed: bool


@dataclass(frozen=True, slots=True)
class HelpText:
    """All options of one build, by spelling."""

    options: tuple[Option, ...]
    text: str

    def option(self, spelling: str) -> Option | None:
        """The entry that lists this spelling, live entries before removed ones."""
        found = [option for option in self.options if spelling in option.spellings]
        return min(found, key=lambda option: option.is_removed, default=None)

    def spellings(self, fits: Callable[[Option], bool]) -> frozenset[str]:
        """Every spelling of the options that fit."""
        options = (option for option in self.options if fits(option))
        return frozenset(spelling for option in options for spelling in option.spellings)

    @property
    def live_spellings(self) -> frozenset[str]:
        """Every spelling that some entry lists as working."""
        return self.spellings(lambda option: not option.is_removed)


def parse_help(text: str) -> HelpText:
    """The options of a help text; entries that cannot be read are left out.

    Only the first `MAX_HELP_CHARS` characters are looked at, and of each line and description only
    the beginning.
    """
    text = text[:MAX_HELP_CHARS]
    entries: list[list[str]] = []
    is_open = False
    for whole_line in text.splitlines():
        line = whole_line[:_MAX_LINE_CHARS]
        stripped = line.strip()
        if not stripped:  # descriptions have blank lines within
            continue
        indent = len(line) - len(line.lstrip())
        if stripped.startswith("-") and indent <= _MAX_OPTION_INDENT and _SPELLING.match(stripped):
            entries.append([stripped])
            is_open = True
        elif is_open and indent > _MAX_OPTION_INDENT:
            entries[-1].append(stripped)
        else:
            is_open = False
    return HelpText(tuple(_option(head, body) for head, *body in entries), text)


def _option(head: str, body: list[str]) -> Option:
    spellings, argument, rest = _split_head(head)
    description = " ".join(part for part in (rest, *body) if part)[:_MAX_DESCRIPTION_CHARS]
    default = _DEFAULT.search(description)
    env = _ENV.search(description)
    return Option(
        spellings=spellings,
        argument=argument,
        description=description,
        default=None if default is None else (default.group(1) or default.group(2) or "").strip(),
        env=None if env is None else env.group(1),
        is_removed="the argument has been removed" in description,
    )


def _split_head(head: str) -> tuple[tuple[str, ...], str, str]:
    """Spellings, argument placeholder, and what follows on the same line.

    A placeholder stands one blank after the last spelling, a description at least two.
    """
    spellings: list[str] = []
    argument = ""
    position = 0
    while (found := _SPELLING.match(head, position)) is not None:
        spellings.append(found.group().removesuffix("(s)"))
        blanks = _GAP.match(head, found.end())
        gap = blanks.group() if blanks is not None else ""
        position = found.end() + len(gap)
        if _SPELLING.match(head, position) and ("," in gap or len(gap) == 1):
            continue
        if gap not in {" ", ", "}:
            break
        between = _BETWEEN.match(head, position)
        if between is not None:
            argument = between.group(1)
            position = between.end()
            continue
        placeholder = _PLACEHOLDER.match(head, position)
        if placeholder is not None:
            argument = placeholder.group().strip()
            position = placeholder.end()
        break
    return tuple(spellings), argument.rstrip(","), head[position:].strip()


_DEVICE = re.compile(
    r"^[ \t]{1,20}(?P<name>[A-Za-z]{1,20}\d{1,4}): (?P<what>.{1,300}?)"
    r"(?: \((?P<total>\d{1,10}) MiB, (?P<free>\d{1,10}) MiB free\))?$",
    re.MULTILINE,
)
# Every repetition is bounded: the text comes from a program that is not trusted yet.
_VERSION = re.compile(
    r"^version: (?:(?P<semantic>\d{1,9}\.\d{1,9}\.\d{1,9}[^\s(]{0,80}) "
    r"\(build \d{1,10}, commit [^\s)]{1,80}\)|(?P<count>\d{1,10}) \([^\s)]{1,80}\))",
    re.MULTILINE,
)

# Digits of an identity that tell builds apart for people, and in names of folders.
SHORT = 12
# ik_llama.cpp takes these but does not list them: those of the first two lines never or no more, as far as `-thp` not before
# July 2026, the others not in a build for the CPU. Source: builds of June and August 2026, each flag tried with a
# missing model file (tests/integration/engine/test_golden_engines.py tries them again).
IK_HIDDEN_FLAGS = frozenset(
    ("-a", "--alias", "--n-predict", "-to", "--embeddings", "--logit-bias", "-rcache", "--rope-cache",
     "-fdn", "--fused-delta-net", "--recurrent-ckpt-mode",
     "-gfm", "--gpu-fit-margin", "--dry-multiplier", "--dry-base", "--dry-allowed-length", "--dry-penalty-last-n",
     "--dry-sequence-breaker", "--no-mmproj-offload", "--scheduler-async", "--transparent-huge-pages",
     "-ot", "--override-tensor", "-rtr", "-cmoe", "-ncmoe", "-thp",
     "-op", "--offload-policy", "-no-ooae", "--no-offload-only-active-experts", "--max-gpu",
     "-ngl", "--gpu-layers", "--n-gpu-layers", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft",
     "-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", "-dev", "--device",
     "-devd", "--device-draft")
)  # fmt: skip
# Listed and taken, and the draft's context is as long as the target's. Source: KV caches of the build of August 2026.
_IK_IDLE_FLAGS = frozenset(("-cd", "--ctx-size-draft"))
# Ik's help does not say how deep a stage drafts that names no depth. Source: its buffer of states for MTP.
_IK_N_MAX = 16
# Nor its p-min, which the one of June rounds. Source: its parser; both draft so without the key.
_IK_P_MIN, _IK_P_MIN_TOLD = 0.75, (None, 0.8)
# `n_parallel is set to auto, using n_parallel = 4 and kv_unified = true`.
_SLOTS_OF_AUTO = 4
# Mainline has it since 2 June 2026, a day after ggml-org/llama.cpp#23861 and #23988 and a day before #23907.
_SINCE_JUNE_2026 = "--sse-ping-interval"
# Builds that list it set SO_REUSEADDR in any case, and with it SO_REUSEPORT too. Source: builds of April to August 2026
# under strace, and ggml-org/llama.cpp#21056, before which cpp-httplib set SO_REUSEPORT, as it does in ik.
_REUSE_PORT = "--reuse-port"


class SpecStyle(StrEnum):
    """How a build wants speculation spelled.

    NONE: not at all. LEGACY: `--draft-max`, a draft model alone switches it on. SPLIT:
    `--spec-type` with `--spec-draft-n-max`. IK_LEGACY: `--multi-token-prediction` with
    `--draft-max`. STAGE: everything inside `--spec-type TYPE:n_max=N,p_min=P`.
    """

    NONE = "none"
    LEGACY = "legacy"
    SPLIT = "split"
    IK_LEGACY = "ik-legacy"
    STAGE = "stage"


class FitStyle(StrEnum):
    """How automatic placement is asked for: not at all, `--fit on|off`, or a bare `--fit`."""

    NONE = "none"
    ON_OFF = "on-off"
    SWITCH = "switch"


@dataclass(frozen=True, slots=True)
class Version:
    """What `--version` printed, and a short form for names; numbers of different families cannot be compared."""

    text: str
    label: str | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one build accepts, read from its help text.

    `takes_chains` says whether `--spec-type` is a list of kinds.
    `flags` holds every spelling that works, `value_flags` those among them that want a value behind them,
    `on_off_flags` those that want `on` or `off`. `lists_gpu_flags` says whether the help itself shows GPU options, which tells
    whether an ik build can use a GPU. Defaults are None where the help does not name one.
    """

    family: Family
    dialect: str
    help: HelpText
    flags: frozenset[str]
    value_flags: frozenset[str]
    on_off_flags: frozenset[str]
    spec_style: SpecStyle
    spec_types: tuple[str, ...]
    takes_chains: bool
    fit: FitStyle
    fit_default_on: bool | None
    has_load_mode: bool
    lists_gpu_flags: bool
    default_n_max: int | None
    default_p_min: float | None
    default_port: int | None
    default_slots: int | None

    @property
    def chooses_slots(self) -> bool:
        """Whether it takes several slots by itself; their cache is one then, whatever is said of it."""
        return self.default_slots == _SLOTS_OF_AUTO

    @property
    def drafts_unasked(self) -> bool:
        """Whether a draft model alone switches speculation on.

        Source: builds of April to August 2026; that of May names the type and does so all the same. Mainline until
        ggml-org/llama.cpp#23988.
        """
        return self.spec_style is not SpecStyle.STAGE and _SINCE_JUNE_2026 not in self.flags

    @property
    def port_option(self) -> PortOption | None:
        """How it binds its port; None for a build of a time that nobody has looked at."""
        if _REUSE_PORT in self.flags:
            return PortOption.REUSE_ADDR
        return PortOption.REUSE_PORT if self.family is Family.IK else None

    def first_of(self, *spellings: str) -> str | None:
        """The first of these spellings that the build takes."""
        return next((spelling for spelling in spellings if spelling in self.flags), None)

    def spec_word(self, kind: str) -> str | None:
        """How this build calls a kind of speculation, or a chain; None if it has no such thing."""
        if "," in kind:
            links = all_known(map(self.spec_word, kind.split(",")))
            return ",".join(links) if self.takes_chains and links else None
        words = SPEC_WORDS.get(kind, (kind,))
        found = next((word for word in words if word in self.spec_types), None)
        if found is None and kind == "mtp" and self.spec_style is SpecStyle.IK_LEGACY:
            return "mtp"
        if found is None and kind == "draft" and self.spec_style in _DRAFT_BY_MODEL:
            return "draft"
        return found


_DRAFT_BY_MODEL = frozenset({SpecStyle.LEGACY, SpecStyle.IK_LEGACY})


@dataclass(frozen=True, slots=True)
class OffloadDevice:
    """A device that a build can offload to, as it prints it now; memory None where it does not say."""

    name: str
    description: str
    total_mib: MiB | None
    free_mib: MiB | None


@dataclass(frozen=True, slots=True)
class Component:
    """One file that the engine's code comes from."""

    path: Path
    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The program and every shared object that a run of it maps, and one hash over them all."""

    sha256: str
    components: tuple[Component, ...]

    @property
    def short(self) -> str:
        """The first digits of the hash."""
        return self.sha256[:SHORT]


class Effect(StrEnum):
    """What a proof run showed about one feature of a build."""

    PROVED = "proved"
    NO_EFFECT = "no effect"
    FAILED = "failed"
    UNTRIED = "untried"


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome of trying one feature on a model whose behaviour is known."""

    feature: str
    effect: Effect
    detail: str


@dataclass(frozen=True, slots=True)
class Found:
    """A program that may be an engine, and how it was found.

    `environment` is what it needs to find its libraries; `subcommand` is what it needs in front of a server's
    arguments, `serve` for `llama`, and None until it is known.
    """

    program: Path
    found_by: str
    name: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    subcommand: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Engine(Found):
    """One installed engine.

    `capabilities` and `version` are None when the probe was refused or failed; `problem` then says why.
    """

    name: str = ""
    subcommand: tuple[str, ...] = ()
    identity: EngineIdentity | None = None
    version: Version | None = None
    capabilities: Capabilities | None = None
    proofs: tuple[Proof, ...] = ()
    problem: str | None = None
    is_embedded: bool = False

    @property
    def port_option(self) -> PortOption | None:
        """How it binds its port; None where nobody knows."""
        return None if self.capabilities is None else self.capabilities.port_option

    def proof(self, feature: str) -> Proof:
        """The proof of this feature, UNTRIED if there is none."""
        untried = Proof(feature, Effect.UNTRIED, "not tried on this build yet")
        return next((proof for proof in self.proofs if proof.feature == feature), untried)


def laws_of(capabilities: Capabilities) -> memory.EngineLaws:
    """What such a build allocates, told by what its help shows; of others those that take the most memory."""
    if capabilities.family is Family.IK:
        return memory.IK
    if not capabilities.has_load_mode:
        is_june = _SINCE_JUNE_2026 in capabilities.flags
        return memory.MAINLINE_JUNE_2026 if is_june else memory.MAINLINE_SPRING_2026
    return memory.MAINLINE_SUMMER_2026 if "--mlock" in capabilities.flags else memory.MAINLINE_NOW


def parse_version(text: str) -> Version | None:
    """The version from what `--version` printed on either stream; None if there is none.

    Device lines of a GPU backend may precede it, and a package may put any word where the commit
    goes.
    """
    found = _VERSION.search(text)
    if found is None:
        return None
    count = int(found["count"] or 0)
    label = found["semantic"] or (f"b{count}" if count else None)
    return Version(found.group().removeprefix("version: "), label)


def parse_devices(text: str) -> tuple[OffloadDevice, ...]:
    """The devices that `--list-devices` prints, in its order."""
    return tuple(
        OffloadDevice(
            name=found["name"],
            description=found["what"],
            total_mib=MiB(int(found["total"])) if found["total"] else None,
            free_mib=MiB(int(found["free"])) if found["free"] else None,
        )
        for found in _DEVICE.finditer(text)
    )


def read_capabilities(help_text: HelpText) -> Capabilities:
    """What a build accepts, from its help text alone; its name and version play no part."""
    flags = help_text.live_spellings
    family = _family(help_text)
    p_min = _number(help_text, "--spec-draft-p-min", "--draft-p-min")
    if family is Family.IK:
        flags |= IK_HIDDEN_FLAGS
        p_min = _IK_P_MIN if p_min in _IK_P_MIN_TOLD else p_min
    spec_types = _spec_types(help_text.option("--spec-type"))
    spec_style = _spec_style(flags, family)
    if spec_style is SpecStyle.STAGE:
        flags -= _IK_IDLE_FLAGS
    fit, fit_default_on = _fit(flags, help_text.option("--fit"))
    return Capabilities(
        family=family,
        dialect=_dialect(help_text, flags, family, spec_types),
        help=help_text,
        flags=flags,
        value_flags=help_text.spellings(lambda one: bool(one.argument) and not one.is_removed),
        on_off_flags=help_text.spellings(lambda one: _names_on_off(one.argument)),
        spec_style=spec_style,
        spec_types=spec_types,
        takes_chains=_is_plain_list(help_text.option("--spec-type")),
        fit=fit,
        fit_default_on=fit_default_on,
        has_load_mode="--load-mode" in flags,
        lists_gpu_flags="--n-gpu-layers" in help_text.live_spellings,
        default_n_max=_IK_N_MAX
        if spec_style is SpecStyle.STAGE
        else _whole(_number(help_text, "--spec-draft-n-max", "--draft-max")),
        default_p_min=p_min,
        default_port=_whole(_number(help_text, "--port")),
        default_slots=_slots(help_text),
    )


def _names_on_off(placeholder: str) -> bool:
    """Whether a placeholder says that `on` or `off` must follow."""
    words = re.findall(r"\w+", placeholder)
    return "on" in words and "off" in words[words.index("on") :]


def _family(help_text: HelpText) -> Family:
    text, flags = help_text.text, help_text.live_spellings
    if "--fit-margin" in flags or "-no-fmoe" in flags:
        return Family.IK
    if "kvarn" in text or "--spec-dflash-cross-ctx" in flags:
        return Family.BEE
    if "--slots" in flags or "LLAMA_ARG_" in text:
        return Family.MAINLINE
    return Family.UNKNOWN


def _dialect(
    help_text: HelpText, flags: frozenset[str], family: Family, spec_types: tuple[str, ...]
) -> str:
    """A name of the generation: for reports, and for what such builds allocate."""
    match family:
        case Family.IK:
            return "ik-now" if _spec_style(flags, family) is SpecStyle.STAGE else "ik-may"
        case Family.BEE:
            if "kvarn" in help_text.text:
                return "bee-04"
            has_mtp = "draft-mtp" in spec_types or "mtp" in spec_types
            return "bee-03" if has_mtp else "bee-01"
        case Family.UNKNOWN:
            return "unknown"
        case Family.MAINLINE:
            if "--load-mode" in flags:
                return "main-lm" if "--mlock" in flags else "main-0x"
            if "draft-mtp" in spec_types:
                return "main-mid"
            if "mtp" in spec_types:
                return "main-pr"
            return "main-b8955" if "--spec-draft-n-max" in flags else "main-old"


def _spec_style(flags: frozenset[str], family: Family) -> SpecStyle:
    if "--spec-draft-n-max" in flags:
        return SpecStyle.SPLIT
    if "--multi-token-prediction" in flags:
        return SpecStyle.IK_LEGACY
    if family is Family.IK and "--spec-type" in flags and "--draft-max" not in flags:
        return SpecStyle.STAGE
    if "--draft-max" in flags:
        return SpecStyle.LEGACY
    return SpecStyle.NONE


def _is_plain_list(option: Option | None) -> bool:
    return option is not None and "," in option.argument and ":" not in option.argument


def _spec_types(option: Option | None) -> tuple[str, ...]:
    """The words that `--spec-type` takes, from its placeholder or its description."""
    if option is None or option.is_removed:
        return ()
    listed = re.fullmatch(r".*?\[([a-z0-9 |-]+)\].*", option.argument)
    if listed is not None and "none" in listed.group(1):
        words = listed.group(1).split("|")
    elif _is_plain_list(option):
        words = option.argument.split(",")
    else:
        found = re.search(r"types: ([a-z0-9, -]+)(.?)", option.description)
        words = []
        if found is not None:
            named, canonical, _ = found.group(1).partition(" canonical")
            words = named.split(",") if canonical or not found.group(2) else []
    return tuple(word.strip() for word in words if word.strip())


def _fit(flags: frozenset[str], option: Option | None) -> tuple[FitStyle, bool | None]:
    """How fit is asked for, and whether it is on without being asked."""
    if option is None or "--fit" not in flags:
        return FitStyle.NONE, None
    if "on" not in option.argument:
        return FitStyle.SWITCH, False
    is_on = None if option.default is None else "on" in option.default.strip("'\"")
    return FitStyle.ON_OFF, is_on


def _number(help_text: HelpText, *spellings: str) -> float | None:
    """The default of the first of these options that works, where it is a number."""
    found = (help_text.option(spelling) for spelling in spellings)
    live = next((option for option in found if option is not None and not option.is_removed), None)
    text = live.default if live is not None else None
    is_number = text is not None and re.fullmatch(r"-?\d{1,10}(\.\d{1,20})?", text)
    return float(text) if text is not None and is_number else None


def _slots(help_text: HelpText) -> int | None:
    option = help_text.option("--parallel")
    if option is not None and (option.default or "").startswith("-1"):
        return _SLOTS_OF_AUTO
    return _whole(_number(help_text, "--parallel"))


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and value.is_integer() else None
