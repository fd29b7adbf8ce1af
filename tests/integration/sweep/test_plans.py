"""What a sweep would try as its plan tells, and which boxes can learn from each other by that."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_gpu import FakeGpuReader, a_card
from tests.support.folders import ROOT
from tests.support.local_box import Box
from tests.support.stand_in import install
from tests.support.sweep_box import SPEED, SweepBox, swept
from tunerd.errors import LeaseEnded
from tunerd.fleet.study import class_of, drafts_of, meet
from tunerd.machine.facts import Gpu
from tunerd.profile.arm import DRAFT_MODEL, Space
from tunerd.sweep.known import Study
from tunerd.sweep.plan import PreparedSweep, SweepRequest, plan_arm, prepare

pytestmark = pytest.mark.timeout(900)

ASKED = ("--goal", "context", "--space", "serving.ctx_size=512,1024,1536,2048")


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    with swept() as found:
        yield found


@pytest.fixture
def profile(box: SweepBox) -> Iterator[Path]:
    """The file of the profile that serves, which is as before afterwards."""
    path = box.box.context.paths.site_profiles / "night.toml"
    text = path.read_text()
    yield path
    path.write_text(text)


def with_build(box: SweepBox, name: str, **words: str) -> Box:
    """The box where a build more stands, or another one, by this name."""
    build = install(box.box.folder / name, **words, **SPEED)
    found = {f"TUNERD_ENGINES__{name.upper()}__PATH": str(build.program)}
    return Box(box.box.folder, {**box.box.variables, **found})


def test_a_plan_shows_what_would_be_tried_and_stops_nothing(box: SweepBox) -> None:
    before = len(box.engine.served())
    plan = box.json("sweep", "run", "--dry-run", "--space", "serving.threads=1,2")["plan"]
    assert plan["points"] == 6
    assert plan["incumbent"]["n_max"] == 4
    families = {(one["engine"], one["speculation"]): one for one in plan["families"]}
    assert set(families) == {("fake", "mtp"), ("fake", "off")}
    assert families["fake", "mtp"]["n_max"] == [2, 4]
    reasons = {one["what"]: one["reason"] for one in plan["left_out"]}
    assert "there is no GPU" in reasons["memory.fit_mib"]
    assert plan["outlook"]["unit"] == "llama-server.service"
    assert len(box.engine.served()) == before


def test_what_makes_no_sense_or_finds_nothing_is_refused_before_anything_stops(
    box: SweepBox,
) -> None:
    before = len(box.engine.served())
    for words, told in (
        ("--budget 10s", "nothing can be found in 10 s"),
        ("--space x.y=1", "no profile key"),
        ("--budget 20h", "downtime_s"),
    ):
        assert told in box.call("sweep", "run", "--yes", *words.split(), code=2).stderr
    assert len(box.engine.served()) == before


def test_no_arm_is_tried_on_a_build_that_was_replaced_since_the_sweep_began(box: SweepBox) -> None:
    """It went on, and kept what the new build showed as shown by the old one."""
    ctx = box.box.context
    prepared = prepare(ctx, SweepRequest(budget_s=600.0, seed=3), proves=False)
    arm = prepared.base.arm
    assert plan_arm(ctx, prepared, arm).engine.name == arm.engine
    before = replace(prepared.seen, identities={arm.engine: "0" * 64})
    with pytest.raises(LeaseEnded, match="was replaced"):
        plan_arm(ctx, replace(prepared, seen=before), arm)


@pytest.mark.parametrize(
    ("edited", "told"),
    [
        ("ctx_size = 512", "profile `night` was edited since it began"),
        ("ctx_size =", "night.toml"),
        (None, "there is no profile `night`"),
    ],
    ids=["another context", "half an edit", "removed"],
)
def test_no_arm_is_tried_by_a_profile_that_was_edited_since_the_sweep_began(
    box: SweepBox, profile: Path, edited: str | None, told: str
) -> None:
    """One that could not be read refused every arm: the sweep said that nothing is faster than what serves."""
    ctx, before = box.box.context, profile.read_text()
    prepared = prepare(ctx, SweepRequest(budget_s=600.0, seed=3), proves=False)
    profile.unlink()
    if edited is not None:
        profile.write_text(before.replace("ctx_size = 1024", edited))
    with pytest.raises(LeaseEnded) as ended:
        plan_arm(ctx, prepared, prepared.base.arm)
    assert told in str(ended.value.cause)
    profile.write_text(before)
    assert plan_arm(ctx, prepared, prepared.base.arm)


def test_no_arm_is_tried_by_a_profile_that_was_edited_while_builds_were_tried_for_the_sweep(
    box: SweepBox, profile: Path
) -> None:
    """All arms, that of what serves too, had what the edit said."""
    ctx, before = with_build(box, "untried", dialect="ik-now").context, profile.read_text()

    def edit(said: object) -> None:
        if "trying untried" in str(said):
            profile.write_text(before.replace("ctx_size = 1024", "ctx_size = 512"))

    asked = SweepRequest(budget_s=600.0, space=("engine=ik",))
    prepared = prepare(replace(ctx, progress=edit), asked, proves=True)
    assert profile.read_text() != before
    with pytest.raises(LeaseEnded, match="was replaced"):
        plan_arm(ctx, prepared, prepared.base.arm)


def test_no_arm_of_a_build_is_tried_by_a_table_of_its_family_that_was_edited_since(
    box: SweepBox, profile: Path
) -> None:
    ctx = with_build(box, "other", dialect="ik-now").context
    prepared = prepare(ctx, SweepRequest(budget_s=600.0, space=("engine=ik",)), proves=False)
    arm = replace(prepared.base.arm, engine="other").canonical()
    assert plan_arm(ctx, prepared, arm).engine.name == "other"
    profile.write_text(f"{profile.read_text()}\n[engines.ik.serving]\nctx_size = 512\n")
    assert plan_arm(ctx, prepared, prepared.base.arm)
    with pytest.raises(LeaseEnded, match="was replaced"):
        plan_arm(ctx, prepared, arm)


def test_what_a_smaller_card_of_the_same_name_showed_counts_no_more(box: SweepBox) -> None:
    """An RTX 5060 Ti has 8 or 16 GiB: the night after one was put in for the other went on with what the other did."""
    box.gets_a_card()

    def basis(total_mib: int) -> str:
        card = a_card("NVIDIA GeForce RTX 5060 Ti", total_mib=total_mib)
        ctx = replace(box.box.context, gpu=FakeGpuReader(card))
        return prepare(ctx, SweepRequest(budget_s=600.0), proves=False).basis

    assert basis(8151) == basis(8151) != basis(16311)


def test_an_engine_is_tried_by_its_family_too_and_a_word_for_none_is_named(box: SweepBox) -> None:
    asked = with_build(box, "other", dialect="ik-now")

    plan = asked.json("sweep", "run", "--dry-run", "--space", "engine=ik,bee")["plan"]

    assert {one["engine"] for one in plan["families"]} == {"fake", "other"}
    reasons = {one["what"]: one["reason"] for one in plan["left_out"]}
    assert reasons["engine.prefer = bee"] == "no such engine here"
    assert reasons["embedded"] == "engine.prefer does not list it"


def test_what_serves_by_another_program_than_its_profile_has_today_is_told_both_and_how_to_deploy(
    box: SweepBox,
) -> None:
    refused = with_build(box, "fake").json("sweep", "run", "--dry-run", code=1)["error"]

    newer = box.box.folder / "fake/llama-server"
    assert refused["cause"] == f"program {box.engine.program} -> {newer}"
    assert "`tunerd apply night` deploys it" in refused["hint"]


def a_bundle(model: str, *settings: dict[str, Any]) -> str:
    entry = {"source": "a friend", "card": None, "engine": {"family": "mainline"}, "model": {"name": model},
             "figures": [{"case": "code", "tok_s": 99.0}]}  # fmt: skip
    entries = [{**entry, "settings": one} for one in settings]
    return json.dumps({"format": "tunerd-results", "version": 1, "written_by": "x", "entries": entries})  # fmt: skip


def test_a_bundle_gives_a_sweep_its_first_candidates_until_it_is_forgotten(
    box: SweepBox, tmp_path: Path
) -> None:
    before = box.json("sweep", "run", "--dry-run")["plan"]["seeds"]
    model = box.json("plan", "night")["model"]["name"]
    file = tmp_path / "friend.json"
    off, deep = {"speculation.type": "off"}, {"speculation.type": "mtp", "speculation.n_max": 2}
    file.write_text(a_bundle(model, *({"speculation.type": f"x{n}"} for n in range(3))))
    (never,) = {row["bundle"] for row in box.json("results", "import", str(file))["entries"]}
    assert box.json("sweep", "run", "--dry-run")["plan"]["seeds"] == before, "none is of the space"
    box.call("results", "forget", never)
    file.write_text(a_bundle(model, off, deep))
    made = box.json("results", "import", str(file))
    assert [row["fits"] for row in made["entries"]] == [True, True]
    (name,) = {row["bundle"] for row in made["entries"]}
    (kept,) = box.box.folder.rglob(f"imported/{name}.json")
    assert kept.stat().st_mode & 0o777 == 0o644, "looking is for everybody"
    kept.with_name("ffffffffffff.json").mkdir()  # as good as one that may not be read

    seeds = box.json("sweep", "run", "--dry-run")["plan"]["seeds"]
    assert len(seeds) == len(before) + 2
    assert any("no speculation" in seed for seed in seeds)
    listed = box.json("results", "list")
    assert listed["results"] == [], "nothing of it counts as measured here"
    assert listed["imported"] == [{"bundle": name, "entries": 2, "sources": ["a friend"]}]
    assert f"imported {name}: 2 configurations from a friend" in box.call("results", "list").stdout  # fmt: skip

    file.write_text(a_bundle("another model", off))
    said = box.call("results", "import", str(file)).stdout
    assert "1 configuration: it is for another model" in said
    assert "first candidates" not in said, "none of it is a candidate"

    box.call("results", "forget", name)
    assert box.json("sweep", "run", "--dry-run")["plan"]["seeds"] == before
    assert box.call("results", "forget", "../../x", code=None).returncode == 2

    shipped = box.json("results", "import", "--shipped")["entries"]
    assert len(shipped) == sum(len(json.loads(one.read_text())["entries"]) for one in (ROOT / "profiles/evidence").glob("*.json"))  # fmt: skip
    assert all("another card" in row["why_not"] or "did not serve" in row["why_not"] for row in shipped)  # fmt: skip

    box.call("bench", "--suite", "mtp", "--repeats", "1", "--yes")
    run = str(box.json("results", "list")["results"][0]["run"])
    out = box.call("results", "export", run, "--format", "bundle").stdout
    assert str(box.box.folder) not in out
    (entry,) = json.loads(out)["entries"]
    assert entry["model"]["name"] == "tunerd designed model", "not what its server is called"
    # Elsewhere the same file came at another time, and the other box does not hand out what it is called.
    file.write_text(out.replace(entry["model"]["name"], "unnamed"))
    before = box.box.model.stat()
    os.utime(box.box.model, (1e9, 1e9))
    mine = box.json("results", "import", str(file))["entries"]
    os.utime(box.box.model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [row["why_not"] for row in mine] == [None]
    assert mine[0]["settings"]["speculation.n_max"] == 4


def test_a_bundle_that_cannot_be_read_any_more_is_named(tmp_path: Path) -> None:
    box = Box(tmp_path)
    ctx = box.context
    ctx.files.make_folder(ctx.paths.imported_dir)
    (ctx.paths.imported_dir / "0123456789ab.json").write_text(
        a_bundle("m", {"speculation.type": "off"})[:-9]
    )
    listed = box.json("results", "list")
    assert listed["imported"] == []
    (told,) = (one for one in listed["messages"] if one["code"] == "damaged-bundle")
    assert "bundle 0123456789ab is left out: the file: Invalid JSON" in told["text"]
    box.json("results", "forget", "0123456789ab")
    assert [one["code"] for one in box.json("results", "list")["messages"]] == ["nothing-measured"]


# The largest context that holds a speed; the stand-in is as fast with any


def test_a_plan_names_the_sizes_and_keeps_all_else(box: SweepBox) -> None:
    plan = box.json("sweep", "run", "--dry-run", *ASKED, "--at-least", "40")["plan"]
    (family,) = plan["families"]
    assert family["n_max"] == [4]
    assert [dict(map(tuple, one))["serving.ctx_size"] for one in family["extra"]] == [
        512, 1024, 1536, 2048,
    ]  # fmt: skip
    said = box.call("sweep", "run", "--dry-run", *ASKED, "--at-least", "40").stdout
    assert "looks for the largest context that holds 40 tok/s" in said
    assert "all other settings" in said
    for words in (("--goal", "context"), ("--at-least", "40")):
        done = box.call("sweep", "run", "--dry-run", *words, code=2)
        assert "--goal context and --at-least go together" in done.stderr
    plan = box.json("sweep", "run", "--dry-run", *ASKED[2:])["plan"]
    reasons = {one["what"]: one["reason"] for one in plan["left_out"]}
    assert "--goal context" in reasons["serving.ctx_size"], "for speed it keeps the context"


def test_a_context_that_somebody_pinned_is_not_searched(box: SweepBox) -> None:
    box.call("apply", "night", "--yes", "--set", "serving.ctx_size=1024")
    done = box.call("sweep", "run", "--dry-run", *ASKED, "--at-least", "40", code=2)
    box.call("apply", "night", "--yes")
    assert "serving.ctx_size is pinned" in done.stderr


@pytest.mark.alone
def test_the_largest_context_is_proved_promoted_and_served(box: SweepBox) -> None:
    found = box.sweep(*ASKED, "--at-least", "40", budget="80s")
    assert found["verdict"] == "promote", found
    assert found["changes"] == "serving.ctx_size = 2048"
    shown = box.newest()
    assert shown["challenges"][-1]["reasons"][0].endswith("starts")
    assert shown["page"]["against"] == "turns at 40 tok/s"
    assert shown["verdict_record"]["ratio"] is None
    done = box.json("promote", "--yes")
    assert "at 40 tok/s it would take" in done["measured_again"]["text"]
    assert done["tuned"] == {"serving.ctx_size": 2048}
    assert "--ctx-size 2048" in " ".join(box.json("plan", "night")["argv"])
    assert box.serves


# Last: it changes the model


def test_a_class_is_what_can_learn_from_each_other_whenever_each_box_got_its_files(
    box: SweepBox,
) -> None:
    model = box.box.folder / "tiny.gguf"

    def found() -> str:
        box.call("apply", "night", "--yes", code=None)
        return class_of(prepare(box.box.context, SweepRequest(budget_s=3600.0), proves=False))

    prepared = prepare(box.box.context, SweepRequest(budget_s=3600.0), proves=False)
    wider = replace(prepared, policy=replace(prepared.policy, at_least_tok_s=20.0))
    assert class_of(wider) != class_of(prepared), "its arms differ in context"
    family = next(iter(prepared.space.space.families.values()))

    def drafted(name: object) -> dict[str, str]:
        pair = frozenset({(DRAFT_MODEL, str(name))})
        drafts = Space({("fake", "draft"): replace(family, extra=(pair,))})
        drafting = replace(prepared, space=replace(prepared.space, space=drafts))
        return drafts_of(box.box.context, drafting)

    shutil.copy(model, copy := model.with_name("elsewhere.gguf"))
    assert drafts_of(box.box.context, prepared) == {}
    assert list(drafted(copy).values()) == list(drafted(model).values())
    assert class_of(prepared, drafted(copy).values()) != class_of(prepared)
    assert drafted("/a/small.gguf") == {"/a/small.gguf": "small.gguf"}

    def with_cards(*cards: Gpu) -> PreparedSweep:
        host = replace(prepared.base_plan.host, gpus=cards or None)
        return replace(prepared, base_plan=replace(prepared.base_plan, host=host))

    told = [class_of(with_cards(a_card(total_mib=mib))) for mib in (24268, 24576, 16311)]
    assert told[0] == told[1] != told[2], "drivers differ in what they count of the same card"
    blind = with_cards()
    said: list[str] = []
    ctx = replace(box.box.context, progress=lambda progress: said.append(progress.text))
    with meet(ctx, blind) as study:
        assert type(study) is Study, "what is unknown is no class"
    assert said == ["this box sweeps alone: its card is not known"]

    first = found()
    os.utime(model, (1_700_000_000, 1_700_000_000))
    assert found() == first
    with model.open("ab") as file:
        file.write(b"\0")
    assert found() != first
