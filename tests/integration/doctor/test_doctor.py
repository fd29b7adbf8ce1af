"""`tunerd doctor` as a command: with nothing there, with a card, and with a real server at work."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import needs, nvml_stub
from tests.support.fake_gpu import rtx_3090_ti, rtx_4070_super
from tests.support.local_box import Box, deployed
from tests.support.ports import free_port
from tunerd.doctor.doctor import read_port
from tunerd.doctor.facts import ServerFacts
from tunerd.doctor.rules import ALL_RULES
from tunerd.measure.evidence import RunOutcome
from tunerd.measure.store import EvidenceStore
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.units.live import read_live
from tunerd.words import MiB

CODES = {rule.code for rule in ALL_RULES}
# What this machine itself may be told, whatever serves on it.
OF_THE_MACHINE = {"cpu-governor", "swap"}
WITHOUT_A_UNIT = {
    "threads", "flags-removed", "mtp-does-not-pay", "mtp-head-quant", "p-min-zero", "mtp-slots",
    "model-without-mtp", "engine-without-mtp", "context-not-fillable", "memlock",
}  # fmt: skip


def doctor(box: Box) -> dict[str, Any]:
    done = box.call("doctor", "--json")
    said: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == worst(said), done.stderr
    assert said["schema"] == 1
    assert said["ok"] is (done.returncode == 0)
    assert codes(said) | unchecked(said) | set(said["passed"]) == CODES
    return said


def worst(said: dict[str, Any]) -> int:
    found = {finding["severity"] for finding in said["findings"]}
    return 7 if "error" in found else 6 if "warning" in found else 0


def codes(said: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in said["findings"]}


def unchecked(said: dict[str, Any]) -> set[str]:
    return {row["code"] for row in said["not_checked"]}


def finding(said: dict[str, Any], code: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in said["findings"] if one["code"] == code)
    return found


def test_without_a_gpu_and_without_a_server_it_says_what_it_could_not_check(tmp_path: Path) -> None:
    box = Box(tmp_path)
    said = doctor(box)

    assert said["unit"] is None
    assert unchecked(said) >= WITHOUT_A_UNIT
    assert all(row["missing"] for row in said["not_checked"])
    if not Path("/dev/nvidiactl").exists():
        assert codes(said) <= OF_THE_MACHINE | {"port-clash"}
    told = box.call("doctor")
    assert told.returncode == worst(said)
    assert "a unit that serves:" in told.stdout
    assert re.search(r"^passed: ", told.stdout, re.MULTILINE)


def test_a_unit_is_judged_where_what_was_deployed_cannot_be_read(tmp_path: Path) -> None:
    """Nothing at all was said of it."""
    box = Box(tmp_path)
    box.put_unit("[Service]\nExecStart=/nonexistent/llama-server -m /m.gguf\n")
    generations = box.context.paths.generations_dir
    generations.parent.mkdir(parents=True, exist_ok=True)
    generations.write_text("no folder")

    assert "server-down" in codes(doctor(box))


def test_whoever_has_the_usual_port_is_no_neighbour_of_a_server_on_a_socket_of_files(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        argv = ("llama-server", "--host", "/run/llama.sock", "--port", str(port))
        server = ServerFacts(unit="llama-server.service", is_active=True, pid=1, argv=argv)
        text = f"[Service]\nExecStart={' '.join(argv)}\n"
        live = read_live(unit=server.unit, text=text, specifiers={})
        assert read_port(Box(tmp_path).context, server, live) is None

        text = f"[Service]\nExecStart=llama-server --host 127.0.0.2,127.0.0.3 --port {port}\n"
        live = read_live(unit=server.unit, text=text, specifiers={})
        assert read_port(Box(tmp_path).context, server, live) == [], "of another address"


@pytest.fixture
def card_box(tmp_path: Path, nvml_library: Path) -> Box:
    """A machine with a card that only the NVML stub knows."""
    shutil.copytree(nvml_library.parent, tmp_path / "nvml")
    return Box(tmp_path, {"LD_LIBRARY_PATH": str(tmp_path / "nvml")})


def test_what_nvml_says_of_a_card_is_judged(card_box: Box) -> None:
    card = replace(
        rtx_4070_super(used_mib=11_800),
        pcie_width=4,
        power_limit_w=150.0,
        bar1_mib=None,
        performance_state=8,
        pcie_generation=1,
    )
    nvml_stub.NvmlWorld(card_box.folder / "nvml").show(card, extra=["bar1 268435456"])

    said = doctor(card_box)
    assert codes(said) >= {"pcie-link", "power-limit", "resizable-bar", "vram-full"}
    missing = next(row for row in said["not_checked"] if row["code"] == "pcie-link")["missing"]
    assert missing == ["the PCIe generation of GPU 0 under load (it idles at 1 of 4)"]


@pytest.mark.engine
@pytest.mark.parametrize(("words", "is_as_meant"), [("", True), ("--fit off", False)])
def test_a_card_that_is_full_but_for_the_margin_of_the_build_itself_is_as_it_should_be(
    card_box: Box, words: str, is_as_meant: bool
) -> None:
    card = rtx_3090_ti()
    assert card.total_mib is not None
    used_mib = card.total_mib - (card.reserved_mib or 0) - 1020
    nvml_stub.NvmlWorld(card_box.folder / "nvml").show(replace(card, used_mib=MiB(used_mib)))
    write(design(SHAPES["tiny"]), card_box.model)
    runs = f"{needs.engine('mainline-2026-08-18')} -m {card_box.model} -c 2048 {words}"
    card_box.put_unit(f"[Service]\nExecStart={runs}\n")

    assert ("vram-full" not in codes(doctor(card_box))) is is_as_meant


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """The embedded server, deployed once; tests leave it and its unit as they found them."""
    with deployed(tmp_path_factory.mktemp("doctor"), free_port()) as box:
        yield box


@pytest.mark.llama
def test_a_server_as_deployed_is_healthy(box: Box) -> None:
    said = doctor(box)

    assert codes(said) <= OF_THE_MACHINE
    assert unchecked(said) <= {*OF_THE_MACHINE, "mtp-does-not-pay", "evidence-stale"}
    assert said["active"] is True


@pytest.mark.llama
def test_an_edited_unit_is_judged_by_its_text_and_not_by_what_still_runs(box: Box) -> None:
    """Flags that its build dropped, a model without the block, and a port of another program's."""
    deployed_text, port = box.unit.read_text(), free_port()
    plain = write(design(SHAPES["tiny-nomtp"]), box.folder / "plain.gguf")
    text = deployed_text.replace("--jinja", "--no-mmap --mlock --threads-http 1", 1)
    text = text.replace("--threads 1", "--threads 4096").replace("--parallel 1", "--parallel 3")
    text = re.sub(r"--port \d+", f"--port {port}", text.replace(str(box.model), str(plain)))
    script = (
        "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[1])));"
        "s.listen(); print('listens', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", script, str(port)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        box.unit.write_text(text)
        said = doctor(box)
        box.unit.write_text(deployed_text)
        other.communicate(b"")

    assert "--no-mmap, --mlock:" in finding(said, "flags-removed")["seen"]
    assert said["messages"][0]["code"] == "edited"
    assert codes(said) >= {"threads", "mtp-slots", "model-without-mtp"}
    assert "mtp-does-not-pay" in unchecked(said)
    assert f"(process {other.pid})" in finding(said, "port-clash")["seen"]


@pytest.mark.llama
def test_evidence_holds_until_another_build_serves(box: Box) -> None:
    box.json("bench", "--suite", "cache", "--repeats", "1", "--depth", "300")
    assert "evidence-stale" in doctor(box)["passed"]

    with EvidenceStore(box.context.paths.evidence) as store:
        run = store.runs(limit=1)[0]
        record, (arm,) = run.record, run.record.arms
        other = replace(arm, fingerprint=replace(arm.fingerprint, engine_sha256="0" * 64))
        number = store.add_run(replace(record, arms=(other,), started_s=record.started_s + 1))
        store.add_samples(number, store.samples(run.number)[:1], arm=arm.name)
        store.end_run(number, RunOutcome.DONE, ended_s=record.started_s + 2)

    stale = finding(doctor(box), "evidence-stale")
    assert "engine changed" in stale["seen"]
    assert stale["do"] == "measure again: tunerd bench"
