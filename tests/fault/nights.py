"""A machine lives through nights: sweeps and promotions, and what its owner, kills and boots do amid them, in any order.

A night is a command that stands still at any of its effects while other things happen; its figures are made up
by a stand-in that drafts in vain, so that no speculation wins.
"""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests.fault.fuse import Burn, Fuse, full_disk
from tests.fault.histories import (
    CUTS,
    OOM,
    SELDOM,
    THEN,
    Cut,
    Histories,
    Job,
    Wish,
)
from tests.fault.world import UNIT
from tests.support.fake_gpu import FakeGpuReader, rtx_4070_super
from tests.support.fake_llama.behaviour import Behaviour
from tests.support.fakes import Invocation, Life
from tests.support.stand_in import flags_of, install
from tests.support.sweep_box import PROFILE, SPEED, WORKLOAD, for_everybody, prove
from tunerd.app import Context
from tunerd.engine.choice import PlanRequest, request_again
from tunerd.engine.server import Address, LlamaServer
from tunerd.errors import TunerdError
from tunerd.machine.facts import GpuProcess
from tunerd.machine.files import Files, is_locked
from tunerd.measure.compare import CompareRequest, run_compare
from tunerd.measure.pairs import Limits
from tunerd.measure.store import reading
from tunerd.production.apply import apply
from tunerd.production.measurement import written_record
from tunerd.production.own import SWEEP_UNIT
from tunerd.production.plan import make_plan
from tunerd.production.power import PowerRecord
from tunerd.profile.arm import Arm
from tunerd.profile.files import read_tuned
from tunerd.records import read
from tunerd.result import Progress
from tunerd.settings import load_settings
from tunerd.sweep.plan import SweepRequest
from tunerd.sweep.promote import decline, promote
from tunerd.sweep.record import KIND, PROMOTED, find_sweep, list_sweeps, show_sweep
from tunerd.sweep.run import run_night, run_sweep, sweep_status
from tunerd.sweep.schedule import read_memory, skip_tonight
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.tryout.local_service import Ending
from tunerd.units.generations import Generation, Outcome
from tunerd.words import MiB, sha256

SETTINGS = """
[engines.fake]
path = "{program}"
allow_writable = true
[sweep]
promote = "{promote}"
window = "13:00-15:00"
timezone = "UTC"
budget_s = 240.0
patience_s = 1.0
quiet_s = 1.0
[schedule]
enabled = true
[service]
settle_s = 0.1
drain_s = 0.0
stop_timeout_s = 3
user = "{user}"
[swap]
keep_engine = false
"""
EDITS = {
    "as it was": ("", ""),
    "other": ("metrics = true", "metrics = false"),
    "pinned": ("\n[sweep]", '\n[pin]\nspeculation.type = "mtp"\n[sweep]'),
    "broken": ("[serving]", "[serving"),
}
# A night without a winner has some 400 effects, its promotion 150 more.
STOPS = st.integers(0, 600) | st.sampled_from(
    ["starting the first", "ending the measurement", "the sweep yielded", "writing the intent", "measuring once more"]
)  # fmt: skip
POWER = "tunerd.production.power"
_DAY_S, _CLOSES_S = 86400.0, 15 * 3600.0


