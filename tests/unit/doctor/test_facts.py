"""From which acceptance on speculation pays, recovered from samples whose costs are known."""

from __future__ import annotations

import math
import random
import shlex
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.support import bench_samples
from tests.support.builders import capabilities_of
from tests.support.doctor_facts import a_box, a_server, engine, model, with_server
from tests.support.folders import DATA
from tests.unit.engine.test_writeups import WRITE_UPS
from tunerd.doctor.facts import (
    NOT_ALIKE,
    NOTHING_MEASURED,
    BreakEven,
    Traffic,
    break_even,
    diagnose,
    read_server_log,
    with_stages,
)
from tunerd.doctor.rules import ALL_RULES
from tunerd.engine.importer import import_command_line, unlisted_flags
from tunerd.measure.answer import Mark, Sample, Timings

UBATCH = 512


def sample(timings: Timings, *marks: Mark, concurrency: int = 1) -> Sample:
    return bench_samples.sample(timings=timings, marks=marks, client=None, concurrency=concurrency,
                                n_predict=timings.predicted_n or 0)  # fmt: skip


def answer(
    n_prompt: int, n_predicted: int, predicted_ms: float, *, tax: float = 1.0, **drafts: Any
) -> Sample:
    """A prompt takes 0.8 ms a token and 100 ms a batch, times what speculation adds."""
    prompt_ms = tax * (0.8 * n_prompt + 100 * n_prompt / UBATCH)
    return sample(Timings(prompt_n=n_prompt, prompt_ms=prompt_ms, predicted_n=n_predicted,
                          predicted_ms=predicted_ms, **drafts))  # fmt: skip


def drafting(n: int = 12, *, tax: float = 1.3) -> list[Sample]:
    """Answers of 400 steps; drafts per step differ between texts."""
    rng = random.Random(3)
    found = []
    for _ in range(n):
        drafted = round(rng.uniform(0.6, 2.6) * 400)
        accepted = round(drafted * rng.uniform(0.3, 0.9))
        n_prompt, took_ms = rng.choice((1024, 2048, 4096)), 400 * 20.0 + 4.0 * drafted
        found.append(answer(n_prompt, 401 + accepted, took_ms, tax=tax, draft_n=drafted, draft_n_accepted=accepted))  # fmt: skip
    return found


def plain(n: int = 12, *, token_ms: float = 18.0) -> list[Sample]:
    return [answer(1024 * (1 + at % 4), 401, 400 * token_ms) for at in range(n)]


def found_of(on: Iterable[Sample], off: Iterable[Sample]) -> BreakEven:
    found = break_even(list(on), list(off), UBATCH)
    assert isinstance(found, BreakEven)
    return found


def traffic(n_prompt: int) -> Traffic:
    return Traffic(20, n_prompt, 10_000, round(1.5 * (10_000 - 3020)), n_accepted=3000)


def test_the_costs_of_step_and_prompt_are_recovered() -> None:
    slow = [one.timings for one in plain(token_ms=90.0) if one.timings is not None]
    marked = [sample(one, Mark.THROTTLED) for one in slow]
    parallel = [sample(one, concurrency=4) for one in slow]
    found = found_of(drafting(), [*plain(), *marked, *parallel])  # of which neither counts

    assert found.token_ms == pytest.approx(18.0)
    seen = traffic(20)
    accepted = (found.acceptance_ratio(seen) or 0.0) * (seen.drafted_per_step or 0.0)
    assert accepted == pytest.approx(26 / 18 - 1, abs=0.06)
    for per_step in (0.7, 1.5, 2.5):
        predicted = found.step_ms[0] + found.step_ms[1] * per_step
        assert predicted == pytest.approx(20 + 4 * per_step, rel=0.03)
    for n_prompt in (1024, 4096):
        tax = found.tax_ms(n_prompt)
        assert tax == pytest.approx(0.3 * (0.8 * n_prompt + 100 * n_prompt / UBATCH), rel=0.1)


def test_a_prompt_tax_above_the_whole_gain_can_never_be_paid() -> None:
    found = found_of(drafting(tax=30.0), plain())

    assert found.acceptance_ratio(traffic(200_000)) == math.inf


