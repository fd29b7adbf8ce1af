"""The daemon's end: answers what the web part asks, which may be anything, by the table of operations.

Every word is checked here, whatever was checked before; nothing can be asked for that a member of the
group may not ask for, whoever the web part says that it speaks for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tunerd.app import Context
from tunerd.errors import HostError, TunerdError, UsageError
from tunerd.jobs import demand_lane, read_job, running_jobs, start_job
from tunerd.machine.peers import account_text
from tunerd.operations import Asked, JobRequest, Lane, asked, word_of
from tunerd.profile.files import load_profile, parse_options
from tunerd.result import ActionResult, error_json, ignore_progress
from tunerd.watch.history import Telemetry
from tunerd.web.routes import LOOKS, Answer, Reads, bad_request, refused

_SLOW_AT_ONCE = 2
_MOST_WORDS = 300

log = structlog.get_logger()


class Question(BaseModel):
    """What the web part asks; `uid` is the account that it speaks for.

    Either the words of an operation, or the name of a look with its values. With `waits` the answer of a
    job that only looks is waited for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    uid: int = Field(ge=0)
    argv: list[str] = Field(default_factory=list, max_length=_MOST_WORDS)
    look: str = ""
    given: dict[str, int | float | bool] = Field(default_factory=dict)
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
        self._reads = Reads(self._ctx, self._telemetry)

    def answer(self, line: bytes) -> bytes:
        """One question and its answer, as they go over the wire."""
        try:
            question = Question.model_validate_json(line)
            answer = self._look(question) if question.look else self._answer(question)
        except ValidationError:
            answer = bad_request("that is no question")
        except Exception:
            log.exception("asked.failed")
            failed = HostError("tunerd itself failed; its log says how")
            answer = Answer(error_json(failed, "api", code="internal"), 1, 500)
        return answer.to_line()

    def _look(self, question: Question) -> Answer:
        look = LOOKS.get(question.look)
        if look is None:
            return refused(404, "there is nothing of that name", "/api/openapi.json")
        try:
            for name, value in question.given.items():
                word_of(look.takes[name], value)
        except (KeyError, ValueError) as error:
            return bad_request("a parameter is wrong", str(error))
        return self._reads.look(question.look, question.given)

    def _answer(self, question: Question) -> Answer:
        argv = question.argv
        try:
            words = asked(argv)
        except UsageError as error:
            return Answer(error_json(error, "api"), error.exit_code, 400)
        if words.lane is Lane.HERE:
            return self._reads.here(words)
        if words.lane is Lane.APART:
            with self._slow:
                return self._reads.apart(argv)
        if question.waits and words.lane is Lane.LOOK:
            with self._slow:
                begun = self._begin(words, argv, question.uid)
                return begun if begun.is_error else self._waited(begun, words)
        return self._begin(words, argv, question.uid)

    def _waited(self, begun: Answer, words: Asked) -> Answer:
        return self._reads.of_job(begun.envelope["job"]["job"], words.kind)

    def _begin(self, words: Asked, argv: Sequence[str], uid: int) -> Answer:
        """Begin a job, if no other one changes something."""
        name = account_text(uid)
        request = JobRequest(words.kind, tuple(argv), words.lane, name, self._ctx.clock.now_s())
        try:
            if words.params.get("profile"):  # one that is not there is told at once, not by a job
                options = parse_options(words.params.get("options", ()))
                load_profile(self._ctx, words.params["profile"], options=options)
            with self._starting:
                number = self._start(request)
            job = read_job(self._ctx, number).to_json()
        except TunerdError as error:
            return Answer(error_json(error, words.kind), error.exit_code)
        log.info("job.begun", job=number, kind=words.kind, by=name, uid=uid)
        return Answer(ActionResult("job", {"job": job}).to_json(), 0, 202)

    def _start(self, request: JobRequest) -> int:
        if request.kind == "sweep watch":  # all who watch are told the same
            found = [one for one in running_jobs(self._ctx) if one.request.kind == request.kind]
            if found:
                return found[0].number
        demand_lane(self._ctx, request)
        return start_job(self._ctx, request)
