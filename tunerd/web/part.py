"""The daemon's end of API and page: answers what the web part asks, which may be anything, and keeps that part running.

Under systemd the web part is `tunerd-web.service`, of an account that can do nothing by itself. Elsewhere
there is no such account, and the daemon starts it, and starts it again where it ends. Every word that it
says is checked here, whatever was checked before; nothing can be asked for that a member of the group may
not ask for, whoever the web part says that it speaks for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tunerd.app import Context
from tunerd.errors import ConfigError, HostError, TunerdError, UsageError
from tunerd.jobs import demand_lane, news_of, read_job, running_jobs, start_job
from tunerd.machine import peers
from tunerd.machine.process import Child, Setting, own_command, run, start
from tunerd.operations import Asked, Call, JobRequest, Lane, asked, value_of
from tunerd.paths import FROM_ELSEWHERE
from tunerd.profile.files import load_profile, parse_options
from tunerd.result import ActionResult, ignore_progress
from tunerd.watch.figures import summarise
from tunerd.watch.history import Telemetry, history
from tunerd.watch.watcher import top
from tunerd.web.routes import LOOKS, MAX_QUESTION_BYTES, Answer, bad_request, refused
from tunerd.words import Mode

# The only one that is heard.
ACCOUNT = "tunerd-web"
UNIT = "tunerd-web.service"
_AGAIN_S = 5.0
_AT_ONCE = 16
_READ_S = 10.0
_WRITE_S = 60.0
_SLOW_AT_ONCE = 2
_MOST_WORDS = 300
_LIMIT_S = 180.0
_POLL_S = 0.1
_MAX_BYTES = 32 * 1024 * 1024
_STEPS_S = (60, 600, 3600, 21600)
_MOST_POINTS = 300
_HOURS = 24.0
# Up to there the looks themselves are told, of which an hour is kept.
_HOURS_OF_LOOKS = 1.0

log = structlog.get_logger()


class Question(BaseModel):
    """What the web part asks; `uid` is the account that it speaks for.

    Either the words of an operation, or the name of a look with its values as texts. With `waits` the
    answer of a job that only looks is waited for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    uid: int = Field(ge=0)
    argv: list[str] = Field(default_factory=list, max_length=_MOST_WORDS)
    look: str = ""
    given: dict[str, str] = Field(default_factory=dict)
    waits: bool = False