def test_the_crossover_of_the_24_gb_write_up() -> None:
    """43k prompts in 37.5 s without and 49 s with MTP, 29 and 46 tok/s: it pays from 900 tokens on."""

    def measured(prompt_ms: float, tok_s: float, *, drafts: bool) -> list[Sample]:
        return [
            sample(Timings(prompt_n=43_241, prompt_ms=prompt_ms, predicted_n=1 + n, predicted_ms=n / tok_s * 1000,
                           draft_n=n // 2 if drafts else None, draft_n_accepted=n * 2 // 5 if drafts else None))
            for n in (500, 1000, 2000)
        ]  # fmt: skip

    on, off = measured(49_000, 46, drafts=True), measured(37_500, 29, drafts=False)
    found = break_even(on, off, 256)
    assert isinstance(found, BreakEven)

    def pays(n: int) -> bool:
        seen = Traffic(10, 432_410, 10 * (n + 1), round(5 * n), round(4 * n))
        wanted = found.acceptance_ratio(seen)
        assert wanted is not None
        return seen.n_accepted / seen.n_drafted >= wanted

    assert [pays(n) for n in (100, 500, 850, 960, 2000)] == [False, False, False, True, True]


def at_depth(
    samples: Iterable[Sample], *, slower: float, cache_n: int | None = 60_000
) -> list[Sample]:
    """The same answers after 60,000 cached tokens, which slow each token; ik tells of them otherwise."""
    return [
        replace(one, details={"cached": 60_000},
                timings=replace(one.timings, cache_n=cache_n,
                                predicted_ms=slower * (one.timings.predicted_ms or 0.0)))
        for one in samples
        if one.timings is not None
    ]  # fmt: skip


def test_what_is_not_alike_or_too_little_gives_nothing() -> None:
    cases: list[tuple[list[Sample], list[Sample], str]] = [
        (drafting(2), plain(), NOTHING_MEASURED),
        (drafting(), plain(2), NOTHING_MEASURED),
        (drafting(), [], NOTHING_MEASURED),
        (drafting(), drafting(), NOTHING_MEASURED),  # what drafted is none of the server without
        (drafting(), at_depth(plain(), slower=3.0), NOT_ALIKE),
        (drafting(), at_depth(plain(), slower=3.0, cache_n=None), NOT_ALIKE),
    ]
    for on, off, why in cases:
        assert break_even(on, off, UBATCH) == why


def test_deep_answers_of_one_side_do_not_move_the_break_even() -> None:
    found = found_of(drafting(), [*plain(), *at_depth(plain(), slower=3.0)])

    assert found.token_ms == pytest.approx(18.0)
    assert found.depth_tokens < 6000


def test_where_only_the_deep_is_measured_on_both_sides_it_is_compared_there() -> None:
    on = [*drafting(), *at_depth(drafting(), slower=3.0)]
    found = found_of(on, at_depth(plain(), slower=2.0))

    assert found.token_ms == pytest.approx(36.0)
    assert found.step_ms[0] + 1.5 * found.step_ms[1] == pytest.approx(3 * 26, rel=0.03)
    assert found.depth_tokens > 60_000


def test_a_prompt_counts_only_where_the_other_side_has_one_of_like_length() -> None:
    slow = Timings(prompt_n=60_000, prompt_ms=600_000.0, predicted_n=401, predicted_ms=7200.0)

    tax = found_of(drafting(), [*plain(), *[sample(slow)] * 12]).tax_ms(4096)
    assert tax == pytest.approx(0.3 * (0.8 * 4096 + 100 * 4096 / UBATCH), rel=0.1)


# What `doctor` reads from a server's own log.

# The words of CUDA builds; none runs here.
CUDA_INFO = (
    "system_info: n_threads = 6 (n_threads_batch = 6) / 12 | CUDA : ARCHS = 860,890 | "
    "USE_GRAPHS = 1 | PEER_MAX_BATCH_SIZE = 128 | FA_ALL_QUANTS = 1 | CPU : SSE3 = 1 | AVX = 1 |"
)
_KV_TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "f16")
PAIRS = [f"{k}-{v}" for k in _KV_TYPES for v in _KV_TYPES]
MAINLINE_REQUESTS = """\
slot launch_slot_: id  0 | task 0 | processing task, is_child = 0
slot print_timing: id  0 | task 0 | prompt eval time =      31.30 ms /   240 tokens (    0.13 ms per token,  7666.51 tokens per second)
slot print_timing: id  0 | task 0 |        eval time =      21.93 ms /    40 tokens (    0.55 ms per token,  1823.99 tokens per second)
slot print_timing: id  0 | task 0 | draft acceptance = 0.27869 (   17 accepted /    61 generated), mean len =  1.81
slot      release: id  0 | task 0 | stop processing: n_tokens = 279, truncated = 0
slot launch_slot_: id  0 | task 9 | processing task, is_child = 0
slot print_timing: id  0 | task 9 | prompt eval time =      10.00 ms /    60 tokens (    0.16 ms per token,  6000.00 tokens per second)
slot print_timing: id  0 | task 9 |        eval time =      20.00 ms /    11 tokens (    1.81 ms per token,   550.00 tokens per second)
slot      release: id  0 | task 9 | stop processing: n_tokens = 70, truncated = 0
""".splitlines()


def log_of(name: str) -> list[str]:
    return (DATA / name).read_text(encoding="utf-8", errors="replace").splitlines()


MISPLACED = (
    "0.01.2 W layer 0 is assigned to device CPU but the fused Gated Delta Net tensor is assigned "
    "to device CUDA0 (usually due to missing support)"
)
# From ggml-org/llama.cpp#27162 (build 10437), as builds since August 2026 say it; seen on no card here.
MISPLACED_NOW = (
    "0.03.129.446 W resolve_fused_ops: layer 0 is assigned to device CPU but fused Gated Delta Net "
    "(chunked) is assigned to device CUDA0 (usually due to missing support)"
)
CASES: list[tuple[list[str], dict[str, Any]]] = [
    ([CUDA_INFO], {"has_cuda": True, "cuda_architectures": (86, 89), "kv_pairs": {"all"}}),
    ([CUDA_INFO.replace("FA_ALL_QUANTS = 1 | ", "").replace("860,890", "1200")],
     {"cuda_architectures": (120,), "kv_pairs": set()}),
    # As builds say it since ggml-org/llama.cpp#28079 (September 2026); seen on no card here.
    ([CUDA_INFO.replace("FA_ALL_QUANTS = 1", "FA_QUANTS = q4_0-q4_0,q8_0-q8_0,f16-f16")],
     {"kv_pairs": {"q4_0-q4_0", "q8_0-q8_0", "f16-f16"}, "cuda_architectures": (86, 89)}),
    ([CUDA_INFO.replace("FA_ALL_QUANTS = 1", f"FA_QUANTS = {','.join(PAIRS)}")],
     {"has_cuda": True, "kv_pairs": set(PAIRS)}),
    (log_of("logs/mainline-2026-04-26/out-of-memory.txt"),
     {"has_cuda": False, "cuda_architectures": None, "kv_pairs": None}),
    # It does not reach back to the start.
    (MAINLINE_REQUESTS, {"has_cuda": None, "kv_pairs": None, "n_slots": None,
                         "traffic": Traffic(2, 300, 51, 61, 17)}),
    (log_of("memory/mainline-2026-08-18-cpu-mtp.txt"), {"traffic": None}),
    (log_of("logs/ik-2026-08/mlock-refused-and-no-mtp-block.txt"), {"mlock_refused": True}),
    (log_of("logs/synthetic/mlock-refused-then-illegal-access.txt"), {"mlock_refused": True}),
    (log_of("logs/mainline-2026-08-18/mlock-refused-and-no-mtp-block.txt"), {"mlock_refused": True}),
    (log_of("logs/synthetic/cuda-no-kernel-image.txt"),
     {"lacks_kernels": True, "mlock_refused": False}),
    # From ggml-org/llama.cpp#17542, where it goes on to serve from RAM; seen on no card here.
    (["ggml_cuda_init: failed to initialize CUDA: system has unsupported display driver / cuda driver combination"],
     {"lacks_cuda": True, "lacks_kernels": False}),
    *(([line], {"has_misplaced_layers": True}) for line in (MISPLACED, MISPLACED_NOW)),
    ([MISPLACED_NOW.replace("fused Gated Delta Net (chunked)", "Flash Attention")],
     {"has_misplaced_layers": False}),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), CASES)
