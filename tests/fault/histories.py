"""A machine lives through what its owner, tunerd, the daemon, kills and boots do to it, in any order.

Rules are what may happen; `holds` is what its owner relies on after each of them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fault.fuse import Fuse, Step, full_disk, let_go, let_go_of_names
from tests.fault.fuse import Life as Process
from tests.fault.world import BROKEN, ENGINE, UNIT, World, in_memory
from tests.support.fakes import Invocation, Life
from tests.support.fuzz import is_asked_for, often
from tunerd.app import Context, data_dir
from tunerd.errors import DeployError, ServiceError, Stranded, TunerdError
from tunerd.machine.files import is_locked
from tunerd.machine.process import Interrupts
from tunerd.production.journal import read_record
from tunerd.production.lease import hold
from tunerd.production.measurement import remove_unit_files
from tunerd.production.probation import ProbationRecord, read_probation
from tunerd.production.recover import changing, recover
from tunerd.production.rollback import rollback
from tunerd.production.status import status, verify
from tunerd.production.swap import swap
from tunerd.result import ActionResult, Progress
from tunerd.tryout.local_service import Ending
from tunerd.units.generations import Outcome
from tunerd.units.manager import candidate_unit, is_candidate, lease_of
from tunerd.units.systemd import Notifier
from tunerd.watch.daemon import Nights, Recovery
from tunerd.watch.guarding import Guarding
from tunerd.watch.probation import take_back
from tunerd.watch.watcher import Watcher
from tunerd.words import sha256

GONE = "/bin/not-there"
KINDS = {ENGINE: "", BROKEN: "-dies", GONE: "-gone"}
OOM = "cudaMalloc failed: out of memory"
BREAKS = f"[Service]\nExecStart=\nExecStart={BROKEN}\n"
DOCUMENTED = {1, 2, 3, 4, 75, 130}
DAY_S = 86400.0
# Longer than a lease waits for production's port.
_RETURNS_S = 130.0
_PATIENCE_S = 120.0


class Wish(Enum):
    """What the owner expects of the server; UNKNOWN where either is right, or the owner broke it."""

    SERVES = auto()
    RESTS = auto()
    UNKNOWN = auto()


@dataclass(frozen=True)
class Cut:
    """After so many effects, or when it tells this, a command `dies` and `then` follows, or the disk is `full`.

    By any other `how` it stands still there.
    """

    at: int | str
    how: str = ""
    then: tuple[str, ...] = ()


THEN = st.sampled_from([
    (), ("stop", "daemon"), ("boot", "stop", "daemon"), ("boot", "daemon"), ("restart", "daemon"),
])  # fmt: skip
CUTS = st.none() | st.builds(
    Cut, st.integers(0, 90) | st.integers(36, 60), st.sampled_from(["dies", "full"]), THEN
)
SELDOM = st.none() | st.none() | CUTS


@dataclass(frozen=True)
class Shown:
    """What is about to be deployed."""

    diff: str


class Job(Process):
    """A command that takes long: it stands still where it is told to while other things happen."""

    def __init__(self, world: World) -> None:
        super().__init__(world.paths.lock)
        self.fuse, self.is_over, self.found, self.is_interrupted = Fuse(), False, None, False
        self._goes_on, self._world, self._stops_at = threading.Event(), world, ""

    def stops(self, cut: Cut | None) -> None:
        """Where it is cut from now on, if anywhere."""
        at, how = (-1, "") if cut is None else (cut.at, cut.how)
        self._stops_at, n = (at, -1) if isinstance(at, str) else ("", at)
        self.fuse.burns_in(n, {"dies": self.die, "full": full_disk}.get(how, self.stand))

    def begin(self, act: Callable[[], Any]) -> None:
        """Until it stands still, ends or dies."""

        def run() -> None:
            try:
                self.found = act()
            finally:
                self.is_over = True

        self.live(run)

    def stand(self, _step: Step | None = None) -> None:
        """Stand still; for the command itself, or its fuse."""
        self.fuse.burnt.clear()
        self.over.set()
        self._goes_on.wait()
        self._goes_on.clear()
        if self.is_interrupted:
            self.is_interrupted = False
            interrupt(sys._getframe())

    def hears(self, told: Progress) -> None:
        """What the command tells of its progress."""
        if self._stops_at and told.text.startswith(self._stops_at):
            self._stops_at = ""
            self.stand()

    def go_on(self) -> None:
        """Until it stands still again, ends or dies."""
        self.over.clear()
        self._goes_on.set()
        assert self.over.wait(_PATIENCE_S), "it hangs"

    def kill(self) -> None:
        """What the kernel and the service manager do at its death."""
        self.is_over, paths = True, self._world.paths
        let_go(paths.lock, paths.measure_lock, paths.sweep_lock, paths.schedule_lock)
        let_go_of_names("tunerd-card-")
        for lease in self._world.manager.leases():
            self._world.manager.drop_lease(lease)
        self._world.clock.advance(_RETURNS_S)


def interrupt(frame: FrameType | None) -> None:
    """What Ctrl-C does in the main thread, which a thread of a test is not: whoever holds it back has it later."""
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, Interrupts):
                value._on_signal(signal.SIGINT, None)
                return
        frame = frame.f_back
    raise KeyboardInterrupt


def went_well(done: Any) -> bool:
    """Whether a command was neither killed nor failed."""
    return done is not None and not isinstance(done, TunerdError)


is_measuring = precondition(lambda self: self.measuring is not None)


class Histories(RuleBasedStateMachine):
    """One machine. `is_cut` from a kill or a full disk on until the daemon's next round, or `recover`, went well."""

    def __init__(self) -> None:
        super().__init__()
        self.all = contextlib.ExitStack()
        self.world = World(self.all.enter_context(in_memory(Path())))
        self.all.callback(self.world.close)
        self.manager = self.world.manager
        self.manager.programs[sys.executable] = self._own
        self.serve, self.has_no_card = {ENGINE: self.manager.programs[ENGINE]}, False
        self.own, self.then = list[Invocation](), list[str]()
        self.wish = Wish.UNKNOWN
        self.is_cut = self.is_lost = self.has_failed = False
        self.good, self.bad = set[bytes | None](), set[bytes | None]()
        self.measuring: Job | None = None
        self.daemon: Callable[[], None] | None = None
        self.newest = self.n_edits = 0
        self.deployed: bytes | None = None
        self.replaced: list[bytes | None] | None = []
        self.drop_in = self.world.unit_path.with_name(f"{UNIT}.d") / "mine.conf"

    def teardown(self) -> None:
        """Whatever was cut short, the daemon's next round mends it."""
        with self.all:
            if not self.has_failed:
                if self.has_no_card:
                    self.lose_card()
                if self.measuring is not None:
                    self.end_measuring(is_killed=True)
                self.daemon_looks(None, 60.0)
                self.holds()
            if self.measuring is not None:
                self.measuring.kill()

    # How it is

    def text(self, alias: str, program: str = ENGINE) -> bytes:
        """A unit as tunerd writes it."""
        made = self.world.text(alias, program=program, service="Restart=on-failure\nRestartSec=5")
        made = made.replace(b"Sec=300", b"Sec=900").replace(b"Burst=1", b"Burst=5")
        (self.good if program == ENGINE else self.bad).add(made)
        return made

    def _own(self, start: Invocation) -> Life:
        self.own.append(start)
        return Life()

    def dies(self, _start: Invocation) -> Life:
        return Life(prints=(OOM,), ends_after_s=0.5, ending=Ending(code=1))

    def ctx(self, fuse: Fuse | None = None) -> Context:
        return replace(self.world.context(fuse, asks=True), data_dir=data_dir())

    def says(self, alias: str) -> bool:
        """Whether what stands starts a server of this name."""
        words = (self.world.standing or b"").decode().split()
        return ("--alias", alias) in pairwise(words)

    @property
    def is_laid_over(self) -> bool:
        return self.drop_in.exists() and self.drop_in.read_text() == BREAKS

    @property
    def can_start(self) -> bool:
        """Whether what stands can, as far as its owner did not break it."""
        return not self.is_laid_over and self.world.standing in self.good

    @property
    def can_go_back(self) -> bool:
        return not self.is_laid_over and self.world.standing in {None, *self.good}

    def act(self, action: Callable[[Context], Any], cut: Cut | None) -> Any:
        """What a command by a process of its own gives, or the error that it ends with; None where it was killed."""
        job = Job(self.world)
        job.stops(cut)
        job.begin(lambda: action(self.ctx(job.fuse)))
        self.is_cut |= bool(job.fuse.burnt)
        if job.died_before is not None:
            self._died(cut)
            return None
        self._is_documented(job.error)
        return job.error or job.found

    def _died(self, cut: Cut | None) -> None:
        self.daemon, self.then = None, [] if cut is None else [*cut.then]

    def _is_documented(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, TunerdError):
            raise error
        assert error is None or error.exit_code in DOCUMENTED
        self.is_cut |= isinstance(error, Stranded)

    def swaps(self, action: Callable[[Context], Any], cut: Cut | None) -> Any:
        """As `act`; what it did to the server is noted."""
        before, could_go_back = self.world.standing, self.can_go_back
        done = self.act(action, cut)
        now, has_failed = self.world.standing, isinstance(done, TunerdError)
        if done is None and (self.wish is Wish.RESTS or not could_go_back):
            self.wish = Wish.UNKNOWN
        if has_failed:
            self._may_be_down(could_go_back)
        if done is None or (self.is_cut and not has_failed):
            self.replaced = None
        elif now != before and not has_failed:
            self.replaced, self.is_lost = [before], False
        if not has_failed:
            self.deployed = now
        return done

    def decides(self, before: bytes | None) -> None:
        """The owner may have had something else stand than before; of use to nights."""

    def _may_be_down(self, could_go_back: bool) -> None:
        """A swap has failed: the way back may have led to what its owner had broken."""
        if not could_go_back and self.wish is Wish.SERVES:
            self.wish = Wish.UNKNOWN

    def _way_back(self) -> list[bytes | None] | None:
        """What served before, if anything; None where that cannot be known."""
        now = self.world.standing
        if self.replaced is None or self.is_cut or self.is_lost or self.is_laid_over:
            return None
        if is_locked(self.world.paths.lock):
            return None
        if self.deployed not in {None, now}:
            return [self.deployed]
        return None if self.replaced == [now] else self.replaced

    # tunerd

    @initialize(begins=st.sampled_from(["nothing", "by hand", "stopped", "packaged", "deployed"]))
    def begin(self, begins: str) -> None:
        if begins in {"by hand", "stopped"}:
            self.world.put(self.text("hand"), starts=begins == "by hand")
        elif begins == "packaged":
            self.good.add(None)
            (self.manager.runtime_unit_dir / UNIT).write_bytes(self.text("packaged"))
            self.manager.reload()
            self.manager.enable(UNIT)
            self.manager.start(UNIT)
        elif begins == "deployed":
            self.apply("a", ENGINE, "apply", None)
        self.wish = Wish.RESTS if begins in {"nothing", "stopped"} else Wish.SERVES

    @rule(alias=st.sampled_from("abc"), program=st.sampled_from([ENGINE, *KINDS]),
          reason=st.sampled_from(["apply", "promote"]), cut=CUTS)  # fmt: skip
    def apply(self, alias: str, program: str, reason: str, cut: Cut | None) -> None:
        alias += KINDS[program]
        text = self.text(alias, program)

        def deploy(ctx: Context) -> Any:
            with changing(ctx, reason, lambda: Shown("x"), ask=lambda _: None,
                          confirm=lambda _: None, by="x", messages=[]):  # fmt: skip
                request = self.world.request(text, alias=alias)
                made = replace(request.generation, reason=reason)
                ran = ctx.services.state(UNIT).runs
                return swap(ctx, replace(request, generation=made, ran=ran, wants_probation=True))

        if went_well(self.swaps(deploy, cut)):
            assert program == ENGINE or self.is_laid_over
            self.wish = Wish.SERVES

    @rule(nth=st.none() | st.integers(0, 5), cut=SELDOM)
    def roll_back(self, nth: int | None, cut: Cut | None) -> None:
        generations = self.ctx().generations
        names = [path.name for path in self.world.backups()] + [*map(str, generations.numbers())]
        to = None if nth is None or not names else names[nth % len(names)]
        was_cut, before, way_back = self.is_cut, self.world.standing, self._way_back()
        may_remove = any(generations.replaced_text(n) is None for n in generations.numbers())
        done = self.swaps(lambda ctx: rollback(ctx, to=to, drain=True, ask=lambda _: None), cut)
        if to is None and way_back is not None and cut is None and not self.has_no_card:
            leads = bool(way_back) and way_back[0] in {None, *self.good}
            assert went_well(done) is leads, done
            assert leads or way_back or isinstance(done, DeployError)
            assert not leads or [self.world.standing] == way_back
        if went_well(done):
            assert was_cut or self.world.standing != before
            self.wish = Wish.SERVES if done.payload["serving"] else Wish.RESTS
        elif done is None and may_remove:
            self.wish = Wish.UNKNOWN
        self.decides(before)

    @rule(cut=SELDOM)
    def recover(self, cut: Cut | None) -> None:
        if went_well(self.act(recover, cut)):
            self.is_cut = cut is not None

    @rule(cut=SELDOM)
    def take_back(self, cut: Cut | None) -> None:
        entry = self.ctx().generations.serving(UNIT)
        record = entry and read_probation(self.ctx(), entry.generation.number)
        if isinstance(record, ProbationRecord) and record.is_open:
            self._take_back(record.generation, "slow", cut)

    def _take_back(self, number: int, reason: str, cut: Cut | None) -> None:
        before = self.world.standing

        def go_back(ctx: Context) -> Any:
            done = take_back(ctx, number, reason, sweep=None)
            if self.world.standing == before:
                raise DeployError("it stands")
            return done

        self.swaps(go_back, cut)
        if self.world.standing is None and self.wish is Wish.SERVES and None not in self.good:
            self.wish = Wish.UNKNOWN

    @rule(cut=SELDOM, after_s=st.sampled_from([0.0, 60.0, 1800.0]))
    def daemon_looks(self, cut: Cut | None, after_s: float) -> None:
        if cut is not None:
            self.daemon = None

        def look(ctx: Context) -> bool:
            looks = self.daemon or _daemon(ctx)
            if cut is None:
                self.daemon = looks
            looks()
            return True

        for _ in range(3):
            self.world.clock.advance(after_s / 3)
            done = self.act(look, cut)
            while self.own:
                self._runs(self.own.pop(0))
        if any(self.world.paths.journal_dir.glob("*.json")):
            is_excused = self.has_no_card or not self.can_start or cut is not None
            assert is_excused or self.wish is not Wish.SERVES, "it is not brought back"
        elif cut is None and went_well(done):
            self.is_cut = False

    def _runs(self, start: Invocation) -> None:
        """What the daemon begins in a unit of its own."""
        words = list(start.argv)
        if "take-back" in words:
            reason = words[words.index("--reason") + 1]
            self._take_back(int(words[words.index("take-back") + 1]), reason, None)
        self.manager.end_main(start.unit, Ending(code=0))

    # Measurements

    @precondition(lambda self: self.measuring is None)
    @rule(cut=SELDOM, budget_s=st.sampled_from([60.0, 3600.0]))
    def measure(self, cut: Cut | None, budget_s: float) -> None:
        def hold_it(ctx: Context) -> None:
            assert self.measuring is not None
            with hold(ctx, purpose="bench", budget_s=budget_s):
                self.measuring.stand()
                for unit in filter(is_candidate, self.manager.service_units()):
                    self.manager.stop(unit)
                    remove_unit_files(self.ctx(), unit)
                self.manager.reload()

        self._begins(hold_it, cut)

    def _begins(self, act: Callable[[Context], Any], cut: Cut | None) -> None:
        if not self.can_start and not self.manager.state(UNIT).needs_reload:
            # what was read anew is seen by times of files, which are the real clock's
            self.wish = Wish.UNKNOWN
        job = self.measuring = Job(self.world)
        ctx = replace(self.ctx(job.fuse), progress=job.hears)
        self._goes(lambda: job.begin(lambda: act(ctx)), cut)

    def _goes(self, go: Callable[[], None], cut: Cut | None) -> None:
        """The measurement begins, goes on or is killed, until it stands still, ends or dies."""
        job = self.measuring
        assert job is not None
        job.stops(cut)
        go()
        if job.died_before is not None:
            job.kill()
            self._died(cut)
        if not isinstance(job.error, KeyboardInterrupt):
            self._is_documented(job.error)
        self.is_cut |= bool(job.fuse.burnt) or job.died_before is not None
        self.measuring = None if job.is_over else job

    @is_measuring
    @rule()
    def candidate(self) -> None:
        for lease in self.manager.leases():
            unit = candidate_unit(lease.spec.id, 1)
            bound = f"[Unit]\nBindsTo={lease.spec.unit}".encode()
            text = self.world.text("candidate").replace(b"[Unit]", bound)
            (self.manager.runtime_unit_dir / unit).write_bytes(text)
            self.manager.reload()
            with contextlib.suppress(ServiceError):
                self.manager.start_bound(unit)

    @is_measuring
    @rule(is_killed=st.booleans())
    def end_measuring(self, is_killed: bool) -> None:
        job = self.measuring
        assert job is not None
        self.is_cut |= is_killed
        self._goes(job.kill if is_killed else job.go_on, None)

    # The owner

    @rule(verb=st.sampled_from(["stop", "start", "restart", "enable", "disable", "reset_failed"]))
    def systemctl(self, verb: str) -> None:
        before, record, is_done = self.manager.state(UNIT), read_record(self.ctx()), True
        try:
            getattr(self.manager, verb)(UNIT)
        except ServiceError:
            is_done = False
        if verb == "stop":
            may_be_ours = record is not None and record.old_invocation == before.invocation_id
            says_nothing = self.is_cut and not before.runs  # to who brings it back
            is_open = may_be_ours or says_nothing or bool(self.manager.leases())
            self.wish = Wish.UNKNOWN if is_open else Wish.RESTS
        elif verb == "restart" or (verb == "start" and not before.is_active):
            self.world.clock.advance(3.0)
            self.wish = Wish.SERVES if is_done and self.can_start else Wish.UNKNOWN

    @rule(what=st.sampled_from(["good", "dies", "nonsense", "removed", "laid over", "laid over, breaks", "bare"]),
          then=st.sampled_from(["", "reload", "restart"]))  # fmt: skip
    def edit(self, what: str, then: str) -> None:
        self.n_edits += 1
        path, before = self.world.unit_path, self.world.standing
        if what in {"good", "dies"}:
            path.write_bytes(self.text(f"hand{self.n_edits}", ENGINE if what == "good" else BROKEN))
        elif what == "nonsense":
            path.write_bytes(b"[Service\nExecStart\n")
            self.bad.add(path.read_bytes())
        elif what == "removed":
            path.unlink(missing_ok=True)
        elif what == "bare":
            self.drop_in.unlink(missing_ok=True)
        else:
            self.drop_in.parent.mkdir(exist_ok=True)
            self.drop_in.write_text(BREAKS if "breaks" in what else "[Service]\nEnvironment=A=1\n")
        if then:
            self.manager.reload()
        if then == "restart":
            self.systemctl("restart")
        if self.measuring is not None and not self.can_start:
            self.wish = Wish.UNKNOWN  # it is what starts afterwards
        self.decides(before)

    @precondition(lambda self: not (self.is_cut and self.is_lost))
    @rule(what=st.sampled_from(["backups", "newest", "oldest", "all"]))
    def delete(self, what: str) -> None:
        numbers = self.ctx().generations.numbers()
        chosen = {"newest": numbers[:1], "oldest": numbers[-1:], "all": numbers}.get(what, ())
        for number in chosen:
            shutil.rmtree(self.world.paths.generations_dir / f"{number:06d}")
        for path in self.world.backups() if what == "backups" else ():
            path.unlink()
        self.is_lost, self.newest = True, 0

    @rule()
    def boot(self) -> None:
        is_enabled = self.manager.state(UNIT).is_enabled
        if self.measuring is not None:
            self.measuring.kill()
            self.measuring, self.is_cut = None, True
        self.world.reboot()
        shutil.rmtree(self.world.paths.runtime_dir, ignore_errors=True)
        for path in self.world.paths.state_dir.glob("probation/*.json"):
            record = json.loads(path.read_text()) | {"boot_id": "the boot before"}
            path.write_text(json.dumps(record))
        self.daemon = None
        self.own.clear()
        self.world.clock.advance(30.0)
        is_sure = self.can_start and is_enabled
        if is_sure and (self.wish is Wish.SERVES or not self.is_cut):
            self.wish = Wish.SERVES
        else:
            self.wish = Wish.UNKNOWN if self.is_cut or is_enabled else Wish.RESTS

    @rule(days=st.sampled_from([-400.0, -0.1, 0.1, 400.0]))
    def set_clock(self, days: float) -> None:
        self.world.clock.set_wall(self.world.clock.now_s() + days * DAY_S)

    @rule(how=st.sampled_from([Ending(code=1), Ending(signal=9), Ending(code=0)]))
    def server_dies(self, how: Ending) -> None:
        if not self.manager.state(UNIT).is_active:
            return
        self.manager.print_line(UNIT, OOM)
        self.manager.end_main(UNIT, how)
        self.world.clock.advance(20.0)
        if not (self.has_no_card or (self.manager.state(UNIT).runs and self.can_start)):
            self.wish = Wish.UNKNOWN

    @rule()
    def lose_card(self) -> None:
        """No server starts without it; once it is back, what was deployed comes back by itself."""
        self.has_no_card = not self.has_no_card
        if self.has_no_card:
            self.manager.programs |= dict.fromkeys(self.serve, self.dies)
            self.server_dies(Ending(code=1))
            return
        self.manager.programs |= self.serve
        entry, standing = self.ctx().generations.serving(UNIT), sha256(self.world.standing)
        is_deployed = entry is not None and entry.generation.unit_sha256 == standing
        if not (is_deployed and self.manager.state(UNIT).is_enabled):
            self.wish = Wish.UNKNOWN
        for _ in range(8):
            self.daemon_looks(None, 1800.0)

    # What the owner relies on

    @invariant()
    def holds(self) -> None:
        self.has_failed = True
        while self.then:
            if (then := self.then.pop(0)) == "daemon":
                self.daemon_looks(None, 60.0)
            elif then == "boot":
                self.boot()
            else:
                self.systemctl(then)
        ctx, paths = self.ctx(), self.world.paths
        shown, checked, newest = status(ctx), verify(ctx), max(ctx.generations.numbers(), default=0)
        assert (shown.exit_code, checked.exit_code in {0, 1, 6}) == (0, True)
        assert newest >= self.newest
        self.newest = newest
        is_amid = is_locked(paths.lock)
        assert self.measuring or not (is_amid or is_locked(paths.measure_lock))
        if not (self.is_cut or self.has_no_card or is_amid or self.manager.leases()):
            self._is_as_wished(shown, checked)
            assert self.world.leftovers() == []
            assert Outcome.RUNNING not in self.world.outcomes()
            names = [path.name for path in self.manager.runtime_unit_dir.iterdir()]
            left = [name for name in names if lease_of(name.removesuffix(".d"))]
            assert self.measuring or left == []
        self.has_failed = False

    def _is_as_wished(self, shown: ActionResult, checked: ActionResult) -> None:
        """What `status` and `verify` say of the server is so too."""
        alias, standing = self.world.serving_alias(), self.world.standing
        assert standing in {None, *self.good, *self.bad}, f"half a unit stands: {standing!r}"
        state = self.manager.state(UNIT)
        assert self.wish is not Wish.SERVES or alias not in {None, "candidate"}, state
        assert self.wish is not Wish.RESTS or alias is None, f"{alias} serves, which was stopped"
        assert (shown.payload["healthy"] is True) is (alias is not None), shown.payload
        is_as_said = alias is not None and self.says(alias)
        may_be_gone = standing is None and self.replaced is None  # its last swap was killed
        is_right = is_as_said or self.deployed is None or may_be_gone
        assert checked.exit_code or is_right, (alias, standing)


def lives(sample: int, *, steps: int) -> settings:
    """So many histories of so many events, or as many as are asked for.

    Of a sample one that fails is shown as it was found: shortening it takes minutes.
    """
    phases = [Phase.generate, Phase.shrink] if is_asked_for() else [Phase.generate]
    return settings(often(sample), stateful_step_count=steps, phases=phases)


def _daemon(ctx: Context) -> Callable[[], None]:
    """A daemon that has just begun, and its next look."""
    notifier, watcher = Notifier({}), Watcher(ctx)
    mends = Recovery(ctx, notifier, lambda _: None)
    guards = Guarding(ctx, notifier, lambda _: None, watcher.server)
    nights = Nights(ctx, lambda _: None)
    mends.recover()

    def look() -> None:
        mends.look()
        guards.after(watcher.look())
        nights.look()

    return look
