"""A change that goes from box to box over ssh: each is told by its own tunerd, and watched, before the next is."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from tunerd.app import Context
from tunerd.errors import HostError, TunerdError, UsageError
from tunerd.fleet import steps
from tunerd.machine.clock import polls
from tunerd.machine.files import lock
from tunerd.machine.process import Completed, Interrupts, Setting, run
from tunerd.records import Unreadable, plain, read
from tunerd.result import SCHEMA, ActionResult, Message, Progress, error, error_from_json
from tunerd.settings import BOX_PATTERN, BOX_WORDS
from tunerd.units.text import shown_hash

E = TypeVar("E", bound=steps.Envelope)
_BOX = re.compile(BOX_PATTERN)
# Nobody is at a keyboard; whom to trust, and by which key, is said by the user's own configuration.
_SSH = (
    "ssh", "-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15",
    "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "-o", "ClearAllForwardings=yes",
)  # fmt: skip
_INVENTORY_LIMIT_S = 60.0
_NOT_FOUND = 127
_LAST_CHARACTERS = 500


class Away(HostError):
    """A box gave no answer that can be read: how it is, nobody knows."""


class _Error(BaseModel):
    code: str = Field(max_length=100)
    message: str = Field(max_length=10_000)
    cause: str | None = Field(max_length=100_000)
    state: str | None = Field(max_length=10_000)
    hint: str | None = Field(max_length=10_000)


class _Head(BaseModel):
    version: int = Field(alias="schema")
    error: _Error | None = None


def boxes_of(ctx: Context, named: Sequence[str], inventory: Path | None) -> tuple[str, ...]:
    """The boxes in their order: those that were named, else of Ansible's inventory, of the settings, of the store.

    Raises:
        UsageError: there are none, one is named twice or in two ways, or a name is none that ssh may be told.
        HostError: Ansible cannot read its inventory, or the store cannot be read.
    """
    boxes = tuple(named)
    if boxes and inventory is not None:
        raise UsageError(
            "boxes are named twice: by --box, and by --inventory", state="nothing was touched",
            hint="use one of them; for a part of an inventory write an inventory of its own",
        )  # fmt: skip
    if not boxes:
        boxes = _of_ansible(ctx, inventory) if inventory is not None else ctx.settings.fleet.boxes
    if not boxes and ctx.settings.store.url is not None:
        from tunerd.fleet.shared import fleet_status

        # A box that was set up anew is there twice, and is one for ssh.
        names = (str(row["name"]) for row in fleet_status(ctx).payload["boxes"])
        boxes = tuple(dict.fromkeys(names))
    hint = 'name them: `--box gpu1 --box gpu2`, or `tunerd settings set fleet.boxes \'["gpu1", "gpu2"]\'`'
    if not boxes:
        raise UsageError("no boxes are known", state="nothing was touched", hint=hint)
    for box in boxes:
        if not _BOX.fullmatch(box):
            raise UsageError(
                f"`{box[:100]}` cannot be a box", cause=BOX_WORDS, state="nothing was touched"
            )
    if len(set(boxes)) < len(boxes):
        raise UsageError("a box is named twice", state="nothing was touched")
    return boxes


def _of_ansible(ctx: Context, inventory: Path) -> tuple[str, ...]:
    words = ("ansible-inventory", "--list", f"--inventory={inventory.absolute()}")
    # Otherwise an inventory that it cannot read is an empty one.
    env = {**ctx.environment, "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true"}
    done = run(words, Setting(env), timeout_s=_INVENTORY_LIMIT_S)
    try:
        if not done.is_ok:
            raise ValueError(_last_of(done.stderr) or "it does not end")  # noqa: TRY301
        return tuple(steps.name_of_hosts(json.loads(done.stdout)))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise HostError(
            f"Ansible cannot read the inventory `{inventory}`", cause=str(error),
            state="nothing was touched", hint=f"`{shlex.join(words)}` should print its hosts",
        ) from error  # fmt: skip


def ask(ctx: Context, box: str, words: Sequence[str], kind: type[E], *, limit_s: float) -> E:
    """What the tunerd of a box answers.

    Args:
        ctx: From where; ssh gets the environment of the caller, with its agent.
        box: Of `boxes_of`.
        words: Of tunerd's command line, `--json` among them; each arrives as it is.
        kind: What the answer must hold.
        limit_s: How long it may take. What is left of ssh is ended then; what it began there goes on.

    Raises:
        Away: no answer came, or none of a tunerd that speaks as this one does.
        TunerdError: the box's own error, as what it was there.
    """
    command = shlex.join([*ctx.settings.fleet.command, *words])
    done = run([*_SSH, "--", box, command], Setting(ctx.environment), timeout_s=limit_s)
    if done.timed_out:
        raise _away(ctx, box, f"it gave no answer within {limit_s:.0f} s, and ssh was ended")
    try:
        body = json.loads(done.stdout)
        head = _Head.model_validate(body)
        if head.version != SCHEMA:
            both = f"schema {head.version}, this one of {SCHEMA}"
            raise _away(ctx, box, f"its tunerd speaks JSON of {both}")
        if head.error is None:
            answer = kind.model_validate(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise _away(ctx, box, f"its tunerd's answer is wrong: {place}: {wrong['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise _away(ctx, box, _why_silent(done)) from error
    if head.error is not None:
        raise error_from_json({"error": head.error.model_dump()})
    answer.exit_code = -1 if done.returncode is None else done.returncode
    return answer


def _why_silent(done: Completed) -> str:
    if done.returncode == _NOT_FOUND:
        return "tunerd was not found there: install it, or set fleet.command to its path"
    last = _last_of(done.stderr)
    # A shell that greets, and an account that is closed, say so there, whatever their status.
    if done.stdout.strip() and (done.returncode == 0 or not last):
        return f"its answer is not JSON of tunerd: {done.stdout[:80]!r}"
    return last or f"ssh ended with status {done.returncode} and no message"


def _last_of(text: str) -> str:
    return "; ".join(text.strip().splitlines())[-_LAST_CHARACTERS:]


def by_hand(ctx: Context, box: str, *words: str) -> str:
    """What a person types to ask a box the same."""
    all_words = (*ctx.settings.fleet.command, *words)
    plain = " ".join(all_words)
    # Two shells read it: the one that it is typed into, and that of the box.
    command = shlex.join(all_words)
    return f"ssh {box} {plain if command == plain else shlex.quote(command)}"


def _away(ctx: Context, box: str, cause: str) -> Away:
    hint = f"`{by_hand(ctx, box, 'status')}`"
    return Away("it cannot be asked over ssh", cause=cause, hint=hint)


# From box to box

Ask = Callable[[steps.Rollout], None]

_SCHEMA = 1
_SHOWN_CHARACTERS = 2000  # of what a box says
# A probation stands still while its box is measured, as in a night; longer than this somebody should know.
_STILL_S = 1800.0
_STATUS = ("status", "--json")
_NEXT = {
    steps.State.REFUSED: "it is as before; fix that, then `tunerd fleet resume` continues with it",
    steps.State.WENT_BACK: "what served there before serves again; `tunerd fleet rollback` returns the boxes before it, "
    "`tunerd fleet resume --past` continues without it",
    steps.State.STRANDED: "`{asks}` says what serves there, if anything; once it serves again, `tunerd fleet resume` "
    "checks it and continues",
    steps.State.LEFT: "`tunerd fleet resume --past` continues without it",
    steps.State.WATCHED: "it serves what was deployed; `tunerd fleet resume` continues to watch it",
    steps.State.APPLYING: "its state is not known: `{asks}` shows it, `tunerd fleet resume` checks it and "
    "continues",
}
# Nobody goes past one of these: there a server may be away.
_LOOKED_AT_AGAIN = frozenset({steps.State.APPLYING, steps.State.STRANDED})
# On the way back, which may be that of a rollout before the one with which `resume` goes on.
_NEXT_BACK = {
    steps.State.WATCHED: "it did not go back; `tunerd fleet rollback {number}` tells it to",
    steps.State.STRANDED: "`{asks}` says what serves there, if anything",
    steps.State.LEFT: "`{returns}` goes back there anyway",
} | dict.fromkeys(
    (steps.State.APPLYING, steps.State.RETURNING),
    "it may serve either: `{asks}` shows which, `tunerd fleet rollback {number}` checks it and continues",
)


def roll_out(
    ctx: Context,
    what: str,
    words: Sequence[str],
    boxes: Sequence[str],
    *,
    agree: Ask,
    probation: bool = True,
) -> ActionResult:
    """Deploy on one box after the other; every box is planned before the first is touched.

    Args:
        ctx: From where; the journal is in its state folder.
        what: `apply` or `promote`.
        words: What stands behind that on each box.
        boxes: Their names, the canary first.
        agree: Shows what would be done and asks a person; raises to stop.
        probation: Whether each is watched, and waited for.

    Raises:
        Busy: another rollout is under way from here.
        HostError: a box cannot be asked, or cannot take it; nothing was touched anywhere.
    """
    with _alone(ctx, f"fleet {what}"):
        number = max(_numbers(ctx), default=0) + 1
        began_s, waiting = ctx.clock.now_s(), tuple(steps.Step(box) for box in boxes)
        made = steps.Rollout(number, what, tuple(words), began_s, waiting, probation=probation)
        walk = _Walk(ctx, made)
        walk.plan()
        if walk.rollout.to_do():
            agree(walk.rollout)
            walk.write()
            walk.go(walk.forward)
        return walk.result(f"fleet {what}")


def resume(ctx: Context, *, agree: Ask, past: bool) -> ActionResult:
    """Go on with the newest rollout, forward or back, wherever it was cut or stopped.

    Args:
        ctx: From where.
        agree: As for `roll_out`; of what is not begun yet.
        past: Whether to go on behind boxes that went back or that others changed; one without a server stops it.

    Raises:
        UsageError: there was none.
        Busy, HostError: as `roll_out`.
    """
    with _alone(ctx, "fleet resume"):
        walk = _Walk(ctx, read_rollout(ctx))
        if walk.rollout.is_back:
            walk.go(walk.back)
        else:
            walk.go(lambda: walk.pick_up(agree, past=past))
            walk.go(lambda: walk.forward(past=past))
        return walk.result("fleet resume")


def roll_back(ctx: Context, number: int | None, *, agree: Ask) -> ActionResult:
    """Return what a rollout changed, the last box first, where what serves is still what it deployed.

    Raises:
        UsageError: there is no such rollout.
        Busy: another rollout is under way from here.
    """
    with _alone(ctx, "fleet rollback"):
        walk = _Walk(ctx, read_rollout(ctx, number).going_back())
        if walk.rollout.to_return():
            agree(walk.rollout)
            walk.write()
            walk.go(walk.back)
        return walk.result("fleet rollback")


def read_rollout(ctx: Context, number: int | None = None) -> steps.Rollout:
    """The journal of a rollout; the newest without a number.

    Raises:
        UsageError: there is none.
        HostError: it cannot be read.
    """
    number = max(_numbers(ctx), default=0) if number is None else number
    data = ctx.files.read_json(_path(ctx, number))
    if data is None:
        told = f"there is no rollout {number}" if number else "no rollout was begun from here yet"
        raise UsageError(told, hint="`tunerd fleet apply PROFILE` begins one")
    try:
        return read(steps.Rollout, data, schema=_SCHEMA)
    except Unreadable as problem:
        raise HostError(
            f"the journal cannot be read: `{_path(ctx, number)}`", cause=str(problem)
        ) from problem


def payload_of(rollout: steps.Rollout) -> dict[str, Any]:
    """A rollout as scripts read it."""
    return {
        "rollout": rollout.number,
        "what": " ".join((rollout.what, *rollout.words)).replace(" -- ", " "),
        "began_s": rollout.began_s,
        "is_back": rollout.is_back,
        "boxes": [plain(step) for step in rollout.boxes],
    }


def _numbers(ctx: Context) -> list[int]:
    names = (path.stem for path in _path(ctx, 0).parent.glob("*.json"))
    return [int(name) for name in names if name.isdecimal()]


def _path(ctx: Context, number: int) -> Path:
    return ctx.paths.state_dir / "fleet" / "rollouts" / f"{number}.json"


@contextlib.contextmanager
def _alone(ctx: Context, purpose: str) -> Iterator[None]:
    """One rollout at a time from this machine; of two machines each box's own lock refuses one."""
    path = _path(ctx, 0).parent.with_name("lock")
    with lock(path, purpose=purpose, since=ctx.now_text()):
        yield


