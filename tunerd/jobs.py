"""What members of the group have asked for: jobs, each a process of its own beside the daemon."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tunerd.app import Context
from tunerd.errors import Busy, HostError, Interrupted, TunerdError, UsageError
from tunerd.machine.clock import Clock, SystemClock
from tunerd.machine.files import Files, is_locked, lock, stamp_of
from tunerd.machine.process import Interrupts, Setting, own_command, start
from tunerd.operations import JobRequest, JobState, Lane
from tunerd.production.own import JOB, NOTIFY, start_own_unit
from tunerd.records import read
from tunerd.result import ActionResult, Progress, ProgressSink, error_json, result_from_json
from tunerd.words import Mode

_MODE = 0o700
_MAX_EVENTS_BYTES = 16 * 1024 * 1024


Tell = Callable[[Mapping[str, Any]], None]
"""Keeps an event of a job."""
News = Callable[[int], Mapping[str, Any]]
"""What a job told since an offset."""


def _add(descriptor: int, event: Mapping[str, Any]) -> None:
    """One line; on a full disk it is lost, and the job goes on."""
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps(event).encode() + b"\n")


class JobFolder:
    """All jobs since the machine was started; whoever writes here is the owner of this tunerd."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def numbers(self) -> tuple[int, ...]:
        """Newest first.

        Raises:
            HostError: what is there cannot be told.
        """
        try:
            names = os.listdir(self._folder)  # noqa: PTH208  a glob takes what it may not read for empty
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise HostError(f"cannot read `{self._folder}`", cause=error.strerror) from error
        return tuple(sorted((int(name) for name in names if name.isdecimal()), reverse=True))

    def create(self, request: JobRequest) -> int:
        """Keep a request under the next number.

        Raises:
            HostError: it cannot be written.
        """
        try:
            self._folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
            self._folder.chmod(_MODE)
            number, path = self._next()
            (path / "events.jsonl").touch(mode=0o600)
        except OSError as error:
            raise HostError(
                f"cannot keep a job in `{self._folder}`", cause=error.strerror or str(error)
            ) from error
        Files().keep(path / "request.json", request)
        return number

    def forget(self, number: int) -> None:
        """Remove a job, unless it lives."""
        if not self.is_alive(number):
            shutil.rmtree(self._folder / str(number), ignore_errors=True)

    def _next(self) -> tuple[int, Path]:
        """A number that nobody has, and its folder; others may be looking for one as well."""
        while True:
            number = next(iter(self.numbers()), 0) + 1
            path = self._folder / str(number)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=_MODE)
                return number, path

    def request(self, number: int) -> JobRequest | None:
        """What was asked; None where there is no such job, or it is one of an older tunerd."""
        return Files().recall(JobRequest, self._folder / str(number) / "request.json")

    def of_lanes(self, *, looks: bool) -> list[int]:
        """Jobs that only look, or that do more, newest first."""
        asked = ((number, self.request(number)) for number in self.numbers())
        return [number for number, one in asked if one and (one.lane is Lane.LOOK) is looks]

    def events(self, number: int, offset: int = 0) -> tuple[tuple[dict[str, Any], ...], int]:
        """What happened since an offset, whole lines only; and the offset to go on from.

        Of very much only the first line and the newest ones: how it began, how it goes and how it ended.
        """
        first = b""
        try:
            with (self._folder / str(number) / "events.jsonl").open("rb") as file:
                begin = os.fstat(file.fileno()).st_size - _MAX_EVENTS_BYTES
                file.seek(offset)
                if begin > offset:
                    first = file.readline()
                    file.seek(begin)
                    file.readline()
                offset, content = file.tell(), file.read(_MAX_EVENTS_BYTES)
        except OSError:
            return (), offset
        whole = content[: content.rfind(b"\n") + 1]
        found = []
        for line in (first + whole).splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return tuple(one for one in found if isinstance(one, dict)), offset + len(whole)

    def log(self, number: int) -> Path:
        """Where a job that no service manager looks after writes what it says."""
        return self._folder / str(number) / "log"

    def is_alive(self, number: int) -> bool:
        """Whether the process of the job lives."""
        return is_locked(self._folder / str(number) / "lock")

    def has_begun(self, number: int) -> bool:
        """Whether a process has taken the job on, be it alive or not: it tells so once it has the lock."""
        stamp = stamp_of(self._folder / str(number) / "events.jsonl")
        return stamp is not None and stamp[0] > 0

    @contextlib.contextmanager
    def writing(self, number: int) -> Iterator[Tell]:
        """The events of a job that this process does; alive until the body, or the process, ends.

        Raises:
            Busy: another process does it.
            HostError: it cannot be locked.
        """
        path = self._folder / str(number)
        with (
            lock(path / "lock", purpose=f"job {number}", since="it began"),
            (path / "events.jsonl").open("ab", buffering=0) as file,
        ):
            tell = partial(_add, file.fileno())
            tell({"event": "begun", "pid": os.getpid()})
            yield tell


