"""What is measured: the live unit, a candidate, or a server that is known by its address alone; who it is, and what it says of itself."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from tunerd import __version__
from tunerd.app import Context
from tunerd.engine.conditions import FingerprintReader
from tunerd.engine.fingerprint import Fingerprint
from tunerd.engine.flags import compared_environment, named_files, without_secrets
from tunerd.engine.health import HttpState
from tunerd.engine.server import Address, LlamaServer, listed_models
from tunerd.engine.serving import address_now, hides_words, read_live_unit, runs_with
from tunerd.errors import BenchError, UsageError
from tunerd.measure import trust
from tunerd.measure.evidence import ArmRecord
from tunerd.measure.request import Frame, PromptBook, PromptStock, Route
from tunerd.production.checks import explain
from tunerd.production.gate import ENGINE, edited_under, replaced_under, why_it_ended
from tunerd.production.lease import Candidate
from tunerd.result import Message, note, warning
from tunerd.units.generations import Generation

LIVE = "live"  # what the unit is called that serves now
_ASK_S = 10.0
# What a server says of itself is believed within these: no context is larger (the longest of models
# is 10 million tokens), and no vocabulary cuts common text into such pieces.
_MOST_CONTEXT = 1 << 24
_SAID = "what-a-user-says"
_MOST_FRAME = 1 << 16  # letters; a template that says more is none
_LETTERS_PER_TOKEN = (0.5, 50.0)
_UNKNOWN = trust.Speculation(None)
# Each look at the counters is work for the server, and resets gauges that others may read.
_SCRAPE_S = 5.0


class NoAnswer(BenchError):
    """The server gave no answer to a request that it must answer."""


@dataclass(frozen=True, slots=True)
class Target:
    """One running server that is measured.

    Attributes:
        arm: What is stored of it.
        server: How it is asked.
        life: Names its process; another name means that it was started again.
        why_ended: Why it ended, in words; None while it runs, or where that cannot be told.
        pids: Its processes, to tell its memory from that of others.
        is_llama: Whether it has llama-server's own routes and keys.
        route: How it is asked for a completion, as long as no life of it has shown otherwise.
        model: The name to ask for on OpenAI routes.
        n_ctx: Context of one request; None where unknown.
        most_tokens: The longest answer that it gives; None for no limit, or where it does not say.
        speculation: What it is meant to do.
        overrides: What is sent with each request beside the usual.
        frame: What its template puts around what a user says; None where it does not tell.
        messages: What should be said of it.
        unit: Whose it is, or in whose place it runs; None of one that is known by its address alone.
        profile: What it was planned from.
        scrape_s: How often its counters may be read [s]; those of a candidate have no other reader.
        kept_bias: What it began with, of a server in which the bias of a request's tokens stays for those that come after
            (ik), the one of `ignore_eos` too; None of one that forgets it.
    """

    arm: ArmRecord
    server: LlamaServer
    life: Callable[[], str | None]
    why_ended: Callable[[], str | None]
    pids: tuple[int, ...] = ()
    is_llama: bool = True
    route: Route = Route.TEXT
    model: str | None = None
    n_ctx: int | None = None
    most_tokens: int | None = None
    speculation: trust.Speculation = _UNKNOWN
    overrides: Mapping[str, Any] = field(default_factory=dict)
    frame: Frame | None = None
    messages: tuple[Message, ...] = ()
    unit: str | None = None
    profile: str | None = None
    scrape_s: float = _SCRAPE_S
    kept_bias: Any = None

    @property
    def name(self) -> str:
        """The name of its arm."""
        return self.arm.name

    @property
    def holds(self) -> bool:
        """Whether its answers may be made to go on; where others ask it too, theirs must end afterwards."""
        return self.is_llama and (self.kept_bias is None or not self.scrape_s)


# What a file that was replaced leaves unknown of a fingerprint, else that of its models.
_PARTS = {ENGINE: "engine_sha256", "model.chat_template_file": "template_sha256"}


def open_live(ctx: Context) -> Target:
    """The unit that serves now.

    Raises:
        BenchError: it does not run, cannot be reached, or runs with other arguments than its file has.
    """
    live = read_live_unit(ctx)
    state = ctx.services.state(live.unit)
    hint = "`tunerd status`; or `tunerd bench PROFILE` for a candidate"
    if not state.is_active or state.main_pid is None:
        raise BenchError(f"{live.unit} does not run", cause=state.active_state, hint=hint)
    address = address_now(ctx, live, state)
    if address is None or live.argv is None:
        way = live.serving.asked_otherwise
        cause = live.problem if way is None else f"it answers {way}, where tunerd cannot reach it"
        raise BenchError(f"cannot tell how {live.unit} is reached", cause=cause, hint=hint)
    # What runs must be what the unit says: it may have been edited since it was started.
    is_same = runs_with(live.argv, state.main_pid)
    if is_same is False:
        cause = "it was edited after the server was started"
        hint = f"`{ctx.systemctl} restart {live.unit}`, or `tunerd verify`"
        if hides_words(live):
            cause = f"`{live.program}`, which it starts, is a script that gives its server others"
            hint = f'make the script pass on what it is given, "$@"; `{ctx.systemctl} status {live.unit}` shows what it passes'
        text = f"{live.unit} runs with other arguments than its file has"
        raise BenchError(text, cause=cause, hint=hint)
    server = LlamaServer(address, ctx.clock)
    state_now = server.health(timeout_s=_ASK_S)
    if state_now is not HttpState.READY:
        raise BenchError(
            f"the server at {address.url} is {state_now}", hint="wait until it is ready"
        )
    props = server.props(timeout_s=_ASK_S)
    if props is not None and props.is_router:
        raise BenchError(
            f"{live.unit} is a router: it starts a server for each model that it is asked for",
            hint=f"`tunerd bench --url {address.url}#MODEL` measures one of them",
        )
    generation = ctx.deployed()
    if generation is not None and tuple(generation.argv) != tuple(live.argv):
        generation = None
    reader = FingerprintReader(ctx)
    arm, problems = arm_record(reader, LIVE, live.argv, live.environment, generation)
    for what, replaced in replaced_under(ctx, state).items():
        part = _PARTS.get(what, "model_sha256")
        arm, part = arm.under(**{part: None}), part.removesuffix("_sha256")
        problems = (
            f"the {part} that is measured is not the one on disk now: {replaced.text}",
            *problems,
        )
    if (edited := edited_under(ctx, state)) is not None:
        arm = arm.under(arguments_sha256=None)
        problems = (
            f"what is measured was started before its unit was changed: {edited.text}",
            *problems,
        )
    if is_same is None:
        problems = (f"the arguments of process {state.main_pid} cannot be read", *problems)
    profile = generation.profile if generation is not None else None
    found = _of_unit(ctx, live.unit, state.main_pid, server, profile, arm, problems)
    return _with_lengths_told(found)


def arm_record(
    reader: FingerprintReader,
    name: str,
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    generation: Generation | None = None,
) -> tuple[ArmRecord, tuple[str, ...]]:
    """The record of an arm, and why parts of its fingerprint are unknown.

    Args:
        reader: Of fingerprints.
        name: Of the arm.
        argv: The whole argument vector, program first.
        environment: What its unit sets.
        generation: What deployed it, where something did.
    """
    found, engine = reader.of(argv, environment), reader.engine(argv[0])
    capabilities, version = engine.capabilities, engine.version
    arm = ArmRecord(
        name=name,
        fingerprint=found.fingerprint,
        engine=engine.name,
        family=str(capabilities.family) if capabilities is not None else None,
        engine_version=version.text if version is not None else None,
        program=argv[0],
        model_path=named_files(argv).get("model.path"),
        argv=without_secrets(argv),
        environment=compared_environment(environment),
        origins=generation.origins if generation is not None else (),
        generation=generation.number if generation is not None else None,
    )
    return arm, found.problems


def open_candidate(
    ctx: Context, candidate: Candidate, name: str, *, reader: FingerprintReader | None = None
) -> Target:
    """A candidate that serves.

    Raises:
        BenchError: it does not serve.
    """
    plan = candidate.plan
    if candidate.fault is not None or candidate.serving is None:
        fault = candidate.fault
        raise BenchError(
            f"`{name}` does not serve",
            cause=None if fault is None else fault.words,
            hint=None if fault is None else fault.hint,
        )
    pid, argv = candidate.serving.pid, plan.command.argv
    server = LlamaServer(replace(candidate.address, pid=pid), ctx.clock)
    reader = reader or FingerprintReader(ctx)
    arm, problems = arm_record(reader, name, argv, candidate.environment)
    arm = replace(arm, origins=explain(plan.command, plan.resolved))
    if runs_with(argv, pid) is False:
        raise BenchError(f"{candidate.unit} runs with other arguments than planned")
    target = _of_unit(ctx, candidate.unit, pid, server, plan.resolved.name, arm, problems)
    return replace(target, scrape_s=0.0)


def _of_unit(
    ctx: Context,
    unit: str,
    pid: int,
    server: LlamaServer,
    profile: str | None,
    arm: ArmRecord,
    problems: Sequence[str],
) -> Target:
    """A server that runs by a unit of this machine."""
    return Target(
        arm=arm,
        server=server,
        life=lambda: _life(ctx, unit),
        why_ended=lambda: _why_ended(ctx, unit, pid),
        pids=(pid,),
        speculation=trust.speculation_of(arm.argv or ()),
        messages=tuple(warning("cannot-tell", problem) for problem in problems),
        unit=ctx.unit,
        profile=profile,
        **_asked(server),
    )


def open_url(ctx: Context, url: str, label: str | None = None) -> Target:
    """A server that is known by its address alone; it is called what it calls its model, without a label.

    `URL#MODEL` asks for one of its models, otherwise it is the first that it lists.

    Raises:
        UsageError: it is no address of plain HTTP.
        BenchError: nobody answers there.
    """
    url, _, wanted = url.partition("#")
    address = _address_of_url(url, ctx.environment.get("OPENAI_API_KEY"))
    server = LlamaServer(address, ctx.clock)
    models = server.get("/v1/models", timeout_s=_ASK_S)
    if models.status is None:
        raise BenchError(
            f"nothing answers at {address.url}",
            cause=models.problem,
            state="nothing was measured",
            hint="start the server there, or give the address that it listens on",
        )
    props = server.props(timeout_s=_ASK_S)  # of which a proxy before one may have nothing
    is_llama = props is not None and props.n_slots is not None
    listed = listed_models(models)
    name = wanted or next(iter(listed), None)
    called = label or name or "server"
    arm = ArmRecord(name=called, fingerprint=Fingerprint(tunerd_version=__version__))
    text = "only its address is known: what ran there is not part of the evidence"
    messages = [note("by-address", text)]
    if len(listed) > 1 and not wanted:
        text = f"{called}: asked for `{name}`, the first of {len(listed)} models that it lists"
        messages.append(note("first-model", text, "--url URL#MODEL asks for another"))
    known: dict[str, Any] = {"route": Route.CHAT, "model": name}
    if is_llama:
        known = _asked(server) | {"model": name}
    else:
        text = "not a llama-server: answer lengths are not fixed, and speeds are by the client's clock alone"
        messages.append(note("no-timings", text))
    found = Target(
        arm=arm,
        server=server,
        life=lambda: address.url,
        why_ended=lambda: None,
        is_llama=is_llama,
        messages=tuple(messages),
        **known,
    )
    return _with_lengths_told(found)


def _with_lengths_told(target: Target) -> Target:
    if target.holds or not target.is_llama:
        return target
    text = "answer lengths are not fixed: this build would keep `ignore_eos` for everybody else's answers"
    told = note("own-lengths", text, "`tunerd bench PROFILE` measures fixed lengths")
    return replace(target, messages=(*target.messages, told))


def _address_of_url(url: str, api_key: str | None) -> Address:
    """The address in a URL; a path of `/v1` is what every such server has.

    Raises:
        UsageError: it is none of plain HTTP, or names an account: a URL is kept with what was measured.
    """
    parts, port = urlsplit(""), -1
    with contextlib.suppress(ValueError):  # a port that is none, a bracket that is left open
        parts = urlsplit(url if "//" in url else f"http://{url}")
        port = parts.port or 80
    is_plain = parts.scheme == "http" and parts.path.rstrip("/") in {"", "/v1"}
    if not is_plain or not (parts.hostname or "").strip() or port == -1 or "@" in parts.netloc:
        hint = "use http://HOST:PORT, with or without /v1; a key is taken from OPENAI_API_KEY"
        raise UsageError(f"not the address of a plain HTTP server: `{url}`", hint=hint)
    return Address(str(parts.hostname), port, api_key)


def _asked(server: LlamaServer) -> dict[str, Any]:
    """What the server says of itself."""
    props = server.get("/props", timeout_s=_ASK_S)
    body = props.body if isinstance(props.body, dict) else {}
    slots = server.get("/slots", timeout_s=_ASK_S)
    rows = slots.body if isinstance(slots.body, list) else []
    first = rows[0] if rows and isinstance(rows[0], dict) else {}
    settings = body.get("default_generation_settings")
    settings = settings if isinstance(settings, dict) else {}
    sizes = (one.get("n_ctx") for one in (first, settings, body))
    # True and false are numbers to Python.
    known = (n for n in sizes if type(n) is int and 0 < n <= _MOST_CONTEXT)
    return {
        "model": server.alias(timeout_s=_ASK_S),
        "n_ctx": next(known, None),
        "most_tokens": _most_tokens(settings),
        "frame": _frame_of(server),
        "kept_bias": settings.get("logit_bias"),
    }


def _frame_of(server: LlamaServer) -> Frame | None:
    """The template, with whatever the server's own settings make of it; None where it cannot be told."""
    message = {"role": "user", "content": _SAID}
    reply = server.post("/apply-template", {"messages": [message]}, timeout_s=_ASK_S)
    text = reply.body.get("prompt") if isinstance(reply.body, dict) else None
    if not isinstance(text, str) or text.count(_SAID) != 1 or len(text) > _MOST_FRAME:
        return None
    head, _, tail = text.partition(_SAID)
    return Frame(head, tail)