def test_what_the_log_of_a_life_says(lines: list[str], expected: dict[str, Any]) -> None:
    log = read_server_log(lines)
    assert {name: getattr(log, name) for name in expected} == expected


def test_no_lines_are_no_log() -> None:
    """But those that its manager says."""
    of_manager = [
        "Started llama-server.service - x.",
        "llama-server.service: Scheduled restart job",
    ]
    assert read_server_log([]) is read_server_log(of_manager) is None


def test_steps_are_what_was_generated_less_the_first_and_the_accepted() -> None:
    seen = Traffic(n_requests=2, n_prompt=300, n_predicted=51, n_drafted=61, n_accepted=17)
    assert seen.n_steps == 32
    assert seen.drafted_per_step == pytest.approx(61 / 32)


# The command lines of the write-ups, as `doctor` reads them and as builds of today take them.


def test_stages_of_ik_are_speculation_though_no_profile_can_say_two_of_them() -> None:
    for dialect, printed, kinds, p_min in (
        ("ik-now", "--spec-type ngram-mod:n_max=64,n_min=2 --spec-type mtp:n_max=2,p_min=0.0", {"ngram-mod", "mtp"}, 0.0),
        ("ik-may", "--spec-stage ngram-mod:n_max=64 --spec-stage mtp:n_max=2,p_min=0.6", {"ngram-mod", "mtp"}, 0.6),
        ("ik-may", "--spec-stage mtp:n_max=2 --draft-p-min 0.3", {"mtp"}, 0.3),
        ("ik-now", "--spec-type mtp:n_max=2,p_min=0.6", {"mtp"}, 0.6),
        ("ik-may", "--spec-stage none", set(), None),
        ("ik-now", "", set(), None),
    ):  # fmt: skip
        words = printed.split()
        imported = import_command_line(words, {}, capabilities_of(dialect))
        settings = with_stages(imported.resolved.profile, words)
        assert settings.speculation.kinds == kinds, printed
        assert settings.speculation.p_min == p_min