END = "end"
# From the request until its process has begun; a loaded machine takes seconds for that.
_START_LIMIT_S = 120.0
# A stop waits until production serves again, which includes the load of its model.
_STOP_S = 1800.0
_POLL_S = 0.5
_MOST_KEPT = 50
_MOST_SHOWN = 20
# Each is a process of root's with memory of its own, which the server needs.
_LOOKS_OF_ONE = 6
_TOLD_EVERY_S = 1.0
_INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Job:
    """One job as it stands, with what it told since an offset; `offset` is where to go on."""

    number: int
    request: JobRequest
    state: JobState
    events: tuple[Mapping[str, Any], ...]
    offset: int

    @property
    def end(self) -> Mapping[str, Any] | None:
        """Its last event; None as long as it is not over."""
        last = self.events[-1] if self.events else None
        return last if last is not None and last.get("event") == END else None

    @property
    def pid(self) -> int | None:
        """The process that does it; None before it has begun."""
        begun = self.events[0] if self.events else {}
        return int(begun["pid"]) if begun.get("pid") is not None else None

    @property
    def exit_code(self) -> int | None:
        """As the command would have exited; 1 where it died."""
        if self.end is not None:
            return int(self.end["exit_code"])
        return 1 if self.state is JobState.DIED else None

    def to_json(self) -> dict[str, Any]:
        """As scripts read it; `result` is the envelope that the same command prints with `--json`."""
        told = (one for one in reversed(self.events) if one.get("event") == "progress")
        return {
            "job": self.number,
            "kind": self.request.kind,
            "argv": list(self.request.argv),
            "asked_by": self.request.asked_by,
            "asked_s": self.request.asked_s,
            "state": str(self.state),
            "progress": next(told, None),
            "exit_code": self.exit_code,
            "result": None if self.end is None else self.end["result"],
        }


def folder_of(ctx: Context) -> JobFolder:
    """Where the jobs of this mode are."""
    return JobFolder(ctx.paths.runtime_dir / "jobs")


def job_unit(number: int) -> str:
    """The name of the unit that does a job."""
    return f"tunerd-job-{number}.service"


def start_job(ctx: Context, request: JobRequest) -> int:
    """Begin a job; its number.

    Raises:
        ServiceError, HostError: its process cannot be started.
    """
    folder = folder_of(ctx)
    number = folder.create(request)
    for looks in (True, False):  # what only looked takes no room from what changed something
        for old in folder.of_lanes(looks=looks)[_MOST_KEPT:]:
            folder.forget(old)
    words = ["job", str(number)]
    try:
        if ctx.mode is Mode.LOCAL:
            _start_process(ctx, folder, number, words)
        else:
            what = f"job {number}, {request.kind}"
            like = NOTIFY if request.kind == "notify test" else JOB
            start_own_unit(ctx, job_unit(number), what, words, like=like, is_told=True)
    except TunerdError:
        folder.forget(number)  # else it would seem to be about to begin
        raise
    return number


def begin_measuring(ctx: Context, kind: str, argv: Sequence[str]) -> int:
    """Begin a job that measures, for whoever runs this process; its number.

    Raises:
        Busy: another one measures.
        ServiceError, HostError: its process cannot be started.
    """
    asked_by = ctx.environment.get("SUDO_USER") or ctx.environment.get("USER") or "root"
    request = JobRequest(
        kind, tuple(argv), Lane.MEASURE, asked_by, ctx.clock.now_s(), is_member=ctx.is_unattended
    )
    demand_lane(ctx, request)
    return start_job(ctx, request)


