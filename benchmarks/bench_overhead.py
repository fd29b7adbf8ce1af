"""What the bench adds to a request, beside a bare httpx loop on the same server.

    python -m benchmarks.bench_overhead [--rounds 30] [--shape medium]

Each figure is a request's time by the caller's clock less the times that the server itself reports for
it: what is left is HTTP, the loop of the server, and whoever measures.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.measure import Case, compared, conditions, options, say, take_turns
from tests.support.bench_box import BenchBox
from tests.support.server_process import serving
from tunerd.app import Context
from tunerd.machine.clock import SystemClock
from tunerd.machine.gpu import NvmlReader
from tunerd.measure.life import Life, prompt_book
from tunerd.measure.request import MTP_KINDS, Composer, PromptStock, Request, Route, Suite, body_of
from tunerd.measure.target import open_url
from tunerd.tryout.designed import SHAPES, design, write

KINDS = [kind for kind in MTP_KINDS if kind != "long_code_review"]
Ask = Callable[[Request], float]


def asking(ctx: Context, url: str) -> dict[str, Ask]:
    """Ways to ask once, each of which says what the server reports of it [ms]."""
    target = replace(open_url(ctx, url), route=Route.NATIVE)
    composer = Composer(PromptStock(prompt_book(ctx), random.Random(1)))  # noqa: S311 -- texts, no secret
    # The real GPU reader: what it takes is part of what is measured.
    life = Life(replace(ctx, gpu=NvmlReader()), target)
    client = httpx.Client(base_url=url, timeout=120,
                          limits=httpx.Limits(max_keepalive_connections=0))  # fmt: skip

    def body(one: Request, *, stream: bool) -> Any:
        return body_of(one, composer.compose(one), target.route) | {"stream": stream}

    def whole(one: Request) -> float:
        return _server_ms(client.post("/completion", json=body(one, stream=False)).json())

    def streamed(one: Request) -> float:
        with client.stream("POST", "/completion", json=body(one, stream=True)) as reply:
            *_, last = [line for line in reply.iter_lines() if line.startswith("data: ")]
        return _server_ms(json.loads(last[6:]))

    def bench(one: Request) -> float:
        found = life.ask(one, composer.compose(one)).sample
        assert found.is_usable, found
        assert found.timings is not None
        return (found.timings.prompt_ms or 0) + (found.timings.predicted_ms or 0)

    return {"httpx, one answer": whole, "httpx, streamed": streamed, "the bench": bench}


def _server_ms(answer: Any) -> float:
    return float(answer["timings"]["prompt_ms"] + answer["timings"]["predicted_ms"])


def main() -> None:
    given = options(__doc__, rounds=30, shape="tiny")
    kinds = random.Random(2)  # noqa: S311 -- texts, no secret
    whole_ms: dict[str, list[float]] = {}

    def beside_ms(name: str, ask: Ask) -> float:
        kind = kinds.choice(KINDS)
        one = Request(suite=Suite.MTP, case=kind, kind=kind, n_predict=192)
        began_s = time.perf_counter()
        server_ms = ask(one)
        took_ms = (time.perf_counter() - began_s) * 1000
        whole_ms.setdefault(name, []).append(took_ms)
        return took_ms - server_ms

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write(design(SHAPES[given.shape]), folder / "model.gguf")
        argv = (sys.executable, "-m", "tunerd.tryout.embedded", "--model", str(model), "--threads", "1",
                "--threads-batch", "1", "--ctx-size", "4096", "--parallel", "1", "--spec-type",
                "draft-mtp", "--spec-draft-n-max", "3", "--spec-draft-p-min", "0.75")  # fmt: skip
        with serving(argv, folder / "log") as server:
            ways = asking(BenchBox(folder, clock=SystemClock()).context(), server.url)
            cases = [Case(name, partial(beside_ms, name, ask)) for name, ask in ways.items()]
            take_turns(cases, given.rounds)
    say(conditions(given.rounds))
    medians = {name: median(found[1:]) for name, found in whole_ms.items()}
    say(f"shape {given.shape}; whole requests, medians [ms]: "
        + ", ".join(f"{name} {took_ms:.1f}" for name, took_ms in medians.items()))  # fmt: skip
    say(compared(cases, cases[1], unit="ms beside the server's own", digits=2))
    for case in cases[:2]:
        added = cases[2].median - case.median
        say(f"against `{case.name}` the bench adds {added:.2f} ms, "
            f"{added / medians[case.name]:.2%} of a request")  # fmt: skip


if __name__ == "__main__":
    main()
