"""How llama-server reads the value of an option; errors carry its own words.

Source: llama.cpp's `common/arg.cpp`; the texts were compared with those of a build of August 2026.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1
_BYTES_PER_MIB = 1024 * 1024
_N_DEVICES = 16
"""llama.cpp's fit wants one margin for each of the 16 devices that it can have."""
_WHOLE = re.compile(r"\s*([+-]?\d+)")
_REAL = re.compile(r"\s*([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|inf|nan))")

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
SPEC_TYPES = (
    "none",
    "draft-simple",
    "draft-eagle3",
    "draft-mtp",
    "draft-dflash",
    "draft-dspark",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
)


@dataclass(frozen=True, slots=True)
class Member:
    """A value of one of the engine library's enumerations."""

    enum: str
    name: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of the engine's parameters and what it is set to.

    `is_added` means that the field is a collection to which the value is added; `is_bit` that the
    value's bit is set in a number.
    """

    field: str
    value: Value
    is_added: bool = False
    is_bit: bool = False


Scalar: TypeAlias = str | int | float | bool | Member
Value: TypeAlias = Scalar | tuple[Scalar, ...] | Mapping[str, str]
Reader: TypeAlias = Callable[[str], Value]


class BadValueError(Exception):
    """A value that llama-server refuses, in its words."""


def whole(text: str) -> int:
    """A 32-bit number; like C's, it may be followed by anything."""
    found = _WHOLE.match(text)
    if found is None or not -_INT32_MAX - 1 <= int(found.group(1)) <= _INT32_MAX:
        raise BadValueError("stoi")
    return int(found.group(1))


def real(text: str) -> float:
    """A floating-point number; like C's, it may be followed by anything."""
    found = _REAL.match(text)
    if found is None:
        raise BadValueError("stof")
    return float(found.group(1))


def seed(text: str) -> int:
    """A seed; -1 asks for a random one."""
    found = _WHOLE.match(text)
    if found is None:
        raise BadValueError("stoul")
    return int(found.group(1)) & _UINT32_MAX


def text(value: str) -> str:
    """Any text."""
    return value


def words(value: str) -> tuple[str, ...]:
    """Parts between commas."""
    return tuple(part for part in value.split(",") if part)


def slots(value: str) -> int:
    """A number of slots; -1 is automatic."""
    number = whole(value)
    if number == 0:
        raise BadValueError("error: invalid value for n_parallel\n")
    return number


def kv_type(value: str) -> Member:
    """An element type of the KV cache."""
    if value not in KV_TYPES:
        raise BadValueError(f"Unsupported cache type: {value}")
    return Member("ggml_type", f"GGML_TYPE_{value.upper()}")


def spec_types(value: str) -> tuple[Member, ...]:
    """Kinds of speculation."""
    for word in value.split(","):
        if word not in SPEC_TYPES:
            raise BadValueError(f"unknown speculative type: {word}")
    return tuple(
        Member(
            "common_speculative_type",
            "COMMON_SPECULATIVE_TYPE_" + word.upper().replace("-", "_"),
        )
        for word in value.split(",")
    )


def choice(options: Mapping[str, Scalar], problem: str) -> Reader:
    """One word of a table; `problem` may show the word as `{}`."""

    def read(value: str) -> Scalar:
        if value not in options:
            raise BadValueError(problem.format(value))
        return options[value]

    return read


def on_off(flag: str, on: Scalar, off: Scalar, auto: Scalar | None = None) -> Reader:
    """`on`, `off` and perhaps `auto`, in all their spellings."""
    table = dict.fromkeys(("on", "enabled", "true", "1"), on)
    table |= dict.fromkeys(("off", "disabled", "false", "0"), off)
    if auto is not None:
        table |= dict.fromkeys(("auto", "-1"), auto)
    return choice(table, f"error: unknown value for {flag}: '{{}}'\n")


def layers(value: str) -> int:
    """A number of layers, `auto` or `all`."""
    return {"auto": -1, "all": -2}[value] if value in {"auto", "all"} else whole(value)


def budget(value: str) -> int:
    """Tokens to think with; -1 is no limit."""
    number = whole(value)
    if number < -1:
        raise BadValueError("invalid value")
    return number


def margins(value: str) -> tuple[int, ...]:
    """Bytes to leave free on each device, from MiB; a single figure is for every device."""
    given = [whole(part) * _BYTES_PER_MIB for part in re.split(r"[,/]+", value)]
    if len(given) > _N_DEVICES:
        raise BadValueError(
            f"got {len(given)} input configs, but system only has {_N_DEVICES} devices"
        )
    filled = given * _N_DEVICES if len(given) == 1 else given + given[-1:] * _N_DEVICES
    return tuple(filled[:_N_DEVICES])


def rates(value: str) -> tuple[float, ...]:
    """Probabilities between commas."""
    return tuple(real(part) for part in value.split(","))


def template_arguments(value: str) -> Mapping[str, str]:
    """A JSON object, each value as JSON again."""
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise BadValueError(f"parse error: {error}") from error
    if not isinstance(parsed, dict):
        raise BadValueError("parse error: not an object")
    return {str(key): json.dumps(item) for key, item in parsed.items()}
