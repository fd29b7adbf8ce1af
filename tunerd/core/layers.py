"""Which files make up a profile, weakest first: its ancestors by `extends`, shipped before site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunerd.core.defaults import default_layer
from tunerd.core.nearest import nearest_name
from tunerd.core.profile_check import Problem
from tunerd.core.resolve import Layer, LayerFile

MAX_EXTENDS = 8
# What a child does not inherit: it describes the parent alone.
_OWN = ("description", "published", "extends", "pin")


@dataclass(frozen=True, slots=True)
class ProfileSources:
    """Every profile file that was found, parsed, by name; `paths` names them for people."""

    shipped: Mapping[str, Mapping[str, Any]]
    site: Mapping[str, Mapping[str, Any]]
    tuned: Mapping[str, Mapping[str, Any]]
    paths: Mapping[tuple[Layer, str], str]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted({*self.shipped, *self.site}))


def with_tuned_layer(
    sources: ProfileSources, name: str, data: Mapping[str, Any], path: object
) -> ProfileSources:
    """The same files with another tuned layer for one profile."""
    return replace(
        sources,
        tuned={**sources.tuned, name: data},
        paths={**sources.paths, (Layer.TUNED, name): str(path)},
    )


def layers_of(
    name: str, sources: ProfileSources, *, with_tuned: bool = True
) -> tuple[LayerFile, ...] | Problem:
    """The layers of a profile below `--set`, or why it cannot be put together."""
    chain = chain_of(name, sources)
    if isinstance(chain, Problem):
        return chain
    layers = [default_layer()]
    for ancestor in chain:
        for layer, files in ((Layer.SHIPPED, sources.shipped), (Layer.SITE, sources.site)):
            data = files.get(ancestor)
            if data is None:
                continue
            if ancestor != name:
                data = {key: value for key, value in data.items() if key not in _OWN}
            layers.append(LayerFile(layer, sources.paths[layer, ancestor], data))
    tuned = sources.tuned.get(name) if with_tuned else None
    if tuned is not None:
        layers.append(LayerFile(Layer.TUNED, sources.paths[Layer.TUNED, name], tuned))
    return tuple(layers)


def chain_of(name: str, sources: ProfileSources) -> list[str] | Problem:
    """The profile with what it extends: ancestors first, the profile itself last."""
    chain: list[str] = []
    current: str | None = name
    while current is not None:
        where = f"profile {chain[-1]}" if chain else "profile"
        if current in chain:
            loop = " -> ".join([*chain, current])
            return Problem(where, "extends", loop, "a chain without a loop")
        if current not in sources.names:
            return Problem(
                source=where,
                key="extends" if chain else "name",
                found=f"`{current}`",
                allowed=", ".join(sources.names) or "no profile is installed",
                nearest=nearest_name(current, sources.names),
            )
        chain.append(current)
        if len(chain) > MAX_EXTENDS:
            return Problem(where, "extends", f"{len(chain)} levels", f"at most {MAX_EXTENDS}")
        parents = [files[current].get("extends") for files in (sources.site, sources.shipped)
                   if current in files]  # fmt: skip
        found = next((parent for parent in parents if parent is not None), None)
        if found is not None and not isinstance(found, str):
            return Problem(where, "extends", repr(found), "the name of a profile")
        current = found
    return chain[::-1]
