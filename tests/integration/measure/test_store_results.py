"""`tunerd results` and fingerprints of this machine, on a real store, program and model file."""

from __future__ import annotations

import csv
import io
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fault.world import a_generation
from tests.support.bench_box import BenchBox
from tests.support.bench_samples import sample
from tests.support.fake_gpu import FakeGpuReader, rtx_3090_ti
from tests.support.fakes import FakeClock
from tests.support.folders import DATA
from tests.support.gguf_bytes import text
from tests.support.model_headers import small
from tests.support.synthetic_runs import MadeRun, made_runs
from tunerd import __version__
from tunerd.cli.measure import render_csv, render_show
from tunerd.engine.conditions import FingerprintReader
from tunerd.engine.fingerprint import Fingerprint
from tunerd.measure.evidence import ArmRecord, RunRecord
from tunerd.measure.learn import find_workload
from tunerd.measure.results import export, export_bundle, results, show
from tunerd.measure.store import EvidenceStore
from tunerd.units.generations import Ending, Generation, Outcome

HELP = DATA / "help" / "mainline-0.7.0.txt"


class Bench(BenchBox):
    """A machine with a store, one engine and one model, readable for the account that probes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FakeGpuReader(rtx_3090_ti()), FakeClock())
        self.program = self.folder / "bin" / "llama-server"
        self.model = self.folder / "model.gguf"
        self.program.parent.mkdir(mode=0o755)
        self.write_engine("first")
        write_model(self.model, "{{ messages }}")
        self.paths.state_dir.mkdir()

    def write_engine(self, version: str) -> None:
        """A program that is probed like a llama-server and does nothing else."""
        self.program.write_text(
            f"#!/bin/sh\n# {version}\ncase $1 in\n--help) cat <<'HELP'\n{HELP.read_text()}\nHELP\n;;\n"
            "--version) echo 'version: 7 (abcdef12)' >&2 ;;\n*) exit 1 ;;\nesac\n"
        )
        self.program.chmod(0o755)

    @property
    def argv(self) -> tuple[str, ...]:
        return (str(self.program), "--model", str(self.model), "--port", "8080", "--ctx-size",
                "4096")  # fmt: skip

    def deploy(self, argv: tuple[str, ...]) -> Generation:
        """A generation that serves; its unit sets one variable."""
        generation = replace(
            a_generation("s"), number=1, argv=argv,
            engine="mainline-7", unit="llama-server.service",
        )  # fmt: skip
        generations = self.context().generations
        generations.create(generation, b"[Service]\nEnvironment=GGML_TEST=1\nExecStart=/bin/true\n")
        generations.end(1, Ending(Outcome.SERVING, 2.0, 1.0, None, None))
        return generation

    def measured(self, arm: ArmRecord, workload: str | None = None) -> int:
        """A run of this arm, stored."""
        record = RunRecord(kind="bench", suites=("mtp",), started_s=1.0, target="live",
                           arms=(arm,), workload=workload)  # fmt: skip
        with EvidenceStore(self.paths.evidence) as store:
            return store.add_run(record)

    def put(self, *runs: MadeRun) -> list[int]:
        with EvidenceStore(self.paths.evidence) as store:
            return [run.put(store) for run in runs]

    def staleness(self) -> dict[str, Any]:
        """What `results list` says of the only arm that was measured."""
        (run,) = results(self.context()).payload["results"]
        (row,) = run["arms"]
        return dict(row)


def write_model(path: Path, template: str) -> None:
    """A file with a model's header."""
    keys = {
        "block_count": 1,
        "context_length": 4096,
        "embedding_length": 32,
        "attention.head_count": 1,
    }
    told = text("tokenizer.chat_template", template)
    path.write_bytes(small(keys=keys, tensors=[("token_embd.weight", (32, 4))], extra=[told]))


@pytest.fixture
def bench(folder: Path) -> Bench:
    return Bench(folder)


def an_arm(bench: Bench, **changes: Any) -> ArmRecord:
    fingerprint = FingerprintReader(bench.context()).of(bench.argv).fingerprint
    values = {"name": "live", "fingerprint": fingerprint, "argv": bench.argv}
    return ArmRecord(**{**values, **changes})


def test_a_fingerprint_names_every_part_of_this_machine(bench: Bench) -> None:
    found = FingerprintReader(bench.context()).of(bench.argv, workload_sha256="w")
    assert found.problems == ()
    data = found.fingerprint.to_json()
    cpu = data.pop("cpu_model")
    assert cpu is None or cpu  # some processors have no name
    assert [name for name, value in data.items() if value is None] == []
    assert data["gpu_names"] == ["NVIDIA GeForce RTX 3090 Ti"]
    assert data["power_limits_w"] == [450.0]
    assert data["driver_version"] == "580.95.05"
    assert data["tunerd_version"] == __version__