def test_mtp_from_a_file_of_its_own_is_none_of_the_models_block() -> None:
    """Doctor said that such a server cannot draft, as its model has no MTP block."""
    line = "-m /m.gguf -md /mtp.gguf --spec-type draft-mtp --spec-draft-n-max 3"
    words = shlex.split(line)
    imported = import_command_line(words, {}, capabilities_of("main-lm"))
    settings = with_stages(imported.resolved.profile, words)

    without = replace(model(), n_nextn=0)
    found = diagnose(with_server(settings=settings, model=without, draft=model()), ALL_RULES)
    bare = diagnose(with_server(settings=settings, model=model(), draft=without), ALL_RULES)

    assert (set(settings.speculation.kinds), settings.speculation.n_max) == ({"mtp"}, 3)
    assert settings.speculation.draft_model == "/mtp.gguf"
    assert "model-without-mtp" not in {one.code for one in found.findings}
    assert "model-without-mtp" in {one.code for one in bare.findings}


def test_a_switch_that_wants_a_word_now_and_an_empty_word_are_none_that_a_build_takes() -> None:
    """The builds of April to August 2026 refuse both, and nothing was said of them."""
    arguments = ["-m", "/m.gguf", "-fa", "-ngl", "99", ""]
    for dialect in ("main-old", "main-lm", "ik-now"):
        bare, empty = unlisted_flags(arguments, capabilities_of(dialect))
        assert bare == "-fa without `on` or `off`"
        assert "`${NAME}` of an empty variable" in empty
    assert unlisted_flags(["-fa", "on", "--fit"], capabilities_of("ik-now")) == ()


def test_todays_builds_would_not_start_with_their_flags() -> None:
    for name, dialect, flags in (
        ("12 GB, mainline", "main-0x", "does not accept --no-mmap, --mlock"),
        ("16 GB", "main-0x", "does not accept --no-mmap, --mlock"),
        ("12 GB, ik", "ik-now", "--multi-token-prediction, --draft-p-min, --draft-max"),
    ):
        arguments = WRITE_UPS[name].printed.split()
        assert unlisted_flags(arguments, capabilities_of(WRITE_UPS[name].dialect)) == ()

        foreign = unlisted_flags(arguments, capabilities_of(dialect))
        facts = replace(a_box(), server=a_server(engine=engine(dialect), foreign_flags=foreign))
        found = diagnose(facts, ALL_RULES)
        told = [one.seen for one in found.findings if one.code == "flags-removed"]
        assert [flags in seen for seen in told] == [True]
        assert found.exit_code == 7
