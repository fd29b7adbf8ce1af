"""Swaps where the port of a server is not free at once, on the way there and on the way back."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault.fuse import Fuse, Kind, Step, ctrl_c, full_disk
from tests.fault.fuse import Life as Process
from tests.fault.scenarios import deploy
from tests.fault.world import BROKEN, ENGINE, UNIT, LateClock, OwnPids, World, a_record
from tests.support.fakes import Invocation, Life
from tests.support.folders import DATA
from tests.support.ports import free_port
from tunerd.app import Context
from tunerd.doctor.doctor import examine
from tunerd.engine.server import Address
from tunerd.errors import DeployError, Interrupted, RolledBack, ServiceError, Stranded, TunerdError
from tunerd.machine.files import lock
from tunerd.machine.host import process_facts
from tunerd.production.journal import SCHEMA
from tunerd.production.measurement import write_measurement
from tunerd.production.recover import recover
from tunerd.production.rollback import rollback
from tunerd.production.status import status, verify
from tunerd.production.swap import swap
from tunerd.records import plain
from tunerd.result import Progress
from tunerd.settings import ServiceSettings, Settings
from tunerd.tryout.local_service import Ending
from tunerd.units.generations import Outcome
from tunerd.units.manager import LeaseRecord
from tunerd.units.text import quote_argument
from tunerd.words import sha256

OLD = "/bin/cat"
NO_PORT = b"[Service]\nType=exec\nExecStart=/bin/true --alias old\n[Install]\nWantedBy=multi-user.target\n"
NOBODYS_PID = 2**22 + 1  # the kernel gives none so high, so nobody can look into it


TAKEN = "OSError: [Errno 98] Address already in use"


def _old_that_cannot_bind_for(
    world: World, seconds: float, *, serves_first: bool = True, words: str = TAKEN
) -> list[float]:
    """An old server that serves, and once stopped cannot bind its port for so long; when it starts."""
    serve = world.manager.programs["/bin/true"]
    first_s: list[float] = [] if serves_first else [0.0]

    def run(invocation: Invocation) -> Life:
        now_s = world.clock.monotonic_s()
        first_s.append(now_s)
        if len(first_s) == 1 or now_s - first_s[1] >= seconds:
            return serve(invocation)
        return Life(prints=(words,), ends_after_s=0.0, ending=Ending(code=1))

    world.manager.programs[OLD] = run
    if serves_first:
        world.put(world.text("old", program=OLD))
    return first_s


def _in_vain(
    world: World, ctx: Context | None = None, *, ends: type[TunerdError] = RolledBack
) -> TunerdError:
    """How a deployment of what does not serve ends."""
    with pytest.raises(ends) as caught:
        deploy(ctx or world.context(), world, "new", program=BROKEN)
    return caught.value


@pytest.mark.parametrize("is_old", [True, False], ids=["of the old server", "of the new server"])
def test_a_port_in_the_last_minute_of_its_connections_is_waited_for(
    world: World, *, is_old: bool
) -> None:
    if not is_old:
        deploy(world.context(), world, "old")
    _old_that_cannot_bind_for(world, 58.0, serves_first=is_old)
    told: list[Progress] = []
    ctx = replace(world.context(), progress=told.append)

    if is_old:
        _in_vain(world, ctx)
    else:
        deploy(ctx, world, "new", program=OLD)

    assert world.serving_alias() == ("old" if is_old else "new")
    assert world.leftovers() == []
    waits = [p for p in told if "port" in p.text]
    assert waits
    assert all(0 < (p.left_s or 0) <= 65 for p in waits)


def test_an_argument_that_is_not_understood_is_told_though_all_options_are_printed_behind_it(
    world: World,
) -> None:
    deploy(world.context(), world, "old")
    options = (DATA / "help/ik-2026-08.txt").read_text().splitlines()
    says = ("error: unknown argument: --log-verbosity", *options)
    world.manager.programs[BROKEN] = lambda _: Life(says, 0.5, Ending(code=1))

    assert _in_vain(world).cause == says[0]


def test_what_an_earlier_server_wrote_is_no_cause_of_the_end_of_one_that_wrote_nothing(
    world: World,
) -> None:
    """Where the journal keeps nothing, or dropped it, a line of days before was the cause."""
    serve = world.manager.programs["/bin/true"]
    old = "CUDA error: out of memory"
    world.manager.programs[OLD] = lambda invocation: replace(serve(invocation), prints=(old,))
    world.put(world.text("old", program=OLD))
    world.manager.programs[BROKEN] = lambda _: Life(ends_after_s=0.5, ending=Ending(code=1))

    said = _in_vain(world)

    assert "it said nothing" in str(said.cause)
    assert "out of VRAM" not in said.message


def test_an_old_server_that_does_not_say_why_it_ended_is_started_again(world: World) -> None:
    # Mainline's log thread is slower than its end over a taken port, and a script hides the port.
    _old_that_cannot_bind_for(world, 15.0, words="srv  llama_server: initializing ...")
    starts: list[float] = []

    def fail(_: Invocation) -> Life:
        starts.append(world.clock.monotonic_s())
        return Life(ends_after_s=0.5, ending=Ending(code=1))

    world.manager.programs[BROKEN] = fail

    _in_vain(world)

    assert world.serving_alias() == "old"
    assert world.leftovers() == []
    assert len(starts) == 1, "the new one has never served"


@pytest.mark.parametrize("moment", ["starting", "it ended for no known reason"])
def test_what_somebody_stops_on_the_way_back_is_not_started_again(
    world: World, moment: str
) -> None:
    """Also where it ends with a status of failure when it is told to stop, as some scripts do."""
    serve = world.manager.programs["/bin/true"]
    starts: list[float] = []
    goes_back = False

    def run(invocation: Invocation) -> Life:
        starts.append(world.clock.monotonic_s())
        if len(starts) == 1:
            return serve(invocation)
        ends_after_s = 0.5 if moment != "starting" else 1000.0
        return Life(ends_after_s=ends_after_s, ending=Ending(code=1), term_ending=Ending(code=1))

    def stop(told: Progress) -> None:
        nonlocal goes_back
        goes_back = goes_back or "putting the previous unit back" in told.text
        if goes_back and moment in told.text and len(starts) == 2:
            world.manager.stop(UNIT)
            if moment != "starting":  # what has failed stays so when it is stopped
                world.manager.reset_failed(UNIT)

    world.manager.programs[OLD] = run
    world.put(world.text("old", program=OLD))
    _in_vain(world, replace(world.context(), progress=stop), ends=TunerdError)

    assert len(starts) == 2
    assert not world.manager.state(UNIT).is_active


def test_a_port_that_stays_taken_though_nobody_listens_is_given_up(world: World) -> None:
    starts = _old_that_cannot_bind_for(world, 200.0)
    began_s = world.clock.monotonic_s()

    stranded = _in_vain(world, ends=Stranded)

    assert "port taken" in (stranded.cause or "")
    assert 60 < world.clock.monotonic_s() - began_s < 90
    assert len(starts) < 30, "what keeps it from its port is not seen from here"
    world.clock.advance(120.0)
    assert recover(world.context()).payload["serving"] is True
    assert world.serving_alias() == "old"


def test_who_stops_a_server_is_not_taken_for_a_port_that_others_keep(world: World) -> None:
    deploy(world.context(), world, "old")
    world.manager.programs[BROKEN] = lambda _: Life(ends_after_s=1000.0)
    told: list[str] = []
    holder = socket.socket()

    def stop(progress: Progress) -> None:
        told.append(progress.text)
        if world.manager.state(UNIT).is_active and "starting" in progress.text:
            with contextlib.suppress(OSError):  # it is kept by then
                holder.bind(("127.0.0.1", world.port))
            world.manager.stop(UNIT)

    with holder:
        _in_vain(world, replace(world.context(), progress=stop), ends=TunerdError)

    assert not [text for text in told if "port" in text], told


def test_a_port_on_which_somebody_listens_is_not_waited_for(world: World) -> None:
    taken: list[socket.socket] = []

    def take_the_port() -> None:
        taken.append(socket.create_server(("127.0.0.1", world.port)))

    broken = Life(ends_after_s=0.5, ending=Ending(code=1), on_end=take_the_port)
    _old_that_cannot_bind_for(world, 200.0)
    world.manager.programs[BROKEN] = lambda _: broken
    began_s = world.clock.monotonic_s()

    stranded = _in_vain(world, ends=Stranded)

    taken[0].close()
    assert "port taken" in (stranded.cause or "")
    assert world.clock.monotonic_s() - began_s < 30


def test_a_server_that_says_it_was_stopped_and_ends_well_is_no_stop_by_somebody(
    world: World,
) -> None:
    deploy(world.context(), world, "old")
    words = ("Stopping", "Stopping server...", f"{UNIT}: Stopping", "Stopping llama-server...")
    liar = Life(prints=words, ends_after_s=0.5)
    world.manager.programs[BROKEN] = lambda _: liar

    undone = _in_vain(world)

    assert world.serving_alias() == "old"
    assert "serves again" in (undone.state or "")


def test_who_stops_the_new_server_while_it_starts_does_not_see_the_old_one_start(
    world: World,
) -> None:
    deploy(world.context(), world, "old")
    world.manager.programs[BROKEN] = lambda _: Life()

    def stop(progress: Progress) -> None:
        if progress.text == "waiting for the model":
            world.manager.stop(UNIT)

    undone = _in_vain(world, replace(world.context(), progress=stop))

    assert "stopped by somebody else" in str(undone)
    assert "somebody stopped it meanwhile" in (undone.state or "")
    assert world.serving_alias() is None
    assert world.standing == world.text("old")


def test_the_old_server_starts_before_anybody_looks_for_the_cause(world: World) -> None:
    deploy(world.context(), world, "old")
    serve = world.manager.programs["/bin/true"]
    ended_s: list[float] = []
    began_s: list[float] = []

    def begin(invocation: Invocation) -> Life:
        began_s.append(world.clock.monotonic_s())
        return serve(invocation)

    def end() -> None:
        ended_s.append(world.clock.monotonic_s())

    world.manager.programs["/bin/true"] = begin
    world.manager.programs[BROKEN] = lambda _: Life(
        prints=("it says nothing that helps",), ends_after_s=0.5, ending=Ending(code=1), on_end=end
    )
    fuse = Fuse()
    # The kernel may remember connections of the other, which is a cause to look for.
    world.port = free_port()
    undone = _in_vain(world, world.context(fuse, asks=True))

    (back_s,) = [at_s for at_s in began_s if at_s >= ended_s[0]]
    assert back_s - ended_s[0] < 0.2, "late last words are waited for when it serves again"
    assert "nothing that helps" in (undone.cause or "")
    said = [step.text for step in fuse.steps]
    last_start = max(at for at, text in enumerate(said) if text == "restart")
    assert "log" in said[last_start:]


class OneStartForTwo(OwnPids):
    """A restart that is asked for joins one that was due, as in systemd 26x after a reload."""

    def restart(self, unit: str, *, timeout_s: float = 180.0) -> None:
        found = self._find(unit)
        if found.sub != "auto-restart":
            super().restart(unit, timeout_s=timeout_s)
            return
        found.restart_at_s = self._clock.monotonic_s()
        self.start(unit, timeout_s=timeout_s)


def test_a_restart_that_was_due_and_the_way_back_may_be_one_start(world: World) -> None:
    world.manager = OneStartForTwo(world.folder, world.clock, world.manager.programs)
    deploy(world.context(), world, "old")
    world.manager.programs[BROKEN] = lambda _: Life(
        prints=("out of memory",), ends_after_s=0.5, ending=Ending(code=1)
    )
    restarts = "Restart=on-failure\nRestartSec=5"
    text = world.text("new", program=BROKEN, service=restarts, starts=9)
    request = world.request(text, alias="new")

    with lock(world.paths.lock, purpose="apply", since="now"), pytest.raises(RolledBack):
        swap(world.context(), request)

    assert world.serving_alias() == "old"
    assert world.manager.state(UNIT).n_restarts == 1


def test_what_the_kernel_killed_names_the_limit_of_its_unit(world: World) -> None:
    drop_in = world.put_drop_in(f"MemoryMax={8 << 30}")
    deploy(world.context(), world, "old")
    killed = f"{UNIT}: Failed with result 'oom-kill'."
    world.manager.programs[BROKEN] = lambda _: Life(prints=(killed,), ends_after_s=0.5)

    undone = _in_vain(world)

    assert world.serving_alias() == "old"
    limit = f"{UNIT} may use 8192 MiB (MemoryMax= in `{drop_in}`)"
    assert undone.message.endswith("out of RAM")
    assert undone.cause == f"killed by the kernel; {limit}"
    assert f"raise it (`systemctl edit {UNIT}`)" in (undone.hint or "")


def _stranded(world: World) -> Callable[[], None]:
    """Generation 2 served and generation 3 does not, nor does 2 any more, until this is called."""
    serve = world.manager.programs["/bin/true"]
    deploy(world.context(), world, "first")
    world.manager.programs[OLD] = serve
    deploy(world.context(), world, "second", program=OLD)
    world.manager.programs[OLD] = lambda _: Life(ends_after_s=0.0, ending=Ending(code=1))
    _in_vain(world, ends=Stranded)

    def mend() -> None:
        world.manager.programs[OLD] = serve

    return mend


def test_what_served_and_does_not_come_back_is_left_by_one_command(world: World) -> None:
    """Recovery, which cannot succeed, refused it: a build that was replaced in place starts under the old unit too."""
    _stranded(world)

    done = rollback(world.context(), to="1", drain=False)

    assert world.serving_alias() == "first"
    assert world.leftovers() == []
    assert "does not serve" in " ".join(message.text for message in done.messages)
    assert world.outcomes()[:2] == [Outcome.SERVING, Outcome.STRANDED]


def test_what_does_not_come_back_is_waited_for_once_and_not_again_behind_a_question(
    world: World,
) -> None:
    """A server that hangs takes minutes each time, and no change is made meanwhile."""
    _stranded(world)
    starts: list[float] = []

    def hang(_: Invocation) -> Life:
        starts.append(world.clock.monotonic_s())
        return Life()

    world.manager.programs[OLD] = hang

    rollback(world.context(), to="1", drain=False, ask=lambda _: None)

    assert world.serving_alias() == "first"
    assert len(starts) == 1


def test_a_change_that_does_not_begin_leaves_the_record_of_what_does_not_come_back(
    world: World,
) -> None:
    _stranded(world)

    def fill(step: Step) -> None:
        if step.text.startswith("create temporary for ") and UNIT in step.text:  # its intent record
            full_disk(step)

    before = world.leftovers()
    with pytest.raises(DeployError, match="could not be started"):
        rollback(world.context(Fuse(0, fill, until=9999, of=Kind.DISK)), to="1", drain=False)

    assert world.leftovers() == before != []


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_where_that_does_not_serve_either_recovery_goes_on_with_what_served(
    world: World, *, is_interrupted: bool
) -> None:
    """Ctrl-C as a change began removed the new record, which was in the old one's place already: nothing tried again."""
    mend, names = _stranded(world), Fuse()
    with pytest.raises(Stranded):
        rollback(world.context(names), to="3", drain=False)
    if is_interrupted:
        steps = [step.text for step in names.steps]
        written = Fuse(steps.index(f"sync folder of {UNIT}.json"), ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            rollback(world.context(written), to="1", drain=False)

    mend()
    assert recover(world.context()).payload["serving"] is True
    assert world.serving_alias() == "second"
    assert world.leftovers() == []


def _interrupted(world: World, *, old_invocation: str | None, ran: bool = True) -> None:
    """A swap over the unit that stands was cut short before it touched anything."""
    record = a_record(old_sha256=sha256(world.standing), old_invocation=old_invocation)
    record = replace(record, was_active=ran, was_healthy=ran)
    (world.paths.unit_dir / str(record.backup)).write_bytes(world.standing or b"")
    ctx = world.context()
    ctx.files.make_folder(world.paths.journal_dir)
    ctx.files.write_json(world.paths.journal_dir / f"{UNIT}.json", plain(record, schema=SCHEMA))


def _interrupted_and_stopped(world: World) -> None:
    world.put(world.text("old"))
    _interrupted(world, old_invocation=world.manager.state(UNIT).invocation_id)
    world.manager.stop(UNIT)


@pytest.mark.parametrize(
    ("since", "alias"),
    [("a boot", "old"), ("a start by hand", "old"), ("a boot, and a stop by hand", None)],
)
def test_what_was_started_since_a_swap_over_a_stopped_server_was_cut_short_is_left_as_it_is(
    world: World, since: str, alias: str | None
) -> None:
    world.put(world.text("old"), starts=False)
    _interrupted(world, old_invocation=None, ran=False)
    if "boot" in since:
        world.reboot()
    else:
        world.clock.set_wall(world.unit_path.stat().st_ctime + 60.0)
        world.manager.start(UNIT)
    if "stop" in since:
        world.manager.stop(UNIT)

    recover(world.context())

    assert world.serving_alias() == alias
    assert world.leftovers() == []


def test_a_limit_that_is_too_short_for_what_served_strands_nothing(tmp_path: Path) -> None:
    clock = LateClock()
    world = World(tmp_path, clock=clock)
    deploy(world.context(), world, "old")
    serve = world.manager.programs["/bin/true"]
    starts = []

    def load(invocation: Invocation) -> Life:
        life = serve(invocation)
        starts.append(invocation)
        api = world.servers[-1].api
        api.is_loaded = False
        clock.in_s(40.0, lambda: setattr(api, "is_loaded", True))
        return life

    world.manager.programs["/bin/true"] = load
    assert world.context().settings.service.start_limit_s < 40.0
    with contextlib.closing(world), pytest.raises(RolledBack, match="hang"):
        deploy(world.context(), world, "new")
    assert [invocation.argv[-1] for invocation in starts] == ["new", "old"]
    assert world.leftovers() == []


def test_a_server_that_says_it_loads_is_not_restarted_by_recovery(world: World) -> None:
    world.put(world.text("old"))
    before = world.manager.state(UNIT).invocation_id
    world.servers[-1].api.is_loaded = False
    _interrupted(world, old_invocation=before)

    with pytest.raises(Stranded):
        recover(world.context())
    assert world.manager.state(UNIT).invocation_id == before

    world.servers[-1].api.is_loaded = True
    assert recover(world.context()).payload["serving"] is True
    assert world.manager.state(UNIT).invocation_id == before


@pytest.mark.parametrize("is_untouched", [True, False])
def test_a_server_that_nobody_can_ask_is_told_as_unknown_and_not_restarted_again_and_again(
    world: World, *, is_untouched: bool
) -> None:
    world.manager.pid = NOBODYS_PID
    world.put(NO_PORT)
    before = world.manager.state(UNIT).invocation_id
    _interrupted(world, old_invocation=before if is_untouched else "another")

    payload = recover(world.context()).payload

    assert payload["serving"] is None
    assert "cannot tell from here" in str(payload["text"])
    assert (world.manager.state(UNIT).invocation_id == before) is is_untouched
    assert world.leftovers() == [], "nothing is left to be tried again"


@pytest.mark.parametrize("more", ["", " --more"])
def test_recovery_leaves_alone_what_was_started_by_the_words_that_stand(
    world: World, more: str
) -> None:
    """The process of an imagined server is this one, and its words are those that a unit must have."""
    facts = process_facts(os.getpid())
    assert facts is not None
    words = " ".join(map(quote_argument, facts.cmdline or ()))
    where = f"Environment=LLAMA_ARG_HOST=127.0.0.1 LLAMA_ARG_PORT={world.port}"
    text = f"[Service]\nType=exec\n{where}\nExecStart=@{ENGINE} {words}{more}\n[Install]\nWantedBy=multi-user.target\n"
    serve, asked = world.manager.programs[ENGINE], ("", "--port", str(world.port))
    world.manager.programs[ENGINE] = lambda one: serve(replace(one, argv=asked))
    world.put(text.encode(), starts=False)
    world.clock.set_wall(world.unit_path.stat().st_ctime + 60.0)
    world.manager.start(UNIT)
    before = world.manager.state(UNIT).invocation_id
    _interrupted(world, old_invocation="another")

    assert recover(world.context()).payload["serving"] is True
    assert (world.manager.state(UNIT).invocation_id == before) is (not more)


def test_while_nobody_can_read_which_unit_it_is_recovery_looks_at_every_record(
    world: World,
) -> None:
    _interrupted_and_stopped(world)
    elsewhere = Settings(service=ServiceSettings(unit="nobody.service"))
    ctx = replace(world.context(), settings=elsewhere)
    assert recover(ctx).payload["found"] is None, "known settings name the unit"
    doubtful = replace(ctx, settings_problem="a line is broken; the defaults hold")
    said = {one.code: one.text for one in status(doubtful).messages}
    assert said["interrupted"] == f"a swap of {UNIT} was cut short"

    done = recover(doubtful)

    assert done.payload["found"] == "untouched"
    assert done.payload["serving"] is True
    (told,) = done.messages
    assert told.text.startswith(f"{UNIT}: ")
    assert world.serving_alias() == "old"
    assert world.leftovers() == []


def test_what_a_measurement_owes_keeps_no_interrupted_swap_half_way(world: World) -> None:
    _interrupted_and_stopped(world)
    owed = LeaseRecord("1234abcd", UNIT, "bench x", 1, 0.0, 1.0, restores=True, is_owed=True)
    write_measurement(world.context(), owed)

    def refuse(step: Step) -> None:
        if step.text == "start":
            raise ServiceError("it does not start")

    with pytest.raises(ServiceError, match="does not start"):
        recover(world.context(Fuse(0, refuse, until=9999, of=Kind.UNITS)))

    assert world.serving_alias() == "old"
    assert world.leftovers() == []


def test_a_server_that_wants_a_key_which_nobody_may_tell_it_serves(world: World) -> None:
    text = world.text("keyed").replace(b"--alias", b"--api-key secret --alias")
    request = world.request(text, alias="keyed")
    ctx = world.context()

    with pytest.raises(RolledBack, match="garbage"):
        swap(ctx, replace(request, address=Address("127.0.0.1", world.port, "wrong")))
    swap(ctx, request)

    assert world.manager.state(UNIT).is_active


def test_a_swap_under_way_is_not_told_as_one_that_was_cut_short(world: World) -> None:
    world.put(world.text("old"))
    swap(world.context(), world.request(world.text("new"), alias="new"))
    _interrupted(world, old_invocation=None)
    ctx = world.context()

    with lock(world.paths.lock, purpose="apply", since="now"):
        under_way = status(ctx)
        verified = world.verify()

    assert under_way.payload["drift"] == []
    assert (under_way.payload["health"], under_way.payload["alias"]) == ("ready", "new")
    assert [one.code for one in under_way.messages] == ["busy"]
    assert verified == 0
    assert [one["code"] for one in status(ctx).payload["drift"]] == ["interrupted"]


def test_what_a_swap_is_half_way_with_is_no_drift(world: World) -> None:
    """`verify` told an old process under a new text as a script that passes other arguments on."""
    world.put(world.text("old"))
    swap(world.context(), world.request(world.text("new"), alias="new"))
    ctx = world.context()

    with lock(world.paths.lock, purpose="apply", since="now"):
        world.manager.stop(UNIT)
        found = verify(ctx)

    assert (found.exit_code, found.payload["drift"]) == (1, [])
    assert found.payload["as_deployed"] is None, "nobody can tell"
    assert [one.text for one in found.messages] == ["a change is under way right now"]
    assert verify(ctx).exit_code == 6


def test_a_recovery_that_is_ended_says_what_stands_and_what_goes_on_with_it(world: World) -> None:
    _interrupted_and_stopped(world)
    words = "the swap of generation 1 was cut short, and the previous unit is in place"
    said = {one.code: one.text for one in status(world.context()).messages}
    assert said["interrupted"] == words
    found = {one["code"]: one["seen"] for one in examine(world.context()).payload["findings"]}
    assert found["swap-cut-short"] == words

    with pytest.raises(KeyboardInterrupt) as caught:
        recover(world.context(Fuse(0, ctrl_c)))

    assert Interrupted.by(caught.value).state == (
        f"{words}; `tunerd recover` will finish or undo it"
    )
    assert Interrupted.by(KeyboardInterrupt()).state is None


@pytest.mark.parametrize("is_link", [False, True])
def test_a_new_server_that_still_runs_is_stopped_where_the_old_unit_was_not_active(
    world: World, is_link: bool
) -> None:
    """Also where its unit file leads elsewhere: that file is older than the new server."""
    world.put(world.text("old"), starts=False)
    old = world.unit_path
    if is_link:
        old = old.rename(world.folder / "elsewhere.service")
        world.unit_path.symlink_to(old)

    def hang(_: Invocation) -> Life:
        time.sleep(0.02)  # between the old file and its way back
        world.clock.set_wall(old.lstat().st_ctime + 0.01)
        return Life(prints=("loading",))

    world.manager.programs[BROKEN] = hang
    _in_vain(world)

    assert world.standing == world.text("old")
    assert world.unit_path.is_symlink() is is_link
    assert world.manager.state(UNIT).active_state == "inactive"


def test_a_new_server_that_is_started_again_before_its_manager_knows_the_old_text_is_stopped(
    world: World,
) -> None:
    world.manager.programs[BROKEN] = lambda _: Life(ends_after_s=30.0, ending=Ending(code=1))
    restarts = "Restart=always\nRestartSec=1"
    world.put(world.text("new", program=BROKEN, service=restarts, starts=9))
    world.unit_path.write_bytes(world.text("old"))
    world.clock.set_wall(world.unit_path.stat().st_ctime + 60.0)
    _interrupted(world, old_invocation=None, ran=False)
    world.clock.sleep(45.0)
    assert world.manager.state(UNIT).runs, "its manager starts it again"

    recover(world.context())

    assert world.manager.state(UNIT).active_state == "inactive"


def test_what_somebody_stops_once_its_swap_was_killed_stays_stopped(world: World) -> None:
    """The daemon's recovery started the server before it, while what had killed the swap was looked at."""
    deploy(world.context(), world, "old")
    process = Process(world.paths.lock)

    def die(progress: Progress) -> None:
        if progress.text == "waiting for the model":
            process.die(Step(Kind.UNITS, progress.text))

    process.live(lambda: deploy(replace(world.context(), progress=die), world, "new"))
    world.manager.stop(UNIT)

    recover(world.context())

    assert world.manager.state(UNIT).active_state == "inactive"
    assert world.standing == world.text("old")
    assert world.leftovers() == []


@pytest.mark.parametrize(
    ("words", "why"),
    [("--api-prefix /x", "below a prefix"), ("--ssl-cert-file /c --ssl-key-file /k", "TLS")],
)
def test_a_server_that_nobody_can_ask_is_seen_to_run_and_strands_nothing_and_status_says_why(
    world: World, words: str, why: str
) -> None:
    """Its answers were taken for somebody else's: it was restarted once more, and by each recovery again."""
    text = world.text("old").replace(b"--alias", f"{words} --alias".encode())
    world.put(text)
    found = status(world.context())
    assert (found.payload["health"], found.payload["healthy"]) == (None, None)
    assert [why in one.text for one in found.messages] == [True]

    assert "cannot tell from here" in str(_in_vain(world).state)
    assert world.leftovers() == []
    assert len(world.servers) == 2

    deploy(world.context(), world, "new")
    back = rollback(world.context(), to=None, drain=True)
    assert world.standing == text
    assert (back.payload["serving"], back.payload["without_service_s"]) == (None, None)
    assert "not-asked" in {one.code for one in back.messages}
    world.manager.stop(UNIT)
    assert status(world.context()).messages == ()