class _Walk:
    """A rollout under way: each step is in the journal before and after it is made."""

    def __init__(self, ctx: Context, rollout: steps.Rollout) -> None:
        self.rollout = rollout
        self._ctx = ctx
        self._longest_s = 0.0

    def plan(self) -> None:
        """Find out what is to be done on every box that has to do something."""
        wrong = []
        to_do = self.rollout.to_do()
        for step in to_do:
            self._say(step, "planning")
            try:
                self.rollout = self.rollout.with_step(self._planned(step))
            except TunerdError as problem:
                wrong.append(f"{step.box}: {problem.words[:_SHOWN_CHARACTERS]}")
        if wrong:
            raise HostError(
                f"{len(wrong)} of {len(to_do)} boxes cannot take it",
                cause="\n".join(wrong),
                state=f"nothing {'more ' * bool(self.rollout.to_return())}was touched on any box",
                hint=f"`{by_hand(self._ctx, 'BOX', *self.rollout.preview)}` says more",
            )

    def _planned(self, step: steps.Step) -> steps.Step:
        status = self._status(step)
        if status.change_under_way:
            raise HostError("a change is under way there")
        preview = self._preview(step)
        if preview.exit_code and preview.nothing is None:
            told = [one.text for one in preview.messages if one.level == "error"]
            raise HostError("; ".join(told) or f"it would be refused ({preview.exit_code})")
        return steps.planned(step, status, preview, shown_hash(preview.diff))

    def keep(self, step: steps.Step) -> steps.Step:
        """Write of a box that it is further on, before anything is done that this tells of."""
        self.rollout = self.rollout.with_step(step)
        self.write()
        return step

    def write(self) -> None:
        """Write the journal."""
        path = _path(self._ctx, self.rollout.number)
        self._ctx.files.keep(path, self.rollout, schema=_SCHEMA, mode=0o600)

    def go(self, walk: Callable[[], None]) -> None:
        """Walk until the end, or until somebody ends it."""
        with Interrupts():
            try:
                walk()
            except (KeyboardInterrupt, SystemExit) as end:
                open_ones = [one for one in self.rollout.boxes if self._next(one)]
                for one in open_ones:
                    end.add_note(f"{one.box}: {one.state}; {self._next(one)}")
                if not open_ones:
                    number, is_back = self.rollout.number, self.rollout.is_back
                    again = f"rollback {number}" if is_back else "resume"
                    end.add_note(f"between two boxes; `tunerd fleet {again}` continues")
                raise

    def pick_up(self, agree: Ask, *, past: bool) -> None:
        """Find out what came of the box at which it was cut, and plan anew what is not begun."""
        for step in self.rollout.boxes:
            if step.state in _LOOKED_AT_AGAIN:
                self._settle(step)
        ends = _LOOKED_AT_AGAIN if past else {*_LOOKED_AT_AGAIN, *steps.STOPS}
        if any(one.state in ends for one in self.rollout.boxes):
            return  # it goes no further than there, so nobody is to be asked about those behind
        self.plan()
        if self.rollout.to_do():
            agree(self.rollout)
        self.write()

    def forward(self, *, past: bool = False) -> None:
        """Box by box, up to the first that does not get there."""
        for before in self.rollout.boxes:
            step = before
            if past and step.state in steps.STOPS - _LOOKED_AT_AGAIN:
                continue
            if step.state in steps.TO_DO:
                step = self._change(step)
            if step.state is steps.State.WATCHED:
                step = self._watch(step)
            if steps.exit_code(step):
                return

    def back(self) -> None:
        """Box by box in reverse; one that cannot return does not keep the others from it."""
        for before in self.rollout.to_return():
            step = self._settle(before) if before.state is steps.State.APPLYING else before
            if step.state in {steps.State.WATCHED, steps.State.DONE, steps.State.RETURNING}:
                self._return(step)

    def _change(self, step: steps.Step) -> steps.Step:
        self._say(step, "deploying")
        step = self.keep(step.at(steps.State.APPLYING))
        limit_s, words = self._ctx.settings.fleet.change_s, self.rollout.change(step)
        try:
            done = ask(self._ctx, step.box, words, steps.Change, limit_s=limit_s)
        except Away as problem:
            step = self._settle(self.keep(step.at(steps.State.APPLYING, problem.words)))
            if step.state is steps.State.REFUSED:  # what it was told it may only be about to do
                told = f"nothing has been done there; {problem.words}"
                step = self.keep(step.at(steps.State.APPLYING, told))
            return step
        except TunerdError as problem:
            step = self.keep(steps.failed(step, problem))
        else:
            step = self.keep(steps.deployed(self.rollout, step, done))
        return self._settle(step) if step.state is steps.State.APPLYING else step

    def _settle(self, step: steps.Step) -> steps.Step:
        """Find out what came of a box that was told to; the same where it cannot be asked."""
        clock, settings = self._ctx.clock, self._ctx.settings.fleet
        self._say(step, "checking what came of it")
        try:
            for _ in polls(clock, settings.change_s, every_s=settings.every_s):
                if not (status := self._status(step)).change_under_way:
                    return self.keep(steps.settled(self.rollout, step, status, self._preview(step)))
            return self.keep(step.at(step.state, "a change is still under way there"))
        except TunerdError as problem:
            return self.keep(step.at(step.state, problem.words))

    def _watch(self, step: steps.Step) -> steps.Step:
        ctx, words = self._ctx, ("probation", "show", "--json")
        settings, left_s, was_missing = ctx.settings.fleet, None, False
        moved_s = seen_s = ctx.clock.monotonic_s()
        for _ in polls(ctx.clock, math.inf, every_s=settings.every_s):
            try:
                found = ask(ctx, step.box, words, steps.Probations, limit_s=settings.limit_s)
            except TunerdError as problem:  # it may be on its way through a reboot
                if ctx.clock.monotonic_s() - seen_s > settings.away_s:
                    return self.keep(step.at(steps.State.WATCHED, problem.words))
                self._say(step, f"{problem.words}; asking again")
                continue
            seen_s = ctx.clock.monotonic_s()
            watched = found.of(step.generation)
            if watched is None and not was_missing:  # it begins just behind the swap
                was_missing = True
                continue
            after = steps.judged(step, watched)
            if watched is None or after.state is not steps.State.WATCHED:
                return self.keep(after)
            if watched.state == "cut":
                told = "no daemon runs there: `systemctl start tunerd`, or `tunerd daemon` in a terminal"
                return self.keep(step.at(steps.State.WATCHED, told))
            if watched.left_s != left_s:
                left_s, moved_s = watched.left_s, seen_s
            elif seen_s - moved_s > _STILL_S:
                return self.keep(step.at(steps.State.WATCHED, "its probation makes no progress"))
            self._say(step, f"generation {step.generation} on probation", left_s)
        return step

    def _return(self, step: steps.Step) -> None:
        self._say(step, "going back")
        limit_s, before = self._ctx.settings.fleet.change_s, step
        try:
            step = steps.to_return(step, self._status(step))
            if step.state in {steps.State.LEFT, steps.State.RETURNED}:
                self.keep(step)
                return
            to = () if step.backup is None else (f"--to={step.backup}",)
            words = ("rollback", "--json", "--dry-run", *to)
            preview = self._ask(step, words, steps.Preview)
            step = self.keep(step.at(steps.State.RETURNING))
            words = ("rollback", "--json", "--yes", f"--shown={shown_hash(preview.diff)}", *to)
            done = ask(self._ctx, step.box, words, steps.Change, limit_s=limit_s)
        except TunerdError as problem:
            is_told = step.state is steps.State.RETURNING
            self.keep(steps.not_returned(before, problem, is_told=is_told))
        else:
            self.keep(step.at(steps.State.RETURNED, done.summary))

    def _status(self, step: steps.Step) -> steps.Status:
        return self._ask(step, _STATUS, steps.Status)

    def _preview(self, step: steps.Step) -> steps.Preview:
        return self._ask(step, self.rollout.preview, steps.Preview)

    def _ask(self, step: steps.Step, words: Sequence[str], kind: type[E]) -> E:
        return ask(self._ctx, step.box, words, kind, limit_s=self._ctx.settings.fleet.limit_s)

    def _say(self, step: steps.Step, text: str, left_s: float | None = None) -> None:
        """How far it is; what is left is that of this box, and as long for each that follows."""
        boxes = self.rollout.boxes
        at = next(index for index, one in enumerate(boxes, 1) if one.box == step.box)
        if left_s is not None:
            self._longest_s = max(self._longest_s, left_s)
            left_s += self._longest_s * len(self.rollout.to_do())
        self._ctx.report(Progress(f"{step.box}: {text}", at, len(boxes), left_s=left_s))

    def _next(self, step: steps.Step) -> str | None:
        """What to do about a box, in the direction that it goes; None where it is where it should be."""
        text = (_NEXT_BACK if self.rollout.is_back else _NEXT).get(step.state)
        if text is None:
            return None
        ctx, number, to = self._ctx, self.rollout.number, step.backup
        back = by_hand(ctx, step.box, "rollback", *(() if to is None else (f"--to={to}",)))
        return text.format(asks=by_hand(ctx, step.box, "status"), number=number, returns=back)

    def result(self, command: str) -> ActionResult:
        """How it stands, and what to do about each box that is not where it should be."""
        messages: list[Message] = [
            error("stopped", f"{one.box}: {one.state}: {one.text}", hint)
            for one in self.rollout.boxes
            if (hint := self._next(one)) is not None
        ]
        return ActionResult(
            command,
            payload_of(self.rollout),
            tuple(messages),
            self.rollout.exit_code,
            has_acted=True,
        )
