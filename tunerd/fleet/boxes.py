"""Which boxes there are, and how one is asked: its own command over ssh, with a limit."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field, ValidationError

from tunerd.app import Context
from tunerd.errors import HostError, UsageError
from tunerd.fleet.steps import Envelope, name_of_hosts
from tunerd.machine.process import Completed, Setting, run
from tunerd.result import SCHEMA, error_from_json
from tunerd.settings import BOX_PATTERN, BOX_WORDS

E = TypeVar("E", bound=Envelope)
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
            hint="one of them; a part of an inventory is another inventory",
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
                f"`{box[:100]}` cannot be a box",
                cause=BOX_WORDS,
                state="nothing was touched",
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
        return tuple(name_of_hosts(json.loads(done.stdout)))
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
            raise _away(
                ctx, box, f"its tunerd speaks JSON of schema {head.version}, this one of {SCHEMA}"
            )
        if head.error is None:
            answer = kind.model_validate(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise _away(ctx, box, f"its tunerd speaks otherwise: {place}: {wrong['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise _away(ctx, box, _why_silent(done)) from error
    if head.error is not None:
        raise error_from_json({"error": head.error.model_dump()})
    answer.exit_code = -1 if done.returncode is None else done.returncode
    return answer


def _why_silent(done: Completed) -> str:
    if done.returncode == _NOT_FOUND:
        return "tunerd is not there: install it, or name its path in fleet.command"
    last = _last_of(done.stderr)
    # A shell that greets, and an account that is closed, say so there, whatever their status.
    if done.stdout.strip() and (done.returncode == 0 or not last):
        return f"what came is no JSON of tunerd: {done.stdout[:80]!r}"
    return last or f"ssh ended with status {done.returncode} and no word"


def _last_of(text: str) -> str:
    return text.strip()[-_LAST_CHARACTERS:]


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
