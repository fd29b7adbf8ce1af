"""Every rule of `doctor`: where it finds something, where it is silent, where it cannot tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.doctor_facts import (
    BREAK_EVEN,
    DRIVER,
    EVIDENCE,
    HOST,
    TRAFFIC,
    a_box,
    card,
    engine,
    estimated,
    model,
    with_card,
    with_log,
    with_server,
    with_settings,
    without_cards,
)
from tests.support.fake_gpu import a_card
from tests.support.transcripts import transcript
from tunerd.doctor.facts import NOTHING_MEASURED, Facts, Finding, Locking, Rule, diagnose
from tunerd.doctor.rules import ALL_RULES
from tunerd.engine.capabilities import Effect, Proof
from tunerd.engine.health import Failure, FailureKind
from tunerd.machine.facts import POWER_CAP, CpuFrequency, GpuProcess
from tunerd.model.memory import Device
from tunerd.model.verdict import MemoryReport
from tunerd.result import error, note, warning
from tunerd.words import MiB

BY_CODE = {rule.code: rule for rule in ALL_RULES}
UNMEASURED = replace(EVIDENCE, break_even=NOTHING_MEASURED)
SMALL_CARD = with_card(total_mib=MiB(12282), used_mib=MiB(9000), processes=())
PLAIN: dict[str, Any] = {"serving__cache_type_k": "f16", "serving__cache_type_v": "f16"}
NEWER_PAIRS = frozenset({"q4_0-q4_0", "q8_0-q8_0", "f16-f16", "bf16-bf16"})
LOW = replace(TRAFFIC, n_accepted=1500)
IQ4_HEAD = replace(model(), mtp_types=(("iq4_xs", 400_000_000), ("f32", 2_000_000)))
TAKEN = error("port-taken", "nginx (process 7) already listens on port 8080", "end it")
XORG = GpuProcess(900, MiB(950), "graphics", "Xorg", "display-manager.service")
OLLAMA = GpuProcess(901, MiB(5200), "compute", "ollama", "ollama.service")
# What others find, and how bad they say that it is.
OWN = {"no-supervisor": error, "no-daemon": warning, "no-linger": warning, "read-only": warning,
       "settings-wrong": warning, "kept-engines": note, "swap-cut-short": warning}  # fmt: skip
CPU_MOE: dict[str, Any] = {"memory__n_cpu_moe": 20, "memory__fit_mib": None}


def with_host(box: Facts, **changes: object) -> Facts:
    return replace(box, host=replace(box.host, **changes))  # type: ignore[arg-type]


def unreadable_cards() -> Facts:
    return with_host(a_box(), gpus=None, gpu_problem="no driver")


def filled(used_mib: int) -> Facts:
    """A card of 12 GB that was to be left a margin of 512 MiB, with so much of it in use."""
    box = with_card(
        total_mib=MiB(12282), used_mib=MiB(used_mib), reserved_mib=MiB(380), processes=()
    )
    return with_settings(box, memory__fit_mib=512)


def with_context(n_ctx: int) -> Facts:
    """The engine made so much context."""
    report = MemoryReport(buffers=(), n_ctx=n_ctx, n_layers_on_gpu=None, n_layers_to_place=None)
    return with_log(report=report)


def old_build(*argv: str) -> Facts:
    """A build without MTP, and a profile that asks for none."""
    server = with_server(engine=engine("main-old"), argv=("llama-server", *argv))
    return with_settings(server, speculation__type="off")


def with_drafter(dialect: str, *argv: str) -> Facts:
    """A command line with a draft model, which is none of the settings where no kind is named."""
    words = ("llama-server", "-md", "/models/draft.gguf", *argv)
    return with_settings(with_server(engine=engine(dialect), argv=words), speculation__type="off")


def on_a_desktop(*, has_other: bool | None, **changes: object) -> Facts:
    driver = replace(DRIVER, has_other_graphics=has_other)
    return replace(with_card(processes=(replace(XORG, **changes),)), driver=driver)  # type: ignore[arg-type]


FIRES = [
    ("gpu-unreadable", "a card that cannot be read", unreadable_cards()),
    ("gpu-mig", "a card split by MIG", with_card(is_mig=True)),
    ("gpu-throttled", "a card held down by more than its power limit",
     with_card(throttle_reasons=(POWER_CAP, "power brake"), temperature_c=93)),
    ("uvm-missing", "a driver without /dev/nvidia-uvm", replace(a_box(), driver=replace(DRIVER, has_uvm_device=False))),
    ("driver-mismatch", "a module that is not the library's",
     with_host(unreadable_cards(), awaits_reboot="the loaded kernel module is 1, the driver's library 2")),
    ("pcie-link", "a card with too few lanes", with_card(pcie_width=4)),
    ("pcie-link", "a card at an old generation while it works", with_card(pcie_generation=1, performance_state=2)),
    ("power-limit", "a power limit below the default", with_card(power_limit_w=150.0)),
    ("resizable-bar", "a window that is smaller than the card", with_card(bar1_mib=MiB(256))),
    ("cpu-governor", "a governor that saves power",
     replace(a_box(), frequency=CpuFrequency("acpi-cpufreq", ("powersave",), ()))),
    ("cpu-governor", "an energy preference that saves power",
     replace(a_box(), frequency=CpuFrequency("intel_pstate", ("powersave",), ("balance_power",)))),
    ("threads", "more threads than cores", with_settings(serving__threads=16)),
    ("threads", "more threads than cores for prompts alone", with_settings(serving__threads_batch=16)),
    ("flags-removed", "flags that have successors", with_server(foreign_flags=("--mlock", "--no-mmap"))),
    ("flags-removed", "a flag that the build lost", with_server(foreign_flags=("--draft-max",))),
    ("engine-architecture", "a build for an older card, which the newer one still takes",
     with_card(with_log(cuda_architectures=(86,)), compute_capability=(12, 0))),
    ("engine-architecture", "a build for a newer card",
     with_card(with_log(cuda_architectures=(90,)), compute_capability=(8, 6))),
    ("engine-architecture", "a build that sees no device", with_server(devices=())),
    ("engine-architecture", "a log without a kernel image", with_log(lacks_kernels=True)),
    ("engine-architecture", "a log without CUDA", with_log(lacks_cuda=True)),
    ("port-clash", "a port that another program serves too",
     replace(a_box(), port=(TAKEN,))),
    ("port-clash", "a port that another program holds while nothing serves",
     replace(a_box(), server=None, port=(TAKEN,))),
    ("port-clash", "a line without a port", with_settings(serving__port=None)),
    ("evidence-stale", "measurements of another driver",
     replace(a_box(), evidence=replace(EVIDENCE, holds=False, changes=("driver changed: 570 -> 580",)))),
    ("vram-full", "a large card that is full", with_card(used_mib=MiB(48_000), reserved_mib=MiB(400))),
    ("vram-full", "a small card with 128 MiB more than was planned", filled(11_390 + 128)),
    ("vram-spill", "memory that may spill by the environment",
     with_server(environment={"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"})),
    ("vram-spill", "layers on two devices", with_log(has_misplaced_layers=True)),
    ("vram-spill", "a layer in RAM, and an MTP block that is not used",
     with_settings(with_log(has_misplaced_layers=True), speculation__type="off")),
    ("vram-spill", "the same, of layers that somebody counted out",
     with_settings(with_log(has_misplaced_layers=True), speculation__type="off", memory__n_gpu_layers=30)),
    ("vram-spill", "a full card of Windows",
     replace(with_card(used_mib=MiB(48_000)), driver=replace(DRIVER, is_wsl=True))),
    ("display-vram", "a desktop on the card, and graphics beside it", on_a_desktop(has_other=True)),
    ("display-vram", "a desktop on the only card", on_a_desktop(has_other=False)),
    ("display-vram", "a desktop on a card of which others are unknown", on_a_desktop(has_other=None)),
    ("display-vram", "a desktop of unknown size", with_card(processes=(replace(XORG, used_mib=None),))),
    ("vram-others", "another program of computing", with_card(processes=(OLLAMA,))),
    ("thinking-off", "thinking that the template has off",
     with_settings(serving__chat_template_kwargs={"enable_thinking": False})),
    ("thinking-off", "thinking that has no budget", with_settings(serving__reasoning_budget=0)),
    ("drafts-by-text", "drafts by text on a hybrid model", with_settings(speculation__type="copyspec")),
    ("kv-plain", "a plain cache on a small card", with_settings(SMALL_CARD, **PLAIN)),
    ("kv-plain", "a plain cache where nothing is estimated",
     with_server(with_settings(SMALL_CARD, **PLAIN), estimate=None)),
    ("kv-pair", "a pair of caches without a kernel", with_settings(serving__cache_type_v="q4_0")),
    ("kv-pair", "a pair of caches that a newer build turns into f16",
     with_log(with_settings(serving__cache_type_v="q4_0"), kv_pairs=NEWER_PAIRS)),
    ("kv-pair", "a cache that no build has a kernel for",
     with_log(with_settings(serving__cache_type_k="iq4_nl", serving__cache_type_v="iq4_nl"),
              kv_pairs=frozenset({"all"}))),
    ("context-not-fillable", "an engine that made less context", with_context(16384)),
    ("context-not-fillable", "more context than trained", with_server(estimate=estimated(524288))),
    ("context-not-fillable", "a context that RAM does not hold",
     with_host(a_box(), memory=replace(HOST.memory, total_mib=MiB(1700)))),
    ("prompts-read-anew", "prompts that the slot held",
     with_log(traffic=replace(TRAFFIC, n_lost=20_000))),
    ("memlock", "a log in which locking was refused", with_log(mlock_refused=True)),
    ("memlock", "a low limit and nothing locked", with_server(locking=Locking(MiB(8), MiB(0)))),
    ("memlock", "a low limit and not everything locked", with_server(locking=Locking(MiB(100), MiB(90)))),
    ("swap", "a server in swap", with_server(swapped_mib=MiB(900))),
    ("swap", "swap in use by others", with_host(a_box(), memory=replace(HOST.memory, swap_used_mib=MiB(500)))),
    ("mapped-experts", "experts in a mapped file", with_settings(serving__load_mode="mmap", **CPU_MOE)),
    ("mapped-experts", "experts on the CPU of a small card with the build's own load mode",
     with_settings(SMALL_CARD, serving__load_mode=None)),
    ("mapped-experts", "a log that says how `auto` was read",
     with_log(with_settings(serving__load_mode="auto"), maps_overridden_tensors=True)),
    ("mtp-does-not-pay", "few drafts accepted", with_log(traffic=LOW)),
    ("mtp-does-not-pay", "no drafts at all", with_log(traffic=replace(TRAFFIC, n_drafted=0, n_accepted=0))),
    ("mtp-does-not-pay", "prompts that cost more than drafts win",
     replace(a_box(), evidence=replace(EVIDENCE, break_even=replace(BREAK_EVEN, prompt_ms=(100.0, 9.0))))),
    ("mtp-head-quant", "few accepted of a coarse head", with_server(with_log(traffic=LOW), model=IQ4_HEAD)),
    ("mtp-head-quant", "few accepted of a coarse head in a file of its own",
     with_server(with_settings(with_log(traffic=LOW), speculation__draft_model="/mtp.gguf"), draft=IQ4_HEAD)),
    ("p-min-zero", "drafts however unsure with experts on the CPU", with_settings(speculation__p_min=0.0, **CPU_MOE)),
    ("p-min-zero", "drafts however unsure by the build's own default",
     with_settings(SMALL_CARD, speculation__p_min=None)),
    ("mtp-slots", "four slots", with_server(n_slots=4)),
    ("mtp-slots", "four slots and a chain of speculation",
     with_settings(with_server(n_slots=4), speculation__type="mtp,ngram-mod")),
    ("engine-without-mtp", "a build that lost MTP in a chain",
     old_build("--spec-type", "ngram-mod,draft-mtp")),
    ("mtp-slots", "slots that only the log tells", with_log(with_server(n_slots=None), n_slots=2)),
    ("mtp-slots", "slots that the build chooses",
     with_settings(with_server(with_log(n_slots=None), n_slots=None), serving__n_parallel=None)),
    ("model-without-mtp", "a model without its MTP block", with_server(model=replace(model(), n_nextn=0))),
    ("model-without-mtp", "a draft model without an MTP block",
     with_server(with_settings(speculation__draft_model="/small.gguf"), draft=replace(model(), n_nextn=0))),
    ("engine-without-mtp", "a build in which MTP has no effect",
     with_server(engine=engine("main-mid", Proof("mtp", Effect.NO_EFFECT, "it drafted nothing")))),
    ("engine-without-mtp", "a build without MTP where it was not asked for",
     old_build()),
    ("engine-without-mtp", "a build that lost `-mtp`",
     old_build("-mtp")),
    ("draft-idle", "a draft model alone, on a build of today", with_drafter("main-0x")),
    ("log-unseen", "a server that writes nothing", with_server(log=None, is_silent=True)),
    *((code, "as others found it", a_box(own={code: told("x", "it is so", "do that")}))
      for code, told in OWN.items()),
    ("server-down", "a model that is gone", with_server(no_start="gone: `/models/a.gguf`")),
    ("server-down", "a model that is gone, of a unit where tunerd deployed nothing",
     with_server(no_start="gone: `/models/a.gguf`", was_deployed=False)),
    ("server-down", "a server that died where tunerd deployed nothing",
     with_server(death=Failure(FailureKind.PORT_TAKEN, "couldn't bind", None), was_deployed=False)),
    ("server-down", "a model that is gone, and a flag that the build lost",
     with_server(foreign_flags=("--mlock",), no_start="gone: `/models/a.gguf`")),
    ("server-down", "a server that died", with_server(death=Failure(FailureKind.PORT_TAKEN, "couldn't bind", None))),
]  # fmt: skip

SILENT = [
    ("server-down", a_box()),
    ("server-down", with_server(foreign_flags=("--mlock",), no_start="`llama-server` no longer accepts --mlock")),
    ("gpu-unreadable", without_cards()),
    ("gpu-unreadable", with_host(a_box(), gpu_problem="1 and 2", awaits_reboot="1 and 2")),
    ("gpu-throttled", with_card(throttle_reasons=(POWER_CAP,))),
    ("uvm-missing", without_cards()),
    ("uvm-missing", replace(a_box(), driver=replace(DRIVER, has_uvm_device=False, is_wsl=True))),
    ("driver-mismatch", without_cards()),
    ("driver-mismatch", replace(unreadable_cards(), driver=replace(
        DRIVER, module_version=None, library_version=None, pci_addresses=()))),
    ("power-limit", with_card(power_limit_w=240.0)),
    ("resizable-bar", with_card(bar1_mib=MiB(65536))),
    ("cpu-governor", replace(a_box(), frequency=CpuFrequency("acpi-cpufreq", ("schedutil",), ()))),
    ("threads", with_settings(serving__threads=None)),
    ("engine-architecture", with_card(with_log(cuda_architectures=(86,)), compute_capability=(8, 9))),
    ("engine-architecture", with_log(has_cuda=False, cuda_architectures=None)),
    ("engine-architecture", without_cards()),
    ("cuda-graphs", without_cards()),
    ("port-clash", replace(a_box(), server=None)),
    ("vram-full", with_card(used_mib=MiB(46_000))),
    ("vram-full", filled(11_390)),
    ("vram-spill", without_cards()),
    ("vram-spill", replace(a_box(), driver=replace(DRIVER, is_wsl=True))),
    ("display-vram", with_card(processes=(replace(XORG, used_mib=MiB(60)),))),
    ("vram-others", with_card(processes=(replace(OLLAMA, used_mib=MiB(60)), XORG))),
    ("thinking-off", with_settings(serving__reasoning_budget=256)),
    ("drafts-by-text", with_settings(speculation__type="draft-mtp,ngram-mod")),
    ("drafts-by-text", with_server(with_settings(speculation__type="ngram-mod"),
                                   model=replace(model(), recurrent=None))),
    ("kv-plain", with_settings(**PLAIN)),
    ("kv-plain", without_cards(with_settings(**PLAIN))),
    ("kv-plain", with_settings(SMALL_CARD, memory__kv_offload=False, **PLAIN)),
    ("kv-pair", with_log(with_settings(serving__cache_type_v="q4_0"), kv_pairs=frozenset({"all"}))),
    ("kv-pair", with_log(with_settings(serving__cache_type_v="q4_0"),
                         kv_pairs=NEWER_PAIRS | {"q8_0-q4_0"})),
    ("kv-pair", with_settings(serving__cache_type_v="q4_0", serving__flash_attn="off")),
    ("kv-pair", with_server(with_settings(serving__cache_type_v="q4_0"), devices=())),
    ("p-min-zero", with_server(with_settings(SMALL_CARD, speculation__p_min=0.0), devices=())),
    ("kv-pair", with_settings(serving__cache_type_k="turbo3", serving__cache_type_v="turbo3")),
    ("context-not-fillable", with_context(32768)),
    ("prompts-read-anew", with_log(traffic=replace(TRAFFIC, n_lost=9_990))),
    ("prompts-read-anew", with_log(traffic=replace(TRAFFIC, n_prompt=500_000, n_lost=20_000))),
    ("memlock", with_settings(with_log(mlock_refused=True), serving__load_mode="none")),
    ("mapped-experts", without_cards(with_settings(serving__load_mode="mmap", **CPU_MOE))),
    ("mapped-experts", with_settings(serving__load_mode="mmap")),
    ("mtp-does-not-pay", with_log(with_settings(speculation__type="off"),
                                  traffic=replace(TRAFFIC, n_drafted=0, n_accepted=0))),
    ("mtp-head-quant", with_server(model=IQ4_HEAD)),
    ("mtp-head-quant", with_server(model=replace(model(), n_nextn=0))),
    ("p-min-zero", with_settings(speculation__p_min=0.0)),
    ("p-min-zero", with_settings(speculation__type="ngram-mod", speculation__p_min=0.0, **CPU_MOE)),
    ("mtp-slots", with_settings(with_server(n_slots=4), speculation__type="off")),
    ("model-without-mtp", with_settings(with_server(model=replace(model(), n_nextn=0), draft=model()),
                                        speculation__draft_model="/models/draft.gguf")),
    ("draft-idle", with_drafter("main-old")),
    ("draft-idle", with_drafter("main-0x", "--spec-type", "none")),
    ("draft-idle", with_settings(with_drafter("main-0x"), speculation__type="draft")),
]  # fmt: skip

UNKNOWN = [
    ("gpu-unreadable", "no card and no file of the driver", replace(unreadable_cards(), driver=None)),
    ("gpu-unreadable", "no card and no look at the PCI bus",
     replace(unreadable_cards(), driver=replace( DRIVER, module_version=None, pci_addresses=None))),
    ("gpu-mig", "MIG unknown", with_card(is_mig=None)),
    ("gpu-throttled", "reasons unknown", with_card(throttle_reasons=None)),
    ("uvm-missing", "no file of the driver", replace(a_box(), driver=None)),
    ("uvm-missing", "no look at the PCI bus",
     replace(unreadable_cards(), driver=replace( DRIVER, has_uvm_device=False, pci_addresses=None))),
    ("driver-mismatch", "no version of the library", replace(a_box(), driver=replace(DRIVER, library_version=None))),
    ("driver-mismatch", "no version of the module",
     replace(unreadable_cards(), driver=replace( DRIVER, module_version=None))),
    ("driver-mismatch", "neither a version nor the PCI bus",
     replace(unreadable_cards(), driver=replace( DRIVER, module_version=None, pci_addresses=None))),
    ("pcie-link", "width unknown", with_card(pcie_width=None)),
    ("pcie-link", "a link that rests", with_card(pcie_generation=1, performance_state=8)),
    ("pcie-link", "generation unknown", with_card(pcie_generation=None)),
    ("power-limit", "default unknown", with_card(power_default_w=None)),
    ("resizable-bar", "window unknown", with_card(bar1_mib=None)),
    ("cpu-governor", "governor unknown", replace(a_box(), frequency=None)),
    ("threads", "cores unknown", with_host(a_box(), cpu=replace(HOST.cpu, physical_cores=None))),
    ("flags-removed", "build unknown", with_server(engine=None)),
    ("engine-architecture", "architectures unknown", with_log(cuda_architectures=None, has_cuda=None)),
    ("cuda-graphs", "what no look tells", a_box()),
    ("port-clash", "port unknown", replace(a_box(), port=None)),
    ("evidence-stale", "no store", replace(a_box(), evidence=None)),
    ("evidence-stale", "no run of what serves", replace(a_box(), evidence=replace(EVIDENCE, newest_run=None))),
    ("evidence-stale", "conditions unknown", replace(a_box(), evidence=replace(EVIDENCE, holds=None))),
    ("vram-full", "use unknown", with_card(used_mib=None)),
    ("vram-spill", "no log of what may have spilled", with_server(log=None)),
    ("mtp-does-not-pay", "a log of another command line", with_server(log=None, was_edited=True)),
    ("display-vram", "processes unknown", with_card(processes=None)),
    ("vram-others", "processes of computing unknown", with_card(processes=None)),
    ("thinking-off", "settings unknown", with_server(settings=None)),
    ("drafts-by-text", "a model that is unknown while drafts come by text",
     with_server(with_settings(speculation__type="ngram-mod"), model=None)),
    ("kv-plain", "size unknown", with_settings(with_card(total_mib=None), **PLAIN)),
    ("kv-pair", "kernels of pairs unknown",
     with_log(with_settings(serving__cache_type_v="q4_0"), kv_pairs=None)),
    ("context-not-fillable", "model that cannot be read", with_server(model=None, model_problem="no such file")),
    ("context-not-fillable", "no estimate of context", with_server(estimate=None)),
    ("prompts-read-anew", "no requests", with_log(traffic=None)),
    ("memlock", "limit unknown", with_server(locking=None)),
    ("swap", "swap unknown", with_host(a_box(), memory=replace(HOST.memory, swap_used_mib=None))),
    ("mapped-experts", "no estimate of experts", with_server(with_settings(serving__load_mode="mmap"), estimate=None)),
    ("mtp-does-not-pay", "no run without speculation", replace(a_box(), evidence=UNMEASURED)),
    ("mtp-does-not-pay", "no requests", with_log(traffic=None)),
    ("mtp-does-not-pay", "few drafts", with_log(traffic=replace(TRAFFIC, n_drafted=120, n_accepted=20))),
    ("mtp-does-not-pay", "the looks of the guard against hangs at a server that rests",
     with_log(traffic=replace(TRAFFIC, n_requests=500, n_predicted=1000, n_drafted=0, n_accepted=0))),
    ("mtp-head-quant", "a coarse head without a run to compare with",
     replace(with_server(model=IQ4_HEAD), evidence=UNMEASURED)),
    ("mtp-head-quant", "a head of unknown types", with_server(model=replace(model(), mtp_types=(("type 999", 5),)))),
    ("p-min-zero", "no estimate of weights", with_server(with_settings(speculation__p_min=0.0), estimate=None)),
    ("mtp-slots", "slots and build unknown",
     with_settings(with_server(with_log(n_slots=None), n_slots=None, engine=None), serving__n_parallel=None)),
    ("model-without-mtp", "model unknown", with_server(model=None)),
    ("model-without-mtp", "a file of its own that cannot be read",
     with_settings(speculation__draft_model="/mtp.gguf")),
    ("draft-idle", "a build that cannot be asked", with_server(with_drafter("main-0x"), engine=None)),
    ("engine-without-mtp", "settings that are none",
     with_server(settings=None, settings_problem="it has 2 ExecStart= lines")),
    ("log-unseen", "no log", with_server(log=None)),
    *((code, "nobody looked", a_box(own=None)) for code in OWN),
    ("server-down", "no server", replace(a_box(), server=None)),
]  # fmt: skip


def ask(rule: Rule, box: Facts) -> tuple[list[Finding], list[str]]:
    said = diagnose(box, [rule])
    return list(said.findings), [what for one in said.not_checked for what in one.missing]


def test_what_a_rule_finds_is_told_as_in_the_golden_text() -> None:
    cases = []
    for code, heading, box in FIRES:
        ((found,), missing) = ask(BY_CODE[code], box)
        assert not missing
        cases.append(
            (f"{code}, {heading}", [f"{found.severity}: {found.seen}", f"  do: {found.do}"])
        )
    transcript("doctor/finds", cases)


@pytest.mark.parametrize(("code", "box"), SILENT)
def test_a_rule_is_silent_where_nothing_is_wrong(code: str, box: Facts) -> None:
    assert ask(BY_CODE[code], box) == ([], [])


def test_what_a_rule_lacks_is_told_as_in_the_golden_text() -> None:
    cases = []
    for code, heading, box in UNKNOWN:
        found, missing = ask(BY_CODE[code], box)
        assert (found, len(missing)) == ([], 1)
        cases.append((f"{code}, {heading}", missing))
    transcript("doctor/lacks", cases)


def test_no_rule_is_without_a_case_of_each_kind() -> None:
    codes = {rule.code for rule in ALL_RULES}
    tells = codes - {"cuda-graphs"}  # which only says what tells
    assert len(codes) == len(ALL_RULES)
    assert ({code for code, *_ in FIRES}, {code for code, *_ in UNKNOWN}) == (tells, codes)
    quiet = diagnose(a_box(), ALL_RULES)
    assert (quiet.findings, set(quiet.passed)) == ((), tells)
    assert [one.code for one in quiet.not_checked] == ["cuda-graphs"]


def test_a_box_of_which_nothing_is_known_has_no_findings_and_passes_nothing() -> None:
    unknown = Facts(host=replace(HOST, gpus=None, memory=replace(HOST.memory, swap_used_mib=None)))
    found = diagnose(unknown, ALL_RULES)
    assert (found.findings, found.passed, len(found.not_checked)) == ((), (), len(ALL_RULES))


def test_the_worst_finding_comes_first_and_decides_the_exit_code() -> None:
    note = with_card(power_limit_w=150.0)
    worse = with_settings(note, serving__threads=16)
    worst = with_server(worse, foreign_flags=("--mlock",))

    found = [diagnose(box, ALL_RULES) for box in (a_box(), note, worse, worst)]

    assert [one.exit_code for one in found] == [0, 0, 6, 7]
    assert [str(one.severity) for one in found[3].findings] == ["error", "warning", "note"]


def test_one_unreadable_card_does_not_hide_what_is_wrong_with_the_other() -> None:
    box = with_host(a_box(), gpus=(card(pcie_width=None), card(index=1, pcie_width=4)))
    ((seen,), missing) = ask(BY_CODE["pcie-link"], box)
    assert (seen.seen, missing) == ("GPU 1: PCIe x4; x16 is possible", ["the PCIe link of GPU 0"])


def test_the_card_of_the_server_is_the_one_where_its_process_is() -> None:
    own = replace(card(), index=1, total_mib=MiB(12282))
    box = with_host(a_box(), gpus=(a_card(index=0, total_mib=49140), own))

    used = [one.used_card() for one in (box, with_server(box, pid=None))]
    assert [one.index for one in used if one is not None] == [1, 0]


def test_what_a_desktop_does_on_a_card_of_its_own_is_no_finding_about_the_server() -> None:
    """Whoever has the monitor on a second card was told to plug it elsewhere, and to raise the margin of the first."""
    other = a_card(index=1, used_mib=12_000, processes=(XORG, OLLAMA))
    desktop = replace(other, throttle_reasons=("software thermal slowdown",))
    box = with_host(a_box(), gpus=(card(), desktop))

    codes = ("vram-full", "display-vram", "vram-others", "gpu-throttled")
    assert [ask(BY_CODE[code], box) for code in codes] == [([], [])] * len(codes)
    resting = with_server(box, pid=None)
    assert all(ask(BY_CODE[code], resting)[0] for code in codes), "it may be started on any"


def test_a_margin_that_fit_keeps_free_can_starve_a_card_that_would_hold_the_model() -> None:
    held = estimated().start_mib(Device.GPU)
    tight = with_card(total_mib=MiB(held + 500), used_mib=MiB(held), processes=())

    kept = with_settings(tight, speculation__p_min=0.0, memory__fit_mib=1536)
    assert len(ask(BY_CODE["p-min-zero"], kept)[0]) == 1
    bare = with_settings(tight, speculation__p_min=0.0, memory__fit_mib=None)
    assert ask(BY_CODE["p-min-zero"], bare) == ([], [])


def test_an_ik_build_may_have_equal_types_that_mainline_has_no_kernel_for() -> None:
    types: dict[str, Any] = {"serving__cache_type_k": "q5_1", "serving__cache_type_v": "q5_1"}
    box = with_settings(with_server(engine=engine("ik-now")), **types)

    assert ask(BY_CODE["kv-pair"], box) == ([], [])
    mixed = with_settings(box, serving__cache_type_v="q4_0")
    assert len(ask(BY_CODE["kv-pair"], mixed)[0]) == 1
