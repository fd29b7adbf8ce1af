"""The flags of keys that need nothing but a spelling, and what happens where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tunerd.core.cmdline_parts import Argument, Note, Part, Refusal, RenderContext
from tunerd.core.engine import Capabilities
from tunerd.core.flags import OnOffFlag, SwitchFlag, ValueFlag
from tunerd.core.resolve import Layer, Origin, Resolved

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
    if flag is not None:
        yield Argument(flag, None, row.key, setting.origin)
    elif row.default is bool(setting.value) or _only_this_way(row, setting.value, capabilities):
        yield Note(row.key, "this is what the engine does without a flag")
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


def on_off(row: OnOffFlag, resolved: Resolved, capabilities: Capabilities) -> Iterator[Part]:
    """The flag of a boolean that some builds spell as a word with `on` or `off` behind it."""
    setting = resolved.settings.get(row.key)
    if setting is None:
        return
    if row.word not in capabilities.flags:
        yield missing(row.key, setting.value, setting.origin, (row.word,), capabilities)
    elif row.word in capabilities.on_off_flags:
        yield Argument(row.word, "on" if setting.value else "off", row.key, setting.origin)
    else:
        flag = row.word if setting.value else row.off_switch
        yield Argument(flag, None, row.key, setting.origin)