def _most_tokens(settings: Mapping[str, Any]) -> int | None:
    """The server's own limit: mainline has it among the sampling parameters, ik flat."""
    params = settings.get("params")
    found = (params if isinstance(params, dict) else settings).get("n_predict")
    return found if type(found) is int and found > 0 else None


def count_tokens(server: LlamaServer, text: str, *, timeout_s: float = _ASK_S) -> int | None:
    """How many tokens a text has by the server's own count; None where it cannot tell."""
    reply = server.post("/tokenize", {"content": text}, timeout_s=timeout_s)
    tokens = reply.body.get("tokens") if isinstance(reply.body, dict) else None
    return len(tokens) if isinstance(tokens, list) and tokens else None


def letters_per_token(server: LlamaServer, book: PromptBook) -> float | None:
    """How many letters of usual text a token has; None where the server does not tell."""
    text = PromptStock(book, random.Random("letters")).filler(_LETTERS)  # noqa: S311 -- only counted
    n_tokens = count_tokens(server, text)
    found, (least, most) = len(text) / (n_tokens or 1), _LETTERS_PER_TOKEN
    return found if n_tokens and least <= found <= most else None


def _life(ctx: Context, unit: str) -> str | None:
    """The name of the life that a unit's server has now; None while it has none."""
    state = ctx.services.state(unit)
    return state.life if state.is_active and state.main_pid is not None else None


def _why_ended(ctx: Context, unit: str, pid: int) -> str | None:
    state = ctx.services.state(unit)
    if state.is_active and state.main_pid == pid:
        return None
    if state.is_active:
        return "it was started again"
    return why_it_ended(ctx, unit).failure.words


# The texts of a mix of requests: the same name gives the same text, whatever was asked before it.

_LETTERS = 20_000  # of text by which the length of a token is told
