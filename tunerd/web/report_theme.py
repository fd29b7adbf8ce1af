"""Colours of pages and charts, for light and for dark, by what they stand for."""

from __future__ import annotations

from collections.abc import Mapping

# Name: (light, dark). Engines keep their colour on every chart and page.
PALETTE: Mapping[str, tuple[str, str]] = {
    "bg": ("#fbfaf8", "#14161a"),
    "surface": ("#ffffff", "#1b1e24"),
    "ink": ("#1c2026", "#e7e9ec"),
    "muted": ("#5b636e", "#a3abb6"),
    "rule": ("#d8dbe0", "#363c46"),
    "grid": ("#ebedf0", "#292e36"),
    "accent": ("#0b5cad", "#7db8f5"),
    "band": ("#efe9dc", "#2b2a26"),
    "good": ("#1f6f43", "#6cc796"),
    "warn": ("#9a4a00", "#f0a860"),
    "bad": ("#a3261d", "#f28b82"),
    "mainline": ("#0b5cad", "#69aef2"),
    "ik": ("#c2410c", "#f2935c"),
    "bee": ("#7a3fb0", "#bb98ee"),
    "other": ("#0f766e", "#4cc4b5"),
    "prefill": ("#71829b", "#8b9ab1"),
    "reasoning": ("#b7791f", "#dfb14e"),
    "decode": ("#2b7a57", "#56b78e"),
    "waiting": ("#86507f", "#c394bd"),
}
FAMILIES = frozenset({"mainline", "ik", "bee"})


def css_variables() -> str:
    """The palette as custom properties: light, dark where the reader's system is, or as chosen."""
    light = _block(0)
    dark = _block(1)
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
    )


def colour_of(family: str | None) -> str:
    """The name of an engine's colour."""
    return family if family in FAMILIES and family is not None else "other"


def _block(side: int) -> str:
    return "".join(f"--{name}:{colours[side]};" for name, colours in PALETTE.items())
