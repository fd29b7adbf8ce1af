"""What a bench measures: the live unit, a candidate, or a server that is known by its address alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from tunerd import __version__
from tunerd.actions.bench_arm import arm_of
from tunerd.actions.candidate import Candidate
from tunerd.actions.context import Context
from tunerd.actions.fingerprint import FingerprintReader
from tunerd.actions.live import address_now, read_live_unit
from tunerd.actions.serve_check import why_it_ended
from tunerd.core.bench.composing import USUAL_LETTERS_PER_TOKEN, Route
from tunerd.core.bench.expected import is_same_command, speculation_of
from tunerd.core.bench.trust import Speculation
from tunerd.core.evidence import ArmRecord
from tunerd.core.fingerprint import Fingerprint
from tunerd.core.health import HttpState
from tunerd.core.live import LiveUnit
from tunerd.core.plan import explain
from tunerd.core.result import Message, note, warning
from tunerd.errors import BenchError, UsageError
from tunerd.system.host import process_facts
from tunerd.system.llama import Address, LlamaServer

LIVE = "live"
_ASK_S = 10.0
# What a server says of itself is believed within these: no context is larger (the longest of models
# is 10 million tokens), and no vocabulary cuts common text into such pieces.
_MOST_CONTEXT = 1 << 24
_LETTERS_PER_TOKEN = (0.5, 50.0)
_OK = 200
_UNKNOWN = Speculation(None)


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
        route: How it is asked for a completion.
        model: The name to ask for on OpenAI routes.
        n_ctx: Context of one request; None where unknown.
        n_slots: How many requests it works on at once; None where unknown.
        most_tokens: The longest answer that it gives; None for no limit, or where it does not say.
        speculation: What it is meant to do.
        overrides: What is sent with each request beside the usual.
    """

    arm: ArmRecord
    server: LlamaServer
    life: Callable[[], str | None]
    why_ended: Callable[[], str | None]
    pids: tuple[int, ...] = ()
    is_llama: bool = True
    route: Route = Route.NATIVE
    model: str | None = None
    n_ctx: int | None = None
    n_slots: int | None = None
    most_tokens: int | None = None
    speculation: Speculation = _UNKNOWN
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its arm."""
        return self.arm.name


@dataclass(frozen=True, slots=True)
class Opened:
    """A target with what should be said of it, and whose it is."""

    target: Target
    messages: tuple[Message, ...] = ()
    unit: str | None = None
    profile: str | None = None


def open_live(ctx: Context, *, reader: FingerprintReader | None = None) -> Opened:
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
        raise BenchError(f"cannot tell how {live.unit} is reached", cause=live.problem, hint=hint)
    messages = _demand_same_command(live, state.main_pid)
    server = ctx.connect(address)
    _demand_ready(server, address)
    entry = ctx.generations.serving(live.unit)
    generation = entry.generation if entry is not None else None
    if generation is not None and tuple(generation.argv) != tuple(live.argv):
        generation = None
    arm, problems = arm_of(ctx, LIVE, live.argv, live.environment, generation, reader)
    pid = state.main_pid
    target = Target(
        arm=arm,
        server=server,
        life=lambda: _life(ctx, live.unit),
        why_ended=lambda: _why_ended(ctx, live.unit, pid),
        pids=(pid,),
        speculation=speculation_of(live.argv),
        **_asked(server),
    )
    told = tuple(warning("cannot-tell", problem) for problem in problems)
    profile = generation.profile if generation is not None else None
    return Opened(target, (*messages, *told), live.unit, profile)


def open_candidate(
    ctx: Context, candidate: Candidate, name: str, *, reader: FingerprintReader | None = None
) -> Opened:
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
    server = ctx.connect(candidate.address)
    argv = plan.command.argv
    arm, problems = arm_of(ctx, name, argv, candidate.environment, None, reader)
    arm = replace(arm, origins=explain(plan.command, plan.resolved))
    pid = candidate.serving.pid
    _demand_same_process(argv, pid, candidate.unit)
    target = Target(
        arm=arm,
        server=server,
        life=lambda: _life(ctx, candidate.unit),
        why_ended=lambda: _fault_words(ctx, candidate),
        pids=(pid,),
        speculation=speculation_of(argv),
        **_asked(server),
    )
    told = tuple(warning("cannot-tell", problem) for problem in problems)
    return Opened(target, told, ctx.unit, plan.resolved.name)


def open_url(ctx: Context, url: str) -> Opened:
    """A server that is known by its address alone.

    Raises:
        UsageError: it is no address of plain HTTP.
        BenchError: nobody answers there.
    """
    address = address_of_url(url, ctx.environment.get("OPENAI_API_KEY"))
    server = ctx.connect(address)
    models = server.get("/v1/models", timeout_s=_ASK_S)
    if models.status is None:
        raise BenchError(f"nobody answers at {address.url}", cause=models.problem)
    is_llama = _is_llama(server)
    name = server.alias(timeout_s=_ASK_S)
    arm = ArmRecord(name=name or "server", fingerprint=Fingerprint(tunerd_version=__version__))
    known = _asked(server) if is_llama else {}
    target = Target(
        arm=arm,
        server=server,
        life=lambda: address.url,
        why_ended=lambda: None,
        is_llama=is_llama,
        **({"route": Route.CHAT, "model": name} | known),
    )
    text = "only its address is known: what ran there is not part of the evidence"
    messages = [note("by-address", text)]
    if not is_llama:
        messages.append(
            note(
                "no-timings",
                "no llama-server: lengths are not fixed, and speeds are by the client's clock alone",
            )
        )
    return Opened(target, tuple(messages))


def address_of_url(url: str, api_key: str | None = None) -> Address:
    """The address in a URL; a path of `/v1` is what every such server has.

    Raises:
        UsageError: it is none of plain HTTP.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    is_plain = parts.scheme == "http" and parts.path.rstrip("/") in {"", "/v1"}
    if not is_plain or not parts.hostname or port == -1:
        hint = "http://HOST:PORT, with or without /v1"
        raise UsageError(f"no address of a server with plain HTTP: `{url}`", hint=hint)
    return Address(parts.hostname, port or 80, api_key)


