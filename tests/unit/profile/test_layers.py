"""Which files make up a profile, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.builders import shipped_sources
from tunerd.profile.layers import (
    MAX_EXTENDS,
    Layer,
    LayerFile,
    ProfileSources,
    Resolved,
    layers_of,
    resolve,
)
from tunerd.words import Problem

Files = dict[str, dict[str, Any]]


def sources(
    shipped: Files, site: Files | None = None, tuned: Files | None = None
) -> ProfileSources:
    layers = ((Layer.SHIPPED, shipped), (Layer.SITE, site or {}), (Layer.TUNED, tuned or {}))
    return ProfileSources(
        {
            (layer, name): LayerFile(layer, f"{layer}/{name}.toml", data)
            for layer, files in layers
            for name, data in files.items()
        }
    )


def order(name: str, found: ProfileSources, *, with_tuned: bool = True) -> list[str]:
    layers = layers_of(name, found, with_tuned=with_tuned)
    assert not isinstance(layers, Problem), layers
    return [layer.source for layer in layers]


def problem(name: str, found: ProfileSources) -> Problem:
    result = layers_of(name, found)
    assert isinstance(result, Problem)
    return result


def test_ancestors_come_first_and_the_site_after_what_was_shipped() -> None:
    found = sources(
        {"base": {}, "child": {"extends": "base"}},
        {"base": {}, "child": {}},
        {"child": {}, "base": {}},
    )
    assert order("child", found) == [
        "tunerd", "shipped/base.toml", "site/base.toml", "shipped/child.toml", "site/child.toml",
        "tuned/child.toml",
    ]  # fmt: skip
    assert order("child", found, with_tuned=False)[-1] == "site/child.toml"


def test_a_site_file_may_extend_a_shipped_profile_of_another_name() -> None:
    found = sources({"base": {}}, {"mine": {"extends": "base"}})
    assert order("mine", found) == ["tunerd", "shipped/base.toml", "site/mine.toml"]


def test_a_site_file_may_change_what_a_shipped_profile_extends() -> None:
    found = sources({"a": {}, "b": {}, "c": {"extends": "a"}}, {"c": {"extends": "b"}})
    assert order("c", found) == ["tunerd", "shipped/b.toml", "shipped/c.toml", "site/c.toml"]


def test_what_describes_the_parent_is_not_inherited() -> None:
    parent = {
        "description": "parent",
        "published": {"tok_s": 5.0},
        "pin": {"serving.port": 1},
        "serving": {"alias": "a"},
    }
    layers = layers_of("child", sources({"parent": parent, "child": {"extends": "parent"}}))
    assert not isinstance(layers, Problem)
    result = resolve("child", layers)
    assert isinstance(result, Resolved)
    assert result.profile.description is None
    assert result.profile.published.tok_s is None
    assert result.pins == frozenset()
    assert result.profile.serving.alias == "a"


def test_a_profile_that_is_not_there_comes_with_the_nearest_name() -> None:
    found = problem("rtx-3090-ti-24g", shipped_sources())
    assert found.nearest == "rtx-3090-ti-24gb"
    assert "cpu-embedded" in found.allowed


def test_a_parent_that_is_not_there_names_the_child() -> None:
    found = problem("child", sources({"child": {"extends": "bsae"}, "base": {}}))
    assert (found.source, found.key, found.nearest) == ("profile child", "extends", "base")


@pytest.mark.parametrize(
    "files",
    [
        {"a": {"extends": "a"}},
        {"a": {"extends": "b"}, "b": {"extends": "c"}, "c": {"extends": "b"}},
    ],
)
def test_a_loop_is_refused(files: Files) -> None:
    assert problem("a", sources(files)).allowed == "a chain without a loop"


def test_a_chain_that_is_too_long_is_refused() -> None:
    files: Files = {f"p{n}": {"extends": f"p{n + 1}"} for n in range(MAX_EXTENDS + 5)}
    files[f"p{MAX_EXTENDS + 5}"] = {}
    assert problem("p0", sources(files)).allowed == f"at most {MAX_EXTENDS}"
    assert len(order(f"p{6}", sources(files))) == MAX_EXTENDS + 1


@pytest.mark.parametrize("value", [5, ["a"], {"a": 1}, True])
def test_a_parent_that_is_no_name_is_a_problem(value: object) -> None:
    assert problem("a", sources({"a": {"extends": value}})).key == "extends"


def test_without_any_profile_that_is_said() -> None:
    assert problem("a", sources({})).allowed == "no profile is installed"
