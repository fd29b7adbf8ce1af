"""Load mode and placement as flags: the parts of memory that dialects spell differently."""

from __future__ import annotations

from collections.abc import Iterator

from tunerd.core.cmdline_flags import missing, plain
from tunerd.core.cmdline_parts import Argument, Note, Part, Refusal, RenderContext
from tunerd.core.engine import Capabilities, FitStyle
from tunerd.core.flags import GPU_FLAGS, PLACEMENT_FLAGS
from tunerd.core.resolve import Layer, Resolved

# Before `--load-mode` these switches had the same meaning. Order matters to builds that have
# both: the last one wins there (ggml-org/llama.cpp#26133).
_LEGACY_LOAD: dict[str, tuple[str, ...]] = {
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
    switches = _LEGACY_LOAD[mode]
    lacking = [switch for switch in switches if switch not in capabilities.flags]
    if lacking:
        yield Refusal(setting.key, mode, setting.origin,
                      f"this build ({capabilities.dialect}) has neither `--load-mode` nor `{lacking[0]}`",
                      "choose another load mode or another engine")  # fmt: skip
    elif not switches:
        yield Note(setting.key, "this is what the engine does without a flag")
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
    switch = resolved.settings.get("memory.fit")
    if switch is not None and not switch.value:
        if capabilities.fit is FitStyle.ON_OFF:
            yield Argument("--fit", "off", switch.key, switch.origin)
        else:
            yield Note(switch.key, "this is what the engine does without a flag")
        return
    value = "on" if capabilities.fit is FitStyle.ON_OFF else None
    if switch is not None and capabilities.fit is FitStyle.NONE:
        yield missing(switch.key, switch.value, switch.origin, ("--fit",), capabilities)
        return
    setting = resolved.settings.get("memory.fit_mib")
    if setting is None:
        if switch is not None:
            yield Argument("--fit", value, switch.key, switch.origin)
        return
    margin = capabilities.first_of("--fit-target", "--fit-margin")
    if capabilities.fit is FitStyle.NONE or margin is None:
        spellings = ("--fit-target", "--fit-margin")
        yield missing(setting.key, setting.value, setting.origin, spellings, capabilities)
        return
    owner = switch or setting
    yield Argument("--fit", value, owner.key, owner.origin)
    yield Argument(margin, str(setting.value), setting.key, setting.origin)


def _explicit(
    resolved: Resolved, capabilities: Capabilities, context: RenderContext, explicit: list[str]
) -> Iterator[Part]:
    if capabilities.fit is FitStyle.ON_OFF:
        origin = resolved.settings[explicit[0]].origin
        yield Argument("--fit", "off", explicit[0], origin)
    fit = resolved.settings.get("memory.fit_mib")
    if fit is not None and fit.origin.layer is not Layer.TUNERD:
        yield Note(fit.key, f"left out: {', '.join(explicit)} place the model by hand")
    for row in PLACEMENT_FLAGS:
        if _places(row.key, resolved):
            yield from plain(row, resolved, capabilities, context)
