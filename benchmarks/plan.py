"""Time to plan on a model with a vocabulary of a quarter of a million tokens.

    python -m benchmarks.plan [--rounds 5] [--vocabulary 250000]

The file is hollow: a real header, holes instead of weights. Beside tunerd's own reader stands the
full parse by the `gguf` package, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import (
    TUNERD,
    Case,
    compared,
    conditions,
    cpu_ms,
    options,
    say,
    table,
    take_turns,
)
from tests.support.build_box import BuildBox, build_box
from tests.support.gguf_bytes import pair
from tests.support.model_headers import QWEN36_27B
from tests.support.shapes import hollow_bytes
from tunerd.model.gguf import ValueType

_OWN = """
import sys
from pathlib import Path
from tunerd.machine.files import Files
from tunerd.model.files import ModelFiles
if len(sys.argv) > 1:
    ModelFiles(None, Files()).read_facts(Path(sys.argv[1]))
"""
_BLOCK_BYTES = 512
# Not ru_maxrss: that of a new program begins with the size of the one that started it.
_PEAK = """
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) // 1024)
"""
_FULL = """
import sys
from gguf import GGUFReader
if len(sys.argv) > 1:
    GGUFReader(sys.argv[1])
"""


def peak_mib(script: str, *arguments: str) -> int:
    """Largest resident memory [MiB] of a script."""
    done = subprocess.run(
        [sys.executable, "-c", f"{script}\n{_PEAK}", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def write_large(path: Path, n_vocab: int) -> Path:
    """A header with as many tokens, and as many merges, as models of that size have."""
    header, n_bytes = hollow_bytes(replace(QWEN36_27B, n_vocab=n_vocab))
    merges = [f"{n:x} {n:x}" for n in range(n_vocab)]
    one_merge = _merges(["a b"])
    assert header.count(one_merge) == 1
    header = header.replace(one_merge, _merges(merges))
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


def main() -> None:
    given = options(__doc__, rounds=5, vocabulary=250_000)
    with build_box(None, shape="tiny") as box:
        large = write_large(box.box.folder / "large.gguf", given.vocabulary)
        box.profile("small")
        box.profile("large", model__path=str(large))
        box.json("plan", "small")  # the engine is probed once
        say(_measured(box, large, given.rounds))
    say(f"\n{conditions(given.rounds)}")


def _measured(box: BuildBox, large: Path, rounds: int) -> str:
    # Weights larger than this machine's memory are refused, but only after everything was read.
    codes = (0, 1)
    python = [sys.executable, "-c"]
    path = str(large)

    def planned(profile: str) -> float:
        return cpu_ms([TUNERD, "plan", profile], box.environment, codes=codes)

    def learn() -> None:
        subprocess.run(
            [TUNERD, "plan", "large"], env=box.environment, capture_output=True, check=False
        )

    base = Case("`tunerd plan`, small model, header known", lambda: planned("small"))
    cases = [
        base,
        Case("`tunerd plan`, large header, first time", lambda: planned("large"),
             prepare=lambda: forget_models(box)),
        Case("`tunerd plan`, large header, known", lambda: planned("large"), prepare=learn),
        Case("tunerd's reader, imports alone", lambda: cpu_ms([*python, _OWN])),
        Case("tunerd's reader, large header", lambda: cpu_ms([*python, _OWN, path])),
        Case("`gguf`, imports alone", lambda: cpu_ms([*python, _FULL])),
        Case("`gguf`, full parse of the large header", lambda: cpu_ms([*python, _FULL, path])),
    ]  # fmt: skip
    take_turns(cases, rounds)
    memory = [
        (name, str(peak_mib(script)), str(peak_mib(script, path)))
        for name, script in (("tunerd's reader", _OWN), ("`gguf`", _FULL))
    ]
    return "\n".join(
        (
            compared(cases, base, unit="CPU ms"),
            "",
            table(("peak memory [MiB]", "imports alone", "large header"), memory),
            "",
            f"Large header: {large.stat().st_blocks * _BLOCK_BYTES / 2**20:.1f} MiB.",
        )
    )


if __name__ == "__main__":
    main()
