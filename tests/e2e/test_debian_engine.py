"""Debian's own llama-server: golden lines, and what it does and says on the software GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import UNIT, Deployment, profile
from tests.support.golden import NO_MODEL, dry, golden_lines
from tests.support.machine import Machine
from tests.support.memory_cases import (
    CASES,
    ENGINES,
    SOFTWARE_GPU,
    differences,
    file_name,
    flags,
    said_by,
    write_models,
)
from tests.support.overlay import Root
from tunerd.engine.capabilities import parse_devices
from tunerd.engine.health import argument_error
from tunerd.machine.files import Files
from tunerd.model.files import ModelFiles
from tunerd.model.memory import MAINLINE_NOW, Device, PartKind, estimate
from tunerd.model.verdict import MemoryReport, parse_report
from tunerd.sweep.space import Frozen, frozen_from_log, read_fit
from tunerd.words import BYTES_PER_MIB

# `python -m benchmarks.memory_estimates` compares all of them; see docs/memory.md.
MOVED_MIB = 150
TRIES = 5
LOADED = re.compile(r"KV buffer size")
SAMPLE = (
    "dense-16k-mtp2-q8",
    "moe-16k-cache",
    "moe-16k-large-cache",
    "dense-32k-ngl12-mtp2",
    "moe-64k-ncmoe8-mtp2-q8",
    "gemma-32k-4slots",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of the memory cases; the machine sees them as /srv/hollow."""
    made = tmp_path_factory.mktemp("hollow")
    made.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def machine(sid_root: Root, model_folder: Path, folder: Path) -> Iterator[Machine]:
    binds = {"/srv/models": model_folder, "/srv/hollow": folder}
    with Machine(sid_root, binds=binds) as made:
        yield made


def test_debians_engine_takes_every_golden_line_of_its_dialect(machine: Machine) -> None:
    lines = golden_lines("main-0x")
    assert len(lines) == len(golden_lines("main-lm"))
    for name, words in lines.items():
        done = machine.run("llama-server", *dry(words, 18080), check=False, user="alice")
        said = done.stdout + "\n" + done.stderr
        assert argument_error(done.returncode, said) is None, f"{name}: {said}"
        assert NO_MODEL in said, f"{name}: {said}"


@pytest.mark.parametrize("name", SAMPLE)
def test_the_memory_estimate_agrees_with_the_table_that_the_server_prints(
    machine: Machine, folder: Path, name: str
) -> None:
    case = next(case for case in CASES if case.name == name)
    program = machine.command("llama-server", env=SOFTWARE_GPU)

    found = differences("mainline-0.7.0", program, case, folder, seen_as="/srv/hollow")

    assert {one.device.value for one in found} == {"gpu0", "host"}
    assert all(one.is_allowed for one in found), "\n".join(map(str, found))


def model_mib(report: MemoryReport, device: Device) -> float:
    found = report.allocated_mib(device, PartKind.WEIGHTS)
    assert found is not None
    return found


