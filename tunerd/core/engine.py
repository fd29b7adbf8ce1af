"""Engines: which dialect a build speaks, what it was probed to accept, what was proved of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tunerd.core.help_text import HelpText, Option
from tunerd.core.quantity import MiB

_DEVICE = re.compile(
    r"^[ \t]{1,20}(?P<name>[A-Za-z]{1,20}\d{1,4}): (?P<what>.{1,300}?)"
    r"(?: \((?P<total>\d{1,10}) MiB, (?P<free>\d{1,10}) MiB free\))?$",
    re.MULTILINE,
)
# Every repetition is bounded: the text comes from a program that is not trusted yet.
_VERSION = re.compile(
    r"^version: (?:(?P<semantic>\d{1,9}\.\d{1,9}\.\d{1,9}[^\s(]{0,80}) "
    r"\(build (?P<build>\d{1,10}), commit (?P<commit>[^\s)]{1,80})\)"
    r"|(?P<count>\d{1,10}) \((?P<hash>[^\s)]{1,80})\))",
    re.MULTILINE,
)

# Digits of an identity that tell builds apart for people, and in names of folders.
SHORT = 12
# ik_llama.cpp takes these but does not list them: the first four never, the others not in a build
# for the CPU. Source: builds of June and August 2026, each flag tried with a missing model file
# (tests/integration/test_dialects.py tries them again).
IK_HIDDEN_FLAGS = frozenset(
    {
        "-a",
        "--alias",
        "--n-predict",
        "-to",
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        "-sm",
        "--split-mode",
        "-ts",
        "--tensor-split",
        "-mg",
        "--main-gpu",
        "-dev",
        "--device",
        "-devd",
        "--device-draft",
    }
)


class Family(StrEnum):
    """Whose code a build is; UNKNOWN is served by its flags like any other."""

    MAINLINE = "mainline"
    IK = "ik"
    BEE = "bee"
    UNKNOWN = "unknown"


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
    """What `--version` printed; numbers of different families cannot be compared."""

    text: str
    semantic: str | None
    build: int | None
    commit: str | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one build accepts, read from its help text.

    `flags` holds every spelling that works, `on_off_flags` those among them that want `on` or
    `off` behind them. `lists_gpu_flags` says whether the help itself shows GPU options, which tells
    whether an ik build can use a GPU. Defaults are None where the help does not name one.
    """

    family: Family
    dialect: str
    flags: frozenset[str]
    on_off_flags: frozenset[str]
    spec_style: SpecStyle
    spec_types: tuple[str, ...]
    kv_types: tuple[str, ...]
    fit: FitStyle
    fit_default_on: bool | None
    has_load_mode: bool
    lists_gpu_flags: bool
    default_n_max: int | None
    default_p_min: float | None
    default_port: int | None

    def first_of(self, *spellings: str) -> str | None:
        """The first of these spellings that the build takes."""
        return next((spelling for spelling in spellings if spelling in self.flags), None)

    def spec_word(self, kind: str) -> str | None:
        """How this build calls a kind of speculation; None if it has no such thing."""
        words = SPEC_WORDS.get(kind, (kind,))
        found = next((word for word in words if word in self.spec_types), None)
        if found is None and kind == "mtp" and self.spec_style is SpecStyle.IK_LEGACY:
            return "mtp"
        if found is None and kind == "draft" and self.spec_style in _DRAFT_BY_MODEL:
            return "draft"
        return found


_DRAFT_BY_MODEL = frozenset({SpecStyle.LEGACY, SpecStyle.IK_LEGACY})

SPEC_WORDS: Mapping[str, tuple[str, ...]] = {
    "mtp": ("draft-mtp", "mtp"),
    "dflash": ("draft-dflash", "dflash"),
    "eagle3": ("draft-eagle3", "eagle3"),
    "dspark": ("draft-dspark", "dspark"),
    "draft": ("draft-simple", "draft"),
}


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
class Engine:
    """One installed engine.

    `capabilities` and `version` are None when the probe was refused or failed; `problem` then says
    why. `environment` is what the program needs to find its libraries.
    """

    name: str
    program: Path
    found_by: str
    identity: EngineIdentity | None
    version: Version | None
    capabilities: Capabilities | None
    proofs: tuple[Proof, ...]
    problem: str | None
    is_embedded: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def proof(self, feature: str) -> Proof:
        """The proof of this feature, UNTRIED if there is none."""
        for proof in self.proofs:
            if proof.feature == feature:
                return proof
        return Proof(feature, Effect.UNTRIED, "not tried on this build yet")


