"""The arguments of a command line that change what a server does, in a form that can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tunerd.core.flags import normal_spelling, owner_of

# How a server is reached and named, and where its model lies, change nothing about what it does:
# a candidate may listen elsewhere, and a model that was moved is the same model by its identity.
_NOT_COMPARED = frozenset(
    {
        "serving.host",
        "serving.port",
        "serving.alias",
        "serving.api_key_file",
        "model.path",
        "model.mmproj",
        "speculation.draft_model",
        "model.chat_template_file",
    }
)
_VARIABLES_NOT_COMPARED = frozenset(
    {
        "LLAMA_ARG_HOST",
        "LLAMA_ARG_PORT",
        "LLAMA_ARG_ALIAS",
        "LLAMA_ARG_MODEL_ALIAS",
        "LLAMA_ARG_MODEL",
        "LLAMA_ARG_API_KEY",
        "LLAMA_API_KEY",
        "HF_TOKEN",
    }
)
# Variables that engines, their libraries and drivers read; only these are kept as they are.
_ENGINE_VARIABLES = ("CUDA_", "GGML_", "GOMP_", "HIP_", "KMP_", "LLAMA_", "OMP_", "VK_")
_SECRET_FLAGS = frozenset({"--api-key", "--hf-token", "-hft", "--hf-token-draft"})
_HASHED = "sha256:"
_HASH_DIGITS = 16


def arguments_sha256(
    argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> str | None:
    """One hash over the arguments and variables that change what a server does.

    Left out are the program itself (its identity is a part of its own), the address, port and alias
    (how it is reached), API keys (they are secrets, and change nothing), and the paths of model
    and template files (their contents are parts of their own). The order of flags does not matter, that of
    values of one flag does.

    Args:
        argv: The whole argument vector, program first.
        environment: The variables that the unit sets; None or empty where it sets none.

    Returns:
        None for an empty vector: nothing is known about the arguments.
    """
    if not argv:
        return None
    variables = sorted(compared_environment(environment or {}).items())
    return digest({"arguments": compared_arguments(argv), "environment": variables})


def compared_arguments(argv: Sequence[str]) -> list[list[str]]:
    """The arguments that count, in a normal spelling: each flag with its values, flags in order."""
    kept = [group for group in argument_groups(argv) if _matters(group[0])]
    return sorted(kept, key=lambda group: group[0])


def argument_groups(argv: Sequence[str]) -> list[list[str]]:
    """All arguments as they come, in a normal spelling: each flag with its values."""
    groups: list[list[str]] = []
    for word in argv[1:]:
        if _is_flag(word) or not groups:
            groups.append([normal_spelling(word)])
        else:
            groups[-1].append(word)
    return groups


def compared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that count, as they may be kept: values that may be secrets as their hash."""
    return {
        name: value
        if name.startswith(_ENGINE_VARIABLES) or value.startswith(_HASHED)
        else _HASHED + digest(value)[:_HASH_DIGITS]
        for name, value in environment.items()
        if name not in _VARIABLES_NOT_COMPARED
    }


def without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """Arguments as they may be kept and shown: keys and tokens given in plain text are left out."""
    flags = ("", *(normal_spelling(word) for word in words))
    return tuple(
        "[secret]" if flag in _SECRET_FLAGS else word
        for flag, word in zip(flags, words, strict=False)
    )


def argument_changes(then: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """What differs between the arguments of two command lines, in words: `--ctx-size 8192 -> 16384`."""
    old, new = _by_flag(then), _by_flag(now)
    found = []
    for flag in sorted({*old, *new}):
        before, after = old.get(flag), new.get(flag)
        if before == after:
            continue
        if before is None:
            found.append(f"{flag} {after}".strip() + " added")
        elif after is None:
            found.append(f"{flag} {before}".strip() + " removed")
        else:
            found.append(f"{flag} {before} -> {after}")
    return tuple(found)


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in its one spelling."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _is_flag(word: str) -> bool:
    """A word with a dash that is not a negative number."""
    return len(word) > 1 and word[0] == "-" and not (word[1].isdigit() or word[1] == ".")


def _matters(flag: str) -> bool:
    return flag not in _SECRET_FLAGS and owner_of(flag) not in _NOT_COMPARED


def _by_flag(argv: Sequence[str]) -> dict[str, str]:
    grouped = groupby(compared_arguments(argv), key=lambda group: group[0])
    return {flag: "; ".join(" ".join(group[1:]) for group in groups) for flag, groups in grouped}