def test_what_fit_chose_is_read_from_its_log_and_frozen_lies_the_same(
    machine: Machine, folder: Path
) -> None:
    """The experts of some layers must go to RAM, and as many do where that is frozen."""
    case = next(case for case in CASES if case.name == "moe-32k-mtp2")
    program = machine.command("llama-server", env=SOFTWARE_GPU)
    write_models(case, folder)
    facts = ModelFiles(folder, Files()).read_facts(folder / file_name(case.shape))
    need_mib = estimate(facts, case.settings).start_mib(Device.GPU)

    def load(*placement: str) -> list[str]:
        words = flags(case, ENGINES["mainline-0.7.0"], "/srv/hollow")
        at = words.index("-ngl")
        words[at : at + 2] = placement
        return said_by([*program, *words, "--no-warmup"], folder, until=LOADED)

    def fitted() -> tuple[list[str], Frozen | str | None]:
        """With a margin that some experts stand in the way of; what is free is the machine's own."""
        listed = machine.run("llama-server", "--list-devices", env=SOFTWARE_GPU)
        (device,) = parse_devices(listed.stdout + listed.stderr)
        assert device.free_mib is not None
        said = load("--fit-target", str(device.free_mib - need_mib + MOVED_MIB))
        return said, frozen_from_log(read_fit(said), facts, MAINLINE_NOW, uses_mtp=True)

    for _ in range(TRIES):
        chosen, frozen = fitted()
        if isinstance(frozen, Frozen) and frozen.n_gpu_layers == len(facts.blocks) + 1:
            break  # else somebody took or gave back much memory in between
    assert isinstance(frozen, Frozen), "\n".join(chosen)
    assert frozen.n_gpu_layers == len(facts.blocks) + 1
    assert 0 < frozen.n_cpu_moe < len(facts.blocks)

    values = frozen.values
    layers, experts = values["memory.n_gpu_layers"], values["memory.n_cpu_moe"]
    lines = load("--fit", "off", "-ngl", str(layers), "-ncmoe", str(experts))
    first, second = parse_report(chosen), parse_report(lines)
    assert read_fit(lines).n_on_gpu == frozen.n_gpu_layers
    layer_mib = max(block.expert_bytes for block in facts.blocks) / BYTES_PER_MIB
    # Fit may split one layer, which goes to RAM whole when it is frozen.
    moved = model_mib(first, Device.GPU) - model_mib(second, Device.GPU)
    assert -0.1 * layer_mib <= moved <= 1.1 * layer_mib


@pytest.fixture(scope="module")
def tunerd(machine: Machine) -> Deployment:
    """A server on the processor, and profiles on the software GPU, where no buffer may be large.

    The limit is one that ggml-vulkan honours; llvmpipe's own memory is all of the machine's. No
    generation runs there: compiling its shaders takes longer than everything else together.
    """

    def on_gpu(alias: str, most_bytes: int, **values: Any) -> str:
        return profile(
            "mainline",
            match__gpu="llvmpipe*",
            memory__n_gpu_layers=99,
            serving__alias=alias,
            environment__GGML_VK_VISIBLE_DEVICES="0",
            environment__GGML_VK_FORCE_MAX_BUFFER_SIZE=str(most_bytes),
            **values,
        )

    made = Deployment(
        machine,
        profiles={
            "processor": profile("mainline", serving__alias="processor"),
            "weights": on_gpu("weights", 4_000_000),
            "cache": on_gpu("cache", 14_000_000, serving__ctx_size=65536),
        },
    )
    made.apply("processor")
    return made


@pytest.mark.parametrize(
    ("name", "words"),
    [("weights", "error loading model"), ("cache", "failed to allocate buffer for kv cache")],
)
def test_a_gpu_without_room_is_told_from_the_engines_words_and_the_old_server_is_back(
    tunerd: Deployment, name: str, words: str
) -> None:
    before = tunerd.unit()
    planned = tunerd.json("plan", name)
    told = [one["code"] for one in planned["messages"] if one["code"].startswith("estimate-")]
    # Where no buffer may be so large, the build's own estimate ends with an error, and is left out.
    assert told == (["estimate-checked"] if name == "weights" else [])
    assert {device["name"] for device in planned["memory"]["devices"]} == {"gpu0", "host"}

    error = tunerd.apply(name, expect=3)["error"]

    assert error["code"] == "rolled_back"
    assert "out of VRAM" in error["message"], error
    assert "exceeds device buffer size limit: ErrorOutOfDeviceMemory" in error["cause"], error
    log = "\n".join(tunerd.machine.journal(f"--unit={UNIT}"))
    assert "failed to allocate Vulkan0 buffer" in log
    assert words in log
    assert tunerd.unit() == before
    assert tunerd.alias() == "processor"
    tunerd.generate()
    status = tunerd.json("status")
    assert (status["healthy"], status["drift"]) == (True, []), status
