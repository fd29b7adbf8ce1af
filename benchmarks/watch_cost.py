"""What being watched costs an engine: speed of the same requests with `tunerd daemon` and without it.

A server on all cores, so that whatever the daemon does is taken from it. Blocks take turns (ABBA); of each
the server's own time per token counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from itertools import cycle

from benchmarks.measure import TUNERD, options, table
from tests.support.build_box import BuildBox, build_box

_LIMIT_S = 60.0
_ANSWER_TOKENS = 128
_WITHOUT, _WITH = "without the daemon", "with it"


@contextlib.contextmanager
def daemon(box: BuildBox) -> Iterator[None]:
    """The daemon with its own settings, from its first look on."""
    seen = box.paths.state_dir / "guards.json"
    seen.unlink(missing_ok=True)
    quiet = subprocess.DEVNULL
    argv = [TUNERD, "daemon"]
    process = subprocess.Popen(argv, env=box.environment, stdout=quiet, stderr=quiet)
    try:
        end_s = time.monotonic() + _LIMIT_S
        while not seen.exists():
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit("the daemon did not look at anything")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(timeout=_LIMIT_S)


def ask(box: BuildBox, number: int) -> float:
    """Milliseconds per token of one request, as the server tells them."""
    body = {"prompt": f"request {number}", "n_predict": _ANSWER_TOKENS, "ignore_eos": True,
            "cache_prompt": False, "seed": number}  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{box.port}/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as reply:  # noqa: S310 -- our own server
        timings = json.load(reply)["timings"]
    return float(timings["predicted_ms"]) / float(timings["predicted_n"])


def block(box: BuildBox, seconds: float) -> float:
    """Mean time per token over some seconds [ms]; the first request counts for nothing."""
    ask(box, 0)
    found: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        found.append(ask(box, len(found) + 1))
    return statistics.fmean(found)


def main() -> None:
    given = options(__doc__, pairs=6, seconds=15.0, shape="medium")
    cores = os.cpu_count() or 1
    print(f"load average before: {os.getloadavg()[0]:.2f}", flush=True)
    ratios, times = [], {_WITHOUT: list[float](), _WITH: list[float]()}
    with build_box(None, shape=given.shape) as box:
        box.profile("plain", serving__threads=cores, serving__threads_batch=cores)
        box.apply("plain")
        block(box, given.seconds / 2)
        for _, order in zip(range(given.pairs), cycle([(_WITHOUT, _WITH), (_WITH, _WITHOUT)])):
            for name in order:
                with daemon(box) if name == _WITH else contextlib.nullcontext():
                    times[name].append(block(box, given.seconds))
            ratios.append(times[_WITH][-1] / times[_WITHOUT][-1])
            print(f"pair {len(ratios)}: {ratios[-1] - 1:+.1%}", flush=True)
    rng = random.Random(1)  # noqa: S311 -- no secret
    means = sorted(statistics.fmean(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    rows = [
        [name, f"{statistics.fmean(one):.2f}", f"{statistics.stdev(one):.2f}"]
        for name, one in times.items()
    ]
    print(table(("", "time per token [ms]", "spread of blocks [ms]"), rows))
    print(
        f"slower by {statistics.fmean(ratios) - 1:+.2%} over {len(ratios)} pairs, "
        f"95 % interval {means[100] - 1:+.2%} to {means[3900] - 1:+.2%}"
    )


if __name__ == "__main__":
    main()
