"""How well the published boxes of the simulator reproduce what their authors published.

python -m benchmarks.simulator_fit

Published are means of texts that are not available; simulated is the mean over the kinds of text that
come nearest to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measure import table
from benchmarks.simulator.box import Truth
from benchmarks.simulator.cards import CARDS
from tunerd.profile.arm import Arm
from tunerd.profile.workload import RequestClass

# mtp-bench's prompts: code, explanations, summaries, mathematics, stories.
_BENCH = ("code", "chat", "summary", "math", "creative")
_AGENT = ("tool", "code", "summary")
_OVERHEAD_MS = 6.0


@dataclass(frozen=True)
class Figure:
    """One published figure, and the same of the simulator."""

    card: str
    what: str
    published: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1


@dataclass(frozen=True)
class Setup:
    """An arm on a published box with the texts it was measured with."""

    truth: Truth
    arm: Arm
    kinds: tuple[str, ...]
    cached: int = 0
    new: int = 300

    def wall_s(self, n_predict: int) -> float:
        times = [
            self.truth.class_ms(self.arm, RequestClass(1.0, kind, self.cached, self.new, n_predict))
            for kind in self.kinds
        ]
        return statistics.mean(times) / 1000

    def prompt_s(self) -> float:
        return self.truth.prompt_ms(self.arm, self.new, self.cached) / 1000

    def decode_tok_s(self, n_predict: int) -> float:
        decode_s = self.wall_s(n_predict) - self.prompt_s() - _OVERHEAD_MS / 1000
        return n_predict / decode_s

    def acceptance(self, n_predict: int) -> float:
        shares = [self.truth.acceptance(self.arm, kind, n_predict) for kind in self.kinds]
        return statistics.mean(shares)


def rtx_4070_super() -> Iterator[Figure]:
    truth = Truth(CARDS["12G"]())
    for engine, margin, tok_s, acceptance in (
        ("mainline", 512, 89.76, 0.9393), ("ik", 1664, 110.24, 0.8749),
    ):  # fmt: skip
        arm = Arm(engine, "mtp", 3, 0.75, margin, "q8_0", 512, 2048, 8)
        setup = Setup(truth, arm, _BENCH)
        yield Figure("12G", f"{engine}: decode [tok/s]", tok_s, setup.decode_tok_s(192))
        yield Figure("12G", f"{engine}: accepted", acceptance, setup.acceptance(192))


def rtx_5060_ti() -> Iterator[Figure]:
    truth = Truth(CARDS["16G"]())
    off = Arm("mainline", "off", 0, 0.0, 0, "q8_0", 512, 2048, 8)
    mtp = Arm("mainline", "mtp", 2, 0.0, 1536, "q8_0", 512, 2048, 8)
    served = Setup(truth, off, _BENCH, 11154, 771)
    shallow, deep = Setup(truth, mtp, _BENCH), Setup(truth, mtp, _AGENT, 42000, 1000)
    yield Figure("16G", "off: decode at 12k [tok/s]", 61.96, served.decode_tok_s(300))
    yield Figure("16G", "off: prompt of 771 at 11k [tok/s]", 744.0, 771 / served.prompt_s())
    yield Figure("16G", "n-max 2: decode [tok/s]", 64.19, shallow.decode_tok_s(500))
    yield Figure("16G", "n-max 2: accepted", 0.76, shallow.acceptance(500))
    yield Figure("16G", "n-max 2: decode at 43k [tok/s]", 49.5, deep.decode_tok_s(300))


_LENGTHS = (100, 500, 1000, 2000)


def rtx_3090_ti() -> Iterator[Figure]:
    truth = Truth(CARDS["24G"]())
    arms = {
        "off": Arm("mainline", "off", 0, 0.0, 1024, "q4_0", 256, 2048, 8),
        "DFlash": Arm("bee", "dflash", 12, 0.0, 1024, "q4_0", 256, 2048, 8),
        "MTP": Arm("mainline", "mtp", 6, 0.75, 1024, "q4_0", 256, 2048, 8),
    }
    prompts = {"off": 37.498, "DFlash": 44.153, "MTP": 49.0}
    decodes = {
        "off": (28.9, 29.1, 29.1, 29.0), "DFlash": (46.9, 37.0, 30.2, 30.1),
        "MTP": (44.6, 39.1, 44.4, 48.9),
    }  # fmt: skip
    walls = {
        "off": (41.888, 55.785, 72.966, 107.476), "DFlash": (48.394, 59.995, 79.528, 112.567),
        "MTP": (52.609, 62.951, 73.089, 91.427),
    }  # fmt: skip
    for name, arm in arms.items():
        setup = Setup(truth, arm, _AGENT, 0, 43241)
        yield Figure("24G", f"{name}: prompt of 43k [s]", prompts[name], setup.prompt_s())
        for length, tok_s, wall_s in zip(_LENGTHS, decodes[name], walls[name], strict=True):
            decode = setup.decode_tok_s(length)
            yield Figure("24G", f"{name}: decode of {length} [tok/s]", tok_s, decode)
            yield Figure("24G", f"{name}: turn of {length} [s]", wall_s, setup.wall_s(length))


def main() -> None:
    found = [*rtx_4070_super(), *rtx_5060_ti(), *rtx_3090_ti()]
    rows = [
        (one.card, one.what, f"{one.published:.4g}", f"{one.simulated:.4g}", f"{one.error:+.0%}")
        for one in found
    ]
    print(table(("card", "figure", "published", "simulated", "error"), rows))
    for card in (*CARDS, ""):
        errors = [abs(one.error) for one in found if one.card == card or not card]
        print(
            f"{card or 'all'}: {len(errors)} figures, median error "
            f"{statistics.median(errors):.1%}, worst {max(errors):.0%}"
        )


if __name__ == "__main__":
    main()