def _start_process(ctx: Context, folder: JobFolder, number: int, words: list[str]) -> None:
    argv = own_command(ctx.mode, *words)
    with folder.log(number).open("ab") as log:
        child = start(argv, Setting(env=dict(ctx.environment)), log=log.fileno())
    threading.Thread(target=child.reap, name=f"job {number}", daemon=True).start()


def read_job(ctx: Context, number: int, offset: int = 0) -> Job:
    """A job as it stands; whoever follows one reads each event once.

    Raises:
        UsageError: there is none of this number.
    """
    folder = folder_of(ctx)
    request = folder.request(number)
    if request is None:
        raise UsageError(f"there is no job {number}", hint="jobs are forgotten at a reboot")
    has_begun, is_alive = folder.has_begun(number), folder.is_alive(number)  # in this order
    events, offset = folder.events(number, offset)  # after that look: it may end in between
    if events and events[-1].get("event") == END:
        state = JobState.FAILED if events[-1]["exit_code"] else JobState.DONE
    elif is_alive:
        state = JobState.RUNNING
    elif has_begun or abs(ctx.clock.now_s() - request.asked_s) > _START_LIMIT_S:
        state = JobState.DIED
    else:
        state = JobState.STARTING
    return Job(number, request, state, events, offset)


def running_jobs(ctx: Context) -> list[Job]:
    """Every job that is not over, newest first; what looks only is among them."""
    folder = folder_of(ctx)
    numbers = [one for one in folder.numbers() if folder.is_alive(one) or not folder.has_begun(one)]
    found = [read_job(ctx, one) for one in numbers if folder.request(one) is not None]
    return [job for job in found if not job.state.is_over]


def demand_lane(ctx: Context, request: JobRequest) -> None:
    """Refuse a job that may not run beside those that are under way.

    Raises:
        Busy: there is such a job, or whoever asks has so many that look.
    """
    lane = request.lane
    same = [one for one in running_jobs(ctx) if one.request.lane is lane]
    if lane is Lane.LOOK:
        same = [one for one in same if one.request.asked_by == request.asked_by]
    job = next(iter(same), None)
    if job is not None and (lane is not Lane.LOOK or len(same) >= _LOOKS_OF_ONE):
        raise Busy(
            "another job is under way",
            cause=f"job {job.number}, {job.request.kind}, asked for by {job.request.asked_by}",
            state="nothing was changed",
            hint=f"`tunerd jobs watch {job.number}` follows it to its end",
        )


def stop_job(ctx: Context, number: int) -> ActionResult:
    """End a job that measures; production serves again, and what was measured is kept.

    Raises:
        UsageError: there is none of this number, or it is over, or it changes something.
        ServiceError: it does not stop.
    """
    job = read_job(ctx, number)
    if job.state.is_over:
        hint = f"`tunerd jobs watch {number}` shows its result"
        raise UsageError(f"job {number} is over", hint=hint)
    if job.request.lane not in {Lane.MEASURE, Lane.LOOK}:
        raise UsageError(
            f"job {number}, {job.request.kind}, cannot be stopped half-way",
            state="it is still running",
            hint=f"wait for it: `tunerd jobs watch {number}`; `tunerd rollback` undoes a swap",
        )
    ctx.say(f"stopping job {number}, {job.request.kind}")
    if ctx.mode is Mode.LOCAL:
        _end_process(ctx, job)
    else:
        ctx.services.stop(job_unit(number), timeout_s=_STOP_S)
    return ActionResult("jobs stop", {"job": number, "kind": job.request.kind}, has_acted=True)


def _end_process(ctx: Context, job: Job) -> None:
    """End a job that is a process of its own, and wait until it has put everything back."""
    end_s, is_told = ctx.clock.monotonic_s() + _STOP_S, False
    while not (found := read_job(ctx, job.number)).state.is_over:
        if ctx.clock.monotonic_s() > end_s:
            raise HostError(f"job {job.number} does not end")
        if not is_told and found.pid is not None:
            is_told = True  # once: what puts everything back is not to be ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGTERM)
        ctx.clock.sleep(_POLL_S)


def sweeping_job(ctx: Context) -> int | None:
    """The number of the job that sweeps, if one does."""
    kinds = {"sweep run", "sweep resume", "sweep night"}
    found = (one for one in running_jobs(ctx) if one.request.kind in kinds)
    return next((one.number for one in found if one.request.lane is Lane.MEASURE), None)