class Desk:
    """Answers questions; any thread may ask."""

    def __init__(self, ctx: Context, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._slow = threading.BoundedSemaphore(_SLOW_AT_ONCE)
        self._starting = threading.Lock()
        self.take_over(ctx)

    def take_over(self, ctx: Context) -> None:
        """Answer by these settings from now on."""
        self._ctx = replace(ctx, progress=ignore_progress)

    def answer(self, line: bytes) -> bytes:
        """One question and its answer, as they go over the wire."""
        try:
            question = Question.model_validate_json(line)
            answer = self._look(question) if question.look else self._answer(question)
        except ValidationError:
            answer = bad_request("that is not a request")
        except Exception:
            log.exception("asked.failed")
            failed = HostError("tunerd itself failed; its log says how")
            answer = Answer.failed(failed, status=500, code="internal")
        return answer.to_line()

    def _answer(self, question: Question) -> Answer:
        try:
            words = asked(question.argv)
        except UsageError as error:
            return Answer.failed(error, status=400)
        return _said(words.kind, lambda: self._done(words, question))

    def _done(self, words: Asked, question: Question) -> Answer:
        """In this process, in one of its own, or by a job."""
        if words.lane is Lane.HERE:
            shown = partial(top, self._ctx, self._telemetry.readings())
            return Answer.of(words.act(Call(ctx=self._ctx, top=shown)))
        is_look = words.lane is Lane.LOOK
        if words.lane is not Lane.APART and not (question.waits and is_look):
            return self._begin(words, question)[1]
        with self._slow:
            return self._waited(words, question) if is_look else self._apart(question.argv)

    def _apart(self, argv: Sequence[str]) -> Answer:
        """In a process of its own."""
        words = own_command(self._ctx.mode, "look", "--", *argv)
        setting = Setting(self._ctx.environment)
        done = run(words, setting, timeout_s=_LIMIT_S, max_output_bytes=_MAX_BYTES)
        try:
            envelope = json.loads(done.stdout)
        except ValueError as error:
            cause = done.stderr[-500:] or None
            raise HostError(f"`tunerd {argv[0]}` gave no answer", cause=cause) from error
        return Answer(envelope, done.returncode if done.returncode is not None else 1)

    def _begin(self, words: Asked, question: Question) -> tuple[int, Answer]:
        """Begin a job, if no other one changes something."""
        name, now_s = peers.account_text(question.uid), self._ctx.clock.now_s()
        request = JobRequest(words.kind, tuple(question.argv), words.lane, name, now_s)
        named = words.params.get("profile") or ()
        options = parse_options(words.params.get("options", ()))
        # One that is not there is told at once, not by a job.
        for profile in (named,) if isinstance(named, str) else named:
            load_profile(self._ctx, profile, options=options)
        with self._starting:
            number = self._start(request)
        log.info("job.begun", job=number, kind=words.kind, by=name, uid=question.uid)
        begun = {"job": read_job(self._ctx, number).to_json()}
        return number, Answer(ActionResult("job", begun).to_json(), 0, 202)

    def _start(self, request: JobRequest) -> int:
        if request.kind == "sweep watch":  # all who watch are told the same
            found = [one for one in running_jobs(self._ctx) if one.request.kind == request.kind]
            if found:
                return found[0].number
        demand_lane(self._ctx, request)
        return start_job(self._ctx, request)

    def _waited(self, words: Asked, question: Question) -> Answer:
        """What a job that only looks comes to."""
        number, _ = self._begin(words, question)
        clock = self._ctx.clock
        end_s = clock.monotonic_s() + _LIMIT_S
        while not (job := read_job(self._ctx, number)).state.is_over:
            if clock.monotonic_s() > end_s:
                raise HostError(f"job {number} takes too long", hint=f"/api/jobs/{number}")
            clock.sleep(_POLL_S)
        if job.end is None:
            raise HostError(f"job {number} ended without an answer", hint="journalctl says why")
        return Answer(job.end["result"], int(job.end["exit_code"]))

    def _look(self, question: Question) -> Answer:
        """What no command says."""
        look = LOOKS.get(question.look)
        if look is None:
            return refused(404, "there is nothing of that name", "/api/openapi.json")
        given = {}
        try:
            for name, text in question.given.items():
                given[name] = value_of(look.takes[name], text)
        except (KeyError, ValueError) as error:
            if name == "number" and look.path:
                return refused(404, "there is nothing of that number", "/api/openapi.json")
            why = "there is no such parameter" if isinstance(error, KeyError) else str(error)
            return bad_request("a parameter is wrong", f"{name[:100]}: {why}")
        name, act = question.look, getattr(self, f"_look_{question.look}")
        return _said(name, lambda: Answer.of(ActionResult(name, dict(act(**given)))))

    # Each look of `LOOKS`, by its name.

    def _look_facts(self) -> Mapping[str, Any]:
        page, settings = self._ctx.settings.page, self._ctx.settings
        return {"unit": self._ctx.unit, "every_s": settings.daemon.every_s, "listen": page.listen,
                "hosts": list(page.hosts)}  # fmt: skip

    def _look_metrics(self) -> Mapping[str, Any]:
        from tunerd.web.metrics import exposition

        found = self._telemetry.readings()
        return {"text": exposition(found[-1] if found else None).decode()}

    def _look_job(self, number: int) -> Mapping[str, Any]:
        return {"job": read_job(self._ctx, number).to_json()}

    def _look_events(self, number: int, offset: int = 0) -> Mapping[str, Any]:
        return news_of(self._ctx, number, offset)

    def _look_telemetry(self, hours: float = _HOURS) -> Mapping[str, Any]:
        now_s = self._ctx.clock.now_s()
        since_s = now_s - hours * 3600
        # Some hundred points, whatever the stretch; rows of a minute and of ten are kept.
        fitting = (step for step in _STEPS_S if hours * 3600 / step <= _MOST_POINTS)
        step_s = next(fitting, _STEPS_S[-1])
        looks = self._telemetry.readings() if hours <= _HOURS_OF_LOOKS else ()
        looks = tuple(one for one in looks if one.at_s >= since_s)
        until_s = looks[0].at_s - step_s if looks else now_s
        kept = history(self._ctx, since_s, until_s, step_s=step_s)
        rows = [summarise([one], begin_s=int(one.at_s), seconds=0) for one in looks]
        looked = (one for one, _ in rows)
        points = [{**asdict(one), **one.rates()} for one in (*kept.points, *looked)]
        gpus = (*kept.gpus, *chain.from_iterable(gpus for _, gpus in rows))
        return {**asdict(replace(kept, points=(), gpus=gpus)), "points": points}


def _said(command: str, read: Callable[[], Answer]) -> Answer:
    try:
        return read()
    except TunerdError as error:
        return Answer.failed(error, command)


class Answering(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers on a listening socket, a line for a line, in threads, from `start` until `stop`.

    Args:
        listener: Its connections.
        uid: The one account that is heard; None for nobody.
        answer: Makes a line of a line.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, listener: socket.socket, uid: int | None, answer: Callable[[bytes], bytes]
    ) -> None:
        super().__init__("", _Line, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.socket.setblocking(False)  # whoever went away before it is accepted holds up nobody
        self.answer = answer
        self._uid = uid
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._is_ending = False
        self._thread = threading.Thread(target=self.serve_forever, name="asked", daemon=True)

    def start(self) -> None:
        """Answer from now on; who came before waits in the socket."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more questions."""
        self._is_ending = True
        self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """A connection; where no descriptor is left, there may be later."""
        try:
            return super().get_request()
        except OSError:
            threading.Event().wait(_POLL_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether it is the account that is heard."""
        del client_address
        return peers.peer_of(request).uid == self._uid

    def process_request(self, request: Any, client_address: Any) -> None:
        """As usual, but so many at once."""
        while not self._places.acquire(timeout=_POLL_S):
            if self._is_ending:  # which waits for this
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread left
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for the next one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever went away needs no answer, and no line in the log."""


class _Line(socketserver.StreamRequestHandler):
    timeout = _READ_S
    server: Answering

    def handle(self) -> None:
        line = self.rfile.readline(MAX_QUESTION_BYTES)
        if line.endswith(b"\n"):
            answer = self.server.answer(line[:-1])
            self.connection.settimeout(_WRITE_S)
            with contextlib.suppress(OSError):
                self.wfile.write(answer + b"\n")


class ApiPart:
    """Answers from `start` until `stop`, on the socket that systemd holds or on one of its own."""

    def __init__(self, ctx: Context, telemetry: Telemetry) -> None:
        self._ctx = ctx
        self._desk = Desk(ctx, telemetry)
        self._answering: Answering | None = None
        self._keeper: _Keeper | None = None

    def start(self) -> None:
        """Begin to answer, as far as that is possible; what is not is said in the log."""
        inherited = peers.inherited_sockets(self._ctx.environment)
        if not inherited and self._ctx.mode is Mode.SYSTEM:  # else it would speak HTTP as root
            peers.say_not_served(HostError("the web part is not started: systemd handed over no socket",
                           hint="`systemctl status tunerd-daemon.socket` says why"))  # fmt: skip
            return
        uid = peers.account_number(ACCOUNT) if inherited else os.geteuid()
        try:
            path = self._ctx.paths.runtime_dir / peers.DAEMON_SOCKET
            listener = inherited[0] if inherited else peers.unix_socket(path, group=None)
        except TunerdError as problem:
            peers.say_not_served(problem)
            return
        self._answering = Answering(listener, uid, self._desk.answer)
        self._answering.start()
        page = self._ctx.settings.page
        if page.token_file is not None:
            peers.say_not_served(ConfigError("page.token_file is no longer used: the page has no tokens",
                             hint=f"remove it from `{self._ctx.paths.settings_file}`; {FROM_ELSEWHERE}"))  # fmt: skip
        if not inherited:
            self._keeper = _Keeper(self._ctx)
            self._keeper.begin()
        elif page.listen is not None:  # without a port whoever connects starts it
            self._do(lambda: self._ctx.services.start(UNIT))

    def take_over(self, ctx: Context) -> None:
        """Answer by other settings from now on; where the page listens as well."""
        before, self._ctx = self._ctx, ctx
        self._desk.take_over(ctx)
        if self._answering is None or ctx.settings.page == before.settings.page:
            return
        if self._keeper is not None:
            self._keeper.again()
        else:
            self._do(lambda: ctx.services.restart(UNIT))

    def stop(self) -> None:
        """Answer no more; jobs go on."""
        if self._keeper is not None:
            self._keeper.end()
        if self._answering is not None:
            self._answering.stop()

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except TunerdError as problem:
            peers.say_not_served(problem)


class _Keeper:
    """Keeps a web part of the daemon's own account running."""

    def __init__(self, ctx: Context) -> None:
        self._argv = own_command(ctx.mode, "web")
        # It ends with the thread that started it, and so with the daemon, however that ends.
        self._setting = Setting(env=dict(ctx.environment), keeps_together=True)
        self._child: Child | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="web", daemon=True)

    def begin(self) -> None:
        """Start it from now on, again and again."""
        self._thread.start()

    def again(self) -> None:
        """Have it end, so that it is started with what holds now."""
        if self._child is not None:
            self._child.send(signal.SIGTERM)

    def end(self) -> None:
        """End it for good."""
        self._ends.set()
        self.again()
        self._thread.join(timeout=2 * _AGAIN_S)

    def _keep(self) -> None:
        while not self._ends.is_set():
            try:
                self._child = start(self._argv, self._setting, log=sys.stderr.fileno())
            except TunerdError as problem:
                peers.say_not_served(problem)
            else:
                if self._ends.is_set():  # it was not there yet when it was to end
                    self.again()
                log.info("web.ended", how=str(self._child.reap()))
            self._ends.wait(_AGAIN_S)
