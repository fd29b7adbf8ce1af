"""Every operation once: a command of the command line is also a route of the API, a form, and a job.

The commands themselves say what they take (`cli`). Here stands who may ask for them without being
root, how they are done then, and what their words may be. What a member asks for is words like those typed
in a terminal, and is checked by the very command, before anything runs and again where it runs.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, cast

import click
from click.core import ParameterSource

from tunerd.calendar import parse_time_span
from tunerd.errors import TunerdError, UsageError
from tunerd.result import ActionResult, Message
from tunerd.words import NAME_PATTERN, check_name

# Texts, but of a pattern that holds no path: names of types.
_PLAIN_TEXTS = frozenset(
    {"serving.cache_type_k", "serving.cache_type_v",
     "speculation.cache_type_k", "speculation.cache_type_v", "speculation.type"}
)  # fmt: skip
_PLAIN_TYPES = frozenset({"integer", "number", "boolean", "null"})
# As in `tunerd sweep run --space`; engines are chosen among those that root installed, by name.
ENGINES_KEY = "engine.prefer"
SHORT_KEYS: Mapping[str, str] = {"engine": ENGINES_KEY, "speculation": "speculation.type"}
_WORD = r"[A-Za-z0-9+-][A-Za-z0-9._+-]{0,99}"
_SETTING_VALUE = re.compile(_WORD)
_VALUES = re.compile(f"{_WORD}(,{_WORD}){{0,63}}")


class Lane(StrEnum):
    """How something that a member asks for is done, and what it may not run beside.

    One job of a lane runs at a time, except those that look: they change nothing, but may try programs
    as another account. A swap does not wait for a measurement: it ends the lease, as it does when root asks
    for it. What is not a job is read by the daemon here, or in a process of its own.
    """

    HERE = "here"
    APART = "apart"
    LOOK = "look"
    CHANGE = "change"
    MEASURE = "measure"
    NOTE = "note"

    @property
    def is_job(self) -> bool:
        """Whether it is done by a unit of its own."""
        return self not in {Lane.HERE, Lane.APART}


class JobState(StrEnum):
    """How far a job is; `DIED` is one whose process ended without a result."""

    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DIED = "died"

    @property
    def is_over(self) -> bool:
        """Whether nothing will follow."""
        return self not in {JobState.STARTING, JobState.RUNNING}


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What is to be done, as words that its command takes, and for whom.

    `kind` is the operation that they ask for; root's own jobs are not held to what members may.
    """

    kind: str
    argv: tuple[str, ...]
    lane: Lane
    asked_by: str
    asked_s: float
    is_member: bool = True


@cache
def plain_keys() -> frozenset[str]:
    """The keys that an operator may set without root: numbers, switches and words of a closed list.

    Nothing among them names a file, a program, an address, or reaches the command line as free text.
    """
    # Whoever asks for nothing through the API needs no schema.
    from pydantic import BaseModel

    from tunerd.profile.schema import Memory, Serving, Speculation

    tables: Mapping[str, type[BaseModel]] = {
        "serving": Serving, "speculation": Speculation, "memory": Memory,
    }  # fmt: skip
    return _PLAIN_TEXTS | {
        f"{table}.{name}"
        for table, model in tables.items()
        for name, schema in model.model_json_schema()["properties"].items()
        if _is_plain(schema)
    }


def check_setting(text: str) -> None:
    """Refuse a `KEY=VALUE` that would let an operator choose programs, files or addresses.

    Raises:
        UsageError: the key is none that may be set without root.
    """
    key = text.partition("=")[0]
    if key not in plain_keys():
        raise UsageError(
            f"may not be set without root: `{key[:100]}`",
            cause="it could choose a program, a file or an address",
            state="nothing was touched",
            hint="without root you may set numbers, switches and fixed words of serving, speculation and memory; "
            "the rest must be in a profile that root writes",
        )


def check_space(text: str) -> None:
    """Refuse a range of a sweep over anything but what may be set without root, and engines by name.

    Raises:
        UsageError: it is over something else, or its values are no plain words.
    """
    key, _, values = text.partition("=")
    key = SHORT_KEYS.get(key, key)
    if key != ENGINES_KEY:
        check_setting(key)
    if not _VALUES.fullmatch(values):
        raise _not_plain(f"--space {text[:200]}")


