"""Placement and draft models as a user meets them: what a sweep would try, and what a promotion leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.sweep_box import PROFILE, SweepBox, swept
from tunerd.errors import DeployError, UsageError
from tunerd.profile.files import TunedRecord, write_tuned
from tunerd.sweep.plan import SweepRequest
from tunerd.sweep.run import sweep_plan
from tunerd.tryout.designed import SHAPES, Shape, design, write
from tunerd.watch.guarding import margin_now

pytestmark = pytest.mark.timeout(540)

# Five blocks and the output: fit has put two layers' experts into RAM, and counts the output with them.
CARD: dict[str, Any] = {
    "name": "Vulkan0", "description": "a card", "total_mib": 8192, "free_mib": 8000,
    "model_mib": 300, "context_mib": 100, "compute_mib": 60, "n_layers": 6, "offloaded": 6,
    "overflowing": 3,
}  # fmt: skip
FROZEN = [["memory.n_cpu_moe", 2], ["memory.n_gpu_layers", 6]]
LITTLE = Shape(n_layer=1, has_mtp=False, full_attention_interval=1)


@pytest.fixture(scope="module")
def box() -> Iterator[SweepBox]:
    """Profile `night` knows no GPU, `card` does, and its model has experts."""
    with swept(device=CARD) as found:
        folder = found.box.folder
        shapes = {name: SHAPES[f"tiny-{name}"] for name in ("moe", "nomtp", "mtp")}
        for name, shape in {**shapes, "little": LITTLE}.items():
            write(design(shape), folder / f"{name}.gguf")
        card = PROFILE.format(model=folder / "moe.gguf", port=found.port)
        card += '[match]\ngpu = "a card"\n[memory]\nfit_mib = 1024\n'
        found.box.configure(card, "profiles/card.toml")
        yield found


def dry_run(box: SweepBox, profile: str, *space: str) -> tuple[dict[str, Any], dict[str, str], str]:
    """The plan of a sweep, the reasons of what was left out, and what was said."""
    ctx = box.box.context
    serving = ctx.generations.serving(ctx.unit)
    if serving is None or serving.generation.profile != profile or serving.generation.pins:
        box.call("apply", profile, "--yes")
    found = sweep_plan(ctx, SweepRequest(budget_s=7200.0, space=space))
    plan = found.payload["plan"]
    reasons = {one["what"]: one["reason"] for one in plan["left_out"]}
    return plan, reasons, " ".join(one.text for one in found.messages)


def extras(plan: dict[str, Any], spec: str) -> list[Any]:
    (family,) = (one for one in plan["families"] if one["speculation"] == spec)
    found: list[Any] = family["extra"]
    return found


def test_what_is_typed_comes_before_what_the_settings_list_for_the_same_key(box: SweepBox) -> None:
    box.call("settings", "set", "sweep.space", "serving.threads=1", "serving.n_ubatch=128")
    try:
        plan, _, _ = dry_run(box, "card", "serving.threads=1,2")
    finally:
        box.call("settings", "unset", "sweep.space")
    assert {tuple(one["threads"]) for one in plan["families"]} == {(1, 2)}
    assert all(128 in one["ubatch"] for one in plan["families"])
    with pytest.raises(UsageError, match=r"`serving.threads` was given twice"):
        dry_run(box, "card", "serving.threads=1,2", "serving.threads=3")


def test_what_fit_chose_is_frozen_for_speculation_on_and_off(box: SweepBox) -> None:
    plan, reasons, said = dry_run(box, "card", "memory.n_cpu_moe=0,3")
    expected = [[], FROZEN, [["memory.n_cpu_moe", 0]], [["memory.n_cpu_moe", 3]]]
    assert extras(plan, "mtp") == expected
    assert extras(plan, "off") == expected
    assert "frozen placement" not in reasons
    assert "memory.n_gpu_layers = 6, memory.n_cpu_moe = 2" in said
    assert "the log of the server that runs" in said
    shown = box.call("sweep", "run", "--dry-run").stdout
    assert "as it is, memory.n_cpu_moe=2 memory.n_gpu_layers=6" in shown
    assert margin_now(box.box.context).fit_mib == 1024


def test_what_was_promoted_is_named_by_its_keys_and_fit_is_tried_again(box: SweepBox) -> None:
    values = {"memory.n_gpu_layers": 6, "memory.n_cpu_moe": 2}
    record = TunedRecord(
        profile="card", values=values, sweep=1, promoted_s=0.0, sentence="as the test says",
        engine="fake", engine_sha256=None, model_sha256=None, driver_version=None,
    )  # fmt: skip
    write_tuned(box.box.context, record)
    try:
        box.call("apply", "card", "--yes")
        plan, reasons, said = dry_run(box, "card")
        shown = box.json("plan", "card", "--explain")
        margin = margin_now(box.box.context)
    finally:
        for path in (box.box.folder / "state/tuned").glob("card.*"):
            path.unlink()
        box.call("apply", "night", "--yes")
    assert "--fit off --n-gpu-layers 6 --n-cpu-moe 2" in " ".join(shown["argv"])
    by_tuned = {one["key"] for one in shown["explain"] if "tuned" in one["origin"]}
    assert by_tuned == {*values}
    fit = [["memory.n_cpu_moe", "default"], ["memory.n_gpu_layers", "default"]]
    assert extras(plan, "mtp") == [FROZEN, fit]
    assert "memory.fit_mib" not in reasons
    assert "fit is tried again" in said
    assert margin.fit_mib is None  # no guard raises what means nothing


def test_the_first_draft_model_that_can_draft_is_a_kind_of_its_own_and_the_others_say_why_not(
    box: SweepBox, tmp_path: Path
) -> None:
    other, none = tmp_path / "other.gguf", tmp_path / "none.gguf"
    write(design(replace(LITTLE, n_vocab=2048)), other)
    tiny, little = box.box.folder / "tiny.gguf", box.box.folder / "little.gguf"
    bad = f"speculation.draft_model={other},{tiny},{none}"
    plan, reasons, _ = dry_run(box, "night", f"{bad},{little}")
    assert extras(plan, "draft") == [[["speculation.draft_model", str(little)]]]
    assert extras(plan, "mtp") == [[]]
    assert "its vocabulary is not the model's" in reasons[str(other)]
    assert "not smaller" in reasons[str(tiny)]
    assert "missing" in reasons[str(none)]
    plan, reasons, _ = dry_run(box, "night", bad)
    assert "draft" not in {one["speculation"] for one in plan["families"]}
    assert "not smaller" in reasons["fake, draft"]


def speculating(box: SweepBox, model: str, kind: str, drafter: str | None) -> str:
    """The name of a profile with this kind and draft model."""
    folder = box.box.folder
    text = PROFILE.format(model=folder / f"{model}.gguf", port=box.port)
    named = "" if drafter is None else f'draft_model = "{folder / drafter}.gguf"\n'
    text = text.replace('type = "mtp"\n', f'type = "{kind}"\n{named}')
    name = f"{model}-{kind}-{drafter or 'none'}"
    box.box.configure(text, f"profiles/{name}.toml")
    return name


def test_mtp_is_tried_by_the_file_with_its_block_that_the_profile_or_a_list_names(
    box: SweepBox,
) -> None:
    """It was left out: the model has no block. A sweep of what drafts so began from no speculation."""
    head = str(box.box.folder / "mtp.gguf")
    named = [["speculation.draft_model", head]]
    plan, _, _ = dry_run(box, speculating(box, "nomtp", "mtp", "mtp"))
    assert plan["incumbent"]["spec"] == "mtp"
    assert extras(plan, "mtp") == extras(plan, "off") == [[]]
    write(design(SHAPES["tiny-mtp"], seed=7), Path(head), force=True)
    with pytest.raises(DeployError, match="replaced or removed while it ran"):
        dry_run(box, "nomtp-mtp-mtp")
    box.call("apply", "nomtp-mtp-mtp", "--yes")
    assert dry_run(box, "nomtp-mtp-mtp")[0]["basis"] != plan["basis"]
    plan, reasons, _ = dry_run(box, speculating(box, "nomtp", "off", "mtp"))
    assert extras(plan, "mtp") == [named]
    assert "fake, draft" not in reasons
    plan, reasons, _ = dry_run(box, speculating(box, "nomtp", "off", None))
    assert reasons["fake, mtp"] == "the model has no MTP block"
    plan, _, _ = dry_run(
        box, speculating(box, "nomtp", "off", None), f"speculation.draft_model={head}"
    )
    assert extras(plan, "mtp") == [named]


def test_mtp_by_the_models_own_block_leaves_out_the_draft_model_of_another_kind(
    box: SweepBox,
) -> None:
    """What a promotion wrote before MTP took files was refused after an upgrade: the file has no MTP block."""
    name = speculating(box, "tiny", "draft", "little")
    plan, _, _ = dry_run(box, name)
    assert extras(plan, "draft") == extras(plan, "mtp") == [[]]
    record = TunedRecord(
        profile=name, values={"speculation.type": "mtp"}, sweep=1, promoted_s=0.0,
        sentence="as the test says", engine="fake", engine_sha256=None, model_sha256=None,
        driver_version=None,
    )  # fmt: skip
    write_tuned(box.box.context, record)
    shown = box.json("plan", name)
    assert "--spec-type draft-mtp" in " ".join(shown["argv"])
    assert "--model-draft" not in shown["argv"]
    box.call("apply", name, "--yes")
    plan, _, _ = dry_run(box, name)
    little = [["speculation.draft_model", str(box.box.folder / "little.gguf")]]
    assert (extras(plan, "mtp"), extras(plan, "draft")) == ([[]], [little])
