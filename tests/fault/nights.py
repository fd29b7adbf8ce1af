"""A machine lives through nights: sweeps and promotions, and what its owner, kills and boots do amid them, in any order.

A night is a command that stands still at any of its effects while other things happen; its figures are made up
by a stand-in that drafts in vain, so that no speculation wins.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pwd
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests.fault.fuse import Fuse
from tests.fault.histories import CUTS, SELDOM, THEN, Cut, Histories, Wish, is_measuring, went_well
from tests.fault.world import UNIT
from tests.support.fake_gpu import FakeGpuReader, rtx_4070_super
from tests.support.fake_llama.behaviour import Behaviour
from tests.support.fakes import Invocation, Life
from tests.support.stand_in import flags_of, install
from tests.support.sweep_box import PROFILE, SPEED, WORKLOAD, prove
from tunerd.app import Context
from tunerd.engine.choice import PlanRequest, request_again
from tunerd.engine.server import Address, LlamaServer
from tunerd.errors import TunerdError
from tunerd.jobs import END, Tell, folder_of
from tunerd.machine.facts import GpuProcess
from tunerd.machine.files import Files, is_locked
from tunerd.measure.compare import CompareRequest, run_compare
from tunerd.measure.pairs import Limits
from tunerd.measure.store import reading
from tunerd.production.apply import apply
from tunerd.production.measurement import written_record
from tunerd.production.plan import make_plan
from tunerd.production.power import PowerRecord
from tunerd.profile.arm import Arm
from tunerd.profile.files import read_tuned
from tunerd.records import read
from tunerd.result import error_json
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
WHERE = st.integers(0, 600) | st.sampled_from(
    ["starting the first", "ending the measurement", "the sweep yielded", "writing the intent", "measuring once more"]
)  # fmt: skip
STOPS = st.builds(Cut, WHERE)
POWER = "tunerd.production.power"
# Who serves; never root.
USER = pwd.getpwuid(os.geteuid()).pw_name if os.geteuid() else "nobody"
_DAY_S, _CLOSES_S = 86400.0, 15 * 3600.0


@functools.cache
def _installed() -> Path:
    """A folder with the engine, a model, and what is found out of both once."""
    folder = Path(tempfile.mkdtemp(prefix="tunerd-nights-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    write(design(SHAPES["tiny"]), folder / "tiny.gguf")
    engine = install(folder / "engine", **SPEED)
    text = engine.program.read_text()  # whether it takes its arguments: it does, in no time
    quick = 'case "$*" in *--model*) echo no such model >&2; exit 1;; esac\nexec'
    engine.program.write_text(text.replace("\nexec", f"\n{quick}", 1))
    return folder


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
        self.decided: list[bytes | None] = []
        self.fails = self.regresses = self.has_no_store = False
        self.skipped_s: float | None = None
        self.alive = contextlib.ExitStack()
        self.night: Tell | None = None
        self.begun, self.proved, self.until_s = set[float | None](), set[int](), inf
        self.files: dict[bytes, tuple[str, int]] = {}
        self.planned: object = None

    def _serve(self, start: Invocation) -> Life:
        is_own = start.unit == UNIT
        if not is_own and self.fails:
            self.fails = False
            return self.dies(start)
        told = dict(self.behaviour)
        if is_own and self.regresses and "--spec-draft-n-max" not in start.argv:
            told["tg_tok_s"] = 40.0
        return self.world.serve_in_a_process(Behaviour(needs_model=False, **told), start)

    # How it is

    def ctx(self, fuse: Fuse | None = None) -> Context:
        made = replace(super().ctx(fuse), settings=self.settings, gpu=self.gpu)
        return replace(made, environment={"PATH": os.environ["PATH"]})

    def act(self, action: Callable[[Context], Any], cut: Cut | None) -> Any:
        done = super().act(action, cut)
        self._learn()
        return done

    def _learn(self) -> None:
        """Whole units are also those of a profile."""
        generations = self.ctx().generations
        for number in generations.numbers():
            text = generations.unit_text(number)
            if text is not None and str(self.program).encode() in text:
                self.files.setdefault(text, self._files())
                self.good.add(text)

    def _files(self) -> tuple[str, int]:
        """What a plan goes by, and its owner may change."""
        return self.profile.read_text(), self.model.stat().st_ino

    def decides(self, before: bytes | None) -> None:
        """A sweep that has not begun to measure begins from it."""
        if self.world.standing != before and is_locked(self.world.paths.sweep_lock):
            self.decided = [self.world.standing]

    # tunerd

    @initialize(begins=st.sampled_from([*["deployed"] * 6, "by hand", "nothing"]),
                policy=st.sampled_from(["auto", "auto", "ask"]), stop=STOPS)  # fmt: skip
    def begin(self, begins: str, policy: str, stop: Cut) -> None:
        config = self.world.paths.config_dir
        text = SETTINGS.format(program=self.program, promote=policy, user=USER)
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
        before, request = self.world.standing, PlanRequest("night", options, with_tuned=with_tuned)
        if went_well(self.swaps(lambda ctx: apply(ctx, request, drain=True), cut)):
            self.wish = Wish.SERVES
            self.decides(before)

    @rule(cut=SELDOM, wants=st.booleans())
    def decide(self, cut: Cut | None, wants: bool) -> None:
        """What the newest sweep proposes."""
        before = self.world.standing
        if wants:
            self._promotes(lambda ctx: promote(ctx, None, drain=False), cut)
            self.decides(before)
        else:
            self.act(lambda ctx: decline(ctx, None, why=None), cut)

    def _promotes(self, action: Callable[[Context], Any], cut: Cut | None) -> Any:
        """It may have swapped twice, and have failed after it."""
        before = self.world.standing
        done = self.swaps(action, cut)
        if self.world.standing != before:
            self.replaced, self.deployed = None, None
        return done

    # Nights

    @rule(what=st.sampled_from(["sweep", "sweep", "in window", "power", "compare"]), stop=STOPS)
    def measure(self, what: str, stop: Cut) -> None:
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
        is_held = is_locked(self.world.paths.measure_lock)
        done = self._promotes(act, None)
        assert not is_held or isinstance(done, TunerdError), "two at once"
        return done

    def _begin(self, act: Callable[[Context], Any], stop: Cut, *, in_window: bool) -> None:
        clock, self.decided = self.world.clock, []
        left_s = _CLOSES_S - clock.now_s() % _DAY_S
        self.until_s = clock.monotonic_s() + left_s if in_window and left_s > 0 else inf
        self._begins(act, stop)

    def _goes(self, go: Callable[[], None], cut: Cut | None) -> None:
        job, before, could_go_back = self.measuring, self.world.standing, self.can_go_back
        number = self.ctx().generations.next_number()
        super()._goes(go, cut)
        assert job is not None
        self._learn()
        now, is_cut = self.world.standing, bool(job.fuse.burnt) or job.died_before is not None
        if now != before:
            is_one = self.ctx().generations.next_number() == number + 1 and not is_cut
            self.replaced, self.deployed = ([before], now) if is_one else (None, None)
            self.is_lost = False
        assert now == before or before not in self.decided, "what its owner decided was undone"
        if job.error is not None:
            self._may_be_down(could_go_back)
        sweep = None if job.found is None else job.found.payload.get("sweep")
        if sweep is not None and not (is_cut or self.has_no_store):
            assert show_sweep(self.ctx(), sweep).payload["state"] in {"done", "stopped"}
        if job.is_over:
            self._night_ends(job.found, is_cut=is_cut)

    @is_measuring
    @rule(cut=st.builds(Cut, WHERE, st.sampled_from(["", "", "", "dies", "full", "ctrl-c"]), THEN))
    def go_on(self, cut: Cut) -> None:
        job = self.measuring
        assert job is not None
        job.is_interrupted = cut.how == "ctrl-c"
        self._goes(job.go_on, cut)

    def _runs(self, start: Invocation) -> None:
        folder, number = folder_of(self.ctx()), int(start.argv[-1]) if "job" in start.argv else 0
        request = folder.request(number)
        if request is None or request.kind != "sweep night":
            super()._runs(start)
            return
        tell = self.alive.enter_context(folder.writing(number))
        self.alive.callback(self.manager.end_main, start.unit, Ending(code=0))
        self.night = tell
        begin_s = read_memory(self.ctx()).last_begin_s
        assert begin_s not in {self.skipped_s, *self.begun}, "it was to be skipped, or has been"
        self.begun.add(begin_s)

        def night(ctx: Context) -> Any:
            return run_night(replace(ctx, own_unit=start.unit), confirm=lambda _: None)

        if self.measuring is None:
            self._begin(night, Cut("starting the first"), in_window=True)
        else:
            self._night_ends(self._beside(night), is_cut=False)

    def _night_ends(self, done: Any, *, is_cut: bool) -> None:
        """Its process is gone; one that was not killed has told what it came to."""
        tell, self.night = self.night, None
        if tell is not None and done is not None and not is_cut:
            failed = isinstance(done, TunerdError)
            told = error_json(done, "sweep night") if failed else done.to_json()
            tell({"event": END, "exit_code": done.exit_code, "result": told})
        self.alive.close()

    @rule(undo=st.booleans())
    def skip(self, undo: bool) -> None:
        if went_well(done := self.act(lambda ctx: skip_tonight(ctx, undo=undo), None)):
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
        """The program that sets the power limit does so here, where its driver is not."""
        if POWER not in start.argv:
            return super()._own(start)
        verb, path = start.argv[-2], Path(start.argv[-1])

        def gives(*, back: bool) -> None:
            if (record := Files().recall(PowerRecord, path)) is None:
                return
            (card,) = self.gpu.read().gpus or ()
            if not back:
                self._show(power_limit_w=record.given_w)
            elif card.power_limit_w == record.given_w:
                self._show(power_limit_w=record.before_w)
            if back:
                Files().remove(path)

        gives(back=verb != "set")
        return Life(on_end=lambda: gives(back=True)) if verb == "set" else Life(ends_after_s=0.0)

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
        fresh.write_bytes((_installed() / "tiny.gguf").read_bytes() + bytes(64 * is_other))
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
            names = sorted(path.name for path in self.manager.runtime_unit_dir.glob("tunerd-*"))
            assert [name for name in names if self.manager.state(name).is_active] == []
            assert not self.manager.leases()
            assert not any(map(is_locked, (paths.sweep_lock, paths.schedule_lock)))
            record = written_record(ctx)  # one that is owed waits for the unit to be mended
            assert record is None or record.is_owed
        if not self.is_cut and not is_locked(paths.lock):
            self._are_proved(ctx)
            self._is_planned(ctx)
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

    def _is_planned(self, ctx: Context) -> None:
        """What serves is there for the reason that it says, and `plan` says the same."""
        standing, deployed = self.world.standing, ctx.deployed()
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

    def _are_proved(self, ctx: Context) -> None:
        """Whatever was promoted since."""
        for entry in ctx.generations.entries(UNIT):
            made = entry.generation
            if made.reason == "promote" and made.number not in self.proved:
                assert self.has_no_store or self._is_proved(ctx, made), made.number
                self.proved.add(made.number)

    def _is_proved(self, ctx: Context, made: Generation) -> bool:
        """Whether a sweep of what it replaced found its flags faster, by the same build and model."""
        replaced = sha256(ctx.generations.replaced_text(made.number))
        with reading(ctx) as store:
            kept = () if store is None else store.runs(kind=KIND)
            found = [find_sweep(ctx, store, one.number) for one in kept]
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
