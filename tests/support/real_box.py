"""A sweep's own box on a real server: everything but the lease, the unit and the plan."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tests.support.bench_box import BenchBox
from tests.support.server_process import ServerEndedError, serving
from tunerd.machine.clock import SystemClock
from tunerd.measure.answer import Sample
from tunerd.measure.life import Texts, prompt_book
from tunerd.measure.target import open_url
from tunerd.production.lease import Candidate, Held
from tunerd.profile.arm import Arm, Boot
from tunerd.sweep.box import House, LeaseBox
from tunerd.tryout.designed import SHAPES, design, write

N_CTX = 6144
SERVES = Arm("it", "off", 0, 0.0, 0, "f16", 512, 2048, 1)


def options(folder: Path) -> tuple[str, ...]:
    """Of a server with the designed model, which is written into the folder."""
    model = folder / "tiny.gguf"
    if not model.exists():
        write(design(SHAPES["tiny"]), model)
    return ("-m", str(model), "-c", str(N_CTX), "-np", "1", "-t", "1", "--metrics")


class NoLease:
    """Nothing ends it, and no candidate of it ever fails."""

    left_s = 3600.0
    restores = True

    def check(self) -> None:
        pass

    def look(self, _candidate: object) -> None:
        pass


class RealBox(LeaseBox):
    """Starts every arm as one real server with the designed model; `samples` is what it was asked."""

    def __init__(self, program: Sequence[str], folder: Path, *more: str, **told: Any) -> None:
        ctx = BenchBox(folder, clock=SystemClock()).context()
        self.samples: list[Sample] = []
        super().__init__(
            ctx=ctx, held=cast("Held", NoLease()), plan_arm=self._no_plan,
            texts=Texts(prompt_book(ctx), seed=1), per_request=(),
            on_arm=lambda _arm, _record: None,
            on_samples=lambda _arm, samples: self.samples.extend(samples),
            tell=ctx.say, patience_s=20.0, house=House(ctx), incumbent=SERVES, **told,
        )  # fmt: skip
        self._program, self._more, self._folder = program, more, folder

    @staticmethod
    def _no_plan(_arm: Arm) -> Any:
        raise AssertionError("nothing is planned here")

    def restart(self, arm: Arm) -> Boot:
        self.close()
        began_s = self.now()
        stack = contextlib.ExitStack()
        try:
            server = stack.enter_context(
                serving([*self._program, *options(self._folder), *self._more], self._folder / "log")
            )
        except ServerEndedError:
            return Boot(False, self.now() - began_s, "crash")
        # As of a candidate: nobody else reads its counters.
        target = replace(open_url(self.ctx, f"http://127.0.0.1:{server.port}"), scrape_s=0.0)
        self.texts.learn(target.server)
        self._warm(arm, cast("Candidate", None), target, stack)
        return Boot(True, self.now() - began_s, n_ctx=target.n_ctx)

    def somebody_else_asks(self) -> None:
        """Have the server answer what is not of this sweep."""
        assert self._process is not None
        self._process.life.target.server.complete(
            "somebody else " * 50, n_predict=2, timeout_s=240.0
        )
