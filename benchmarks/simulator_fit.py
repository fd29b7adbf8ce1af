"""How well the published boxes of the simulator reproduce what their authors published.

    python -m benchmarks.simulator_fit

Published are means of texts that are not available; simulated is the mean over the kinds of text that
come nearest to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.measure import say, table
from benchmarks.simulator.box import Truth
from benchmarks.simulator.cards import CARDS
from tunerd.profile.arm import Arm
from tunerd.profile.workload import RequestClass

# mtp-bench's prompts: code, explanations, summaries, mathematics, stories.
_BENCH = ("code", "chat", "summary", "math", "creative")
_AGENT = ("tool", "code", "summary")
_OVERHEAD_MS = 6.0
Figure = tuple[str, float, float]
"""What it is, as published, as simulated."""


@dataclass(frozen=True)
class Setup:
    """An arm on a published box with the texts it was measured with."""

    truth: Truth
    arm: Arm
    kinds: tuple[str, ...]
    cached: int = 0
    new: int = 300

    def wall_s(self, n_predict: int) -> float:
        asked = [RequestClass(1.0, kind, self.cached, self.new, n_predict) for kind in self.kinds]
        return mean(self.truth.class_ms(self.arm, one) for one in asked) / 1000

    def prompt_s(self) -> float:
        return self.truth.prompt_ms(self.arm, self.new, self.cached) / 1000

    def decode_tok_s(self, n_predict: int) -> float:
        return n_predict / (self.wall_s(n_predict) - self.prompt_s() - _OVERHEAD_MS / 1000)

    def acceptance(self, n_predict: int) -> float:
        return mean(self.truth.acceptance(self.arm, kind, n_predict) for kind in self.kinds)


def rtx_4070_super(truth: Truth) -> Iterator[Figure]:
    for engine, margin, tok_s, acceptance in (
        ("mainline", 512, 89.76, 0.9393), ("ik", 1664, 110.24, 0.8749),
    ):  # fmt: skip
        setup = Setup(truth, Arm(engine, "mtp", 3, 0.75, margin, "q8_0", 512, 2048, 8), _BENCH)
        yield f"{engine}: decode [tok/s]", tok_s, setup.decode_tok_s(192)
        yield f"{engine}: accepted", acceptance, setup.acceptance(192)


def rtx_5060_ti(truth: Truth) -> Iterator[Figure]:
    off = Arm("mainline", "off", 0, 0.0, 0, "q8_0", 512, 2048, 8)
    mtp = Arm("mainline", "mtp", 2, 0.0, 1536, "q8_0", 512, 2048, 8)
    served = Setup(truth, off, _BENCH, 11154, 771)
    shallow, deep = Setup(truth, mtp, _BENCH), Setup(truth, mtp, _AGENT, 42000, 1000)
    yield "off: decode at 12k [tok/s]", 61.96, served.decode_tok_s(300)
    yield "off: prompt of 771 at 11k [tok/s]", 744.0, 771 / served.prompt_s()
    yield "n-max 2: decode [tok/s]", 64.19, shallow.decode_tok_s(500)
    yield "n-max 2: accepted", 0.76, shallow.acceptance(500)
    yield "n-max 2: decode at 43k [tok/s]", 49.5, deep.decode_tok_s(300)


def rtx_3090_ti(truth: Truth) -> Iterator[Figure]:
    for name, prompt_s, arm, published in (
        ("off", 37.498, Arm("mainline", "off", 0, 0.0, 1024, "q4_0", 256, 2048, 8),
         ((100, 28.9, 41.888), (500, 29.1, 55.785), (1000, 29.1, 72.966), (2000, 29.0, 107.476))),
        ("DFlash", 44.153, Arm("bee", "dflash", 12, 0.0, 1024, "q4_0", 256, 2048, 8),
         ((100, 46.9, 48.394), (500, 37.0, 59.995), (1000, 30.2, 79.528), (2000, 30.1, 112.567))),
        ("MTP", 49.0, Arm("mainline", "mtp", 6, 0.75, 1024, "q4_0", 256, 2048, 8),
         ((100, 44.6, 52.609), (500, 39.1, 62.951), (1000, 44.4, 73.089), (2000, 48.9, 91.427))),
    ):  # fmt: skip
        setup = Setup(truth, arm, _AGENT, 0, 43241)
        yield f"{name}: prompt of 43k [s]", prompt_s, setup.prompt_s()
        for length, tok_s, wall_s in published:
            yield f"{name}: decode of {length} [tok/s]", tok_s, setup.decode_tok_s(length)
            yield f"{name}: turn of {length} [s]", wall_s, setup.wall_s(length)


def main() -> None:
    heads = ("card", "figure", "published", "simulated", "error")
    rows, errors = [], dict[str, list[float]]()
    for card, figures in (("12G", rtx_4070_super), ("16G", rtx_5060_ti), ("24G", rtx_3090_ti)):
        for what, published, simulated in figures(Truth(CARDS[card]())):
            error = simulated / published - 1
            rows.append((card, what, f"{published:.4g}", f"{simulated:.4g}", f"{error:+.0%}"))
            for name in (card, "all"):
                errors.setdefault(name, []).append(abs(error))
    say(table(heads, rows))
    for name in (*CARDS, "all"):
        of = errors[name]
        say(f"{name}: {len(of)} figures, median error {median(of):.1%}, worst {max(of):.0%}")


if __name__ == "__main__":
    main()