@functools.cache
def _installed() -> Path:
    """A folder with the engine, a model, and what is found out of both once."""
    folder = Path(tempfile.mkdtemp(prefix="tunerd-nights-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    write(design(SHAPES["tiny"]), folder / "tiny.gguf")
    engine = install(folder / "engine", **SPEED)
    for_everybody(engine)
    text = engine.program.read_text()  # whether it takes its arguments: it does, in no time
    quick = 'case "$*" in *--model*) echo no such model >&2; exit 1;; esac\nexec'
    engine.program.write_text(text.replace("\nexec", f"\n{quick}", 1))
    return folder


def _account() -> str:
    """Who serves; never root."""
    return pwd.getpwuid(os.geteuid()).pw_name if os.geteuid() else "nobody"


class Nights(Histories):
    """`decided` is what its owner had stand since the measurement under way began."""

    # What only bare units are for.
    candidate = delete = lose_card = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        folder, self.gpu = _installed(), FakeGpuReader(rtx_4070_super())
        self.program = folder / "engine" / "llama-server"
        self.world.folder.chmod(0o755)  # for the account that serves
        self.model = self.world.folder / "tiny.gguf"
        shutil.copy(folder / "tiny.gguf", self.model)
        self.profile = self.world.paths.config_dir / "profiles" / "night.toml"
        (self.profile.parent / "workloads").mkdir(parents=True)
        (self.profile.parent / "workloads" / "small.toml").write_text(WORKLOAD)
        made = PROFILE.replace("[2, 4]", "[4]")
        self.made = made.format(model=self.model, port=self.world.port)
        self.profile.write_text(self.made)
        self.serve[str(self.program)] = self._serve
        self.manager.programs |= self.serve
        self.behaviour = {**SPEED, "time_scale": 0.0, "flags": flags_of("main-0x")}
        self.stops_at = ""
        self.decided: list[bytes | None] = []
        self.fails = self.regresses = self.has_no_store = False
        self.skipped_s: float | None = None
        self.begun = set[float | None]()
        self.until_s = inf
        self.files: dict[bytes, tuple[str, int]] = {}
        self.proved: set[int] = set()
        self.planned: object = None

    def _serve(self, start: Invocation) -> Life:
        is_own = start.unit == UNIT
        if not is_own and self.fails:
            self.fails = False
            return Life(prints=(OOM,), ends_after_s=0.5, ending=Ending(code=1))
        told = dict(self.behaviour)
        if is_own and self.regresses and "--spec-draft-n-max" not in start.argv:
            told["tg_tok_s"] = 40.0
        return self.world.serve_in_a_process(Behaviour(needs_model=False, **told), start)

    # How it is

    def ctx(self, fuse: Fuse | None = None) -> Context:
        return replace(
            super().ctx(fuse), settings=self.settings, gpu=self.gpu, progress=self._hears,
            environment={"PATH": os.environ["PATH"]},
        )  # fmt: skip

    def _hears(self, told: Progress) -> None:
        job = self.measuring
        is_its_own = threading.current_thread() is not threading.main_thread()
        is_there = bool(self.stops_at) and told.text.startswith(self.stops_at)
        if job is not None and is_its_own and is_there:
            self.stops_at = ""
            job.stand()

    def act(self, action: Callable[[Context], Any], cut: Cut | None) -> Any:
        stops, self.stops_at = self.stops_at, ""
        try:
            return super().act(action, cut)
        finally:
            self.stops_at = stops
            self._learn()

    def _learn(self) -> None:
        """Whole units are also those of a profile."""
        generations = self.ctx().generations
        for number in generations.numbers():
            text = generations.unit_text(number)
            if text is None or str(self.program).encode() not in text:
                continue
            self.files.setdefault(text, self._files())
            self.whole.add(text)
            self.good.add(text)

    def _files(self) -> tuple[str, int]:
        """What a plan goes by, and its owner may change."""
        return self.profile.read_text(), self.model.stat().st_ino

    def says(self, alias: str) -> bool:
        return super().says(alias) or f"--alias {alias}".encode() in (self.world.standing or b"")

    def _way_back(self) -> list[bytes | None] | None:
        return None if is_locked(self.world.paths.lock) else super()._way_back()

    def _decides(self, before: bytes | None) -> None:
        """A sweep that has not begun to measure begins from it."""
        if self.world.standing != before and is_locked(self.world.paths.sweep_lock):
            self.decided = [self.world.standing]

    # tunerd

    @initialize(begins=st.sampled_from([*["deployed"] * 6, "by hand", "nothing"]),
                policy=st.sampled_from(["auto", "auto", "ask"]), stop=STOPS)  # fmt: skip
    def begin(self, begins: str, policy: str, stop: int | str) -> None:
        config = self.world.paths.config_dir
        text = SETTINGS.format(program=self.program, promote=policy, user=_account())
        (config / "tunerd.toml").write_text(text)
        self.settings = load_settings(self.world.paths, {})
        cache, ctx = _installed() / "cache", self.ctx()
        if not cache.exists():
            prove(ctx)
            shutil.copytree(ctx.paths.cache_dir, cache)
        shutil.copytree(cache, ctx.paths.cache_dir, dirs_exist_ok=True)
        if begins == "by hand":
            self.world.put(self.text("hand"))
        elif begins == "deployed":
            self.apply({}, True, None)
            assert self.wish is Wish.SERVES
        self.wish = Wish.RESTS if begins == "nothing" else Wish.SERVES
        if begins == "deployed":
            self.measure("in window", stop)

    @rule(options=st.sampled_from([{}, {}, {"serving.alias": "b"}, {"speculation.type": "off"}]),
          with_tuned=st.booleans(), cut=CUTS)  # fmt: skip
    def apply(self, options: dict[str, Any], with_tuned: bool, cut: Cut | None) -> None:
        before, could_go_back = self.world.standing, self.can_go_back
        request = PlanRequest("night", options, with_tuned=with_tuned)
        done = self.act(lambda ctx: apply(ctx, request, drain=True), cut)
        if self._has_swapped(before, done, could_go_back=could_go_back):
            self.wish = Wish.SERVES
            self._decides(before)

    @rule(nth=st.none() | st.integers(0, 5), cut=SELDOM)
    def roll_back(self, nth: int | None, cut: Cut | None) -> None:
        before = self.world.standing
        super().roll_back(nth, cut)
        self._decides(before)

    @rule(what=st.sampled_from(["good", "dies", "nonsense", "removed", "laid over", "laid over, breaks", "bare"]),
          then=st.sampled_from(["", "reload", "restart"]))  # fmt: skip
    def edit(self, what: str, then: str) -> None:
        before = self.world.standing
        super().edit(what, then)
        self._decides(before)

    @rule(cut=SELDOM, wants=st.booleans())
    def decide(self, cut: Cut | None, wants: bool) -> None:
        """What the newest sweep proposes."""
        before, could_go_back = self.world.standing, self.can_go_back
        if not wants:
            self.act(lambda ctx: decline(ctx, None, why=None), cut)
            return
        done = self.act(lambda ctx: promote(ctx, None, drain=False), cut)
        self._noted(before, done, could_go_back)
        self._decides(before)

    def _noted(self, before: bytes | None, done: Any, could_go_back: bool) -> None:
        """A promotion may have swapped twice, and have failed after it."""
        self._has_swapped(before, done, could_go_back=could_go_back)
        if self.world.standing != before:
            self.replaced, self.deployed = None, None

    # Nights

    @rule(what=st.sampled_from(["sweep", "sweep", "in window", "power", "compare"]), stop=STOPS)
    def measure(self, what: str, stop: int | str) -> None:
        """By hand."""
        window = self.settings.sweep.window if what == "in window" else None
        space = ("gpu.power_limit_w=150",) if what == "power" else ()
        request = SweepRequest(budget_s=240.0, seed=3, window=window, space=space)
        sides = CompareRequest((), options=("speculation.type=off",), limits=Limits(budget_s=240.0))

        def act(ctx: Context) -> Any:
            if what == "compare":
                return run_compare(ctx, sides, confirm=lambda _: None)
            return run_sweep(ctx, request, confirm=lambda _: None)

        if self.measuring is None:
            self._begin(act, stop, in_window=what == "in window")
        else:
            self._beside(act)

    def _beside(self, act: Callable[[Context], Any]) -> Any:
        """Another measurement, which is refused unless the one that stands still has only just begun, or is over."""
        before, could_go_back = self.world.standing, self.can_go_back
        is_held = is_locked(self.world.paths.measure_lock)
        done = self.act(act, None)
        assert not is_held or isinstance(done, TunerdError), "two at once"
        self._noted(before, done, could_go_back)
        return done

    def _begin(self, act: Callable[[Context], Any], stop: int | str, *, in_window: bool) -> None:
        if not self.can_start and not self.manager.state(UNIT).needs_reload:
            self.wish = Wish.UNKNOWN
        job = self.measuring = Job(self.world)
        ctx = self.ctx(job.fuse)
        self.decided = []
        clock = self.world.clock
        left_s = _CLOSES_S - clock.now_s() % _DAY_S
        self.until_s = clock.monotonic_s() + left_s if in_window and left_s > 0 else inf
        self._until(job, stop, lambda: job.begin(lambda: act(ctx)))

    def _until(
        self, job: Job, stop: int | str | None, go: Callable[[], None], burn: Burn | None = None
    ) -> None:
        before, could_go_back = self.world.standing, self.can_go_back
        newest = self.ctx().generations.next_number()
        job.fuse.burns_in(stop if isinstance(stop, int) else -1, burn or job.stand)
        self.stops_at = stop if isinstance(stop, str) else ""
        go()
        self.stops_at = ""
        self._learn()
        now = self.world.standing
        if now != before:
            is_one = self.ctx().generations.next_number() == newest + 1
            self.replaced = (
                [before] if is_one and job.died_before is None and not job.fuse.burnt else None
            )
            self.deployed = now if self.replaced else None
            self.is_lost = False
        burnt = bool(job.fuse.burnt) or job.died_before is not None
        assert now == before or before not in self.decided, "what its owner decided was undone"
        if job.error is not None and not could_go_back and self.wish is Wish.SERVES:
            self.wish = Wish.UNKNOWN
        self._look_at_measuring(job)
        number = None if job.found is None else job.found.payload.get("sweep")
        if number is not None and not (burnt or self.has_no_store):
            assert show_sweep(self.ctx(), number).payload["state"] in {"done", "stopped"}
        if self.measuring is None and self.manager.state(SWEEP_UNIT).is_active:
            code = 0 if job.found is not None and not job.found.exit_code else 1
            self.manager.end_main(SWEEP_UNIT, Ending(code=code))

    @rule(
        how=st.sampled_from(["", "", "", "dies", "full", "ctrl-c"]),
        stop=STOPS,
        then=st.sampled_from(THEN),
    )
    def go_on(self, how: str, stop: int | str, then: tuple[str, ...]) -> None:
        job = self.measuring
        if job is None:
            return
        if how == "ctrl-c":
            job.interrupt()
        self._until(job, stop, job.go_on, {"dies": job.die, "full": full_disk}.get(how))
        if job.died_before is not None:
            self.daemon, self.then = None, [*then]

    @rule(is_killed=st.booleans())
    def end_measuring(self, is_killed: bool) -> None:
        job = self.measuring
        if job is None:
            return
        if is_killed:
            self.is_cut = True
            self._until(job, None, job.kill)
        else:
            self._until(job, None, job.go_on)

    def _runs(self, start: Invocation) -> None:
        if "night" not in start.argv:
            super()._runs(start)
            return
        begin_s = read_memory(self.ctx()).last_begin_s
        assert begin_s not in {self.skipped_s, *self.begun}, "it was to be skipped, or has been"
        self.begun.add(begin_s)
        if self.measuring is not None:
            done = self._beside(lambda ctx: run_night(ctx, confirm=lambda _: None))
            self.manager.end_main(start.unit, Ending(code=done.exit_code))
            return
        self._begin(
            lambda ctx: run_night(replace(ctx, own_unit=start.unit), confirm=lambda _: None),
            "starting the first",
            in_window=True,
        )

    @rule(undo=st.booleans())
    def skip(self, undo: bool) -> None:
        done = self.act(lambda ctx: skip_tonight(ctx, undo=undo), None)
        if not isinstance(done, TunerdError):
            self.skipped_s = None if undo else done.payload["skipped"]["begin_s"]

    # What happens

    @rule(days=st.sampled_from([-400.0, -0.1, 0.1, 400.0]))
    def set_clock(self, days: float) -> None:
        super().set_clock(days)
        self.begun.clear()  # an opening that is ahead again is had again
        self.until_s = inf

    @rule()
    def somebody_asks(self) -> None:
        address = Address("127.0.0.1", self.world.port)
        LlamaServer(address, self.world.clock).complete("go on", n_predict=8, timeout_s=9.0)

    @rule(is_used=st.sampled_from([False, False, True]))
    def somebody_computes(self, is_used: bool) -> None:
        other = GpuProcess(1, MiB(900), "compute", "train", None)
        self._show(processes=(other,) if is_used else ())

    def _show(self, **changed: Any) -> None:
        (card,) = self.gpu.read().gpus or ()
        self.gpu.show(replace(card, **changed))

    def _own(self, start: Invocation) -> Life:
        if POWER not in start.argv:
            return super()._own(start)
        return self._sets_power(start.argv[-2], Path(start.argv[-1]))

    def _sets_power(self, verb: str, path: Path) -> Life:
        """As the program does, of which the driver is not here."""
        record = Files().recall(PowerRecord, path)
        if record is not None and verb == "set":
            self._show(power_limit_w=record.given_w)
            return Life(on_end=lambda: self._power_goes_back(path))
        self._power_goes_back(path)
        return Life(ends_after_s=0.0)

    def _power_goes_back(self, path: Path) -> None:
        record, (card,) = Files().recall(PowerRecord, path), self.gpu.read().gpus or ()
        if record is None:
            return
        if card.power_limit_w == record.given_w:
            self._show(power_limit_w=record.before_w)
        Files().remove(path)

    @rule(how=st.sampled_from(["gone", "garbage", "back", "back"]))
    def store(self, how: str) -> None:
        path = self.world.paths.evidence
        kept = path.with_suffix(".kept")
        if how == "back" and kept.exists():
            path.unlink(missing_ok=True)
            kept.replace(path)
        elif how != "back" and path.exists() and not kept.exists() and self.measuring is None:
            path.replace(kept)
            if how == "garbage":
                path.write_bytes(b"x" * 9000)
        self.has_no_store = kept.exists()

    @rule(what=st.sampled_from(["fails", "regresses", "well"]))
    def engine(self, what: str) -> None:
        self.fails, self.regresses = what == "fails", what == "regresses"

    @rule(what=st.sampled_from(sorted(EDITS)))
    def edit_profile(self, what: str) -> None:
        self.profile.write_text(self.made.replace(*EDITS[what]))

    @rule(is_other=st.booleans())
    def replace_model(self, is_other: bool) -> None:
        fresh = self.model.with_suffix(".new")
        shutil.copy(_installed() / "tiny.gguf", fresh)
        if is_other:
            with fresh.open("ab") as file:
                file.write(bytes(64))
        fresh.replace(self.model)

    @rule(by_s=st.sampled_from([10.0, 600.0, 5000.0]))
    def time_passes(self, by_s: float) -> None:
        self.world.clock.advance(by_s)

    # What the owner relies on

    @invariant()
    def holds(self) -> None:
        super().holds()
        self.has_failed = True
        ctx, paths = self.ctx(), self.world.paths
        if not self.has_no_store:
            self._is_told(ctx)
        if not self.manager.leases() and not self.is_cut:
            assert [gpu.power_limit_w for gpu in self.gpu.read().gpus or ()] == [220.0]
            assert not paths.power.exists()
        if self.measuring is None and not self.is_cut:
            names = sorted(path.name for path in self.manager.runtime_unit_dir.iterdir())
            left = [
                name
                for name in names
                if name.startswith("tunerd-") and self.manager.state(name).is_active
            ]
            assert left == []
            assert not self.manager.leases()
            assert not any(map(is_locked, (paths.sweep_lock, paths.schedule_lock)))
            record = written_record(ctx)  # one that is owed waits for the unit to be mended
            assert record is None or record.is_owed
        if not self.is_cut and not is_locked(paths.lock):
            self._promotions(ctx)
        self.has_failed = False

    def _is_told(self, ctx: Context) -> None:
        """What `sweep` says is so."""
        shown, rows = sweep_status(ctx).payload, list_sweeps(ctx).payload["sweeps"]
        decided = show_sweep(ctx, None).payload["decided"] or {} if rows else {}
        if decided.get("what") == PROMOTED:
            assert ctx.generations.demand(decided["generation"]).ending.outcome is Outcome.SERVING
        running = [row["sweep"] for row in rows if row["state"] == "running"]
        assert running == ([] if shown["sweep"] is None else [shown["sweep"]])
        assert not running or self.manager.leases() or self.is_cut
        assert not self.manager.leases() or self.world.clock.monotonic_s() <= self.until_s
        if self.measuring is None and not self.is_cut:
            assert (shown["sweep"], shown["waits"]) == (None, None)

    def _promotions(self, ctx: Context) -> None:
        """Of what serves, why, and whether `plan` says the same."""
        standing, deployed = self.world.standing, ctx.deployed()
        for made in self._new_promotions(ctx):
            assert self.has_no_store or self._is_proved(ctx, made), f"{made.number} was not proved"
        if standing is None or deployed is None or deployed.unit_sha256 != sha256(standing):
            return
        tuned = read_tuned(ctx, "night")
        if deployed.reason == "promote":
            assert tuned is not None
            assert tuned.generation == deployed.number
            if not (self.has_no_store or self.measuring):
                decided = show_sweep(ctx, tuned.sweep).payload["decided"] or {}
                told = decided.get("what"), decided.get("generation")
                assert told == (PROMOTED, deployed.number)
        if tuned is not None and tuned.generation is not None:
            entry = ctx.generations.demand(tuned.generation)
            assert (entry.generation.reason, entry.ending.outcome) == ("promote", Outcome.SERVING)
        now = standing, self._files(), tuned, deployed.number
        is_unchanged = self.files.get(standing) == self._files() and not self.is_laid_over
        if is_unchanged and self.planned != now and deployed.profile == "night":
            plan = make_plan(ctx, request_again(deployed))
            assert plan.unit_text.encode() == standing, plan.diff
            self.planned = now

    def _new_promotions(self, ctx: Context) -> list[Generation]:
        found = [
            one.generation
            for one in ctx.generations.entries(UNIT)
            if one.generation.reason == "promote"
        ]
        new = [one for one in found if one.number not in self.proved]
        self.proved |= {one.number for one in new}
        return new

    def _is_proved(self, ctx: Context, made: Generation) -> bool:
        """Whether a sweep of what it replaced found its flags faster, by the same build and model."""
        replaced = sha256(ctx.generations.replaced_text(made.number))
        with reading(ctx) as store:
            found = (
                []
                if store is None
                else [find_sweep(ctx, store, one.number) for one in store.runs(kind=KIND)]
            )
        for one in found:
            if one.verdict is None or one.verdict.outcome != "promote":
                continue
            begun = ctx.generations.read(int(one.plan["generation"]))
            arm = one.run.record.arm(str(read(Arm, one.verdict.details["arm"])))
            if begun is None or arm is None or begun.generation.unit_sha256 != replaced:
                continue
            of_arm, of_made = arm.fingerprint, made.model_identity or {}
            is_same = of_arm.engine_sha256 == made.engine_sha256
            if is_same and of_arm.model_sha256 == of_made["sha256"]:
                return arm.argv == made.argv and "--spec-draft-n-max" not in made.argv
        return False
