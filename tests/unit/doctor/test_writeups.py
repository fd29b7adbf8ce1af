"""What `doctor` would have told the authors of the write-ups, from what they printed.

Command lines, cards, counts and rates are theirs; sizes of weights are those of the published models
in q8_0, which is larger than what they served, and too large for two of the three cards all the same.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.support.builders import capabilities_of
from tests.support.doctor_facts import (
    DRIVER,
    EVIDENCE,
    HOST,
    PID,
    UNIT,
    a_box,
    a_server,
    engine,
)
from tests.support.fake_gpu import rtx_3090_ti, rtx_4070_super, rtx_5060_ti
from tests.support.model_headers import QWEN36_27B, QWEN36_35B_A3B, facts_of_shape
from tests.unit.engine.test_writeups import WRITE_UPS
from tunerd.doctor.facts import (
    BreakEven,
    Diagnosis,
    Facts,
    LogFacts,
    Traffic,
    break_even,
    diagnose,
    speculates,
    with_stages,
)
from tunerd.doctor.rules import ALL_RULES
from tunerd.engine.commandline import KINDS_WITH_PROBABILITY
from tunerd.engine.help import Effect, Proof
from tunerd.engine.importer import import_command_line, unlisted_flags
from tunerd.machine.facts import Gpu, GpuProcess
from tunerd.measure.answer import Sample, Timings
from tunerd.model.facts import ModelFacts
from tunerd.model.memory import MemorySettings, estimate
from tunerd.profile.schema import ProfileFile
from tunerd.words import MiB

UNMEASURED = replace(EVIDENCE, newest_run=None, holds=None, break_even=None)


@functools.cache
def weights(shape_name: str) -> ModelFacts:
    return facts_of_shape(QWEN36_27B if shape_name == "27B" else QWEN36_35B_A3B)


def settings_of(printed: str, dialect: str) -> ProfileFile:
    """What the printed command line means on a build."""
    words = printed.split()
    imported = import_command_line(words, {}, capabilities_of(dialect))
    return with_stages(imported.resolved.profile, words)


@pytest.mark.parametrize(
    ("dialect", "printed", "kinds", "p_min"),
    [
        ("ik-now", "--spec-type ngram-mod:n_max=64,n_min=2 --spec-type mtp:n_max=2,p_min=0.0",
         {"ngram-mod", "mtp"}, 0.0),
        ("ik-may", "--spec-stage ngram-mod:n_max=64 --spec-stage mtp:n_max=2,p_min=0.6",
         {"ngram-mod", "mtp"}, 0.6),
        ("ik-may", "--spec-stage mtp:n_max=2 --draft-p-min 0.3", {"mtp"}, 0.3),
        ("ik-now", "--spec-type mtp:n_max=2,p_min=0.6", {"mtp"}, 0.6),
        ("ik-may", "--spec-stage none", set(), None),
        ("ik-now", "", set(), None),
    ],
)  # fmt: skip
def test_stages_of_ik_are_speculation_though_no_profile_can_say_two_of_them(
    dialect: str, printed: str, kinds: set[str], p_min: float | None
) -> None:
    settings = settings_of(printed, dialect)
    assert settings.speculation.kinds == kinds
    assert settings.speculation.p_min == p_min
    assert speculates(settings) is bool(kinds)


def box(
    name: str,
    gpu: Gpu,
    model: str,
    *,
    dialect: str | None = None,
    traffic: Traffic | None = None,
    cost: BreakEven | None = None,
) -> Facts:
    """The box of a write-up, on the build that it ran or on another; nothing else is known of it."""
    writeup = WRITE_UPS[name]
    dialect = dialect or writeup.dialect
    settings = settings_of(writeup.printed, dialect)
    serving, speculation = settings.serving, settings.speculation
    facts = weights(model)
    needed = estimate(
        facts,
        MemorySettings(
            ctx_size=serving.ctx_size or 0,
            cache_type_k=serving.cache_type_k or "f16",
            cache_type_v=serving.cache_type_v or "f16",
            speculation="mtp" if speculation.type in KINDS_WITH_PROBABILITY else "off",
            n_max=speculation.n_max or 0,
            load_mode=serving.load_mode or "auto",
        ),
    )
    server = a_server(
        settings=settings,
        engine=engine(dialect, Proof("mtp", Effect.PROVED, "it drafts")),
        devices=None,
        model=facts,
        estimate=needed,
        n_slots=None,
        foreign_flags=unlisted_flags(writeup.printed.split(), capabilities_of(dialect)),
        log=LogFacts(
            has_cuda=True, cuda_architectures=(86, 89, 120), has_all_kv_pairs=False, traffic=traffic
        ),
    )
    return replace(
        a_box(),
        host=replace(HOST, gpus=(gpu,)),
        driver=DRIVER,
        server=server,
        evidence=replace(UNMEASURED, break_even=cost),
    )


def said(facts: Facts) -> dict[str, str]:
    """Findings by code, as a person reads them."""
    return {one.code: f"{one.seen} -> {one.do}" for one in told(facts).findings}


def told(facts: Facts) -> Diagnosis:
    return diagnose(facts, ALL_RULES)


def unchecked(facts: Facts) -> set[str]:
    return {one.code for one in told(facts).not_checked}


def sample(prompt: tuple[int, float], n: int, tok_s: float, per_step: float, rate: float) -> Sample:
    """One answer of `n` tokens, by what was printed: prompt [tok, ms], speed, drafts, acceptance."""
    accepted = per_step * rate
    steps = round(n / (1 + accepted))
    timings = Timings(
        prompt_n=prompt[0],
        prompt_ms=prompt[1],
        predicted_n=n + 1,
        predicted_ms=n / tok_s * 1000,
        draft_n=round(steps * per_step) if per_step else None,
        draft_n_accepted=n - steps if per_step else None,
    )
    return Sample("mtp", "", "", "", "", 1, 0.0, n, 1, timings, None)


# 12 GB: KDE on the card (about 1 GB), 131k context on a card that was pinned above 95 %.
KWIN = GpuProcess(700, MiB(1000), "graphics", "kwin_wayland", None)
LLAMA = GpuProcess(PID, MiB(10_700), "compute", "llama-server", UNIT)
CARD_12 = replace(rtx_4070_super(used_mib=11_700), processes=(LLAMA, KWIN), free_mib=MiB(202))
# Sums of its table for mainline: nine answers of 192 tokens, 1118 drafted, 1050 accepted.
BENCH_12 = Traffic(n_requests=9, n_prompt=900, n_predicted=1728, n_drafted=1118, n_accepted=1050)


def test_12_gb_the_desktop_on_the_card_and_the_way_out() -> None:
    facts = box("12 GB, mainline", CARD_12, "35B", traffic=BENCH_12)

    found = said(facts)
    assert set(found) == {"display-vram", "vram-full", "port-clash"}
    assert "kwin_wayland holds 1000 MiB" in found["display-vram"]
    assert "plug the monitor into the mainboard" in found["display-vram"]
    assert "98%" in found["vram-full"]
    assert "names no port" in found["port-clash"]


def test_12_gb_with_the_margin_that_its_command_line_asks_for_is_not_too_full() -> None:
    # 95.7 % of what programs can have, since fit was told to leave 512 MiB.
    card = replace(CARD_12, processes=(LLAMA,), used_mib=MiB(11_390), reserved_mib=MiB(380))

    assert "vram-full" not in said(box("12 GB, mainline", card, "35B", traffic=BENCH_12))
    fuller = replace(card, used_mib=MiB(11_390 + 128))
    assert "97%" in said(box("12 GB, mainline", fuller, "35B", traffic=BENCH_12))["vram-full"]


@pytest.mark.parametrize(
    ("name", "dialect", "flags"),
    [
        ("12 GB, mainline", "main-0x", "does not take --no-mmap, --mlock"),
        ("16 GB", "main-0x", "does not take --no-mmap, --mlock"),
        ("12 GB, ik", "ik-now", "--multi-token-prediction, --draft-p-min, --draft-max"),
    ],
)
def test_todays_builds_would_not_start_with_their_flags(
    name: str, dialect: str, flags: str
) -> None:
    writeup = WRITE_UPS[name]
    arguments = writeup.printed.split()
    own = capabilities_of(writeup.dialect)
    assert unlisted_flags(arguments, own) == ()

    foreign = unlisted_flags(arguments, capabilities_of(dialect))
    facts = replace(a_box(), server=a_server(engine=engine(dialect), foreign_flags=foreign))
    assert flags in said(facts)["flags-removed"]
    assert told(facts).exit_code == 7


# 16 GB: 57 tok/s without MTP, 64 with two drafts a step of which 76 % are right. WSL.
COST_16 = break_even(
    [sample((1000, 900.0), 500, 64.19, 2.0, 0.76) for _ in range(3)],
    [sample((1000, 900.0), 500, 57.0, 0.0, 0.0) for _ in range(3)],
)


def traffic_16(rate: float) -> Traffic:
    steps = 5000
    accepted = round(2 * steps * rate)
    return Traffic(20, 20_000, steps + accepted + 20, 2 * steps, accepted)


@pytest.mark.parametrize(
    ("rate", "pays"), [(0.93, True), (0.76, True), (0.67, True), (0.55, False)]
)
def test_16_gb_mtp_pays_on_fresh_tasks_and_not_in_the_deepest_sessions(
    rate: float, pays: bool
) -> None:
    facts = box(
        "16 GB", rtx_5060_ti(used_mib=14_000), "35B", traffic=traffic_16(rate), cost=COST_16
    )

    found = said(facts)
    assert ("mtp-does-not-pay" in found) is not pays
    if not pays:
        assert "speculation pays from 62% on" in found["mtp-does-not-pay"]


def test_16_gb_the_spill_into_shared_memory_has_a_name() -> None:
    """Its speed at 43k fell from 64 to 46 tok/s when the cache went over PCIe, under WSL."""
    full = rtx_5060_ti(used_mib=15_700)
    facts = replace(box("16 GB", full, "35B"), driver=replace(DRIVER, is_wsl=True))

    found = said(facts)
    assert "Windows' driver moves VRAM to RAM" in found["vram-spill"]
    assert "Sysmem Fallback" in found["vram-spill"]
    roomy = replace(facts, host=replace(facts.host, gpus=(rtx_5060_ti(used_mib=14_000),)))
    assert "vram-spill" not in said(roomy)


# 24 GB: prompts of 43k tokens; 37.5 s and 29 tok/s without MTP, 49 s and 39 to 49 tok/s with.
PROMPT_24 = 43_241
COST_24 = break_even(
    [sample((PROMPT_24, 49_000.0), n, tok_s, 0.8, 0.9) for n, tok_s in
     ((500, 44.5), (1000, 44.4), (2000, 48.9))],
    [sample((PROMPT_24, 37_500.0), n, 29.0, 0.0, 0.0) for n in (500, 1000, 2000)],
    256,
)  # fmt: skip


def traffic_24(n: int) -> Traffic:
    steps = round(n / 1.72)
    return Traffic(20, 20 * PROMPT_24, 20 * (n + 1), round(20 * 0.8 * steps), 20 * (n - steps))


@pytest.mark.parametrize(("n", "pays"), [(100, False), (500, False), (2000, True)])
def test_24_gb_mtp_pays_for_long_answers_and_not_for_tool_calls(n: int, pays: bool) -> None:
    facts = box(
        "24 GB, MTP", rtx_3090_ti(used_mib=20_902), "27B", traffic=traffic_24(n), cost=COST_24
    )

    assert ("mtp-does-not-pay" in said(facts)) is not pays


def test_24_gb_the_rest_of_its_box_is_in_order() -> None:
    """Reserve is there, the cache is quantised in equal types, and p-min filters."""
    facts = box(
        "24 GB, MTP", rtx_3090_ti(used_mib=20_902), "27B", traffic=traffic_24(2000), cost=COST_24
    )

    assert set(said(facts)) == {"port-clash"}
    assert "mtp-slots" in unchecked(facts)  # it names no number, and its log was not printed
