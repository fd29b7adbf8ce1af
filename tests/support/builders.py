"""Builds values that many tests need: profiles as shipped, capabilities of captured builds."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

from tunerd.engine.capabilities import Capabilities, parse_help, read_capabilities
from tunerd.engine.flags import RenderContext
from tunerd.profile.layers import (
    Layer,
    LayerFile,
    ProfileSources,
    Resolved,
    layers_of,
    resolve,
    set_layer,
)
from tunerd.words import Problem

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "profiles"
HELP = ROOT / "tests" / "data" / "help"

# Dialect of `engines.md` to the text that its `--help` prints.
HELP_OF = {
    "main-old": "mainline-2026-04-26",
    "main-pr": "synthetic-main-pr",
    "main-mid": "mainline-2026-05-16",
    "main-lm": "mainline-2026-08-18",
    "main-0x": "mainline-0.7.0",
    "ik-may": "ik-2026-06-02",
    "ik-now": "ik-2026-08",
    "bee-01": "bee-2026-05-21",
    "bee-03": "synthetic-bee-03",
    "bee-04": "synthetic-bee-04",
}


@functools.cache
def capabilities_of(dialect: str) -> Capabilities:
    return read_capabilities(parse_help((HELP / f"{HELP_OF[dialect]}.txt").read_text()))


@functools.cache
def shipped_sources() -> ProfileSources:
    found = {}
    for path in PROFILES.glob("*.toml"):
        data = tomllib.loads(path.read_text())
        found[Layer.SHIPPED, path.stem] = LayerFile(Layer.SHIPPED, path.name, data)
    return ProfileSources(found)


def resolved(name: str, *engine_names: str, **options: object) -> Resolved:
    layers = layers_of(name, shipped_sources())
    assert not isinstance(layers, Problem), layers
    given = {key.replace("__", "."): value for key, value in options.items()}
    result = resolve(name, (*layers, set_layer(given)), engine_names)
    assert isinstance(result, Resolved), "\n".join(str(problem) for problem in result)
    return result


def recorded_context(profile: Resolved) -> RenderContext:
    """The machine of the golden files: eight physical cores, the card unless it is a CPU profile."""
    draft = profile.profile.speculation.draft_model
    return RenderContext(
        program="llama-server",
        model_path=f"/models/{profile.profile.model.path}",
        has_gpu=profile.profile.match.gpu != "none",
        physical_cores=8,
        paths={} if draft is None else {"speculation.draft_model": f"/models/{draft}"},
    )