def jobs(ctx: Context) -> ActionResult:
    """`tunerd jobs`: the newest that do more than look, newest first."""
    numbers = folder_of(ctx).of_lanes(looks=False)[:_MOST_SHOWN]
    return ActionResult("jobs", {"jobs": [read_job(ctx, one).to_json() for one in numbers]})


def news_of(ctx: Context, number: int, offset: int = 0) -> Mapping[str, Any]:
    """What a job told since an offset, the offset to go on from, and whether nothing will follow."""
    job = read_job(ctx, number, offset)
    return {"events": job.events, "offset": job.offset, "is_over": job.state.is_over}


def watch_job(ctx: Context, number: int) -> ActionResult:
    """As `follow`, by the files of the job."""
    return follow(number, partial(news_of, ctx, number), ctx.report, ctx.clock)


def follow(number: int, news: News, report: ProgressSink, clock: Clock) -> ActionResult:
    """Report the progress of a job from its beginning, and give what it came to.

    Args:
        number: Of the job.
        news: What it told since an offset, as `news_of` has it.
        report: Takes its progress.
        clock: By which it is looked at again.

    Raises:
        UsageError: there is none of this number.
        TunerdError: as the job itself.
    """
    offset = 0
    while True:
        told = news(offset)
        offset = told["offset"]
        for event in told["events"]:
            if event["event"] == "progress":
                report(read(Progress, event))
            if event["event"] == END:
                return result_from_json(event["result"], int(event["exit_code"]))
        if told["is_over"]:
            raise HostError(
                f"job {number} ended without a result",
                cause="its process was killed",
                hint="`tunerd status` shows what serves",
            )
        clock.sleep(_POLL_S)


# In the process of the job


def run_job(
    make_context: Callable[[ProgressSink], Context],
    number: int,
    act: Callable[[Context, JobRequest], ActionResult],
) -> int:
    """Do a job in this process, and keep what happens; the exit code.

    Args:
        make_context: The context of this process, given where progress goes.
        number: Of the job.
        act: Does what it asks for.

    Raises:
        HostError: there is no such job.
    """
    folder = folder_of(make_context(lambda _progress: None))
    request = folder.request(number)
    if request is None:
        raise HostError(f"there is no job {number}")
    result = None
    # Signals are held but for the work itself, so whatever becomes of that is kept.
    with Interrupts() as interrupts, interrupts.held(), folder.writing(number) as tell:
        try:
            with interrupts.heard():
                ctx = make_context(Teller(tell).tell)
                result = act(_as_job(ctx, number, request), request)
        except TunerdError as error:
            return _end(tell, error.exit_code, error_json(error, request.kind))
        except (KeyboardInterrupt, SystemExit) as end:
            if result is None:  # else it came just as that was there
                return _end(tell, _status(end), error_json(Interrupted.by(end), request.kind))
        except BaseException:
            crash = HostError("tunerd itself failed; `journalctl` shows how")
            _end(tell, 1, error_json(crash, request.kind, code=_INTERNAL))
            raise
        return _end(tell, result.exit_code, result.to_json())


def _as_job(ctx: Context, number: int, request: JobRequest) -> Context:
    """The context of a job: who asked for it, and the unit that a lease is bound to."""
    environment = {**ctx.environment, "USER": request.asked_by, "SUDO_USER": ""}
    own_unit = None if ctx.mode is Mode.LOCAL else job_unit(number)
    return replace(ctx, environment=environment, own_unit=own_unit, is_unattended=request.is_member)


def _status(end: BaseException) -> int:
    code = end.code if isinstance(end, SystemExit) else None
    return code if isinstance(code, int) and code else Interrupted.exit_code


@dataclass
class Teller:
    """Writes progress; of one step not more often than anybody reads."""

    add: Tell
    clock: Clock = field(default_factory=SystemClock)
    _text: str | None = None
    _told_s: float = 0.0

    def tell(self, progress: Progress) -> None:
        """Keep it, unless it says the same as a moment ago."""
        now_s = self.clock.monotonic_s()
        if progress.text == self._text and now_s - self._told_s < _TOLD_EVERY_S:
            return
        self._text, self._told_s = progress.text, now_s
        self.add({"event": "progress", **asdict(progress)})


def _end(tell: Tell, exit_code: int, envelope: Mapping[str, Any]) -> int:
    tell({"event": END, "exit_code": exit_code, "result": envelope})
    return exit_code
