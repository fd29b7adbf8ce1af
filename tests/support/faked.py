"""A box whose clock and service manager are fakes, and what a test changes of it by name."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from tests.fault.world import a_generation
from tests.support.fakes import FakeClock, FakeServiceManager, Life, Program
from tests.support.local_box import Box
from tunerd.app import Context
from tunerd.units.generations import Ending, Outcome

UNIT = "llama-server.service"
SERVER = "[Service]\nExecStart=/bin/server\nRestart=on-failure\nRestartSec=5\n"


def set_to(ctx: Context, **settings: object) -> Context:
    """The same with other settings, by their names: `guards__drift="act"`."""
    for name, value in settings.items():
        section, _, key = name.partition("__")
        part = getattr(ctx.settings, section).model_copy(update={key: value})
        ctx = replace(ctx, settings=ctx.settings.model_copy(update={section: part}))
    return ctx


class FakedBox:
    """A server runs; what tunerd starts of itself does as `own` says, nothing by default."""

    def __init__(
        self,
        folder: Path,
        own: Program = lambda _start: Life(ends_after_s=1.0),
        now_s: float = 1_790_000_000.0,
    ) -> None:
        self.box = Box(folder)
        self.clock = FakeClock(now_s)
        programs: dict[str, Program] = {"/bin/server": lambda _start: Life(), sys.executable: own}
        self.manager = FakeServiceManager(folder, self.clock, programs)
        (self.manager.unit_dir / UNIT).write_text(SERVER)
        self.ctx = replace(self.box.context, clock=self.clock, services=self.manager)
        self.ctx.paths.state_dir.mkdir(parents=True, exist_ok=True)
        self.manager.start(UNIT)

    @property
    def life(self) -> str | None:
        """Names the run of the server."""
        return self.manager.state(UNIT).invocation_id

    def generation(
        self, number: int, outcome: Outcome = Outcome.SERVING, **changed: object
    ) -> None:
        """A swap that came to this now."""
        now_s = self.clock.now_s()
        made = replace(a_generation(None), number=number)
        made = replace(made, **{"created_s": now_s, **changed})  # type: ignore[arg-type]
        self.ctx.generations.create(made, None)
        self.ctx.generations.end(number, Ending(outcome, now_s, 1.0, None, None))

    def find(self, **found: object) -> None:
        """What `tunerd guard check` leaves."""
        (self.ctx.paths.state_dir / "guards.json").write_text(json.dumps(found))