def _is_llama(server: LlamaServer) -> bool:
    """Whether it has llama-server's own routes; a proxy before one may have none of them."""
    props = server.get("/props", timeout_s=_ASK_S)
    return props.status == _OK and isinstance(props.body, dict) and "total_slots" in props.body


def _asked(server: LlamaServer) -> dict[str, Any]:
    """What the server says of itself."""
    props = server.get("/props", timeout_s=_ASK_S)
    body = props.body if isinstance(props.body, dict) else {}
    slots = server.get("/slots", timeout_s=_ASK_S)
    rows = slots.body if isinstance(slots.body, list) else []
    first = rows[0] if rows and isinstance(rows[0], dict) else {}
    settings = body.get("default_generation_settings")
    settings = settings if isinstance(settings, dict) else {}
    sizes = (first.get("n_ctx"), settings.get("n_ctx"), body.get("n_ctx"))
    n_slots = body.get("total_slots")
    return {
        "route": Route.NATIVE,
        "model": server.alias(timeout_s=_ASK_S),
        "n_ctx": next((n for n in sizes if _is_size(n)), None),
        "n_slots": n_slots if _is_size(n_slots) else None,
        "most_tokens": _most_tokens(settings),
    }


def _is_size(value: Any) -> bool:
    """Whether a server can have so many: true and false are numbers to Python."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_CONTEXT


def _most_tokens(settings: Mapping[str, Any]) -> int | None:
    """The server's own limit: mainline has it among the sampling parameters, ik flat."""
    params = settings.get("params")
    found = (params if isinstance(params, dict) else settings).get("n_predict")
    is_limit = isinstance(found, int) and not isinstance(found, bool) and found > 0
    return found if is_limit else None


def letters_per_token(server: LlamaServer, text: str) -> float:
    """How many letters of this text a token has; the usual number where the server cannot tell."""
    reply = server.post("/tokenize", {"content": text}, timeout_s=_ASK_S)
    tokens = reply.body.get("tokens") if isinstance(reply.body, dict) else None
    if not isinstance(tokens, list) or not tokens:
        return USUAL_LETTERS_PER_TOKEN
    found, (least, most) = len(text) / len(tokens), _LETTERS_PER_TOKEN
    return found if least <= found <= most else USUAL_LETTERS_PER_TOKEN


def _demand_ready(server: LlamaServer, address: Address) -> None:
    state = server.health(timeout_s=_ASK_S)
    if state is not HttpState.READY:
        raise BenchError(f"the server at {address.url} is {state}", hint="wait until it is ready")


def _demand_same_command(live: LiveUnit, pid: int) -> tuple[Message, ...]:
    """What runs must be what the unit says: it may have been edited since it was started."""
    argv = live.argv or ()
    facts = process_facts(pid)
    same = is_same_command(argv, facts.cmdline if facts is not None else None)
    if same is False:
        raise BenchError(
            f"{live.unit} runs with other arguments than its file has",
            cause="it was edited after the server was started",
            hint=f"`systemctl restart {live.unit}`, or `tunerd verify`",
        )
    if same is None:
        return (warning("cannot-tell", f"the arguments of process {pid} cannot be read"),)
    return ()


def _demand_same_process(argv: tuple[str, ...], pid: int, unit: str) -> None:
    facts = process_facts(pid)
    if is_same_command(argv, facts.cmdline if facts is not None else None) is False:
        raise BenchError(f"{unit} runs with other arguments than planned")


def _life(ctx: Context, unit: str) -> str | None:
    """The name of the life that a unit's server has now; None while it has none."""
    state = ctx.services.state(unit)
    if not state.is_active or state.main_pid is None:
        return None
    return state.invocation_id or f"process {state.main_pid}"


def _why_ended(ctx: Context, unit: str, pid: int) -> str | None:
    state = ctx.services.state(unit)
    if state.is_active and state.main_pid == pid:
        return None
    if state.is_active:
        return "it was started again"
    return why_it_ended(ctx, unit).failure.words


def _fault_words(ctx: Context, candidate: Candidate) -> str | None:
    fault = candidate.look(ctx)
    return None if fault is None else fault.words
