"""A place to bench from: real files, store and HTTP; a fake GPU, and a clock that does not wait."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.fake_gpu import FakeGpuReader
from tests.support.fakes import FakeClock, FakeServiceManager
from tests.support.local_box import Box
from tests.support.server_process import Server, serving
from tests.support.stand_in import StandIn, install
from tunerd.app import Context
from tunerd.machine.clock import Clock
from tunerd.measure.bench import bench_urls
from tunerd.measure.request import BenchRequest, Suite
from tunerd.measure.store import EvidenceStore
from tunerd.paths import Paths
from tunerd.result import ActionResult, Progress


class HurriedClock:
    """Real time, except that waiting takes none: what is slept is only added."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def now_s(self) -> float:
        return time.time() + self._skipped_s

    def monotonic_s(self) -> float:
        return time.monotonic() + self._skipped_s

    def suspended_s(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self._skipped_s += max(0.0, seconds)


@dataclass
class BenchBox:
    """Folders, seams, and a bench by address."""

    folder: Path
    gpu: FakeGpuReader = field(default_factory=FakeGpuReader)
    clock: Clock = field(default_factory=HurriedClock)
    said: list[Progress] = field(default_factory=list)

    @property
    def paths(self) -> Paths:
        return self.context().paths

    def context(self) -> Context:
        services = FakeServiceManager(self.folder, FakeClock())
        made = Box(self.folder, {"TUNERD_UNIT_DIR": str(services.unit_dir)}).context
        return replace(
            made, clock=self.clock, gpu=self.gpu, services=services, progress=self.said.append
        )

    def bench(
        self, url: str | Sequence[str], suite: Suite = Suite.MTP, **asked: Any
    ) -> ActionResult:
        """Bench a server by its address, or several, each case once unless told otherwise."""
        request = BenchRequest(suite=suite, **{"repeats": 1, "seed": 11, **asked})
        return bench_urls(self.context(), request, [url] if isinstance(url, str) else url)

    def store(self) -> EvidenceStore:
        return EvidenceStore(self.paths.evidence, writable=False)


@contextmanager
def answering(
    folder: Path, *flags: str, dialect: str = "main-0x", **behaviour: Any
) -> Iterator[tuple[Server, StandIn]]:
    """A stand-in that serves, as fast as the test may be: what it says of its times is what it took."""
    folder.mkdir(exist_ok=True)
    model = folder / "model.gguf"
    model.write_bytes(b"GGUF")
    usual = {"pp_tok_s": 1e6, "tg_tok_s": 1e5, "time_scale": 1.0}
    made = install(folder, dialect=dialect, **{**usual, **behaviour})
    slots = () if "-np" in flags else ("-np", "1")
    with serving([str(made.program), "-m", str(model), *slots, *flags], folder / "log") as server:
        yield server, made


def came_to(payload: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """What a suite found under this name, by arm."""
    return [{"arm": one["arm"], **one["figures"]}
            for one in payload["summaries"] if one["name"] == name]  # fmt: skip
