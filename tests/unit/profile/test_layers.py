"""Which files make up a profile, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.builders import resolved, shipped_sources
from tests.support.transcripts import refusal, transcript
from tunerd.profile.layers import (
    MAX_EXTENDS,
    Layer,
    LayerFile,
    ProfileSources,
    Resolved,
    layers_of,
    parse_set,
    resolve,
    set_layer,
)
from tunerd.profile.schema import nest
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


LONG: Files = {f"p{n}": {"extends": f"p{n + 1}"} for n in range(MAX_EXTENDS + 5)}
LONG[f"p{MAX_EXTENDS + 5}"] = {}

NO_CHAIN: dict[str, tuple[str, ProfileSources]] = {
    "A profile that is misspelt": ("rtx-3090-ti-24g", shipped_sources()),
    "A parent that is misspelt": ("child", sources({"child": {"extends": "bsae"}, "base": {}})),
    "A profile that extends itself": ("p0", sources({"p0": {"extends": "p0"}})),
    "A loop": ("p0", sources({"p0": {"extends": "b"}, "b": {"extends": "c"}, "c": {"extends": "b"}})),
    "A chain that is too long": ("p0", sources(LONG)),
}  # fmt: skip


def test_what_is_said_of_what_is_no_chain_and_no_option_is_the_golden_text() -> None:
    cases = [(told, [str(problem(name, found))]) for told, (name, found) in NO_CHAIN.items()]
    options = ("", "=", "=1", "serving.port", "  =1")
    refused = [(f"The option {option!r}", refusal(parse_set, option)) for option in options]
    transcript("errors/layers", [*cases, *refused])
    assert len(order("p6", sources(LONG))) == MAX_EXTENDS + 1


# How they are merged: per key, and every value knows who set it.

FILES = [Layer.TUNERD, Layer.SHIPPED, Layer.SITE, Layer.TUNED]


def merged(*layers: LayerFile, engines: tuple[str, ...] = ()) -> Resolved:
    result = resolve("p", layers, engines)
    assert isinstance(result, Resolved), [str(problem) for problem in result]
    return result


def refused(*layers: LayerFile) -> tuple[Problem, ...]:
    result = resolve("p", layers)
    assert not isinstance(result, Resolved)
    return result


def file(layer: Layer, **data: Any) -> LayerFile:
    return LayerFile(
        layer, f"{layer}.toml", nest({k.replace("__", "."): v for k, v in data.items()})
    )


def test_a_pin_beats_the_tuned_layer_and_gives_way_to_set() -> None:
    site = LayerFile(
        Layer.SITE, "site", {"speculation": {"n_max": 2}, "pin": {"speculation": {"n_max": 4}}}
    )
    tuned = file(Layer.TUNED, speculation__n_max=6, speculation__p_min=0.5)
    result = merged(site, tuned)
    assert result.profile.speculation.n_max == 4
    assert str(result.origin("speculation.n_max")) == "site [pin]"
    assert result.pins == {"speculation.n_max"}
    over = merged(site, tuned, set_layer({"speculation.n_max": 1}))
    assert over.profile.speculation.n_max == 1
    assert over.profile.speculation.p_min == 0.5


def test_the_table_of_an_engine_wins_over_the_general_value_of_its_file_alone() -> None:
    shipped = LayerFile(
        Layer.SHIPPED,
        "shipped",
        {
            "memory": {"fit_mib": 1},
            "engines": {"ik": {"memory": {"fit_mib": 2}}, "mine": {"memory": {"fit_mib": 3}}},
        },
    )
    site = file(Layer.SITE, memory__fit_mib=4)
    assert merged(shipped).profile.memory.fit_mib == 1
    assert merged(shipped, engines=("ik",)).profile.memory.fit_mib == 2
    assert merged(shipped, engines=("ik", "mine")).profile.memory.fit_mib == 3
    assert merged(shipped, site, engines=("ik", "mine")).profile.memory.fit_mib == 4
    assert str(merged(shipped, engines=("ik",)).origin("memory.fit_mib")) == "shipped [engines.ik]"


def test_problems_of_every_layer_are_reported_together() -> None:
    found = refused(
        file(Layer.SHIPPED, serving__prot=1),
        file(Layer.SITE, speculation__typ="mtp"),
        set_layer({"memory.fit_mb": 1}),
    )
    assert [(problem.source, problem.key, problem.nearest) for problem in found] == [
        ("shipped.toml", "serving.prot", "port"),
        ("site.toml", "speculation.typ", "type"),
        ("--set", "memory.fit_mb", "fit_mib"),
    ]


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("speculation.n_max=2", "speculation.n_max", 2),
        ("speculation.p_min=0.75", "speculation.p_min", 0.75),
        (" serving.jinja = true", "serving.jinja", True),
        ("serving.threads=physical", "serving.threads", "physical"),
        ("serving.threads=8", "serving.threads", 8),
        ("model.path=/models/a b=c.gguf", "model.path", "/models/a b=c.gguf"),
        ('serving.alias="quoted"', "serving.alias", "quoted"),
        ("serving.alias=123", "serving.alias", "123"),
        ("environment.CUDA_VISIBLE_DEVICES=0", "environment.CUDA_VISIBLE_DEVICES", "0"),
        ("serving.ctx_size=default", "serving.ctx_size", "default"),
        ("memory.override_tensor=['a=CPU']", "memory.override_tensor", ["a=CPU"]),
        ("serving.n_predict=-1", "serving.n_predict", -1),
        ("serving.alias=", "serving.alias", ""),
        ("serving.alias=1\nserving.port=2", "serving.alias", "1\nserving.port=2"),
    ],
)
def test_an_option_is_read_as_typed(option: str, key: str, value: object) -> None:
    assert parse_set(option) == (key, value)


LAYERED = st.dictionaries(
    st.sampled_from(["serving.port", "speculation.n_max", "memory.fit_mib", "serving.top_k"]),
    st.one_of(st.integers(1, 60), st.just("default")),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(LAYERED, min_size=len(FILES), max_size=len(FILES)), LAYERED, LAYERED)
def test_the_value_is_that_of_the_last_layer_that_has_the_key(
    files: list[dict[str, Any]], pins: dict[str, Any], options: dict[str, Any]
) -> None:
    layers = [
        LayerFile(layer, str(layer), nest(data)) for layer, data in zip(FILES, files, strict=True)
    ]
    layers[2] = LayerFile(Layer.SITE, "site", {**nest(files[2]), "pin": pins})
    result = merged(*layers, set_layer(options))
    order = [*zip(FILES, files, strict=True), (Layer.PIN, pins), (Layer.SET, options)]
    for key in {key for _, data in order for key in data}:
        said = [(layer, data[key]) for layer, data in order if key in data]
        layer, value = said[-1]
        if value == "default":
            assert result.left_to_engine[key].layer is layer
            assert key not in result.settings
        else:
            setting = result.settings[key]
            assert (setting.origin.layer, setting.value) == (layer, value)
            assert [(o.layer, v) for o, v in setting.replaced] == said[:-1]


@pytest.mark.parametrize("name", shipped_sources().names)
def test_every_value_of_a_shipped_profile_has_an_origin(name: str) -> None:
    for setting in resolved(name, "mainline").settings.values():
        assert setting.origin.source
        assert setting.origin.layer in {Layer.TUNERD, Layer.SHIPPED, Layer.SET}
        if setting.origin.layer is Layer.TUNERD:
            assert setting.origin.reason, f"tunerd sets {setting.key} without saying why"
