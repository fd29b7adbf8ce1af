"""Bundles of results: what is refused, what fits here, and what never leaves a box."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.support.bench_samples import sample
from tests.support.fake_gpu import a_card
from tests.support.folders import DATA, ROOT
from tunerd.engine.fingerprint import Fingerprint
from tunerd.errors import ConfigError
from tunerd.measure.evidence import ArmRecord
from tunerd.measure.results import (
    MOST_BYTES,
    MOST_CANDIDATES,
    Bundle,
    Entry,
    Here,
    candidates,
    entries_of,
    model_of,
    read_bundle,
    why_not,
)
from tunerd.profile.arm import Arm

SHIPPED = sorted((ROOT / "profiles/evidence").glob("*.json"))
SCHEMA = json.loads((ROOT / "docs/reference/results-bundle.schema.json").read_text())
CARD = a_card("NVIDIA GeForce RTX 5060 Ti", total_mib=16311)
HERE = Here((CARD,), "Qwen3.6 35B A3B", None, {"main": "mainline", "fork": "ik"})
MODEL = ("--model-draft /m/d.gguf", "speculation.draft_model", "x")
UNNAMED = {"live": model_of(None, None)}
BASE = Arm("main", "mtp", 3, 0.0, 1024, "q8_0", 512, 2048, 8)


def an_entry(**changes: Any) -> dict[str, Any]:
    return {
        "source": "a write-up",
        "card": {"name": "RTX 5060 Ti", "memory_mib": 16384},
        "engine": {"family": "mainline"},
        "model": {"name": "Qwen3.6-35B-A3B"},
        "settings": {"speculation.type": "mtp", "speculation.n_max": 2},
        "figures": [{"case": "code", "tok_s": 60.0}],
        **changes,
    }


def a_bundle(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "format": "tunerd-results", "version": 1, "written_by": "x", "entries": list(entries) or [an_entry()], **changes,
    }  # fmt: skip


def entry(**changes: Any) -> Entry:
    return read_bundle(bundled(an_entry(**changes)), "x").entries[0]


def test_the_schema_is_that_of_the_code_and_says_the_same() -> None:
    validator = jsonschema_rs.validator_for(SCHEMA)
    for path in SHIPPED:
        validator.validate(json.loads(path.read_text()))
        read_bundle(path.read_bytes(), str(path))
    assert not validator.is_valid(a_bundle(host="box"))
    assert not validator.is_valid(a_bundle(an_entry(settings={"model.path": "/home/x"})))


def bundled(*entries: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(a_bundle(*entries, **changes)).encode()


def of_speed(tok_s: float) -> bytes:
    return bundled(an_entry(figures=[{"case": "x", "tok_s": tok_s}]))


HOSTILE = [
    (b'{"a":' * 5000, "recursion"),
    (b"[" * 5000 + b"]" * 5000, "recursion"),
    (b" " * (MOST_BYTES + 1), "larger than"),
    (b"\xff\xfe", "the file"),
    (bundled(version=2), "has version '2', and this tunerd reads version 1"),
    (b'{"some": "json"}', "version: Field required"),
    (bundled(version=2, more=1), "has version '2'"),
    (bundled(host="box"), "host"),
    *((of_speed(tok_s), "tok_s") for tok_s in (float("nan"), -1, 1e300)),
    (bundled(an_entry(source="\x1b[2Jx")), "entries.0.source"),
    (bundled(an_entry(model={"name": "/home/alice/m"})), "model.name"),
    (bundled(an_entry(settings={"extra_args": "-x"})), "extra_args"),
    (bundled(an_entry(settings={"speculation.n_max": "2"})), "n_max"),
    (bundled(*[an_entry()] * 1001), "entries"),
    (b"[]", "the file"),
]


def test_hostile_files_are_refused_with_their_place() -> None:
    for content, told in HOSTILE:
        with pytest.raises(ConfigError, match="not a bundle of results: `x`") as raised:
            read_bundle(content, "x")
        assert told in str(raised.value.cause)


def test_what_does_not_fit_is_said_with_its_reason() -> None:
    reasons: list[tuple[dict[str, Any], str]] = [
        ({"card": {"name": "NVIDIA GeForce RTX 5060 Ti", "memory_mib": 8192}}, "another card"),
        ({"card": {"name": "RTX 3090 Ti", "memory_mib": 16311}}, "another card: RTX 3090 Ti"),
        ({"card": None}, "it does not name its card"),
        ({"model": {"name": "Gemma-4"}}, "another model: Gemma-4"),
        ({"engine": {"family": "bee"}}, "no engine of its family is installed: bee"),
        ({"failure": "oom"}, "it did not serve there: oom"),
    ]
    assert why_not(entry(), HERE) is None
    for changes, why in reasons:
        assert why in str(why_not(entry(**changes), HERE))
    bare = replace(HERE, cards=())
    assert why_not(entry(card=None), bare) is None
    assert "another model" in str(why_not(entry(card=None, model={"name": "Gemma"}), bare))
    assert "another card" in str(why_not(entry(), bare))


def test_the_fastest_few_come_first_and_what_serves_does_not() -> None:
    def of_depth(n: int, *tok_s: float) -> Entry:
        figures = [{"case": "x", "tok_s": one} for one in tok_s]
        return entry(settings={"speculation.type": "mtp", "speculation.n_max": n}, figures=figures)

    found = [of_depth(n, 10.0 * n) for n in range(1, 7)]
    found += [of_depth(3, 60.0), found[-1], of_depth(9)]
    arms = candidates(found, HERE, BASE, lambda _arm: True)
    assert [arm.n_max for arm in arms] == [6, 5, 4]
    assert len(arms) == MOST_CANDIDATES
    assert arms[0] == replace(BASE, n_max=6)
    some = candidates(found, HERE, BASE, lambda arm: arm.n_max != 6)
    assert [arm.n_max for arm in some] == [5, 4, 2], "what is not tried takes no place"
    off = entry(engine={"family": "ik"}, settings={"speculation.type": "off"})
    other = candidates([off], HERE, BASE, lambda _arm: True)
    assert [(arm.engine, arm.spec, arm.n_max, arm.p_min) for arm in other] == [("fork", "off", 0, 0.0)]  # fmt: skip


def test_a_run_is_handed_out_without_texts_paths_and_names() -> None:
    arm = ArmRecord(
        name="live", fingerprint=Fingerprint(gpu_names=(CARD.name,), engine_sha256="a" * 64),
        engine="alices-build", family="ik", engine_version="4522 (40254a51)", program="/home/alice/llama-server",
        model_path="/home/alice/m.gguf", argv=("/home/alice/llama-server",), environment={"HF_TOKEN": "x"},
        origins=(("--model /home/alice/m.gguf", "model.path", "alice.toml"),
                 ("--spec-type mtp:n_max=3,p_min=0.75", "speculation.type", "alice.toml"),
                 ("(left out)", "speculation.n_max", ""), ("--fit-margin 1664", "memory.fit_mib", "x"),
                 ("--cache-type-k q8_0", "serving.cache_type_k", "x"),
                 ("--cache-type-v q8_0", "serving.cache_type_v", "x")),
    )  # fmt: skip
    samples = {"live": [sample(case="code"), sample(case="/home/alice/secret text")]}
    samples["live"].append(sample(case="letters to alice", details={"class": 1}))
    made = list(entries_of([arm], samples, {"live": model_of(None, "/home/alice/m")}, (CARD,)))
    text = Bundle(format="tunerd-results", version=1, written_by="x", entries=tuple(made)).model_dump_json()  # fmt: skip
    assert "alice" not in text
    assert "HF_TOKEN" not in text
    (one,) = made
    assert one.card is not None
    assert (one.card.memory_mib, one.model.name, one.engine.family) == (16311, "unnamed", "ik")
    assert one.settings.model_dump(exclude_none=True) == {
        "spec": "mtp", "n_max": 3, "p_min": 0.75, "fit_mib": 1664, "kv": "q8_0"
    }  # fmt: skip
    assert [figure.case for figure in one.figures] == ["mtp code", "case", "mtp class 2"]
    of_less = arm.under(gpu_memory_mib=(8188,))
    assert next(entries_of([of_less], samples, UNNAMED, (CARD,))).card is None
    other = list(entries_of([arm], samples, UNNAMED, (a_card(),)))
    assert other[0].card is None, "the card that was measured is no longer here"


def test_settings_travel_by_the_names_that_profiles_have() -> None:
    """But for a type of K that is not that of V."""

    def settings(*origins: tuple[str, str, str]) -> tuple[Any, Any]:
        arm = ArmRecord(name="live", fingerprint=Fingerprint(), origins=origins)
        (one,) = entries_of([arm], {"live": [sample()]}, UNNAMED, ())
        return one.settings.spec, one.settings.kv

    def kind(words: str, *more: tuple[str, str, str]) -> Any:
        return settings((words, "speculation.type", "x"), *more)[0]

    assert kind("--spec-type draft-simple", MODEL) == "draft"
    assert kind("(the draft model alone turns it on)", MODEL) == "draft"
    assert kind("--spec-type draft-eagle3", MODEL) == "eagle3"
    assert kind("--multi-token-prediction") == "mtp"
    k, v = (("--cache-type-k q8_0", "serving.cache_type_k", "x"), ("--cache-type-v q4_0", "serving.cache_type_v", "x"))  # fmt: skip
    assert settings(("(left out)", MODEL[1], "x"), k, v) == settings(k) == ("off", None)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_shipped_figure_stands_in_the_published_table(path: Path) -> None:
    bundle = read_bundle(path.read_bytes(), str(path))
    surface = tomllib.loads((DATA / f"surfaces/{path.stem}.toml").read_text())
    published = {(table["name"], *cell.get("tok_s", [cell.get("failure")])) for table in surface["tables"] for cell in table["cells"]}  # fmt: skip
    for one in bundle.entries:
        if one.source.startswith("LM Cache"):
            profile = tomllib.loads((ROOT / "profiles/rtx-5060-ti-16gb.toml").read_text())
            assert one.figures[0].tok_s == profile["published"]["tok_s"]
            continue
        figures: list[Any] = [figure.tok_s for figure in one.figures] or [one.failure]
        assert (one.source.rpartition("; ")[2], *figures) in published
