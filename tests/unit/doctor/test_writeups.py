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
# Of what programs can have, since fit was told to leave 512 MiB.
AS_ASKED = replace(CARD_12, processes=(LLAMA,), used_mib=MiB(11_390), reserved_mib=MiB(380))
FULLER = replace(AS_ASKED, used_mib=MiB(11_390 + 128))
# Sums of its table for mainline: nine answers of 192 tokens, 1118 drafted, 1050 accepted.
BENCH_12 = Traffic(n_requests=9, n_prompt=900, n_predicted=1728, n_drafted=1118, n_accepted=1050)
# 16 GB: 57 tok/s without MTP, 64 with two drafts a step of which 76 % are right. WSL.
COST_16 = break_even(
    [sample((1000, 900.0), 500, 64.19, 2.0, 0.76) for _ in range(3)],
    [sample((1000, 900.0), 500, 57.0, 0.0, 0.0) for _ in range(3)],
)
# 24 GB: prompts of 43k tokens; 37.5 s and 29 tok/s without MTP, 49 s and 39 to 49 tok/s with.
PROMPT_24 = 43_241
COST_24 = break_even(
    [sample((PROMPT_24, 49_000.0), n, tok_s, 0.8, 0.9) for n, tok_s in
     ((500, 44.5), (1000, 44.4), (2000, 48.9))],
    [sample((PROMPT_24, 37_500.0), n, 29.0, 0.0, 0.0) for n in (500, 1000, 2000)],
    256,
)  # fmt: skip
NEVER_PAYS = {"mtp-does-not-pay": ""}


def of_12(card: Gpu) -> Facts:
    return box("12 GB, mainline", card, "35B", traffic=BENCH_12)


def of_16(rate: float, used_mib: int = 14_000) -> Facts:
    steps = 5000
    accepted = round(2 * steps * rate)
    traffic = Traffic(20, 20_000, steps + accepted + 20, 2 * steps, accepted)
    return box("16 GB", rtx_5060_ti(used_mib=used_mib), "35B", traffic=traffic, cost=COST_16)


def of_24(n: int) -> Facts:
    steps = round(n / 1.72)
    traffic = Traffic(20, 20 * PROMPT_24, 20 * (n + 1), round(20 * 0.8 * steps), 20 * (n - steps))
    card = rtx_3090_ti(used_mib=20_902)
    return box("24 GB, MTP", card, "27B", traffic=traffic, cost=COST_24)


def under_wsl(facts: Facts) -> Facts:
    return replace(facts, driver=replace(DRIVER, is_wsl=True))


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (of_12(CARD_12), {"display-vram": "kwin_wayland holds 1000 MiB", "vram-full": "98%",
                          "port-clash": "names no port"}),
        # 95.7 % in use, with the margin that its command line asks for.
        (of_12(AS_ASKED), {"port-clash": ""}),
        (of_12(FULLER), {"port-clash": "", "vram-full": "97%"}),
        # MTP pays on fresh tasks, and not in the deepest sessions.
        (of_16(0.93), {}),
        (of_16(0.67), {}),
        (of_16(0.55), {"mtp-does-not-pay": "speculation pays from 62% on"}),
        # Its speed at 43k fell from 64 to 46 tok/s when the cache went over PCIe.
        (under_wsl(of_16(0.76)), {}),
        (under_wsl(of_16(0.76, used_mib=15_700)), {"vram-full": "", "vram-spill":
                                                   "Windows' driver moves VRAM to RAM"}),
        # It pays for long answers and not for tool calls; the rest of the box is in order.
        (of_24(100), {"port-clash": "", **NEVER_PAYS}),
        (of_24(500), {"port-clash": "", **NEVER_PAYS}),
        (of_24(2000), {"port-clash": ""}),
    ],
    ids=["12 GB", "12 GB, margin kept", "12 GB, less", "16 GB, 93 %", "16 GB, 67 %", "16 GB, 55 %",
         "16 GB, WSL", "16 GB, WSL, full", "24 GB, 100", "24 GB, 500", "24 GB, 2000"],
)  # fmt: skip
def test_what_the_authors_would_have_been_told(facts: Facts, found: dict[str, str]) -> None:
    told = {one.code: one.seen for one in diagnose(facts, ALL_RULES).findings}

    assert set(told) == set(found)
    assert all(words in told[code] for code, words in found.items()), told


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
    arguments = WRITE_UPS[name].printed.split()
    assert unlisted_flags(arguments, capabilities_of(WRITE_UPS[name].dialect)) == ()

    foreign = unlisted_flags(arguments, capabilities_of(dialect))
    facts = replace(a_box(), server=a_server(engine=engine(dialect), foreign_flags=foreign))
    found = diagnose(facts, ALL_RULES)
    assert [flags in one.seen for one in found.findings if one.code == "flags-removed"] == [True]
    assert found.exit_code == 7