def _hidden_cards(bench: Bench) -> None:
    bench.gpu.hide("driver and library do not match")


def _new_model(bench: Bench) -> None:
    stamp = bench.model.stat()
    os.utime(bench.model, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))


def lay_over(bench: Bench, text: str, name: str = "limits.conf") -> None:
    folder = bench.paths.unit_dir / "llama-server.service.d"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"[Service]\n{text}\n")


@pytest.mark.parametrize(
    ("change", "holds", "parts"),
    [
        (lambda _: None, True, []),
        (lambda it: lay_over(it, "CPUQuota=50%"), False, ["limits of the unit"]),
        (lambda it: lay_over(it, "Environment=X=1\nRestartSec=9"), True, []),
        (lambda it: it.gpu.show(replace(rtx_3090_ti(), power_limit_w=350.0)), False, ["power limit"]),
        (lambda it: it.gpu.show(replace(rtx_3090_ti(), name="NVIDIA GeForce RTX 5090")), False, ["GPU"]),
        (lambda it: it.write_engine("second"), False, ["engine"]),
        (_new_model, False, ["model"]),
        (lambda it: write_model(it.model, "{{ other }}"), False, ["model", "chat template"]),
        (_hidden_cards, None, [
            "driver: 580.95.05 then, unknown now",
            "GPU: NVIDIA GeForce RTX 3090 Ti then, unknown now",
            "power limit: 450 W then, unknown now",
            "the GPUs cannot be read: driver and library do not match",
        ]),
    ],
    ids=["nothing", "a drop-in with a limit", "a drop-in without one", "power limit", "card", "engine", "model", "template", "no card to be seen"],
)  # fmt: skip
def test_evidence_holds_until_the_machine_changes_and_what_changed_is_named(
    bench: Bench, change: Any, holds: bool | None, parts: list[str]
) -> None:
    bench.measured(an_arm(bench))
    change(bench)
    row = bench.staleness()
    assert row["holds"] is holds
    assert [text.partition(" changed: ")[0] for text in row["texts"]] == parts
    assert (row["remarks"], row["differs_from_live"]) == ([], None)
    only_limit = "a power limit of 450 W" if parts == ["power limit"] else None
    assert row["holds_at"] == only_limit


@pytest.mark.parametrize(
    ("first", "more", "emptied", "changed"),
    [
        ("CPUQuota=400%\nMemoryMax=20G", "CPUQuota=200%", "more.conf",
         "CPUQuota=200%, MemoryMax=20G -> CPUQuota=400%, MemoryMax=20G"),
        # systemd merges masks, and the one that stays is the last of them before and after.
        ("CPUAffinity=0-5", "CPUAffinity=6", "first.conf", "CPUAffinity=0-5 6 -> CPUAffinity=6"),
    ],
    ids=["half of the processors were taken", "processors of one of two masks"],
)  # fmt: skip
def test_a_limit_of_a_drop_in_that_is_gone_or_another_is_named_with_both(
    bench: Bench, first: str, more: str, emptied: str, changed: str
) -> None:
    """What was proved with all processors still held, after half of them were taken from what serves."""
    lay_over(bench, first, "first.conf")
    lay_over(bench, more, "more.conf")
    bench.measured(an_arm(bench))
    assert bench.staleness()["holds"] is True

    lay_over(bench, "", emptied)
    row = bench.staleness()
    assert row["holds"] is False
    assert row["texts"] == [f"limits of the unit changed: {changed}"]


def write_workload(bench: Bench, answer_tokens: int) -> Path:
    folder = bench.paths.site_profiles / "workloads"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "office.toml"
    path.write_text(
        f"[[classes]]\nprompt_tokens = 500\nanswer_tokens = {answer_tokens}\nkind = 'chat'\n"
    )
    return path


def test_a_workload_that_changed_or_is_gone_makes_evidence_stale_and_is_named(bench: Bench) -> None:
    path = write_workload(bench, 100)
    arm = an_arm(bench)
    of_it = find_workload(bench.context(), "office").shape.sha256
    bench.measured(
        replace(arm, fingerprint=replace(arm.fingerprint, workload_sha256=of_it)), "office"
    )
    assert bench.staleness()["holds"] is True

    write_workload(bench, 200)
    row = bench.staleness()
    assert row["holds"] is False
    assert [text.partition(" changed: ")[0] for text in row["texts"]] == ["workload"]

    path.write_text("nothing = [")
    assert bench.staleness()["holds"] is None

    path.unlink()
    row = bench.staleness()
    assert row["holds"] is False
    assert row["texts"] == [f"workload changed: {of_it[:12]} -> not there"]


