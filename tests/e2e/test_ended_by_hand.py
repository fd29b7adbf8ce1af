"""Ctrl-C while several requests are under way: nobody waits for their answers."""

from __future__ import annotations

import time

from tests.support.deployment import Deployment, profile
from tests.support.machine import Machine

SLOW = """
[engines.good]
path = "/srv/good/llama-server"
[engines.slow]
path = "/srv/slow/llama-server"
"""
LIMIT_S = 150.0


def test_a_bench_ended_amid_parallel_requests_gives_the_place_back_at_once(
    host_machine: Machine,
) -> None:
    box = Deployment(
        host_machine,
        settings=SLOW,
        profiles={
            "good": profile("good", serving__alias="production"),
            "slow": profile("slow", serving__alias="slow", serving__n_parallel=4),
        },
    )
    box.stand_ins(good={}, slow={"tg_tok_s": 8.0, "time_scale": 1.0})
    box.apply("good")
    before = box.unit()
    bench = box.start("bench", "slow", "--suite", "concurrency", "--yes", "--json")
    began_s = time.monotonic()
    n_most = 0
    while n_most < 2 and time.monotonic() - began_s < LIMIT_S:
        told = host_machine.sh("ss -Htn state established dport = :8080 | wc -l").stdout
        n_most = int(told)
        time.sleep(0.2)
    pid = host_machine.run("pgrep", "--full", "--oldest", "tunerd bench").stdout.strip()
    ended_s = time.monotonic()
    host_machine.kill(pid, "INT")
    bench.communicate(timeout=LIMIT_S)
    took_s = time.monotonic() - ended_s

    assert n_most >= 2
    assert box.alias() == "production"
    assert box.unit() == before
    assert took_s < 10, "it waited for answers"
