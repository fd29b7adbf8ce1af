"""What the bench adds to a request, beside a bare httpx loop on the same server.

python -m benchmarks.bench_overhead --rounds 30 [--shape medium]

Each figure is a request's time by the caller's clock less the times that the server itself reports for
it: what is left is HTTP, the loop of the server, and whoever measures.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx

from benchmarks.measure import Case, compared, conditions, say, take_turns
from tests.support.bench_box import BenchBox
from tests.support.server_process import Server, serving
from tunerd.machine.clock import SystemClock
from tunerd.machine.gpu import NvmlReader
from tunerd.measure.life import Life, open_url
from tunerd.measure.request import (
    MTP_KINDS,
    Composer,
    PromptStock,
    Request,
    Route,
    Suite,
    body_of,
    read_prompts,
)
from tunerd.tryout.designed import SHAPES, design, write

PROMPTS = Path(__file__).parents[1] / "tunerd/data/prompts.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shape", default="tiny", choices=sorted(SHAPES))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write(design(SHAPES[asked.shape]), folder / "model.gguf").path
        options = ("--model", str(model), "--threads", "1", "--threads-batch", "1", "--ctx-size",
                   "4096", "--parallel", "1", "--spec-type", "draft-mtp", "--spec-draft-n-max", "3",
                   "--spec-draft-p-min", "0.75")  # fmt: skip
        argv = (sys.executable, "-m", "tunerd.tryout.embedded", *options)
        with serving(argv, folder / "log") as server:
            compare(folder, server, asked.rounds, asked.shape)


def compare(folder: Path, server: Server, rounds: int, shape: str) -> None:
    """The three loops, in turns."""
    box = BenchBox(folder, clock=SystemClock())
    ctx = box.context()
    target = replace(open_url(ctx, f"http://127.0.0.1:{server.port}"), route=Route.NATIVE)
    book = read_prompts(tomllib.loads(PROMPTS.read_text(encoding="utf-8")))
    composer = Composer(PromptStock(book, random.Random(1)))  # noqa: S311 -- texts, no secret
    # The real GPU reader: what it takes is part of what is measured.
    life = Life(replace(ctx, gpu=NvmlReader()), target)
    kinds = random.Random(2)  # noqa: S311 -- texts, no secret
    whole: dict[str, list[float]] = {}

    def request() -> Request:
        kind = kinds.choice([kind for kind in MTP_KINDS if kind != "long_code_review"])
        return Request(suite=Suite.MTP, case=kind, kind=kind, n_predict=192)

    def timed(name: str, ask: Callable[[Request], float]) -> Callable[[], float]:
        def once() -> float:
            one = request()
            began_s = time.perf_counter()
            server_ms = ask(one)
            wall_ms = (time.perf_counter() - began_s) * 1000
            whole.setdefault(name, []).append(wall_ms)
            return wall_ms - server_ms

        return once

    def bare(*, stream: bool) -> Callable[[Request], float]:
        client = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120,
                              limits=httpx.Limits(max_keepalive_connections=0))  # fmt: skip

        def ask(one: Request) -> float:
            body = body_of(one, composer.compose(one), target.route) | {"stream": stream}
            if not stream:
                return _server_ms(client.post("/completion", json=body).json()["timings"])
            with client.stream("POST", "/completion", json=body) as reply:
                *_, last = [line for line in reply.iter_lines() if line.startswith("data: ")]
            return _server_ms(json.loads(last[6:])["timings"])

        return ask

    def harness(one: Request) -> float:
        found = life.ask(one, composer.compose(one)).sample
        assert found.is_usable, found
        assert found.timings is not None
        return (found.timings.prompt_ms or 0) + (found.timings.predicted_ms or 0)

    names = ("httpx, one answer", "httpx, streamed", "the bench")
    cases = [
        Case(names[0], timed(names[0], bare(stream=False))),
        Case(names[1], timed(names[1], bare(stream=True))),
        Case(names[2], timed(names[2], harness)),
    ]
    take_turns(cases, rounds)
    say(conditions(rounds))
    medians = {name: statistics.median(found[1:]) for name, found in whole.items()}
    say(f"shape {shape}; whole requests, medians [ms]: "
        + ", ".join(f"{name} {median:.1f}" for name, median in medians.items()))  # fmt: skip
    say(compared(cases, cases[1], unit="ms beside the server's own", digits=2))
    for case in cases[:2]:
        added = cases[2].median - case.median
        say(f"against `{case.name}` the bench adds {added:.2f} ms, "
            f"{added / medians[case.name]:.2%} of a request")  # fmt: skip


def _server_ms(timings: dict[str, float]) -> float:
    return timings["prompt_ms"] + timings["predicted_ms"]


if __name__ == "__main__":
    main()
