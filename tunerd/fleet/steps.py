"""What comes next in a rollout, by its journal and by what the boxes said: decisions alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints

from tunerd import errors
from tunerd.production.checks import masked

# What another machine says is taken in these sizes, and not at all beyond them.
_Number = Annotated[int, Field(ge=0, le=10**12)]
_Words = Annotated[str, StringConstraints(max_length=10_000)]
_Unit = Annotated[str, StringConstraints(max_length=1_000_000)]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9:_.\\@-]{0,299}$")]
_SHOWN_CHARACTERS = 500
_OVERTAKEN = 1  # or what follows a deployment failed
_BLANK = " \t\\"


class Told(BaseModel):
    """A message of a box."""

    level: _Words
    code: _Words
    text: _Words


class Envelope(BaseModel):
    """What every answer holds; `exit_code` is that of the command there."""

    messages: Annotated[list[Told], Field(max_length=1000)]
    exit_code: int = 0

    def text_of(self, code: str) -> str:
        """The first message of this code; empty where there is none."""
        return next((one.text for one in self.messages if one.code == code), "")


class Swap(BaseModel):
    """The newest swap of a box."""

    number: _Number
    reason: _Words
    outcome: _Words
    detail: _Words | None
    from_generation: _Number | None = None
    replaced: _Name | Annotated[str, StringConstraints(pattern="^no unit file$")] | None


class Drift(BaseModel):
    """A difference of a box from what was deployed there."""

    code: _Words


class Measurement(BaseModel):
    """What holds the place of a box's server for a while."""

    restores: bool = False
    is_owed: bool = False  # older ones do not tell


class Status(Envelope):
    """`tunerd status`."""

    generation: _Number | None
    healthy: bool | None
    change_under_way: bool
    last_swap: Swap | None
    measurement: Measurement | None = None
    drift: Annotated[list[Drift], Field(max_length=1000)]

    @property
    def newest(self) -> int | None:
        """The number of the newest swap."""
        return None if self.last_swap is None else self.last_swap.number

    @property
    def is_well(self) -> bool:
        """Whether its server serves, or a measurement will give it its place back."""
        now = self.measurement
        return self.healthy is True or (now is not None and now.restores and not now.is_owed)

    @property
    def is_edited(self) -> bool:
        """Whether somebody changed the unit by hand."""
        return any(one.code == "unit-edited" for one in self.drift)


class Preview(Envelope):
    """`apply`, `promote` or `rollback` with `--dry-run`; `nothing` says why there is nothing to do."""

    diff: _Unit
    nothing: _Words | None = None


class Change(Envelope):
    """`apply`, `promote` or `rollback`."""

    generation: _Number
    backup: _Name | None
    summary: _Words


class Watched(BaseModel):
    """The probation of one generation."""

    generation: _Number
    state: _Words
    reason: _Words
    left_s: Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]


class Probations(Envelope):
    """`tunerd probation show`."""

    probations: Annotated[list[Watched], Field(max_length=100_000)]

    def of(self, generation: int | None) -> Watched | None:
        """That of one generation."""
        return next((one for one in self.probations if one.generation == generation), None)


class State(StrEnum):
    """How far a box is.

    `APPLYING` and `RETURNING` are written before the box is told, so they also mean that nobody knows yet
    what came of it. `REFUSED` is as before, and may be tried again.
    """

    WAITING = "waiting"
    SKIPPED = "skipped"
    APPLYING = "applying"
    WATCHED = "watched"
    DONE = "done"
    REFUSED = "refused"
    WENT_BACK = "went back"
    STRANDED = "stranded"
    LEFT = "left alone"
    RETURNING = "returning"
    RETURNED = "returned"


# The exit code of a rollout that ends at a box in this state; a person must look where it is 4.
_EXIT_CODES: Mapping[State, int] = (
    dict.fromkeys((State.WAITING, State.WATCHED, State.REFUSED, State.LEFT), 1)
    | {State.WENT_BACK: 3}
    | dict.fromkeys((State.STRANDED, State.APPLYING, State.RETURNING), 4)
)
_HAS_IT = frozenset({State.APPLYING, State.WATCHED, State.DONE, State.RETURNING})
TO_DO = frozenset({State.WAITING, State.REFUSED})
# On these a way back has nothing to do.
_AS_BEFORE = frozenset({State.WAITING, State.REFUSED, State.WENT_BACK})
# Not tried again: by itself nothing goes on behind these.
STOPS = frozenset({State.WENT_BACK, State.STRANDED, State.LEFT})


