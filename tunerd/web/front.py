"""The web part's end: asks the daemon for everything, and holds each account to its share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from tunerd.errors import Busy, HostError
from tunerd.operations import MOST_NUMBER, WrongError, argv_of, json_of, schema_of, takes, word_of
from tunerd.result import error_json
from tunerd.web.asking import ask
from tunerd.web.gate import Gate, Visitor
from tunerd.web.routes import (
    LOOK_PATHS,
    LOOKS,
    READS,
    Answer,
    answer_of,
    bad_request,
    is_slow,
    refused,
)

if TYPE_CHECKING:
    import click


# Longer than two that look for something take, one after the other.
_LIMIT_S = 600.0
_SLOW_AT_ONCE = 2
_OF_ONE_AT_ONCE = 2
_MOST_WAITING = 32


@dataclass(frozen=True, slots=True)
class Facts:
    """What the page needs to know of the daemon's settings."""

    unit: str
    every_s: float
    listen: str | None
    hosts: tuple[str, ...]


def read_facts(path: Path) -> Facts:
    """Ask a daemon for them.

    Raises:
        HostError: it does not answer.
    """
    answer = _asked(path, {"uid": 0, "look": "facts"})
    found = answer.envelope
    if answer.is_error:
        raise HostError("tunerd's daemon does not answer", cause=found["error"]["message"])
    return Facts(found["unit"], found["every_s"], found["listen"], tuple(found["hosts"]))


@dataclass
class Front:
    """What every handler works with; `path` is where the daemon is asked."""

    path: Path
    gate: Gate
    facts: Facts
    _shares: dict[str, anyio.CapacityLimiter] = field(default_factory=dict)
    _slow: anyio.CapacityLimiter | None = None

    async def read(
        self,
        path: str,
        visitor: Visitor,
        parts: Mapping[str, str] | None = None,
        query: Mapping[str, str | list[str]] | None = None,
    ) -> Answer:
        """What a path of the API says; slow ones wait for each other, and hold up nobody else."""
        given = {**(query or {}), **(parts or {})}
        if path in LOOK_PATHS:
            return await self.look(LOOK_PATHS[path], visitor, given)
        kind = READS[path]
        if not _may_be(takes(kind), parts or {}):
            return refused(404, "there is nothing of that name", "/api/openapi.json")
        try:
            argv = argv_of(kind, given, is_text=True)
        except WrongError as error:
            return bad_request("a parameter is wrong", str(error))
        if not is_slow(kind):
            return await anyio.to_thread.run_sync(_asked, self.path, _question(visitor, argv=argv))
        return await self.wait(argv, visitor)

    async def look(self, name: str, visitor: Visitor, given: Mapping[str, Any]) -> Answer:
        """What no command says."""
        schemas = LOOKS[name].takes
        try:
            values = {key: json_of(schemas[key], value) for key, value in given.items()}
        except (KeyError, TypeError, ValueError) as error:
            return bad_request("a parameter is wrong", str(error))
        if values.get("number", 0) > MOST_NUMBER or values.get("number", 0) < 0:
            return refused(404, "there is nothing of that name", "/api/openapi.json")
        question = _question(visitor, look=name, given=values)
        return await anyio.to_thread.run_sync(_asked, self.path, question)

    async def wait(self, argv: Sequence[str], visitor: Visitor) -> Answer:
        """What a slow look comes to."""
        if self._slow is None:
            self._slow = anyio.CapacityLimiter(_SLOW_AT_ONCE)
        question = _question(visitor, argv=list(argv), waits=True)
        return await self._in_turn(visitor, argv[0], question, self._slow)

    async def run(self, argv: Sequence[str], visitor: Visitor) -> Answer:
        """What these words come to: a job that was begun, or what was read."""
        question = _question(visitor, argv=list(argv))
        return await self._in_turn(visitor, argv[0] if argv else "api", question, None)

    async def begin(
        self, kind: str, given: Mapping[str, Any], visitor: Visitor, *, is_text: bool = False
    ) -> Answer:
        """Begin a job with these values of its operation."""
        try:
            argv = argv_of(kind, given, is_text=is_text)
        except WrongError as error:
            return bad_request("the body is wrong", str(error))
        return await self.run(argv, visitor)

    async def _in_turn(
        self,
        visitor: Visitor,
        command: str,
        question: Mapping[str, Any],
        limiter: anyio.CapacityLimiter | None,
    ) -> Answer:
        """Ask; what one account asks for waits for each other, and not what others ask for."""
        share = self._shares.setdefault(visitor.key, anyio.CapacityLimiter(_OF_ONE_AT_ONCE))
        if share.statistics().tasks_waiting >= _MOST_WAITING:
            problem = Busy(
                "too much that you asked for waits",
                cause=f"{_MOST_WAITING} requests of {visitor.name}",
                state="nothing was touched",
                hint="try again when they are answered",
            )
            return Answer(error_json(problem, command), problem.exit_code)
        async with share:
            return await anyio.to_thread.run_sync(_asked, self.path, question, limiter=limiter)


def _asked(path: Path, question: Mapping[str, Any]) -> Answer:
    try:
        return answer_of(ask(path, json.dumps(question).encode(), timeout_s=_LIMIT_S))
    except HostError as problem:
        return Answer(error_json(problem, "api"), problem.exit_code)


def _question(visitor: Visitor, **what: Any) -> Mapping[str, Any]:
    return {"uid": visitor.peer.uid, **what}


def _may_be(known: Mapping[str, click.Parameter], parts: Mapping[str, str]) -> bool:
    """Whether the parts of a path are numbers and names that something could have."""
    try:
        for name, text in parts.items():
            schema = schema_of(known[name])
            word_of(schema, json_of(schema, text))
    except ValueError:
        return False
    return True
