"""Debian's own llama-server: golden lines, and what it does and says on the software GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import UNIT, Deployment, profile
from tests.support.golden import NO_MODEL, dry, golden_lines
from tests.support.machine import Machine
from tests.support.memory_cases import CASES, SOFTWARE_GPU, differences
from tests.support.overlay import Root
from tunerd.core.failure import argument_error

pytestmark = pytest.mark.xdist_group("debian-engine")  # one machine for all

# `python -m benchmarks.memory_estimates` compares all of them; see docs/memory.md.
SAMPLE = ("dense-16k-mtp2-q8", "dense-32k-ngl12-mtp2", "moe-64k-ncmoe8-mtp2-q8", "gemma-32k-4slots")


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


@pytest.mark.parametrize("spoken", ["main-mid", "ik-now"])
def test_debians_engine_refuses_a_golden_line_of_another_dialect(
    machine: Machine, spoken: str
) -> None:
    words = dry(golden_lines(spoken)["rtx-5060-ti-16gb-baseline"], 18080)
    done = machine.run("llama-server", *words, check=False, user="alice")

    said = argument_error(done.returncode, done.stdout + "\n" + done.stderr)
    assert said == "error: invalid argument: --no-mmap"


@pytest.mark.parametrize("name", SAMPLE)
def test_the_memory_estimate_agrees_with_the_table_that_the_server_prints(
    machine: Machine, folder: Path, name: str
) -> None:
    case = next(case for case in CASES if case.name == name)
    program = machine.command("llama-server", env=SOFTWARE_GPU)

    found = differences("mainline-0.7.0", program, case, folder, seen_as="/srv/hollow")

    assert {one.device.value for one in found} == {"gpu0", "host"}
    assert all(one.is_allowed for one in found), "\n".join(map(str, found))


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
