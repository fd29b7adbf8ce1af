"""What the local API does for operators: each job is a process of its own, beside the daemon.

The daemon is confined and could not try a program as another account; a job is tunerd's own
command, started by the service manager, so it outlives the daemon and whoever asked for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunerd.actions.context import Context
from tunerd.actions.own_unit import OwnUnit, start_own_unit
from tunerd.core.host import Mode
from tunerd.core.job import JobKind, JobRequest, JobState, check_options, request_from_json
from tunerd.core.names import check_name
from tunerd.core.progress import Progress
from tunerd.core.result import SCHEMA, ActionResult
from tunerd.core.swap import sha256
from tunerd.errors import DeployError, HostError, TunerdError, UsageError
from tunerd.system.job_folder import JobEvents, JobFolder

END = "end"
# From the request until its process has begun; a loaded machine takes seconds for that.
_START_LIMIT_S = 120.0
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


def start_job(ctx: Context, request: JobRequest) -> int:
    """Begin a job; its number.

    Raises:
        UsageError: its arguments are wrong.
        ServiceError, HostError: its process cannot be started.
    """
    check_job(request)
    folder = folder_of(ctx)
    number = folder.create(request.to_json())
    words = ["job", str(number)]
    if ctx.mode is Mode.LOCAL:
        _start_process(ctx, folder, number, words)
    else:
        unit = OwnUnit(f"tunerd-job-{number}.service", f"job {number}, {request.kind}", words)
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


def running_job(ctx: Context) -> Job | None:
    """The job that changes something right now."""
    jobs = list_jobs(ctx)
    return next((one for one in jobs if one.request.kind.changes and not one.state.is_over), None)


def check_job(request: JobRequest) -> None:
    """Refuse what may not be asked for through the API, by the very checks of the command line.

    Raises:
        UsageError: a name cannot be one, or an option may not be set.
    """
    arguments = request.arguments
    if "profile" in arguments:
        check_name(arguments["profile"], of="a profile")
    if arguments.get("workload") is not None:
        check_name(arguments["workload"], of="a workload")
    check_options(arguments.get("set", {}))


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
        events.add({"event": "begun"})
        try:
            ctx = make_context(lambda progress: _tell(events, progress))
            environment = {**ctx.environment, "USER": request.asked_by, "SUDO_USER": ""}
            result = do(replace(ctx, environment=environment), request)
        except TunerdError as error:
            return _end(events, error.exit_code, error_json(error, str(request.kind)))
        except BaseException:
            crash = HostError("tunerd itself failed; `journalctl` shows how")
            _end(events, 1, error_json(crash, str(request.kind), code=_INTERNAL))
            raise
        return _end(events, result.exit_code, result.to_json())


def do(ctx: Context, request: JobRequest) -> ActionResult:
    """What the job asks for.

    Raises:
        TunerdError: as the action of that name.
    """
    check_job(request)
    return _ACTIONS[request.kind](ctx, request.arguments)


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


def shown_hash(diff: str) -> str:
    """What stands for the difference that somebody was shown before they said yes."""
    return sha256(diff.encode("utf-8", "surrogateescape")) or ""


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


def _as_shown(arguments: Mapping[str, Any]) -> Callable[[Any], None]:
    """Refuses to go on where the difference is another one than was shown."""
    shown = arguments.get("shown")

    def confirm(made: Any) -> None:
        if shown is not None and shown_hash(made.diff) != shown:
            raise DeployError(
                "what would change is no longer what was shown",
                cause="a profile, the machine or the unit changed in the meantime",
                state="nothing was changed",
                hint="look at it again",
            )

    return confirm


def _apply(ctx: Context, arguments: Mapping[str, Any]) -> ActionResult:
    from tunerd.actions.apply import apply

    return apply(
        ctx,
        _plan_request(arguments),
        drain=not arguments.get("now", False),
        confirm=_as_shown(arguments),
        probation=arguments.get("probation", True),
    )


def _rollback(ctx: Context, arguments: Mapping[str, Any]) -> ActionResult:
    from tunerd.actions.rollback import rollback

    return rollback(
        ctx,
        to=arguments.get("to"),
        drain=not arguments.get("now", False),
        confirm=_as_shown(arguments),
    )


def _promote(ctx: Context, arguments: Mapping[str, Any]) -> ActionResult:
    from tunerd.actions.promote import promote

    return promote(
        ctx,
        arguments.get("sweep"),
        drain=not arguments.get("now", False),
        confirm=lambda _plan: None,
        with_probation=arguments.get("probation", True),
    )


def _decline(ctx: Context, arguments: Mapping[str, Any]) -> ActionResult:
    from tunerd.actions.promote import decline

    return decline(ctx, arguments.get("sweep"), why=arguments.get("why"))


def _sweep_start(ctx: Context, arguments: Mapping[str, Any]) -> ActionResult:
    from tunerd.actions.sweep_plan import SweepRequest
    from tunerd.actions.sweep_unit import start_sweep

    request = SweepRequest(
        budget_s=float(arguments["budget_s"]),
        max_arms=arguments.get("max_arms"),
        workload=arguments.get("workload"),
    )
    return start_sweep(ctx, request, confirm=lambda _prepared: None)


def _sweep_stop(ctx: Context, _arguments: Mapping[str, Any]) -> ActionResult:
    from tunerd.actions.sweep_unit import stop_sweep

    return stop_sweep(ctx)


def _plan(ctx: Context, arguments: Mapping[str, Any]) -> ActionResult:
    from tunerd.actions.plan import plan

    return plan(ctx, _plan_request(arguments), with_explain=arguments.get("explain", False))


def _engines(ctx: Context, _arguments: Mapping[str, Any]) -> ActionResult:
    from tunerd.actions.engines import engines

    return engines(ctx)


def _plan_request(arguments: Mapping[str, Any]) -> Any:
    from tunerd.actions.choose_engine import PlanRequest

    return PlanRequest(
        arguments["profile"],
        dict(arguments.get("set", {})),
        with_tuned=not arguments.get("untuned", False),
    )


_ACTIONS: Mapping[JobKind, Callable[[Context, Mapping[str, Any]], ActionResult]] = {
    JobKind.APPLY: _apply,
    JobKind.ROLLBACK: _rollback,
    JobKind.PROMOTE: _promote,
    JobKind.DECLINE: _decline,
    JobKind.SWEEP_START: _sweep_start,
    JobKind.SWEEP_STOP: _sweep_stop,
    JobKind.PLAN: _plan,
    JobKind.ENGINES: _engines,
}