def parse_version(text: str) -> Version | None:
    """The version from what `--version` printed on either stream; None if there is none.

    Device lines of a GPU backend may precede it, and a package may put any word where the commit
    goes.
    """
    found = _VERSION.search(text)
    if found is None:
        return None
    build = found["build"] or found["count"]
    return Version(
        text=found.group().removeprefix("version: "),
        semantic=found["semantic"],
        build=int(build),
        commit=found["commit"] or found["hash"],
    )


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
    if family is Family.IK:
        flags |= IK_HIDDEN_FLAGS
    spec_types = _spec_types(help_text.option("--spec-type"))
    spec_style = _spec_style(flags, family)
    fit_option = help_text.option("--fit")
    fit = _fit_style(flags, fit_option)
    return Capabilities(
        family=family,
        dialect=_dialect(help_text, flags, family, spec_types),
        flags=flags,
        on_off_flags=frozenset(
            spelling
            for option in help_text.options
            if _names_on_off(option.argument)
            for spelling in option.spellings
        ),
        spec_style=spec_style,
        spec_types=spec_types,
        kv_types=_kv_types(help_text, family),
        fit=fit,
        fit_default_on=_fit_default(fit, fit_option),
        has_load_mode="--load-mode" in flags,
        lists_gpu_flags="--n-gpu-layers" in help_text.live_spellings,
        default_n_max=_whole(_default(help_text, "--spec-draft-n-max", "--draft-max")),
        default_p_min=_real(_default(help_text, "--spec-draft-p-min", "--draft-p-min")),
        default_port=_whole(_default(help_text, "--port")),
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
    """A name for reports; nothing is decided by it."""
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


def _spec_types(option: Option | None) -> tuple[str, ...]:
    """The words that `--spec-type` takes, from its placeholder or its description."""
    if option is None or option.is_removed:
        return ()
    listed = re.fullmatch(r".*?\[([a-z0-9 |-]+)\].*", option.argument)
    if listed is not None and "none" in listed.group(1):
        words = listed.group(1).split("|")
    elif "," in option.argument and ":" not in option.argument:
        words = option.argument.split(",")
    else:
        found = re.search(r"types: ([a-z0-9, -]+)(.?)", option.description)
        words = []
        if found is not None:
            named, canonical, _ = found.group(1).partition(" canonical")
            words = named.split(",") if canonical or not found.group(2) else []
    return tuple(word.strip() for word in words if word.strip())


def _fit_style(flags: frozenset[str], option: Option | None) -> FitStyle:
    if option is None or "--fit" not in flags:
        return FitStyle.NONE
    return FitStyle.ON_OFF if "on" in option.argument else FitStyle.SWITCH


def _fit_default(style: FitStyle, option: Option | None) -> bool | None:
    match style:
        case FitStyle.NONE:
            return None
        case FitStyle.SWITCH:
            return False
        case FitStyle.ON_OFF:
            default = option.default if option is not None else None
            return None if default is None else "on" in default.strip("'\"")


def _kv_types(help_text: HelpText, family: Family) -> tuple[str, ...]:
    option = help_text.option("--cache-type-k")
    if option is None:
        return ()
    if option.allowed_values:
        return option.allowed_values
    if family is Family.IK:
        # ik's help names no values. Source: its parser's list, tried one by one.
        return (
            "f32",
            "f16",
            "bf16",
            "q8_0",
            "q4_0",
            "q4_1",
            "iq4_nl",
            "q5_0",
            "q5_1",
            "q6_0",
            "q8_KV",
        )
    return ()


def _default(help_text: HelpText, *spellings: str) -> str | None:
    for spelling in spellings:
        option = help_text.option(spelling)
        if option is not None and not option.is_removed:
            return option.default
    return None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,10}", text) else None


def _real(text: str | None) -> float | None:
    is_number = text is not None and re.fullmatch(r"-?\d{1,10}(\.\d{1,20})?", text)
    return float(text) if text is not None and is_number else None
