"""Every rule of `doctor`: where it finds something, where it is silent, where it cannot tell."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
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
from tunerd.cli.main import cli
from tunerd.doctor import rules
from tunerd.doctor.facts import Facts, Finding, Locking, OwnFacts, PortFacts, Rule, diagnose
from tunerd.doctor.rules import ALL_RULES
from tunerd.engine.health import Failure, FailureKind
from tunerd.engine.help import Effect, Proof
from tunerd.machine.facts import POWER_CAP, CpuFrequency, GpuProcess
from tunerd.model.memory import Device
from tunerd.model.report import MemoryReport
from tunerd.result import Level, error, warning
from tunerd.words import MiB

# A command with its options, as far as the next sentence.
COMMAND = re.compile(r"tunerd ([a-z][a-z-]*)((?: [A-Z]+| --?[a-z-]+(?:[ =][^ ,;`]+)?)*)")
BY_CODE = {rule.code: rule for rule in ALL_RULES}
UNMEASURED = replace(EVIDENCE, break_even=None)
SMALL_CARD = with_card(total_mib=MiB(12282), used_mib=MiB(9000), processes=())
PLAIN: dict[str, Any] = {"serving__cache_type_k": "f16", "serving__cache_type_v": "f16"}
LOW = replace(TRAFFIC, n_accepted=1500)
IQ4_HEAD = replace(model(), mtp_types=(("iq4_xs", 400_000_000), ("f32", 2_000_000)))
XORG = GpuProcess(900, MiB(950), "graphics", "Xorg", "display-manager.service")
OLLAMA = GpuProcess(901, MiB(5200), "compute", "ollama", "ollama.service")
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


# A box on which a rule finds something of this severity, in these words.
FIRES = [
    ("gpu-unreadable", unreadable_cards(), Level.ERROR, "no driver"),
    ("gpu-mig", with_card(is_mig=True), Level.WARNING, "GPU 0 is split by MIG"),
    ("gpu-throttled", with_card(throttle_reasons=(POWER_CAP, "power brake"), temperature_c=93),
          Level.WARNING, "held down by power brake, at 93 °C"),
    ("uvm-missing", replace(a_box(), driver=replace(DRIVER, has_uvm_device=False)),
          Level.WARNING, "no /dev/nvidia-uvm"),
    ("driver-mismatch", replace(unreadable_cards(), driver=replace(DRIVER, module_version="570.1")),
          Level.ERROR, "kernel module is 570.1"),
    ("pcie-link", with_card(pcie_width=4), Level.WARNING, "x4, and x16"),
    ("pcie-link", with_card(pcie_generation=1, performance_state=2), Level.WARNING,
          "generation 1 at work"),
    ("power-limit", with_card(power_limit_w=150.0), Level.NOTE, "150 W, and 220 W"),
    ("resizable-bar", with_card(bar1_mib=MiB(256)), Level.NOTE, "256 MiB of 49140 MiB"),
    ("cpu-governor", replace(a_box(), frequency=CpuFrequency("acpi-cpufreq", ("powersave",), ())),
          Level.WARNING, "powersave"),
    ("cpu-governor", replace(a_box(), frequency=CpuFrequency("intel_pstate", ("powersave",),
          ("balance_power",))), Level.NOTE, "balance_power"),
    ("threads", with_settings(serving__threads=16), Level.WARNING, "16, and there are 8"),
    ("threads", with_settings(serving__threads_batch=16), Level.NOTE, "threads_batch is 16"),
    ("flags-removed", with_server(foreign_flags=("--mlock", "--no-mmap")), Level.ERROR,
          "does not take --mlock, --no-mmap"),
    ("flags-removed", with_server(foreign_flags=("--draft-max",)), Level.ERROR, "--draft-max"),
    ("engine-architecture", with_card(with_log(cuda_architectures=(86,)), compute_capability=(12, 0)),
          Level.WARNING, "code for 8.6, and the card is 12.0"),
    ("engine-architecture", with_card(with_log(cuda_architectures=(90,)),
          compute_capability=(8, 6)), Level.ERROR, "card is 8.6"),
    ("engine-architecture", with_server(devices=()), Level.WARNING, "no device to offload to"),
    ("engine-architecture", with_log(lacks_kernels=True), Level.ERROR, "no kernel image"),
    ("engine-architecture", with_log(lacks_cuda=True), Level.ERROR, "without the card"),
    ("port-clash", replace(a_box(), port=PortFacts(8080, ("nginx (process 7)",))), Level.ERROR,
          "nginx (process 7)"),
    ("port-clash", replace(a_box(), server=None, port=PortFacts(8080, ("nginx (process 7)",))),
          Level.NOTE, "listens there already"),
    ("port-clash", with_settings(serving__port=None), Level.NOTE, "names no port"),
    ("evidence-stale", replace(a_box(), evidence=replace(EVIDENCE, holds=False,
          changes=("driver changed: 570 -> 580",))), Level.WARNING, "driver changed: 570 -> 580"),
    ("vram-full", with_card(used_mib=MiB(48_000), reserved_mib=MiB(400)), Level.WARNING, "98%"),
    ("vram-full", filled(11_390 + 128), Level.WARNING, "97%"),
    ("vram-spill", with_server(environment={"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"}),
          Level.WARNING, "goes to RAM"),
    ("vram-spill", with_log(has_misplaced_layers=True), Level.WARNING, "on different devices"),
    ("vram-spill", replace(with_card(used_mib=MiB(48_000)), driver=replace(DRIVER, is_wsl=True)),
          Level.WARNING, "Windows' driver"),
    ("display-vram", with_card(processes=(XORG,)), Level.WARNING, "Xorg holds 950 MiB"),
    ("display-vram", with_card(processes=(replace(XORG, used_mib=None),)), Level.WARNING,
          "the driver does not say"),
    ("vram-others", with_card(processes=(OLLAMA,)), Level.WARNING,
          "ollama (ollama.service) holds 5200 MiB"),
    ("thinking-off", with_settings(serving__chat_template_kwargs={"enable_thinking": False}),
          Level.NOTE, "off server-wide"),
    ("thinking-off", with_settings(serving__reasoning_budget=0), Level.NOTE, "off server-wide"),
    ("drafts-by-text", with_settings(speculation__type="copyspec"), Level.WARNING,
          "copyspec on a hybrid model"),
    ("kv-plain", with_settings(SMALL_CARD, **PLAIN), Level.WARNING, "f16/f16 on a card of 12282"),
    ("kv-plain", with_server(with_settings(SMALL_CARD, **PLAIN), estimate=None), Level.NOTE,
          "f16/f16"),
    ("kv-pair", with_settings(serving__cache_type_v="q4_0"), Level.ERROR, "q8_0/q4_0"),
    ("context-not-fillable", with_context(16384), Level.WARNING,
          "32768 tokens of context were asked for, and the engine made 16384"),
    ("context-not-fillable", with_server(estimate=estimated(524288)), Level.WARNING,
          "trained for 262144"),
    ("context-not-fillable", with_host(a_box(), memory=replace(HOST.memory,
          total_mib=MiB(1700))), Level.WARNING, "may grow to"),
    ("memlock", with_log(mlock_refused=True), Level.WARNING, "not everything"),
    ("memlock", with_server(locking=Locking(False, MiB(8), MiB(0))), Level.WARNING,
          "nothing is locked; the server's limit is 8 MiB"),
    ("memlock", with_server(locking=Locking(False, MiB(100), MiB(90))), Level.WARNING,
          "not everything"),
    ("swap", with_server(swapped_mib=MiB(900)), Level.WARNING, "900 MiB of the server itself"),
    ("swap", with_host(a_box(), memory=replace(HOST.memory, swap_used_mib=MiB(500))), Level.NOTE,
          "500 MiB of swap"),
    ("mapped-experts", with_settings(serving__load_mode="mmap", **CPU_MOE), Level.WARNING,
          "experts are on the CPU"),
    ("mapped-experts", with_settings(SMALL_CARD, serving__load_mode=None), Level.WARNING,
          "the file is mapped"),
    ("mapped-experts", with_log(with_settings(serving__load_mode="auto"),
          maps_overridden_tensors=True), Level.WARNING, "the file is mapped"),
    ("mtp-does-not-pay", with_log(traffic=LOW), Level.WARNING, "12% of 12000"),
    ("mtp-does-not-pay", with_log(traffic=replace(TRAFFIC, n_drafted=0, n_accepted=0)),
          Level.WARNING, "drafted nothing"),
    ("mtp-does-not-pay", replace(a_box(), evidence=replace(EVIDENCE,
          break_even=replace(BREAK_EVEN, prompt_ms=(100.0, 9.0)))), Level.WARNING,
          "would not pay if all of them were"),
    ("mtp-head-quant", with_server(with_log(traffic=LOW), model=IQ4_HEAD), Level.WARNING,
          "4.3 bits per weight (iq4_xs)"),
    ("p-min-zero", with_settings(speculation__p_min=0.0, **CPU_MOE), Level.WARNING, "p-min is 0"),
    ("p-min-zero", with_settings(SMALL_CARD, speculation__p_min=None), Level.WARNING,
          "p-min is 0"),
    ("mtp-slots", with_server(n_slots=4), Level.WARNING, "4 slots"),
    ("mtp-slots", with_settings(with_server(n_slots=4), speculation__type="mtp,ngram-mod"),
          Level.WARNING, "4 slots"),
    ("engine-without-mtp", with_settings(with_server(engine=engine("main-old"),
          argv=("llama-server", "--spec-type", "ngram-mod,draft-mtp")), speculation__type="off"),
          Level.ERROR, "knows no such kind"),
    ("mtp-slots", with_log(with_server(n_slots=None), n_slots=2), Level.WARNING, "2 slots"),
    ("mtp-slots", with_settings(with_server(with_log(n_slots=None), n_slots=None),
                                serving__n_parallel=None), Level.WARNING, "4 slots"),
    ("model-without-mtp", with_server(model=replace(model(), n_nextn=0)), Level.ERROR,
          "no MTP block"),
    ("engine-without-mtp", with_server(engine=engine("main-mid", Proof("mtp", Effect.NO_EFFECT,
          "it drafted nothing"))), Level.ERROR, "it drafted nothing"),
    ("engine-without-mtp", with_settings(with_server(engine=engine("main-old")),
          speculation__type="off"), Level.NOTE, "knows no MTP"),
    ("engine-without-mtp", with_settings(with_server(engine=engine("main-old"),
          argv=("llama-server", "-mtp")), speculation__type="off"), Level.ERROR, "knows no such kind"),
    ("log-unseen", with_server(log=None, is_silent=True), Level.WARNING, "nothing that the server wrote"),
    ("no-supervisor", a_box(own=OwnFacts(error("no-supervisor", "it is down", "tunerd supervise"))),
          Level.ERROR, "it is down"),
    ("no-daemon", a_box(own=OwnFacts(unwatched=warning("no-daemon", "it is down", "start tunerd"))),
          Level.WARNING, "it is down"),
    ("settings-wrong", a_box(own=OwnFacts(settings=warning("settings", "no TOML", "correct it"))),
          Level.ERROR, "no TOML"),
    ("server-down", with_server(no_start="gone: `/models/a.gguf`"), Level.ERROR, "cannot start"),
    ("server-down", with_server(death=Failure(FailureKind.PORT_TAKEN, "couldn't bind", None)),
          Level.ERROR, "port taken, couldn't bind"),
    ("swap-cut-short", a_box(own=OwnFacts(interrupted=warning("interrupted", "of generation 3", "recover"))),
          Level.ERROR, "of generation 3"),
]  # fmt: skip

SILENT = [
    ("server-down", a_box()),
    ("gpu-unreadable", without_cards()),
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
    ("kv-pair", with_log(with_settings(serving__cache_type_v="q4_0"), has_all_kv_pairs=True)),
    ("kv-pair", with_settings(serving__cache_type_v="q4_0", serving__flash_attn="off")),
    ("kv-pair", with_server(with_settings(serving__cache_type_v="q4_0"), devices=())),
    ("p-min-zero", with_server(with_settings(SMALL_CARD, speculation__p_min=0.0), devices=())),
    ("kv-pair", with_settings(serving__cache_type_k="turbo3", serving__cache_type_v="turbo3")),
    ("context-not-fillable", with_context(32768)),
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
    ("model-without-mtp", with_settings(with_server(model=replace(model(), n_nextn=0)),
                                        speculation__draft_model="/models/draft.gguf")),
]  # fmt: skip

UNKNOWN = [
    ("gpu-unreadable", replace(unreadable_cards(), driver=None), "no driver"),
    ("gpu-unreadable", replace(unreadable_cards(), driver=replace(
        DRIVER, module_version=None, pci_addresses=None)), "a GPU at all (no driver)"),
    ("gpu-mig", with_card(is_mig=None), "GPU 0 is split"),
    ("gpu-throttled", with_card(throttle_reasons=None), "clocks of GPU 0"),
    ("uvm-missing", replace(a_box(), driver=None), "driver's files"),
    ("uvm-missing", replace(unreadable_cards(), driver=replace(
        DRIVER, has_uvm_device=False, pci_addresses=None)), "PCI bus"),
    ("driver-mismatch", replace(a_box(), driver=replace(DRIVER, library_version=None)), "library"),
    ("driver-mismatch", replace(unreadable_cards(), driver=replace(
        DRIVER, module_version=None)), "kernel module"),
    ("driver-mismatch", replace(unreadable_cards(), driver=replace(
        DRIVER, module_version=None, pci_addresses=None)), "PCI bus"),
    ("pcie-link", with_card(pcie_width=None), "PCIe link of GPU 0"),
    ("pcie-link", with_card(pcie_generation=1, performance_state=8), "idles at 1 of 4"),
    ("pcie-link", with_card(pcie_generation=None), "PCIe generation"),
    ("power-limit", with_card(power_default_w=None), "power limit of GPU 0"),
    ("resizable-bar", with_card(bar1_mib=None), "BAR1"),
    ("cpu-governor", replace(a_box(), frequency=None), "governor"),
    ("threads", with_host(a_box(), cpu=replace(HOST.cpu, physical_cores=None)), "physical cores"),
    ("flags-removed", with_server(engine=None), "accepts"),
    ("engine-architecture", with_log(cuda_architectures=None, has_cuda=None), "ARCHS"),
    ("cuda-graphs", a_box(), "tunerd compare --set"),
    ("port-clash", replace(a_box(), port=None), "the port"),
    ("evidence-stale", replace(a_box(), evidence=None), "stored measurements"),
    ("evidence-stale", replace(a_box(), evidence=replace(EVIDENCE, newest_run=None)), "what serves"),
    ("evidence-stale", replace(a_box(), evidence=replace(EVIDENCE, holds=None)), "still holds"),
    ("vram-full", with_card(used_mib=None), "GPU 0"),
    ("vram-spill", with_server(log=None), "the log"),
    ("mtp-does-not-pay", with_server(log=None, was_edited=True), "another command line"),
    ("display-vram", with_card(processes=None), "which processes"),
    ("vram-others", with_card(processes=None), "which processes"),
    ("thinking-off", with_server(settings=None), "the settings of"),
    ("drafts-by-text", with_server(with_settings(speculation__type="ngram-mod"), model=None), "header"),
    ("kv-plain", with_settings(with_card(total_mib=None), **PLAIN), "size of GPU 0"),
    ("kv-pair", with_log(with_settings(serving__cache_type_v="q4_0"), has_all_kv_pairs=None),
     "FA_ALL_QUANTS"),
    ("context-not-fillable", with_server(model=None, model_problem="no such file"), "no such file"),
    ("context-not-fillable", with_server(estimate=None), "estimate"),
    ("memlock", with_server(locking=None), "lock limit"),
    ("swap", with_host(a_box(), memory=replace(HOST.memory, swap_used_mib=None)), "swap"),
    ("mapped-experts", with_server(with_settings(serving__load_mode="mmap"), estimate=None),
     "where the weights are"),
    ("mtp-does-not-pay", replace(a_box(), evidence=UNMEASURED), "one without speculation"),
    ("mtp-does-not-pay", with_log(traffic=None), "requests in the log"),
    ("mtp-does-not-pay", with_log(traffic=replace(TRAFFIC, n_drafted=120, n_accepted=20)),
     "120 drafted tokens are too few"),
    # what the guard against hangs asks of a server that rests
    ("mtp-does-not-pay", with_log(traffic=replace(TRAFFIC, n_requests=500, n_predicted=1000, n_drafted=0,
                                          n_accepted=0)), "0 tokens are too few"),
    ("mtp-head-quant", replace(with_server(model=IQ4_HEAD), evidence=UNMEASURED),
     "one without speculation"),
    ("mtp-head-quant", with_server(model=replace(model(), mtp_types=(("type 999", 5),))), "types"),
    ("p-min-zero", with_server(with_settings(speculation__p_min=0.0), estimate=None),
     "where the weights are"),
    ("mtp-slots", with_settings(with_server(with_log(n_slots=None), n_slots=None, engine=None),
                                serving__n_parallel=None), "what the build"),
    ("model-without-mtp", with_server(model=None), "header"),
    ("engine-without-mtp", with_server(settings=None, settings_problem="it has 2 ExecStart= lines"),
     "2 ExecStart"),
    ("log-unseen", with_server(log=None), "the log of the running server"),
    ("no-supervisor", a_box(own=None), "supervisor answers"),
    ("no-daemon", a_box(own=None), "daemon runs"),
    ("settings-wrong", a_box(own=None), "the settings are right"),
    ("swap-cut-short", a_box(own=None), "was cut short"),
    ("server-down", replace(a_box(), server=None), "a unit that serves"),
]  # fmt: skip


def ask(rule: Rule, box: Facts) -> tuple[list[Finding], list[str]]:
    said = diagnose(box, [rule])
    return list(said.findings), [what for one in said.not_checked for what in one.missing]


@pytest.mark.parametrize(("code", "box", "severity", "words"), FIRES)
def test_a_rule_finds_what_is_wrong(code: str, box: Facts, severity: Level, words: str) -> None:
    seen, missing = ask(BY_CODE[code], box)

    assert [one.severity for one in seen] == [severity], (seen, missing)
    assert words in seen[0].seen
    assert seen[0].do


@pytest.mark.parametrize(("code", "box"), SILENT)
def test_a_rule_is_silent_where_nothing_is_wrong(code: str, box: Facts) -> None:
    assert ask(BY_CODE[code], box) == ([], [])


@pytest.mark.parametrize(("code", "box", "words"), UNKNOWN)
def test_a_rule_that_lacks_a_fact_says_which(code: str, box: Facts, words: str) -> None:
    seen, missing = ask(BY_CODE[code], box)

    assert seen == []
    assert len(missing) == 1
    assert words in missing[0]


def test_no_rule_is_without_a_case_of_each_kind() -> None:
    codes = {rule.code for rule in ALL_RULES}
    assert {code for code, *_ in FIRES} == codes - {"cuda-graphs"}, "it only says what tells"
    assert {code for code, _, _ in UNKNOWN} == codes
    quiet = diagnose(a_box(), ALL_RULES)
    assert quiet.findings == ()
    assert [one.code for one in quiet.not_checked] == ["cuda-graphs"]
    assert set(quiet.passed) == codes - {"cuda-graphs"}
    assert len(codes) == len(ALL_RULES)


def test_a_box_of_which_nothing_is_known_has_no_findings_and_passes_nothing() -> None:
    unknown = Facts(host=replace(HOST, gpus=None, memory=replace(HOST.memory, swap_used_mib=None)))

    found = diagnose(unknown, ALL_RULES)

    assert found.findings == ()
    assert found.passed == ()
    assert len(found.not_checked) == len(ALL_RULES)


def test_the_worst_finding_comes_first_and_decides_the_exit_code() -> None:
    note = with_card(power_limit_w=150.0)
    worse = with_settings(note, serving__threads=16)
    worst = with_server(worse, foreign_flags=("--mlock",))

    found = [diagnose(box, ALL_RULES) for box in (a_box(), note, worse, worst)]

    assert [one.exit_code for one in found] == [0, 0, 6, 7]
    assert [str(one.severity) for one in found[3].findings] == ["error", "warning", "note"]


def test_one_unreadable_card_does_not_hide_what_is_wrong_with_the_other() -> None:
    box = with_host(a_box(), gpus=(card(pcie_width=None), card(index=1, pcie_width=4)))

    seen, missing = ask(BY_CODE["pcie-link"], box)

    assert [one.seen for one in seen] == ["GPU 1: PCIe x4, and x16 is possible"]
    assert missing == ["the PCIe link of GPU 0"]


@pytest.mark.parametrize(
    ("has_other", "words"),
    [
        (True, "plug the monitor into the mainboard"),
        (False, "systemctl set-default multi-user.target"),
        (None, "if it has one"),
    ],
)
def test_the_way_out_for_a_desktop_depends_on_other_graphics(
    has_other: bool | None, words: str
) -> None:
    driver = replace(DRIVER, has_other_graphics=has_other)

    seen, _ = ask(BY_CODE["display-vram"], replace(with_card(processes=(XORG,)), driver=driver))

    assert words in seen[0].do
    assert ("monitor" in seen[0].do) is (has_other is not False)


def test_the_card_of_the_server_is_the_one_where_its_process_is() -> None:
    large = a_card(index=0, total_mib=49140)
    own = replace(card(), index=1, total_mib=MiB(12282))
    box = with_host(a_box(), gpus=(large, own))

    found = box.used_card()
    assert found is not None
    assert found.index == 1
    resting = with_server(box, pid=None).used_card()
    assert resting is not None
    assert resting.index == 0


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


def test_every_command_that_the_doctor_names_can_be_typed() -> None:
    texts = [
        node.value
        for node in ast.walk(ast.parse(Path(rules.__file__).read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = [found for text in texts for found in COMMAND.findall(text)]
    assert len(named) > 20
    for name, words in named:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        options = {one for param in command.params for one in param.opts}
        assert set(re.findall(r"--[a-z-]+", words)) <= options, f"tunerd {name}{words}"