def test_what_was_measured_by_its_address_alone_cannot_be_checked(bench: Bench) -> None:
    bench.measured(an_arm(bench, argv=None, fingerprint=Fingerprint()))
    row = bench.staleness()
    assert row["holds"] is None
    assert "by its address only" in row["texts"][0]


def test_what_serves_is_compared_with_what_was_measured(bench: Bench) -> None:
    bench.measured(an_arm(bench))
    bench.deploy((*bench.argv[:-1], "8192", "--port", "9000", "--no-mmap"))
    row = bench.staleness()
    assert row["holds"] is True
    assert row["differs_from_live"] == ["--ctx-size 4096 -> 8192", "--no-mmap added"]


def test_the_fingerprint_of_a_generation_counts_its_units_variables(bench: Bench) -> None:
    generation = bench.deploy(bench.argv)
    now = FingerprintReader(bench.context()).of_generation(generation).fingerprint
    plain = FingerprintReader(bench.context()).of(bench.argv).fingerprint
    assert now.arguments_sha256 != plain.arguments_sha256
    assert replace(now, arguments_sha256=plain.arguments_sha256) == plain


def test_a_run_is_shown_with_missing_figures_as_missing(bench: Bench) -> None:
    numbers = bench.put(*made_runs(repeats=1))
    payload = show(bench.context(), numbers[2]).payload
    off = [row for row in payload["figures"] if row["arm"] == "speculation off"]
    assert {row["case"] for row in off} == {row["case"] for row in payload["figures"]} - {"warm-up"}
    assert {row["n_drafted"] for row in off} == {None}
    left_out = {(row["arm"], row["reason"]): row["samples"] for row in payload["left_out"]}
    assert left_out == {
        ("speculation on", "warm-up"): 1,
        ("speculation on", "throttled"): 1,
        ("speculation on", "foreign traffic"): 1,
        ("speculation on", "server and client clocks disagree"): 1,
        ("speculation on", "no answer"): 1,
        ("speculation off", "warm-up"): 1,
    }
    text = "\n".join(render_show(payload))
    assert re.search(r"throttled +speculation on +1", text)
    compare = "\n".join(render_show(show(bench.context(), numbers[0]).payload))
    assert "B is 4.1 % faster on chat" in compare
    assert "unknown" in "\n".join(render_show(show(bench.context(), numbers[4]).payload))


@pytest.mark.parametrize(
    "more", [(), ("--model-draft", "draft.gguf")], ids=["alone", "drafted for"]
)
def test_a_bundle_names_the_model_by_its_header_while_its_files_are_those_that_were_measured(
    bench: Bench, more: tuple[str, ...]
) -> None:
    """Where another model drafts for it, it was `unnamed`, so that it fitted nobody by its name."""
    bench.model.write_bytes(small(extra=[text("general.name", "Qwen3.6 27B")]))
    argv = (*bench.argv, *more[:1], *(str(bench.folder / name) for name in more[1:]))
    write_model(Path(argv[-1] if more else bench.folder / "other.gguf"), "")
    fingerprint = FingerprintReader(bench.context()).of(argv).fingerprint
    arm = an_arm(bench, argv=argv, model_path=str(bench.model), fingerprint=fingerprint, origins=(("--spec-type mtp", "speculation.type", "x"),))  # fmt: skip
    record = RunRecord(kind="bench", suites=("mtp",), started_s=1.0, target="live", model_name="bob", arms=(arm,))  # fmt: skip
    numbers = bench.put(MadeRun(record, {"live": [sample()]}))

    def name() -> str:
        (entry,) = export_bundle(bench.context(), numbers).payload["entries"]
        return str(entry["model"]["name"])

    assert name() == "Qwen3.6 27B"
    write_model(Path(argv[-1] if more else bench.model), "of another")
    assert name() == "unnamed"


def test_an_export_holds_every_sample_and_says_null_where_nothing_is_known(bench: Bench) -> None:
    made = made_runs(repeats=1)
    numbers = bench.put(*made)
    payload = export(bench.context(), numbers).payload
    for run, original in zip(payload["runs"], made, strict=True):
        assert len(run["samples"]) == sum(len(samples) for samples in original.samples.values())
    off = [s for s in payload["runs"][2]["samples"] if s["arm"] == "speculation off"]
    assert {sample["timings"]["draft_n"] for sample in off} == {None}
    rows = list(csv.DictReader(io.StringIO("\n".join(render_csv(payload)))))
    assert len(rows) == sum(len(run["samples"]) for run in payload["runs"])
    assert {row["draft_n"] for row in rows if row["arm"] == "speculation off"} == {""}
    failed = [row for row in rows if row["problem"]]
    assert [(row["wall_ms"], row["predicted_n"]) for row in failed] == [("", "")]
