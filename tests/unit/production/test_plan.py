"""What a plan says of memory goes by the same decision as its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.world import UNIT, World
from tests.support.builders import ROOT, capabilities_of
from tests.support.doctor_facts import HOST
from tests.support.fake_gpu import FakeGpuReader, a_card, rtx_3090_ti
from tests.support.model_headers import facts_of_shape
from tests.support.profiles import a_plan_for, profile_of
from tests.support.shapes import PlainShape
from tunerd.engine.capabilities import Engine, OffloadDevice
from tunerd.engine.choice import Choice
from tunerd.engine.flags import CommandLine
from tunerd.engine.serving import memory_limits, read_live_unit
from tunerd.machine.facts import Gpu, Host
from tunerd.machine.host import has_memory_groups
from tunerd.measure.results import here_of
from tunerd.model.facts import ModelFacts
from tunerd.model.memory import Device, Estimate, MemorySettings, PartKind, estimate
from tunerd.model.verdict import MemoryPlan
from tunerd.production.emit import Together, all_fit, together
from tunerd.production.plan import (
    Plan,
    cards_of,
    memory_of_plan,
    plan_json,
    settings_of,
    unit_spec,
)
from tunerd.production.profiles import new_profile
from tunerd.result import Level
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.web.view import plan_facts
from tunerd.words import MiB, all_known

LLAMA = facts_of_shape(PlainShape(architecture="llama"))
SMALL = facts_of_shape(PlainShape(architecture="llama", n_layer=2, n_vocab=2048))
BARE = replace(HOST, gpus=())


def build_of(dialect: str | None) -> Engine:
    capabilities = None if dialect is None else capabilities_of(dialect)
    return Engine(Path("/bin/true"), "test", "mine", capabilities=capabilities)


def settings_by(
    dialect: str, data: dict[str, object], facts: ModelFacts | None = None
) -> MemorySettings:
    return settings_of(profile_of(data), build_of(dialect), facts, HOST, has_gpu=True)


def choice_of(
    data: dict[str, object], devices: Sequence[OffloadDevice], dialect: str | None = None
) -> Choice:
    return Choice(
        build_of(dialect), profile_of(data), CommandLine("/bin/true", ()), Path("/m.gguf"),
        tuple(devices), has_gpu=bool(devices), passed_over=(),
    )  # fmt: skip


def judged_on(
    world: World, gpu_mib: int, dialect: str | None, data: dict[str, object], host: Host = BARE
) -> MemoryPlan:
    """What a plan says of 2 GiB of cache and 0.3 of weights on a card with so much free, or none."""
    cards = [OffloadDevice("CUDA0", "a card", MiB(gpu_mib), MiB(gpu_mib))] if gpu_mib else []
    ctx, chosen = world.context(), choice_of(data, cards, dialect)
    return memory_of_plan(ctx, chosen, LLAMA, host, None, ctx.services.state(UNIT))


@pytest.mark.parametrize(
    ("dialect", "n_slots", "n_max"),
    [
        ("main-mid", 4, 16),
        ("main-lm", 4, 3),
        ("main-0x", 4, 3),
        ("bee-01", 4, 16),
        ("ik-may", 1, 16),
        ("ik-now", 1, 16),
    ],
)
def test_what_is_left_to_the_build_takes_what_the_build_has_for_it(
    dialect: str, n_slots: int, n_max: int
) -> None:
    left = {"serving.n_parallel": "default", "speculation.n_max": "default"}
    said = {"serving.n_parallel": 2, "speculation.n_max": 1}

    settings = settings_by(dialect, {"speculation.type": "mtp", **left})
    own = settings_by(dialect, {"speculation.type": "mtp", **said})

    assert (settings.n_parallel, settings.kv_unified) == (n_slots, n_slots > 1)
    assert (settings.n_max, settings.drafts) == (n_max, True)
    assert (own.n_parallel, own.kv_unified, own.n_max) == (2, False, 1)


@pytest.mark.parametrize(
    ("dialect", "n_ctx", "kind"),
    [
        ("main-old", 1024, "f16"),
        ("ik-may", 1024, "q8_0"),
        ("ik-now", 0, "q8_0"),
        ("main-0x", 0, "f16"),
    ],
)
def test_the_cache_of_a_draft_model_is_as_the_build_makes_it(
    dialect: str, n_ctx: int, kind: str
) -> None:
    target = {"serving.cache_type_k": "q8_0", "serving.cache_type_v": "q8_0"}
    asked = {"speculation.type": "draft", "speculation.ctx_size": 1024, **target}

    settings = settings_by(dialect, asked, SMALL)
    own = settings_by(dialect, {**asked, "speculation.cache_type_k": "f16"}, SMALL)
    settings = replace(settings, ctx_size=8192)
    need, whole = (
        estimate(SMALL, one).bytes_of(Device.GPU, (PartKind.DRAFT_KV,))
        for one in (settings, replace(settings, draft_ctx_size=0))
    )

    assert (settings.draft_ctx_size, settings.draft_cache_type_k) == (n_ctx, kind)
    assert own.draft_cache_type_k == "f16"
    assert need * (8 if n_ctx else 1) == whole


def test_a_projector_counts_by_its_file_and_is_unknown_without_it(tmp_path: Path) -> None:
    data, file = {"model.mmproj": str(tmp_path / "mmproj.gguf")}, b"GGUF" * 100

    def need(**more: object) -> Estimate:
        return estimate(SMALL, settings_by("main-0x", {**data, **more}))

    missing = need()
    (tmp_path / "mmproj.gguf").write_bytes(file)
    found = need()

    assert not missing.is_complete
    assert found.is_complete
    assert found.bytes_of(Device.GPU, (PartKind.PROJECTOR,)) == len(file)
    assert any("projector" in one for one in found.notes)
    in_ram = need(extra_args=["--no-mmproj-offload"])
    more = found.bytes_of(Device.GPU) - in_ram.bytes_of(Device.GPU)
    assert more == 249 * 1024 * 1024 + len(file)
    assert more == in_ram.bytes_of(Device.HOST) - found.bytes_of(Device.HOST)


def test_flags_that_no_key_renders_count_where_they_take_memory(tmp_path: Path) -> None:
    """`--swa-full` on Gemma 3 took a gigabyte and more than was said to fit, adapters what their files have."""
    shape = PlainShape(architecture="gemma3", n_layer=12, sliding_window=1024, n_vocab=2048)
    (tmp_path / "a.gguf").write_bytes(bytes(3 * 1024 * 1024))

    def need(*words: str, **memory: object) -> Estimate:
        asked = {"serving.ctx_size": 32768, "extra_args": list(words), **memory}
        return estimate(facts_of_shape(shape), settings_by("main-0x", asked))

    plain, whole = need(), need("--swa-full")
    adapted = need("--lora-scaled", f"{tmp_path}/a.gguf:0.5,{tmp_path}/a.gguf:1")

    kv = (PartKind.KV,)
    assert whole.bytes_of(Device.GPU, kv) == 12 * 32768 * 2 * 4 * 64 * 2
    assert plain.bytes_of(Device.GPU, kv) < whole.bytes_of(Device.GPU, kv) / 4
    assert adapted.start_mib(Device.GPU) - plain.start_mib(Device.GPU) == 6
    assert not need("--lora", f"{tmp_path}/none.gguf").is_complete
    drafter = need("--spec-type", "draft-mtp", "-md", f"{tmp_path}/a.gguf")
    assert drafter.start_mib(Device.GPU) - plain.start_mib(Device.GPU) == 3
    assert not need(**{"memory.override_tensor": ["exps=CPU"]}).is_complete
    assert plain.is_mapped
    assert not need("-rtr").is_mapped
    assert need("-rtr", **{"serving.load_mode": "mlock"}).is_locked


@pytest.mark.parametrize(
    ("memory", "is_placed_by_fit"),
    [
        ({}, True),
        ({"memory.cpu_moe": False}, True),
        ({"memory.override_tensor": []}, True),
        ({"memory.cpu_moe": True}, False),
        ({"memory.n_gpu_layers": 99}, False),
        ({"memory.fit": False}, False),
    ],
)
def test_a_card_that_is_too_small_is_told_by_who_places_the_model(
    world: World, memory: dict[str, object], is_placed_by_fit: bool
) -> None:
    judged = judged_on(world, 8, None, {"memory.fit_mib": 64, **memory})

    (refused,) = [one for one in judged.messages if one.level is Level.ERROR]
    assert ("fit can move no more" in refused.text) is is_placed_by_fit
    assert ("let fit place it" in (refused.hint or "")) is not is_placed_by_fit


BY_BUILD = {"memory.fit_mib": "default"}
FAST = rtx_3090_ti(index=1)
DESKTOP = a_card(index=0, used_mib=4000)
CUDA = (
    OffloadDevice("CUDA0", FAST.name, FAST.total_mib, FAST.free_mib),
    OffloadDevice("CUDA1", DESKTOP.name, DESKTOP.total_mib, DESKTOP.free_mib),
)
TWINS = (rtx_3090_ti(used_mib=20_000), FAST)
BESIDE_PROCESSOR = (
    OffloadDevice("Vulkan0", "Intel(R) UHD Graphics", MiB(48_000), MiB(40_000)),
    OffloadDevice("Vulkan1", FAST.name, FAST.total_mib, FAST.free_mib),
)
SECOND = {"environment": {"CUDA_VISIBLE_DEVICES": "1"}}
BY_UUID = {"environment": {"CUDA_VISIBLE_DEVICES": DESKTOP.uuid}}


@pytest.mark.parametrize(
    ("gpus", "devices", "data", "used"),
    [
        ((DESKTOP, FAST), CUDA, {}, (FAST, DESKTOP)),
        ((DESKTOP, FAST), CUDA[1:], SECOND, (DESKTOP,)),
        ((DESKTOP, FAST), CUDA, {"memory.device": "CUDA1"}, (DESKTOP,)),
        ((DESKTOP, FAST), CUDA, {"memory.device": "none"}, ()),
        ((DESKTOP, FAST), CUDA, {"memory.device": "cuda1"}, (DESKTOP,)),
        ((DESKTOP, FAST), CUDA, {"memory.split_mode": "none"}, (FAST,)),
        ((DESKTOP, FAST), CUDA, {"memory.split_mode": "none", "memory.main_gpu": 1}, (DESKTOP,)),
        ((DESKTOP, FAST), CUDA, {"memory.split_mode": "none", "memory.device": "CUDA1,CUDA0"}, (DESKTOP,)),
        ((FAST,), BESIDE_PROCESSOR, {"memory.split_mode": "none"}, (FAST,)),
        ((FAST,), BESIDE_PROCESSOR, {"memory.device": "Vulkan0"}, ()),
        ((DESKTOP, FAST), (*CUDA[:1], OffloadDevice("Vulkan1", "AMD Radeon", MiB(64_000), MiB(60_000))), {}, (FAST,)),
        (TWINS, (replace(CUDA[0], free_mib=MiB(3800)),), SECOND, TWINS[:1]),
        (TWINS, CUDA[:1], SECOND, (FAST,)),
        ((DESKTOP, FAST), (), {}, (DESKTOP, FAST)),
        ((DESKTOP, FAST), (), BY_UUID, (DESKTOP,)),
        ((DESKTOP, FAST), (), SECOND, ()),
        ((DESKTOP, FAST), (), {"memory.split_mode": "none"}, ()),
        ((DESKTOP,), (), SECOND, (DESKTOP,)),
        ((DESKTOP,), (OffloadDevice("CUDA0", "its MIG device", MiB(5000), MiB(5000)),), {}, (DESKTOP,)),
        ((), CUDA, {}, ()),
    ],
)  # fmt: skip
def test_a_server_is_on_the_cards_that_its_build_and_command_line_take(
    gpus: tuple[Gpu, ...],
    devices: tuple[OffloadDevice, ...],
    data: dict[str, object],
    used: tuple[Gpu, ...],
) -> None:
    """What was free on the largest card was taken for any other that a server was confined to."""
    assert cards_of(replace(HOST, gpus=gpus), choice_of(data, devices)) == used


def planned_on_two(world: World, data: dict[str, object], *, has_gpu: bool = True) -> Plan:
    """Of a machine with both cards."""
    ctx = replace(world.context(), data_dir=ROOT)
    host = replace(HOST, gpus=(DESKTOP, FAST))
    bare = a_plan_for(ctx, Path("/bin/true"))
    made = replace(
        bare,
        engine=replace(bare.engine, capabilities=capabilities_of("main-0x")),
        resolved=profile_of({"memory.n_gpu_layers": 99, **data}),
        devices=CUDA,
        has_gpu=has_gpu,
        host=host,
    )
    memory = memory_of_plan(ctx, made, LLAMA, host, None, ctx.services.state(UNIT))
    return replace(made, memory=memory, facts=LLAMA)


@pytest.mark.parametrize(
    ("data", "free_mib", "code"),
    [
        ({}, (FAST.free_mib or 0) + (DESKTOP.free_mib or 0), "several-cards"),
        ({"memory.device": "CUDA1"}, DESKTOP.free_mib, "too-big-for-vram"),
        ({"extra_args": ["--rpc", "10.0.0.2:50052"]}, None, "vram-unknown"),
        ({"memory.device": "none"}, None, "vram-unknown"),
    ],
)
def test_a_model_is_held_against_what_its_own_cards_have_together(
    world: World, data: dict[str, object], free_mib: int | None, code: str
) -> None:
    """A model on two cards, or one that another machine helps with, was refused for the size of one."""
    judged = planned_on_two(world, {"serving.ctx_size": 1_500_000, **data}).memory

    assert judged.free_mib[Device.GPU] == free_mib
    assert code in [one.code for one in judged.messages]
    assert any(one.level is Level.ERROR for one in judged.messages) is (code == "too-big-for-vram")


def test_servers_on_cards_of_their_own_are_not_added_up_on_one(world: World) -> None:
    """Two models to which a person gave a card each were said not to fit on the larger one."""
    fast, slow = (planned_on_two(world, {"memory.device": f"CUDA{n}"}) for n in (0, 1))

    (alone,), (apart,) = together([slow]), together([fast, slow], MiB(60_000))

    assert (alone.budget_mib, alone.held_mib) == (DESKTOP.free_mib, 4380)
    assert (apart.budget_mib, apart.fits) == (None, None)


def test_a_server_without_a_card_counts_in_ram_beside_one_on_the_card(world: World) -> None:
    """Nobody could tell whether they fit, as what the one needs of the card was taken for unknown."""
    small: dict[str, object] = {"memory.device": "CUDA1", "serving.ctx_size": 2048}
    plans = [planned_on_two(world, small), planned_on_two(world, small, has_gpu=False)]

    card, ram = together(plans, MiB(7000))

    assert (card.budget_mib, len(card.needs)) == (7000, 1)
    assert (ram.budget_mib, len(ram.needs)) == (plans[1].memory.free_mib[Device.HOST], 2)
    assert ram.left_mib == (ram.budget_mib or 0) - sum(all_known(mib for _, mib in ram.needs))


@pytest.mark.parametrize(
    ("each", "all_of_them"),
    [((True, True), True), ((True, False), False), ((None, False), False), ((None, True), None)],
)
def test_what_does_not_fit_on_one_device_does_not_fit(
    each: tuple[bool | None, ...], all_of_them: bool | None
) -> None:
    budget = {True: 5, False: 3, None: None}
    assert all_fit([needs(4, budget=budget[one]) for one in each]) is all_of_them


def needs(*mib: int | None, budget: int | None, margin: int = 0) -> Together:
    named = tuple((f"p{n}", None if one is None else MiB(one)) for n, one in enumerate(mib))
    return Together("GPU", named, MiB(margin), None if budget is None else MiB(budget), None)


@pytest.mark.parametrize(
    ("found", "left", "fits"),
    [
        (needs(4000, 6000, budget=11000, margin=1000), 0, True),
        (needs(4000, 6000, budget=11000, margin=1001), -1, False),
        (needs(4000, None, budget=11000), None, None),
        (needs(4000, 6000, budget=None), None, None),
    ],
)
def test_needs_and_margin_are_held_against_the_budget(
    found: Together, left: int | None, fits: bool | None
) -> None:
    assert (found.left_mib, found.fits) == (left, fits)


@pytest.mark.parametrize(
    ("dialect", "data", "code"),
    [
        ("main-old", {}, "fit-moves"),
        ("main-0x", {}, "fit-moves"),
        ("main-0x", {"memory.fit": False}, "too-big-for-vram"),
        ("ik-now", {}, "too-big-for-vram"),
        ("ik-now", {"memory.fit": True}, "fit-moves"),
    ],
)
def test_a_build_that_fits_unasked_is_not_taken_for_one_that_does_not(
    world: World, dialect: str, data: dict[str, object], code: str
) -> None:
    """A line of `-m FILE -c N` alone, as adopted, was refused on a card that is too small for all of it."""
    judged = judged_on(world, 1500, dialect, {**BY_BUILD, "serving.ctx_size": 131072, **data})

    assert judged.messages[0].code == code


@pytest.mark.parametrize("placed", [{}, {"memory.n_gpu_layers": 99}, {"memory.fit_mib": 512}])
def test_a_context_that_nobody_set_is_what_fit_makes_of_it(
    world: World, placed: dict[str, object]
) -> None:
    """All of the trained one was refused, or said to make fit move weights."""
    judged = judged_on(world, 2500, "main-0x", placed)

    (told,) = judged.messages
    assert (told.level, told.code) == (Level.NOTE, "fit-context")
    assert judged.estimate.n_ctx is not None
    assert f"fit will take about {judged.estimate.n_ctx}" in told.text
    margin = int(str(placed.get("memory.fit_mib", 1024)))
    assert 0 <= 2500 - margin - judged.estimate.start_mib(Device.GPU) < 40


@pytest.mark.parametrize(
    ("dialect", "data", "n_ctx"),
    [
        ("main-0x", {}, 4096),
        ("main-0x", {"extra_args": ["--fit-ctx", "8192"]}, 8192),
        ("main-0x", {"serving.ctx_size": 0}, 131072),
        ("main-0x", {"memory.fit": False}, 131072),
        ("ik-now", {}, 131072),
    ],
)
def test_fit_stops_at_a_least_context_and_leaves_one_that_was_set(
    world: World, dialect: str, data: dict[str, object], n_ctx: int
) -> None:
    judged = judged_on(world, 1100, dialect, data)

    assert judged.estimate.n_ctx == n_ctx
    assert ("fit-context" in {one.code for one in judged.messages}) is (n_ctx < 131072)


def put_units(world: World, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = world.paths.unit_dir / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    world.manager.reload()


IN_SLICE = "[Service]\nSlice=ai-gpu.slice\n"
SERVER = "[Service]\nExecStart=/bin/server\n"
OF_SLICES = {"ai-gpu.slice": "[Slice]\n", "ai.slice": f"[Slice]\nMemoryMax={2 << 30}\n"}


@pytest.mark.parametrize(
    ("own", "drop_ins", "now", "after"),
    [
        ("", {}, [], []),
        (f"MemoryMax={1 << 30}\n", {}, [("MemoryMax", UNIT, 1024, UNIT)], []),
        # What a drop-in says stays in force; of several the last one counts.
        (f"MemoryMax={1 << 30}\n", {"a.conf": f"[Service]\nMemoryMax={3 << 30}\n", "b.conf": "[Service]\nNice=1\n"},
         [("MemoryMax", UNIT, 3072, "a.conf")], [("MemoryMax", UNIT, 3072, "a.conf")]),
        ("", {"a.conf": f"[Service]\nMemoryHigh={1 << 30}\n", "b.conf": "[Service]\nMemoryHigh=infinity\n"}, [], []),
        # The tightest of each kind counts, wherever it is.
        ("", {"a.conf": f"{IN_SLICE}MemoryMax={3 << 30}\nMemoryHigh={1 << 30}\n"},
         *2 * ([("MemoryMax", "ai.slice", 2048, "ai.slice"), ("MemoryHigh", UNIT, 1024, "a.conf")],)),
        # A slice that only the replaced file names is left with it.
        ("Slice=ai-gpu.slice\n", {}, [("MemoryMax", "ai.slice", 2048, "ai.slice")], []),
    ],
)  # fmt: skip
def test_the_tightest_limits_on_ram_are_those_that_hold_for_the_new_unit_as_well(
    world: World,
    own: str,
    drop_ins: dict[str, str],
    now: list[tuple[str, str, int, str]],
    after: list[tuple[str, str, int, str]],
) -> None:
    files = {UNIT: SERVER + own, **OF_SLICES}
    files |= {f"{UNIT}.d/{name}": text for name, text in drop_ins.items()}
    put_units(world, files)
    ctx = world.context()
    state = ctx.services.state(UNIT)

    for is_replaced, expected in ((False, now), (True, after)):
        found = memory_limits(ctx, state, is_replaced=is_replaced)
        shown = [(one.name, one.unit, one.mib, one.where and one.where.name) for one in found]
        assert shown == expected


def test_a_limit_counts_where_the_file_of_its_slice_cannot_be_read(world: World) -> None:
    put_units(world, {UNIT: SERVER, f"{UNIT}.d/a.conf": IN_SLICE, **OF_SLICES})
    ctx = world.context()
    state = ctx.services.state("ai.slice")
    (world.paths.unit_dir / "ai.slice").unlink()
    (world.paths.unit_dir / "ai.slice").mkdir()  # which root cannot read either

    (limit,) = memory_limits(ctx, ctx.services.state(UNIT), is_replaced=True)

    assert state.memory_max_bytes is not None
    assert str(limit) == "ai.slice may use 2048 MiB (MemoryMax=)"


@pytest.mark.parametrize(("swap_mib", "level"), [(0, Level.ERROR), (512, Level.WARNING)])
def test_a_unit_that_may_not_have_the_ram_that_its_server_needs_is_told_before_it_is_tried(
    world: World, swap_mib: int, level: Level
) -> None:
    limit = f"{UNIT}.d/limit.conf"
    put_units(world, {UNIT: SERVER, limit: f"[Service]\nMemoryMax={1 << 20}\n"})
    host = replace(BARE, memory=replace(HOST.memory, swap_total_mib=MiB(swap_mib)))

    judged = judged_on(world, 0, None, {"serving.ctx_size": 262144}, host)

    (said,) = [one for one in judged.messages if one.code == "unit-limit"]
    assert f"{UNIT} may use 1 MiB (MemoryMax= in `{world.paths.unit_dir / limit}`)" in said.text
    assert said.level is (level if has_memory_groups() else Level.WARNING)


def test_what_others_found_is_tried_where_it_was_found_on_the_card_that_serves(
    world: World,
) -> None:
    """Of two cards either would do, whichever the server was on."""
    made = planned_on_two(world, {"memory.device": "CUDA1"})

    assert here_of(world.context(), made).cards == (DESKTOP,)


def test_a_plan_says_what_the_model_is_and_of_which_type_most_of_it_is(world: World) -> None:
    said = dict(plan_facts(plan_json(planned_on_two(world, {}), with_explain=False)))

    assert "(llama, q8_0, 315 MiB)" in (said["model"] or "")


def test_a_new_profile_for_a_model_is_for_the_largest_card(world: World, tmp_path: Path) -> None:
    """A small card for the desktop, which the driver counts first, was the one that it was written for."""
    model = write(design(SHAPES["tiny"]), tmp_path / "tiny.gguf")
    ctx = replace(world.context(), gpu=FakeGpuReader(DESKTOP, FAST))

    made = new_profile(ctx, "mine", model=str(model))

    assert 'gpu = "*GeForce RTX 3090 Ti*"' in made.payload["text"]


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("Restart=always", "always"),
        ("Restart=always\nRestart=no", "on-failure"),
        ("", "on-failure"),
    ],
)
def test_a_server_that_came_back_whatever_ended_it_goes_on_to(
    world: World, said: str, kept: str
) -> None:
    """Its new unit left it down where something ended it in order, as whoever frees memory does."""
    world.put(world.text("old", service=said), starts=False)
    ctx = world.context()

    command = CommandLine("/bin/true", ())
    spec = unit_spec(ctx, profile_of({}), build_of("main-0x"), command, read_live_unit(ctx))

    assert spec.restart == kept
