"""CPU time of commands, beside the bare operation or the same command with little behind it.

    python -m benchmarks.commands start|plan|history|report [--rounds 7] [--size N]

`start`: short commands, against Python alone and against the packages that they stand on.
`plan`: on a model with a vocabulary of so many tokens (250,000). The file is hollow: a real header, holes instead
of weights. Beside tunerd's own reader stands the full parse by the `gguf` package.
`history`: what shows the past, with so many swaps (1,000) and with ten. One is real, the others are copies of its
record with a backup each.
`report`: about so many samples (10,000) and about a usual night's few hundred. The samples are made up; storing,
reading, adding up and writing them is real. Beside it stands the export, which reads them and computes nothing.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import (
    TUNERD,
    Case,
    compared,
    conditions,
    cpu_ms,
    note,
    options,
    say,
    table,
    take_turns,
)
from tests.support.build_box import BuildBox, build_box
from tests.support.deployment import UNIT
from tests.support.gguf_bytes import pair
from tests.support.model_headers import QWEN36_27B
from tests.support.shapes import hollow_bytes
from tests.support.synthetic_runs import made_runs
from tunerd.machine.files import Files
from tunerd.measure.store import EvidenceStore
from tunerd.model.gguf import ValueType
from tunerd.units.generations import Ending, Generations, Outcome

_PYTHON = (sys.executable, "-c")
_PACKAGES = "import click, pydantic_settings"
_FEW_SWAPS, _FEW_REPEATS = 10, 3
_DAY_S = 86400.0
_BLOCK_BYTES = 512
_OWN = """
import sys
from pathlib import Path
from tunerd.machine.files import Files
from tunerd.model.files import ModelFiles
if len(sys.argv) > 1:
    ModelFiles(Path("/proc"), Files()).read_facts(Path(sys.argv[1]))
"""
_FULL = """
import sys
from gguf import GGUFReader
if len(sys.argv) > 1:
    GGUFReader(sys.argv[1])
"""
# By a small program: ru_maxrss of a new one begins with the size of the one that started it.
_PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""


def peak_mib(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Largest resident memory [MiB] of a program."""
    timed = [*_PYTHON, _PEAK, *argv]
    done = subprocess.run(timed, env=environment, capture_output=True, text=True, check=True)
    return int(done.stderr.split()[-1]) // 1024


def python(name: str, *words: str) -> Case:
    return Case(name, lambda: cpu_ms([*_PYTHON, *words]))


def tunerd(box: BuildBox, name: str, *words: str, codes: Sequence[int] = (0,)) -> Case:
    return Case(name, lambda: cpu_ms([TUNERD, *words], box.environment, codes=codes))


def start(rounds: int, _size: int) -> Iterator[str]:
    with build_box(None, shape="tiny") as idle, build_box(None, shape="tiny") as busy:
        for name in ("plain", "other"):
            busy.profile(name)
        busy.apply("plain")
        turns = itertools.cycle(["other", "plain"])
        cases = [
            python("`pass`", "pass"),
            python(f"`{_PACKAGES}`", _PACKAGES),
            python(f"`{_PACKAGES}, httpx`", f"{_PACKAGES}, httpx"),
            tunerd(idle, "`tunerd --help`", "--help"),
            tunerd(idle, "`tunerd status`, nothing deployed", "status"),
            tunerd(busy, "`tunerd status`, a live unit, its server answers", "status"),
            tunerd(busy, "`tunerd plan`", "plan", "other"),
            Case(
                "`tunerd apply`, a swap until the new server has answered",
                lambda: cpu_ms([TUNERD, "apply", next(turns), "--yes"], busy.environment),
            ),
        ]
        take_turns(cases, rounds)
        assert busy.json("status")["healthy"] is True
        assert idle.json("status")["active"] == "inactive"
    yield compared(cases, cases[1], unit="CPU ms")


def plan(rounds: int, n_vocab: int) -> Iterator[str]:
    with build_box(None, shape="tiny") as box:
        large = write_large(box.box.folder / "large.gguf", n_vocab)
        path = str(large)
        box.profile("small")
        box.profile("large", model__path=path)
        box.json("plan", "small")  # the engine is probed once
        # Weights larger than this machine's memory are refused, but only after everything was read.
        codes = (0, 1)
        known = tunerd(box, "`tunerd plan`, large header, known", "plan", "large", codes=codes)
        first = replace(known, name="`tunerd plan`, large header, first time", figures=[])
        first.prepare = lambda: forget_models(box)
        known.prepare = lambda: note(f"learnt in {known.run():.0f} ms")
        cases = [
            tunerd(box, "`tunerd plan`, small model, header known", "plan", "small", codes=codes),
            first,
            known,
            python("tunerd's reader, imports alone", _OWN),
            python("tunerd's reader, large header", _OWN, path),
            python("`gguf`, imports alone", _FULL),
            python("`gguf`, full parse of the large header", _FULL, path),
        ]
        take_turns(cases, rounds)
        yield compared(cases, cases[0], unit="CPU ms")
        memory = [
            (name, *(str(peak_mib([*_PYTHON, script, *rest])) for rest in ((), (path,))))
            for name, script in (("tunerd's reader", _OWN), ("`gguf`", _FULL))
        ]
        yield table(("peak memory [MiB]", "imports alone", "large header"), memory)
        yield f"Large header: {large.stat().st_blocks * _BLOCK_BYTES / 2**20:.1f} MiB."