def check_side(word: str) -> None:
    """Refuse a side of a comparison that is neither a name nor a single setting that may be set.

    Raises:
        UsageError: it is something else.
    """
    key, equals, value = word.partition("=")
    if not equals:
        check_name(word, of="a profile, a generation or an engine")
        return
    check_setting(key)
    if not _SETTING_VALUE.fullmatch(value):
        raise _not_plain(word[:200])


def _not_plain(text: str) -> UsageError:
    return UsageError(
        f"needs root: `{text}`",
        cause="without root, values may be numbers and plain words only",
        state="nothing was touched",
        hint="other values must be in a profile that root writes",
    )


def _is_plain(schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return all(_is_plain(one) for one in schema["anyOf"])
    return "enum" in schema or "const" in schema or schema.get("type") in _PLAIN_TYPES


# What members may ask for, and how it is done. An option behind a command makes it another operation.
_BY_LANE: Mapping[Lane, Sequence[str]] = {
    Lane.HERE: ("status", "top", "history", "history show", "history diff", "rollback --list",
        "rollback --dry-run", "verify", "profiles list", "profiles show", "profiles check",
        "schedule show", "guard show", "jobs"),
    Lane.APART: ("doctor", "results list", "results show", "results export", "report",
        "sweep list", "sweep show", "sweep status", "workload list", "workload show",
        "probation show"),
    Lane.LOOK: ("plan", "emit", "fits", "apply --dry-run", "promote --dry-run", "engines",
        "detect", "guard check", "sweep run --dry-run", "sweep watch"),
    Lane.CHANGE: ("apply", "rollback", "promote", "guard raise-margin", "recover"),
    Lane.MEASURE: ("bench", "compare", "sweep run", "sweep resume", "sweep night",
        "engines --prove"),
    Lane.NOTE: ("decline", "sweep start", "sweep stop", "schedule set", "schedule skip-tonight",
        "schedule run-now", "guard set", "workload learn", "notify test", "jobs stop"),
}  # fmt: skip
MAY: Mapping[str, Lane] = {kind: lane for lane, kinds in _BY_LANE.items() for kind in kinds}
# What is left to root where the system's server is meant, and why. All else is done by whoever types it.
ONLY_ROOT: Mapping[str, str] = {
    "results import": "the daemon reads no files for members of the group",
    "results forget": "only root decides what nights try first",
    "profiles new": "a profile names programs and files that a service uses",
    "engines keep": "it copies programs to where services start them",
    "bench --url": "the daemon connects to no address for members of the group; leave out --system to measure from here",
    "workload learn --unit": "members of the group may not read the logs of other units",
    "settings show": "settings may hold secrets, such as the address of a webhook",
    "support-bundle": "it holds what only root may read: units, logs and settings",
    "settings set": "settings decide what system services do",
    "settings unset": "settings decide what system services do",
    "probation take-back": "only the daemon starts it; `tunerd rollback` goes back",
    "fleet hand-in": "the daemon does it, with root's password for the database",
    "fleet status": "it needs root's password for the database",
    "notify send": "only a unit runs it; `tunerd notify test` tries the webhook",
}
# Options about what is shown where they are typed; `yes` is said by `ask` in the API.
_OF_TERMINALS = frozenset({"as_json", "yes", "output", "force", "once", "every_s"})
MOST_VALUES = 64
MOST_NUMBER = 10**12 - 1
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")
_SWITCH = {"true": True, "false": False}
_TYPES: Mapping[str, Any] = {
    "boolean": bool, "integer": int, "number": (int, float), "string": str,
}  # fmt: skip
_BOOLEAN = {"type": "boolean"}

_KEY = r"[a-z_]{1,40}\.[a-z_0-9]{1,60}"


# A function, or its name in the module of its command, which may stand below it there.
Named = str | Callable[..., Any]


class Question(Exception):
    """An operation has come as far as its question; `result` is what a person is shown and asked."""

    def __init__(self, result: ActionResult) -> None:
        super().__init__()
        self.result = result


@dataclass(kw_only=True)
class Call:
    """For whom an operation is done: what it works with, and who answers its question.

    Here somebody who asked from elsewhere: an unanswered question ends it.

    Attributes:
        ctx: The `Context` that was made for whoever asks.
        yes: Whether its question was answered beforehand.
        top: Shows what is watched; kept for the next time that the same call does it.
    """

    ctx: Any = None
    yes: bool = True
    top: Callable[[], ActionResult] | None = None

    def context(self, *, acts: bool = False, tells: bool = False) -> Any:
        """The `Context`: for who acts, and so tells how far it is; tells; or only looks."""
        del acts, tells
        return self.ctx

    def ask(
        self,
        question: str,
        messages: Sequence[Message] = (),
        shown: Mapping[str, Any] | None = None,
    ) -> None:
        """Show what would be done, and go on where that is agreed to; raises to stop."""
        if not self.yes:
            payload = {**(shown or {}), "question": question}
            raise Question(ActionResult("question", payload, tuple(messages)))
        self.ctx.say(question.removesuffix(" Go on?"))

    def agree(self, prepared: Any) -> None:
        """Ask what is asked before something is measured in production's place."""
        self.ask(prepared.question, prepared.messages)


@dataclass(frozen=True, slots=True)
class Operation:
    """What a command does; functions are named, and found in its module when they are used.

    Attributes:
        act: Does it, with a `Call` and the parameters of its command.
        render: Its payload as lines for people.
        preview: What is shown before its question, as lines.
        show: Presents it in a terminal by itself, where rendering is not all.
        goes_ahead: With nobody to answer, its question counts as answered.
        tells_lines: What it tells while it runs is what it is for.
        needs_settings: Whether it is refused where settings are wrong; else it goes by the last good ones,
            and says so. What goes back or ends something does not need them.
        asks: Whether it has a question, by its parameters.
    """

    act: Callable[..., ActionResult]
    render: Named
    preview: Named | None = None
    show: str | None = None
    goes_ahead: bool = False
    tells_lines: bool = False
    needs_settings: bool = True
    asks: Callable[[Mapping[str, Any]], bool] = lambda given: "yes" in given

    def do(self, call: Call, params: Mapping[str, Any]) -> ActionResult:
        """What was asked for by these parameters; the answer to its question is the call's."""
        try:
            result = self.act(call, **{name: one for name, one in params.items() if name != "yes"})
        except TunerdError as error:
            for told in self._of_settings(call):
                if told.text.startswith(error.message):
                    continue  # it is just that
                error.hint = "\n".join(filter(None, (error.hint, told.text, told.hint)))
            raise
        return replace(result, messages=(*result.messages, *self._of_settings(call)))

    def _of_settings(self, call: Call) -> tuple[Message, ...]:
        """That it went by other settings than those written."""
        if self.needs_settings or call.ctx is None:
            return ()
        return tuple(call.ctx.settings_messages())

    def named(self, name: Named) -> Any:
        """A function of the command's module, or of another one."""
        return getattr(sys.modules[self.act.__module__], name) if isinstance(name, str) else name


_OPERATIONS: dict[Callable[..., Any], Operation] = {}
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def operation(render: Named, **more: Any) -> Callable[[Any], Any]:
    """Makes a command of a function that takes a `Call`: whoever runs the command line says how it is run."""

    def made(act: Callable[..., ActionResult]) -> Any:
        @functools.wraps(act)
        def run(**_params: Any) -> None:
            ctx = click.get_current_context()
            if ctx.invoked_subcommand is None:
                ctx.find_root().obj.run(ctx)

        _OPERATIONS[run] = Operation(act, render, **more)
        return json_option(run)

    return made


def operation_of(command: click.Command) -> Operation:
    """What a command does."""
    return next(made for run, made in _OPERATIONS.items() if run is command.callback)


# What a value may be


class Kind(click.ParamType[Any]):
    """Words of one kind; what a member gives must match the schema, root's is checked where it is used."""

    name = "text"

    def __init__(
        self,
        schema: Mapping[str, Any],
        *,
        read: Callable[[str], Any] = str,
        check: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.schema = schema
        self._read = read
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value; refused by click, or by what a name or a key may be."""
        if not isinstance(value, str):
            return value
        try:
            if ctx is not None and ctx.find_root().obj is MEMBER:
                self._check(value)
                value_of(self.schema, value)
            return self._read(value)
        except ValueError as error:
            self.fail(f"{value[:200]!r} {error}.", param, ctx)


def _text(pattern: str, check: Callable[[str], None] = lambda _text: None) -> Kind:
    return Kind({"type": "string", "pattern": f"^{pattern}$", "maxLength": 500}, check=check)


def _span_s(text: str) -> float:
    seconds = parse_time_span(text)
    if seconds is None or not 0 < seconds < float("inf"):
        raise ValueError("is not a duration such as 2h")
    return seconds


def _check_span(text: str) -> None:
    if not 1.0 <= _span_s(text) <= 86400.0:  # noqa: PLR2004 -- a day
        raise ValueError("is not between a second and a day")


def name_of(what: str) -> Kind:
    """The name of a profile, or of something else."""
    return _text(NAME_PATTERN, lambda text: check_name(text, of=what))


class Decimal(click.FloatRange):
    """A number from a range; what is no number is within none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; click lets `nan` through, which is neither below nor above."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


PROFILE, WORKLOAD = name_of("a profile"), name_of("a workload")
NUMBER, SEED = click.IntRange(0, MOST_NUMBER), click.IntRange(0, 2**31 - 1)
SPAN = Kind(
    {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?[a-z]{0,7}$"},
    read=_span_s, check=_check_span,
)  # fmt: skip
SETTING = _text(f"{_KEY}=[A-Za-z0-9_+.-]{{1,40}}", check_setting)
SPACE = _text(f"[a-z_.0-9]{{1,60}}={_WORD}(,{_WORD}){{0,63}}", check_space)
SIDE = _text(f"({NAME_PATTERN}|{_KEY}={_WORD})", check_side)
# A backup's name, or a generation's number: never a path.
TARGET = _text(r"[A-Za-z0-9:_.@-]{1,300}")
HASH = _text("[0-9a-f]{64}")
IMAGE = _text("[a-z0-9][A-Za-z0-9._:/@-]{0,254}")
LINE = _text(r"[^\x00-\x1f\x7f]{1,500}")
# As `tunerd schedule set` takes them; a zone is a file, so no dots in it.
TIMES = _text("[0-9]{1,2}:[0-9]{2} ?- ?[0-9]{1,2}:[0-9]{2}")
DAYS = _text("[A-Za-z]{3,5}([,-][A-Za-z]{3}){0,12}")
ZONE = _text("[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,2}")


def _read(kind: str, text: object) -> Any:
    if not isinstance(text, str):
        raise ValueError("is given more than once")  # noqa: TRY004 -- by whoever wrote the query
    if kind == "boolean" and text in _SWITCH:
        return _SWITCH[text]
    if kind == "integer" and _WHOLE.fullmatch(text):
        return int(text)
    if kind == "number" and _DECIMAL.fullmatch(text):
        return float(text)
    if kind == "string":
        return text
    raise ValueError(f"is not of type {kind}")


def value_of(schema: Mapping[str, Any], given: Any, *, is_text: bool = True) -> Any:
    """A JSON value that a schema allows, given as such or, as in a query or a form, as a text.

    Raises:
        ValueError: it stands for none, or for another one.
    """
    kind = schema["type"]
    value = _read(kind, given) if is_text else given
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        raise ValueError(f"is not of type {kind}")
    if "minimum" in schema and not schema["minimum"] <= value <= schema["maximum"]:
        raise ValueError(f"is not between {schema['minimum']} and {schema['maximum']}")
    if kind != "string":
        return value
    if len(value) > schema.get("maxLength", 500):
        raise ValueError("is too long")
    if value not in schema.get("enum", (value,)):
        raise ValueError(f"is not one of {', '.join(schema['enum'])}")
    value.encode()  # halves of characters are no text
    if not re.fullmatch(schema.get("pattern", ".*"), value) or value.endswith("\n"):
        raise ValueError(f"does not match {schema['pattern']}")
    return value


def schema_of(param: click.Parameter) -> dict[str, Any]:
    """What a parameter takes, as JSON Schema."""
    kind = param.type
    if isinstance(kind, Kind):
        found = dict(kind.schema)
    elif isinstance(kind, click.Choice):
        found = {"type": "string", "enum": list(kind.choices)}
    elif isinstance(kind, click.IntRange | click.FloatRange):
        name = "integer" if isinstance(kind, click.IntRange) else "number"
        most = MOST_NUMBER if kind.max is None else kind.max
        found = {"type": name, "minimum": kind.min, "maximum": most}
    elif isinstance(param, click.Option) and param.is_flag:
        found = dict(_BOOLEAN)
    else:
        raise TypeError(f"`{param.name}` takes anything")
    if param.multiple or param.nargs != 1:
        found = {"type": "array", "items": found, "maxItems": MOST_VALUES}
    if param.nargs == -1 and param.required:
        found["minItems"] = 1
    help_text = param.help if isinstance(param, click.Option) else None
    return {**found, "description": help_text} if help_text else found


# Operations as words


@dataclass(frozen=True, slots=True)
class Asked:
    """Words that a member may say, as their command understood them."""

    kind: str
    lane: Lane
    operation: Operation
    params: Mapping[str, Any]

    def act(self, call: Call) -> ActionResult:
        """Do it, as far as its question where that is not answered."""
        return self.operation.do(call, self.params)


# Stand at the root of words that are parsed and not run.
MEMBER, ROOT = object(), object()


def asked(argv: Sequence[str], *, is_member: bool = True) -> Asked:
    """What a member asks for by these words, or root in a job of its own.

    Raises:
        UsageError: it is left to root, or its words are none that the command takes from a member.
    """
    path, command, parent = _command_of(argv, MEMBER if is_member else ROOT)
    rest = list(argv[len(path) :])
    try:
        ctx = command.make_context(path[-1], rest, parent=parent, help_option_names=[])
    except (click.ClickException, ValueError) as error:
        told = error.format_message() if isinstance(error, click.ClickException) else str(error)
        raise UsageError(told, state="nothing was touched") from error
    params = dict(ctx.params)
    given = {one.name for one in _given(ctx)}
    kind = kind_of(ctx)
    if (
        ctx.args
        or ctx._protected_args  # noqa: SLF001 -- where click keeps the words of a group
        or kind not in MAY
        or given & (_OF_TERMINALS - {"as_json", "yes"})
    ):
        raise _needs_root(" ".join(path), ONLY_ROOT.get(kind))
    params.pop("as_json", None)
    found = operation_of(command)
    lane = MAY[kind]
    if lane.is_job and not params.get("yes", True) and found.asks(params):
        lane = Lane.LOOK  # it ends at its question
    return Asked(kind, lane, found, params)


def kind_of(ctx: click.Context) -> str:
    """The operation that a parsed command is: its words, with the options that make it another one."""
    path = ctx.command_path.partition(" ")[2]
    path = "detect" if path == "overview" else path  # shown in short
    options = {word for one in _given(ctx) for word in one.opts}
    made = [kind for kind, more in _kinds_of(path) if more <= options]
    return max(made, key=lambda kind: (kind in ONLY_ROOT, len(kind)), default=path)


def _kinds_of(path: str) -> Iterator[tuple[str, set[str]]]:
    """The operations of a command, each with the options that make it that one."""
    for kind in (*MAY, *ONLY_ROOT):
        if kind.partition(" --")[0] == path:
            yield kind, {word for word in kind.split() if word.startswith("-")}


def _given(ctx: click.Context) -> Iterator[click.Parameter]:
    """The parameters that stand on the command line."""
    for one in ctx.command.params:
        if ctx.get_parameter_source(one.name or "") is ParameterSource.COMMANDLINE:
            yield one


# The command that has all others.
_ENTRY: list[click.Command] = []


def entered_by(command: click.Command) -> None:
    """Ask this command for all others from now on; the entry says so, since commands know this module."""
    _ENTRY[:] = [command]


def _command_of(
    argv: Sequence[str], who: object = MEMBER
) -> tuple[list[str], click.Command, click.Context]:
    (command,) = _ENTRY
    commands = {key.partition(" --")[0] for key in MAY}
    path = next((list(argv[:n]) for n in (2, 1) if " ".join(argv[:n]) in commands), None)
    if path is None:
        words = " ".join(argv[:2])[:100]
        raise _needs_root(words, ONLY_ROOT.get(words))
    parent = ctx = click.Context(command, info_name="tunerd", obj=who, help_option_names=[])
    for word in path:
        parent = ctx
        command = cast("click.Command", cast("click.Group", command).get_command(ctx, word))
        ctx = click.Context(command, parent=parent, info_name=word)
    return path, command, parent


def _needs_root(words: str, why: str | None) -> UsageError:
    return UsageError(f"`tunerd {words}` needs root", cause=why, state="nothing was touched")


# Operations as JSON


def command_of(kind: str) -> click.Command:
    """The command of an operation that members may ask for."""
    return _command_of(kind.split())[1]


def takes(kind: str) -> dict[str, click.Parameter]:
    """What an operation takes from a member, by its name in the API."""
    makes_another = {word for _, more in _kinds_of(kind.partition(" --")[0]) for word in more}
    return {
        _api_name(one): one
        for one in command_of(kind).params
        if one.name not in _OF_TERMINALS and not makes_another & set(one.opts)
    }


def _api_name(param: click.Parameter) -> str:
    """A parameter's name in the API: that of its option."""
    if isinstance(param, click.Argument):
        return str(param.name)
    return max(param.opts, key=len).lstrip("-").replace("-", "_")


def has_question(kind: str) -> bool:
    """Whether a job of this operation may ask something before it goes on."""
    return MAY[kind].is_job and any(one.name == "yes" for one in command_of(kind).params)


class WrongError(ValueError):
    """A value that an operation does not take; the text names its place."""


def argv_of(kind: str, given: Mapping[str, Any], *, is_text: bool = False) -> list[str]:
    """The words that ask for an operation with these values.

    Args:
        kind: Of `MAY`.
        given: By their names in the API.
        is_text: Whether every value is a text, or texts, as in a query or a form.

    Raises:
        WrongError: a value is not allowed, or is none of the operation's.
    """
    values = dict(given)
    said = kind
    if has_question(kind):
        asks = values.pop("ask", "false" if is_text else False)
        only_asks = _value("ask", _BOOLEAN, asks, is_text=is_text)
        if only_asks is None:  # what is not said would be done at once
            raise WrongError("ask: is not of type boolean")
        said = kind if only_asks else f"{kind} --yes"
    known = takes(kind)
    if extra := sorted(set(values) - set(known)):
        raise WrongError(f"{extra[0][:100]}: there is no such parameter")
    params = {}
    for name, param in known.items():
        if param.required and values.get(name) is None:
            raise WrongError(f"{name}: is missing")
        value = _value(name, schema_of(param), values.get(name), is_text=is_text)
        params[str(param.name)] = value
    return argv_with(said, params)


def _value(name: str, schema: Mapping[str, Any], given: Any, *, is_text: bool) -> Any:
    """What a parameter is set to by a value, or several; None where none is given."""
    if given is None:
        return None
    item = schema.get("items", schema)
    listed = given if schema["type"] == "array" else [given]
    if is_text and isinstance(listed, str):
        listed = [listed]
    if not isinstance(listed, list) or not schema.get("minItems", 0) <= len(listed) <= MOST_VALUES:
        raise WrongError(f"{name}: is not a list, or has too many values")
    try:
        found = tuple(value_of(item, one, is_text=is_text) for one in listed)
    except ValueError as error:
        raise WrongError(f"{name}: {error}") from error
    return found if schema["type"] == "array" else found[0]


def argv_typed(ctx: click.Context, kind: str) -> list[str]:
    """The words of a parsed command as they go to the daemon: without what is the terminal's alone."""
    names = [one.name for one in _given(ctx) if one.name not in _OF_TERMINALS]
    given = {str(name): ctx.params[str(name)] for name in names}
    return argv_with(kind.partition(" --")[0], given)


def argv_with(kind: str, params: Mapping[str, Any]) -> list[str]:
    """The words of an operation with these parameters; what is None or empty is not said."""
    words, arguments = kind.split(), []
    for one in command_of(kind).params:
        value = params.get(str(one.name))
        if value in (None, ()):
            continue
        values = value if isinstance(value, tuple) else (value,)
        if isinstance(one, click.Argument):
            arguments += [str(word) for word in values]
        elif isinstance(one, click.Option) and one.is_flag:
            words += [one.opts[0]] if value else list(one.secondary_opts[:1])
        else:
            words += [f"{one.opts[0]}={word}" for word in values]
    return [*words, "--", *arguments] if arguments else words