@dataclass(frozen=True, slots=True)
class Step:
    """One box of a rollout.

    Attributes:
        box: As ssh knows it.
        state: How far it is.
        text: What is to be said of it.
        shown: Stands for the difference that was planned there.
        newest: The newest swap there before.
        generation: What the rollout deployed there.
        backup: What that replaced; None where no unit file stood.
    """

    box: str
    state: State = State.WAITING
    text: str = ""
    shown: str = ""
    newest: int | None = None
    generation: int | None = None
    backup: str | None = None

    def at(self, state: State, text: str = "", **changes: Any) -> Step:
        """The same box, further on."""
        is_cut = len(text) > _SHOWN_CHARACTERS
        line = "; ".join(text[:_SHOWN_CHARACTERS].splitlines()) + "..." * is_cut
        return replace(self, state=state, text=line, **changes)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The journal: what each box is told, in which order, and how far that is.

    `what` is `apply` or `promote`, `words` what stands behind it.
    """

    number: int
    what: str
    words: tuple[str, ...]
    began_s: float
    boxes: tuple[Step, ...]
    is_back: bool = False
    probation: bool = True

    @property
    def preview(self) -> tuple[str, ...]:
        """The words that show what would be done on a box."""
        return (self.what, "--json", "--dry-run", *self.words)

    def change(self, step: Step) -> tuple[str, ...]:
        """The words that do it, if it still is what was planned: so nothing is done twice."""
        watched = () if self.probation else ("--no-probation",)
        return (self.what, "--json", "--yes", f"--shown={step.shown}", *watched, *self.words)

    def with_step(self, step: Step) -> Rollout:
        """With a box further on."""
        boxes = tuple(step if one.box == step.box else one for one in self.boxes)
        return replace(self, boxes=boxes)

    def to_do(self) -> tuple[Step, ...]:
        """The boxes that were not touched yet."""
        return tuple(one for one in self.boxes if one.state in TO_DO)

    def to_return(self) -> tuple[Step, ...]:
        """The boxes that have what it deployed, or may have, the last one first."""
        return tuple(one for one in reversed(self.boxes) if one.state in _HAS_IT)

    def going_back(self) -> Rollout:
        """On its way back, where a box that was left alone counts again: it may serve what was deployed."""
        if self.is_back:
            return self
        boxes = tuple(
            one.at(State.WATCHED, one.text)
            if one.state is State.LEFT and one.generation is not None
            else one
            for one in self.boxes
        )
        return replace(self, boxes=boxes, is_back=True)

    def exit_code_of(self, step: Step) -> int:
        """Of one of its boxes; 0 where nothing is left to do in the direction that it goes."""
        return 0 if self.is_back and step.state in _AS_BEFORE else exit_code(step)

    @property
    def exit_code(self) -> int:
        """The gravest of its boxes."""
        return max(map(self.exit_code_of, self.boxes), default=0)


def exit_code(step: Step) -> int:
    """0 where nothing is left to say of the box; going on from another one ends with this."""
    return _EXIT_CODES.get(step.state, 0)


def planned(step: Step, status: Status, preview: Preview, shown: str) -> Step:
    """What is to be done on a box, by what serves there and what would.

    Raises:
        HostError: nothing is, and its server does not serve.
    """
    if preview.nothing is not None:
        return step.at(State.SKIPPED, preview.nothing)
    if not preview.diff and not status.is_well:
        raise errors.HostError("it already serves exactly that, but it is not well")
    if not preview.diff:
        return step.at(State.SKIPPED, "already serves exactly that")
    lines = (line for line in preview.diff.splitlines()[2:] if line[:1] in {"+", "-"})
    changes = []
    for sign, run in groupby(lines, key=lambda line: line[0]):
        text = masked("\n".join(line[1:] for line in run))  # a flag's value may be on the next line
        changes += [f"{sign} {line.strip(_BLANK)}" for line in text.splitlines()]
    text = "; ".join(changes)
    if len(text) > _SHOWN_CHARACTERS:  # nobody may take a part for all that is asked about
        text = f"{len(changes)} lines: {text}"
    if step.shown not in {"", shown}:
        text = f"not what was planned before: {text}"
    return step.at(State.WAITING, text, shown=shown, newest=status.newest)


def deployed(rollout: Rollout, step: Step, done: Change) -> Step:
    """After the box said that it is done; what its own second look took back is told by the exit code.

    It is done where nobody is to watch it: neither the rollout nor the box wants that, or there is nothing to
    go back to. `APPLYING` where the connection ended otherwise than its tunerd.
    """
    if done.exit_code == errors.RolledBack.exit_code:
        return step.at(State.WENT_BACK, done.text_of("taken-back") or done.summary)
    if done.exit_code not in {0, _OVERTAKEN}:
        return step.at(State.APPLYING, f"ssh ended with status {done.exit_code}")
    wants_none = any(one.code == "no-probation" and one.level == "note" for one in done.messages)
    is_watched = rollout.probation and done.backup is not None and not wants_none
    well = State.WATCHED if is_watched else State.DONE
    state = State.LEFT if done.exit_code else well
    said = map(done.text_of, ("unfinished", "overtaken", "no-probation"))
    text = next(filter(None, said), done.summary)
    return step.at(state, text, generation=done.generation, backup=done.backup)


def failed(step: Step, error: errors.TunerdError) -> Step:
    """After the box said that it did not."""
    if isinstance(error, errors.Interrupted):
        return step.at(step.state, error.words)
    known = {_EXIT_CODES[one]: one for one in (State.WENT_BACK, State.STRANDED)}
    return step.at(known.get(error.exit_code, State.REFUSED), error.words)


def settled(rollout: Rollout, step: Step, status: Status, preview: Preview) -> Step:
    """What came of a box that was told to, and from which no answer came.

    Where the newest swap is that of before, nothing was done. What would be planned now is told from what
    was deployed by the difference: there is none.
    """
    swap = status.last_swap
    if swap is None or swap.number == step.newest:
        return step.at(State.REFUSED, step.text or "nothing was done there")
    if swap.outcome == "running":
        told = "its swap was cut short: its daemon settles that, or `tunerd recover` there"
        return step.at(step.state, told)
    if swap.outcome == "stranded" and status.healthy is not True:
        return step.at(State.STRANDED, swap.detail or "no reason is known")
    if status.generation != swap.number:
        return step.at(State.WENT_BACK, f"{swap.outcome}: {swap.detail or 'no reason is known'}")
    # The margin that a guard raises is from no generation, and what went back has one in between.
    newest = step.newest or 0
    is_back = swap.reason == "guard" and 0 < (swap.from_generation or 0) <= newest
    if is_back and swap.number > newest + 1:
        told = f"its own daemon took it back as generation {swap.number}"
        return step.at(State.WENT_BACK, told)
    if preview.diff or swap.reason != rollout.what or status.is_edited:
        return step.at(State.LEFT, f"generation {swap.number} was deployed there meanwhile")
    backup = None if swap.replaced == "no unit file" else swap.replaced
    state = State.WATCHED if rollout.probation and backup is not None else State.DONE
    return step.at(state, generation=swap.number, backup=backup)


def judged(step: Step, watched: Watched | None) -> Step:
    """A box that was deployed to, by its probation: the same while that goes on."""
    if watched is None:
        text = "it serves what was deployed, but nothing watches it: no probation began there"
        return step.at(State.LEFT, text)
    if watched.state == "passed":
        return step.at(State.DONE, watched.reason)
    ends = {"taken back": State.WENT_BACK, "worse": State.STRANDED, "ended": State.LEFT}
    over = ends.get(watched.state)
    return step if over is None else step.at(over, watched.reason)


def to_return(step: Step, status: Status) -> Step:
    """A box before it is told to go back: the same where what serves is what the rollout deployed."""
    if status.generation == step.generation and not status.is_edited:
        return step
    swap = status.last_swap
    is_back = swap is not None and swap.reason == "rollback" and swap.number == status.generation
    if step.state is State.RETURNING and is_back:
        return step.at(State.RETURNED)
    if status.is_edited:
        return step.at(State.LEFT, "somebody edited the unit there")
    return step.at(State.LEFT, f"generation {status.generation} serves there now")


def not_returned(step: Step, error: errors.TunerdError, *, is_told: bool) -> Step:
    """A box that did not go back; where it was told before (`step`), it may still be at it.

    Args:
        step: The box as it was found.
        error: What came instead.
        is_told: Whether it was told to by now.
    """
    is_sure = isinstance(
        error, errors.Busy | errors.DeployError | errors.UsageError
    ) and not isinstance(error, errors.Stranded)
    is_as_deployed = (is_sure or not is_told) and step.state is not State.RETURNING
    return step.at(State.WATCHED if is_as_deployed else State.RETURNING, error.words)


def name_of_hosts(listed: Mapping[str, Any]) -> Iterable[str]:
    """The boxes of `ansible-inventory --list`, in its order, as ssh has to be told.

    Raises:
        ValueError: a host has what only Ansible knows, such as a port.
    """
    facts = listed.get("_meta", {}).get("hostvars", {})
    hosts: dict[str, None] = {}
    waiting, seen = ["all"], set()
    while waiting:
        group = waiting.pop(0)
        if group not in seen:
            seen.add(group)
            table = listed.get(group, {})
            hosts |= dict.fromkeys(table.get("hosts", ()))
            waiting += table.get("children", ())
    for host in hosts:
        known = facts.get(host, {})
        # Ansible takes the older spelling as well.
        address, port, user = (
            known.get(f"ansible_{one}", known.get(f"ansible_ssh_{one}"))
            for one in ("host", "port", "user")
        )
        if str(port or 22) != "22":
            raise ValueError(f"{host} has a port: set it in ~/.ssh/config, where ssh reads it")
        yield f"{user}@" * bool(user) + str(address or host)