def write_large(path: Path, n_vocab: int) -> Path:
    """A header with as many tokens, and as many merges, as models of that size have."""
    header, n_bytes = hollow_bytes(replace(QWEN36_27B, n_vocab=n_vocab))
    one_merge = _merges(["a b"])
    assert header.count(one_merge) == 1
    header = header.replace(one_merge, _merges([f"{n:x} {n:x}" for n in range(n_vocab)]))
    header += bytes(-len(header) % 32)
    path.write_bytes(header)
    os.truncate(path, len(header) + n_bytes)
    return path


def _merges(texts: list[str]) -> bytes:
    return pair("tokenizer.ggml.merges", ValueType.ARRAY, (ValueType.STRING, texts))


def forget_models(box: BuildBox) -> None:
    """As if no header had been read yet; what is known of engines stays."""
    for path in box.paths.cache_dir.glob("model-*.json"):
        path.unlink()


def history(rounds: int, many: int) -> Iterator[str]:
    with build_box(None, shape="tiny") as short, build_box(None, shape="tiny") as long:
        pasts = ((short, _FEW_SWAPS), (long, many))
        for box, n in pasts:
            note(f"writing a past of {n} swaps ...")
            give_past(box, n)
            assert box.json("history")["total"] == n
            assert box.json("status")["drift"] == []
        for words in ("history", "history --all", "rollback --list", "status"):
            cases = [
                tunerd(box, f"`tunerd {words}`, {n:,} swaps", *words.split()) for box, n in pasts
            ]
            take_turns(cases, rounds)
            yield compared(cases, cases[0], unit="CPU ms")


def give_past(box: BuildBox, n: int) -> None:
    """Generations and backups of `n` swaps, the last of which serves."""
    box.profile("plain")
    box.apply("plain")
    kept = Generations(box.paths.generations_dir, Files())
    first = kept.read(1)
    text = kept.unit_text(1)
    assert first is not None
    assert text is not None
    for number in range(2, n + 1):
        at_s = first.generation.created_s + (number - n) * _DAY_S
        name = f"{UNIT}.pre-{number:08d}T000000Z-apply"
        older = text.replace(b"[Service]", b"# %d\n[Service]" % number, 1)
        (box.paths.unit_dir / name).write_bytes(older)
        record = replace(first.generation, number=number, created_s=at_s, replaced_backup=name)
        kept.create(record, older if number < n else text)
        outcome = Outcome.SERVING if number % 2 == 0 else Outcome.ROLLED_BACK
        kept.end(number, Ending(outcome, at_s, None, None, None))


def report(rounds: int, n_samples: int) -> Iterator[str]:
    per_repeat = samples_of(_FEW_REPEATS + 1) - samples_of(_FEW_REPEATS)
    many = _FEW_REPEATS + round((n_samples - samples_of(_FEW_REPEATS)) / per_repeat)
    cases, files = [], []
    with build_box(None, shape="tiny") as small, build_box(None, shape="tiny") as large:
        for box, repeats in ((small, _FEW_REPEATS), (large, many)):
            note(f"storing {repeats} repeats ...")
            n, numbers = fill(box, repeats)
            page = box.box.folder / "report.html"
            words = ("report", *numbers, "--no-check", "-o", str(page))
            cases.append(tunerd(box, f"`tunerd report`, {n:,} samples", *words))
            files.append((box, page, [TUNERD, *words]))
        export = f"`tunerd results export`, {n:,} samples"
        cases.append(tunerd(large, export, "results", "export", *numbers))
        take_turns(cases, rounds)
        yield compared(cases, cases[0], unit="CPU ms")
        for box, page, argv in files:
            peak = peak_mib(argv, box.environment)
            yield f"A file of {page.stat().st_size / 1e6:.2f} MB; peak memory {peak} MiB."


def fill(box: BuildBox, repeats: int) -> tuple[int, list[str]]:
    """Store made-up runs of every suite; how many samples that was, and the runs' numbers."""
    box.paths.state_dir.mkdir(exist_ok=True)
    with EvidenceStore(box.paths.evidence) as store:
        numbers = [run.put(store) for run in made_runs(repeats=repeats)]
        return sum(one.n_samples for one in store.runs()), [str(number) for number in numbers]


def samples_of(repeats: int) -> int:
    return sum(len(one) for run in made_runs(repeats=repeats) for one in run.samples.values())


MEASURED: dict[str, tuple[Callable[[int, int], Iterator[str]], int]] = {
    "start": (start, 0),
    "plan": (plan, 250_000),
    "history": (history, 1000),
    "report": (report, 10_000),
}


def main() -> None:
    given = options(__doc__, what=tuple(MEASURED), rounds=7, size=0)
    measure, usual = MEASURED[given.what]
    for text in measure(given.rounds, given.size or usual):
        say(f"{text}\n")
    say(conditions(given.rounds))


if __name__ == "__main__":
    main()
