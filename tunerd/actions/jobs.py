"""What the local API does for operators: each job is a process of its own, beside the daemon.

The daemon is confined and could not try a program as another account; a job is tunerd's own
command, started by the service manager, so it outlives the daemon and whoever asked for it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunerd.actions import job_actions
from tunerd.actions.context import Context
from tunerd.actions.envelope import progress_of, result_from_json
from tunerd.actions.own_unit import OwnUnit, start_own_unit
from tunerd.core.host import Mode
from tunerd.core.job import (
    JobKind,
    JobRequest,
    JobState,
    Lane,
    check_arguments,
    request_from_json,
)
from tunerd.core.progress import Progress
from tunerd.core.result import SCHEMA, ActionResult
from tunerd.errors import Busy, HostError, Interrupted, TunerdError, UsageError
from tunerd.system.interrupts import Interrupts
from tunerd.system.job_folder import JobEvents, JobFolder

END = "end"
# From the request until its process has begun; a loaded machine takes seconds for that.
_START_LIMIT_S = 120.0
# A stop waits until production serves again, which includes the load of its model.
_STOP_S = 1800.0
_POLL_S = 0.25
_INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Job:
    """One job as it stands; `result` is the envelope that the same command prints with `--json`."""

    number: int
    request: JobRequest
    state: JobState
    events: tuple[Mapping[str, Any], ...]

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
        """As scripts read it."""
        return {
            "job": self.number,
            "kind": str(self.request.kind),
            "asked_by": self.request.asked_by,
            "asked_s": self.request.asked_s,
            "arguments": dict(self.request.arguments),
            "state": str(self.state),
            "progress": self._progress(),
            "exit_code": self.exit_code,
            "result": None if self.end is None else self.end["result"],
        }

    def _progress(self) -> Mapping[str, Any] | None:
        found = (one for one in reversed(self.events) if one.get("event") == "progress")
        return next(found, None)


def folder_of(ctx: Context) -> JobFolder:
    """Where the jobs of this mode are."""
    return JobFolder(ctx.paths.runtime_dir / "jobs")


def job_unit(number: int) -> str:
    """The name of the unit that does a job."""
    return f"tunerd-job-{number}.service"


def start_job(ctx: Context, request: JobRequest) -> int:
    """Begin a job; its number.

    Raises:
        UsageError: its arguments are wrong.
        ServiceError, HostError: its process cannot be started.
    """
    check_arguments(request.arguments)
    folder = folder_of(ctx)
    number = folder.create(request.to_json())
    words = ["job", str(number)]
    if ctx.mode is Mode.LOCAL:
        _start_process(ctx, folder, number, words)
    else:
        unit = OwnUnit(job_unit(number), f"job {number}, {request.kind}", words)
        start_own_unit(ctx, unit)
    return number


def _start_process(ctx: Context, folder: JobFolder, number: int, words: list[str]) -> None:
    from tunerd.system.process import Setting, start

    argv = [sys.executable, "-m", "tunerd", f"--{ctx.mode}", *words]
    with folder.log(number).open("ab") as log:
        child = start(argv, Setting(env=dict(ctx.environment)), log=log.fileno())
    threading.Thread(target=child.reap, name=f"job {number}", daemon=True).start()


def read_job(ctx: Context, number: int) -> Job:
    """A job as it stands.

    Raises:
        UsageError: there is none of this number.
    """
    folder = folder_of(ctx)
    stored = folder.request(number)
    if stored is None:
        raise UsageError(f"there is no job {number}", hint="jobs are forgotten at a reboot")
    request = request_from_json(stored)
    has_begun, is_alive = folder.has_begun(number), folder.is_alive(number)  # in this order
    events = folder.events(number)  # after the look whether it lives: it may end in between
    if events and events[-1].get("event") == END:
        state = JobState.FAILED if events[-1]["exit_code"] else JobState.DONE
    elif is_alive:
        state = JobState.RUNNING
    elif has_begun or ctx.clock.now_s() - request.asked_s > _START_LIMIT_S:
        state = JobState.DIED
    else:
        state = JobState.STARTING
    return Job(number, request, state, events)


def list_jobs(ctx: Context, *, limit: int = 20) -> list[Job]:
    """The newest jobs, newest first."""
    folder = folder_of(ctx)
    found = (number for number in folder.numbers() if folder.request(number) is not None)
    return [read_job(ctx, number) for _, number in zip(range(limit), found, strict=False)]


def running_jobs(ctx: Context) -> list[Job]:
    """Every job that is not over, newest first; what looks only is among them."""
    folder = folder_of(ctx)
    numbers = [one for one in folder.numbers() if folder.is_alive(one) or not folder.has_begun(one)]
    found = [read_job(ctx, one) for one in numbers if folder.request(one) is not None]
    return [job for job in found if not job.state.is_over]


def demand_lane(ctx: Context, request: JobRequest) -> None:
    """Refuse a job that may not run beside one that is under way.

    Raises:
        Busy: there is such a job.
    """
    lane = request.lane
    if lane is Lane.LOOK:
        return
    job = next((one for one in running_jobs(ctx) if one.request.lane is lane), None)
    if job is not None:
        raise Busy(
            "another job is under way",
            cause=f"job {job.number}, {job.request.kind}, asked for by {job.request.asked_by}",
            state="nothing was changed",
            hint=f"`tunerd jobs watch {job.number}` tells when it is over",
        )


def stop_job(ctx: Context, number: int) -> ActionResult:
    """End a job that measures; production serves again, and what was measured is kept.

    Raises:
        UsageError: there is none of this number, or it is over, or it changes something.
        ServiceError: it does not stop.
    """
    job = read_job(ctx, number)
    if job.state.is_over:
        raise UsageError(
            f"job {number} is over", hint=f"`tunerd jobs watch {number}` shows its end"
        )
    if job.request.lane not in {Lane.MEASURE, Lane.LOOK}:
        raise UsageError(
            f"job {number}, {job.request.kind}, is not ended half-way",
            state="it goes on",
            hint=f"wait for it: `tunerd jobs watch {number}`; `tunerd rollback` undoes a swap",
        )
    if ctx.mode is Mode.LOCAL:
        raise UsageError(
            f"job {number} is a process of its own here, without a service manager",
            hint=f"`kill {job.pid}` ends it" if job.pid is not None else "it is just being started",
        )
    ctx.say(f"ending job {number}, {job.request.kind}")
    ctx.services.stop(job_unit(number), timeout_s=_STOP_S)
    payload = {"job": number, "kind": str(job.request.kind)}
    return ActionResult("jobs stop", payload, has_acted=True)


def measuring_job(ctx: Context) -> int | None:
    """The number of the job that sweeps, if one does."""
    kinds = {JobKind.SWEEP_RUN, JobKind.SWEEP_RESUME}
    found = (one for one in running_jobs(ctx) if one.request.kind in kinds)
    return next((one.number for one in found if one.request.lane is Lane.MEASURE), None)


def jobs(ctx: Context) -> ActionResult:
    """`tunerd jobs`: the newest ones."""
    return ActionResult("jobs", {"jobs": [one.to_json() for one in list_jobs(ctx)]})


def watch_job(ctx: Context, number: int) -> ActionResult:
    """Report the progress of a job from its beginning, and give what it came to.

    Raises:
        UsageError: there is none of this number.
        TunerdError: as the job itself.
    """
    seen = 0
    while True:
        job = read_job(ctx, number)
        for event in job.events[seen:]:
            if event["event"] == "progress":
                ctx.report(progress_of(event))
        seen = len(job.events)
        if job.state.is_over:
            return _outcome(job)
        ctx.clock.sleep(_POLL_S)


def _outcome(job: Job) -> ActionResult:
    if job.end is None:
        raise HostError(
            f"job {job.number} ended without a word",
            cause="its process was killed",
            hint="`tunerd status` shows what serves",
        )
    return result_from_json(job.end["result"], int(job.end["exit_code"]))


# In the process of the job


def run_job(make_context: Callable[[Callable[[Progress], None]], Context], number: int) -> int:
    """Do a job in this process, and keep what happens; the exit code.

    Args:
        make_context: The context of this process, given where progress goes.
        number: Of the job.

    Raises:
        HostError: there is no such job.
    """
    folder = folder_of(make_context(lambda _progress: None))
    stored = folder.request(number)
    if stored is None:
        raise HostError(f"there is no job {number}")
    request = request_from_json(stored)
    with folder.writing(number) as events:
        events.add({"event": "begun", "pid": os.getpid()})
        try:
            with Interrupts():
                ctx = make_context(lambda progress: _tell(events, progress))
                result = job_actions.do(_as_job(ctx, number, request), request)
        except TunerdError as error:
            return _end(events, error.exit_code, error_json(error, str(request.kind)))
        except (KeyboardInterrupt, SystemExit) as end:
            return _end(events, _status(end), error_json(_ended(end), str(request.kind)))
        except BaseException:
            crash = HostError("tunerd itself failed; `journalctl` shows how")
            _end(events, 1, error_json(crash, str(request.kind), code=_INTERNAL))
            raise
        return _end(events, result.exit_code, result.to_json())


def _as_job(ctx: Context, number: int, request: JobRequest) -> Context:
    """The context of a job: who asked for it, and the unit that a lease is bound to."""
    environment = {**ctx.environment, "USER": request.asked_by, "SUDO_USER": ""}
    own_unit = None if ctx.mode is Mode.LOCAL else job_unit(number)
    return replace(ctx, environment=environment, own_unit=own_unit)


def _ended(end: BaseException) -> Interrupted:
    """What a signal ended; its notes say how the machine is."""
    return Interrupted("interrupted", state="\n".join(getattr(end, "__notes__", ())) or None)


def _status(end: BaseException) -> int:
    code = end.code if isinstance(end, SystemExit) else None
    return code if isinstance(code, int) and code else Interrupted.exit_code


def error_json(error: TunerdError, command: str, *, code: str | None = None) -> dict[str, Any]:
    """The envelope of an error, as every `--json` prints it."""
    return {
        "schema": SCHEMA,
        "command": command,
        "ok": False,
        "messages": [],
        "error": {
            "code": code or error.code,
            "message": error.message,
            "cause": error.cause,
            "state": error.state,
            "hint": error.hint,
        },
    }


def _tell(events: JobEvents, progress: Progress) -> None:
    events.add(
        {
            "event": "progress",
            "text": progress.text,
            "step": progress.step,
            "steps": progress.steps,
            "done_ratio": progress.done_ratio,
            "left_s": progress.left_s,
        }
    )


def _end(events: JobEvents, exit_code: int, envelope: Mapping[str, Any]) -> int:
    events.add({"event": END, "exit_code": exit_code, "result": envelope})
    return exit_code
