"""Speculation as flags, in each of the ways that builds want it spelled.

n-max and p-min are always passed: the same command without them means (16, 0.75), (3, 0.0) or
(16, 0.0), depending on the build.
"""

from __future__ import annotations

from collections.abc import Iterator

from tunerd.core.cmdline_flags import missing, plain
from tunerd.core.cmdline_parts import Argument, Note, Part, Refusal, RenderContext
from tunerd.core.engine import Capabilities, SpecStyle
from tunerd.core.flags import DRAFT_FLAGS, DRAFT_GPU_FLAGS
from tunerd.core.resolve import Layer, Resolved

KINDS_WITH_DRAFT_FILE = frozenset({"dflash", "dspark", "eagle3", "draft"})
KINDS_WITH_PROBABILITY = KINDS_WITH_DRAFT_FILE | {"mtp"}
_DEFAULT_TYPE = "off"
_WEAKEST_FIRST = tuple(Layer)


def speculation(
    resolved: Resolved, capabilities: Capabilities, context: RenderContext
) -> Iterator[Part]:
    """All flags of the kind of speculation that the profile wants, or a refusal."""
    wanted = resolved.profile.speculation
    kind = wanted.type or _DEFAULT_TYPE
    if kind == "off":
        yield Note("speculation.type", "off: no flag, since every build is off without one")
        return
    word = capabilities.spec_word(kind)
    setting = resolved.settings["speculation.type"]
    if word is None:
        types = ", ".join(word for word in capabilities.spec_types if word != "none") or "none"
        yield Refusal(setting.key, kind, setting.origin,
                      f"this build ({capabilities.dialect}) cannot speculate with {kind}; it has: {types}",
                      'choose another engine, or set speculation.type = "off"')  # fmt: skip
        return
    if kind in KINDS_WITH_DRAFT_FILE and wanted.draft_model is None:
        yield Refusal(setting.key, kind, setting.origin, f"{kind} needs a draft model",
                      "set speculation.draft_model")  # fmt: skip
        return
    yield from _kind(resolved, capabilities, kind, word)
    if kind in KINDS_WITH_PROBABILITY:
        for row in DRAFT_FLAGS:
            if row.key != "speculation.draft_model" or kind in KINDS_WITH_DRAFT_FILE:
                yield from plain(row, resolved, capabilities, context)
        if context.has_gpu:
            for row in DRAFT_GPU_FLAGS:
                yield from plain(row, resolved, capabilities, context)


def _kind(resolved: Resolved, capabilities: Capabilities, kind: str, word: str) -> Iterator[Part]:
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
    rows = _DRAFT_ROWS if kind in KINDS_WITH_PROBABILITY else _ngram_rows(kind)
    for key, spellings in rows:
        value = resolved.settings.get(key)
        flag = capabilities.first_of(*spellings)
        if value is not None and flag is not None:
            yield Argument(flag, str(value.value), key, value.origin)
        elif value is not None:
            yield missing(key, value.value, value.origin, spellings, capabilities)
    yield from _adaptive(resolved, capabilities)


_DRAFT_ROWS = (
    ("speculation.n_max", ("--spec-draft-n-max", "--draft-max")),
    ("speculation.n_min", ("--spec-draft-n-min", "--draft-min")),
    ("speculation.p_min", ("--spec-draft-p-min", "--draft-p-min")),
    ("speculation.cross_ctx", ("--spec-dflash-cross-ctx",)),
)


def _ngram_rows(kind: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Sizes of an n-gram kind; the older builds have one set of flags for all of them."""
    if kind == "ngram-mod":
        return (
            ("speculation.n_max", ("--spec-ngram-mod-n-max", "--draft-max")),
            ("speculation.n_min", ("--spec-ngram-mod-n-min", "--draft-min")),
            ("speculation.ngram_size_n", ("--spec-ngram-mod-n-match", "--spec-ngram-size-n")),
        )
    return (
        ("speculation.ngram_size_n", (f"--spec-{kind}-size-n", "--spec-ngram-size-n")),
        ("speculation.ngram_size_m", (f"--spec-{kind}-size-m", "--spec-ngram-size-m")),
        ("speculation.ngram_min_hits", (f"--spec-{kind}-min-hits", "--spec-ngram-min-hits")),
    )


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


def _stage(resolved: Resolved, kind: str, word: str) -> Iterator[Part]:
    """Ik since June 2026: everything about a stage is inside one value."""
    names = {
        "speculation.n_max": "n_max",
        "speculation.n_min": "n_min",
        "speculation.p_min": "p_min",
        "speculation.cross_ctx": "cross_ctx",
        "speculation.ngram_size_n": "ngram_size_n",
        "speculation.ngram_size_m": "ngram_size_m",
        "speculation.ngram_min_hits": "ngram_min_hits",
    }
    if kind not in KINDS_WITH_PROBABILITY:
        del names["speculation.p_min"]
    present = [key for key in names if key in resolved.settings]
    words = {key: f"{names[key]}={resolved.settings[key].value}" for key in present}
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
