"""Tries once per build what it does with speculation, on a tiny designed model whose answers are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunerd.app import Context
from tunerd.engine.builds import engine_json, find_engines, sandbox
from tunerd.engine.capabilities import Effect, Engine, Proof
from tunerd.engine.flags import CommandLine, RenderContext, render
from tunerd.engine.health import Completion, HttpState, classify
from tunerd.engine.probe import BARE_ENVIRONMENT, is_unchanged, loads_its_own, remember_proofs
from tunerd.engine.server import Address, LlamaServer
from tunerd.errors import HostError, ServiceError
from tunerd.machine.clock import polls
from tunerd.machine.net import free_port
from tunerd.machine.process import Child
from tunerd.profile.layers import Layer, LayerFile, Resolved, default_layer, resolve
from tunerd.profile.schema import nest
from tunerd.result import ActionResult, Message, note
from tunerd.units.manager import cut_lines
from tunerd.units.sandbox import Sandbox
from tunerd.words import Family

# What each trial is for; the words name the settings that it ran with.
PLAIN = "n_max 3, p_min 0"
GATED = "n_max 3, p_min 0.75"
SHALLOW = "n_max 1, p_min 0"
NATIVE = "native route"
OVERRIDDEN = "n_max 1 by request"
GATED_BY_REQUEST = "p_min 0.75 by request"
OFF = "off"

# Features that show in another number of drafted tokens: the trial, and how it differs.
_CHANGES = (
    ("p-min", GATED, "0.75 instead of 0"),
    ("n-max", SHALLOW, "1 instead of 3"),
    ("per-request", OVERRIDDEN, "n-max 1 with the request"),
    ("per-request p-min", GATED_BY_REQUEST, "p-min 0.75 with the request"),
)


def engines(ctx: Context, *, prove: bool = False) -> ActionResult:
    """List engines, after trying their features on a designed model if asked to."""
    found = find_engines(ctx)
    if prove:
        found = tuple(prove_engine(ctx, engine) for engine in found)
    messages: list[Message] = []
    known = [engine for engine in found if engine.capabilities is not None]
    if any(engine.proof("mtp").effect is Effect.UNTRIED for engine in known):
        messages.append(
            note(
                "untried",
                "not every build has been tried for what it does with its flags",
                "`tunerd engines --prove` tries them, a few seconds each",
            )
        )
    return ActionResult(
        "engines", {"engines": [engine_json(engine) for engine in found]}, tuple(messages)
    )


def judge_trials(trials: Mapping[str, Completion], expected_text: str) -> tuple[Proof, ...]:
    """The proofs that a set of trials gives; a feature whose trial is missing stays untried."""
    proofs = []
    plain = trials.get(PLAIN)
    base = plain or trials.get(OFF)
    if base is not None:
        proofs.append(Proof("text", *_text(base, expected_text)))
    if plain is not None:
        proofs.append(Proof("mtp", *_mtp(plain)))
    if plain is not None and plain.n_drafted:
        proofs += [
            Proof(feature, *_differs(plain, trials[name], change))
            for feature, name, change in _CHANGES
            if name in trials
        ]
        if NATIVE in trials:
            yes = Effect.PROVED, "the native route counts drafts"
            no = Effect.NO_EFFECT, "only the OpenAI routes count drafts"
            proofs.append(Proof("counts", *(yes if trials[NATIVE].n_drafted else no)))
    return tuple(proofs)


def _text(trial: Completion, expected: str) -> tuple[Effect, str]:
    if trial.problem is not None:
        return Effect.FAILED, trial.problem
    written = (trial.text or "").rstrip()
    # ik with MTP may leave out the last one or two tokens that it counts.
    if len(written) * 2 < len(expected):
        return Effect.FAILED, f"it writes {len(written)} characters of {len(expected)}"
    if not expected.startswith(written[: len(expected)]):
        return Effect.FAILED, "it writes something other than the model's known text"
    return Effect.PROVED, f"{len(written)} characters as the model must write them"


def _mtp(trial: Completion) -> tuple[Effect, str]:
    if trial.problem is not None:
        return Effect.FAILED, f"it does not serve a model with MTP: {trial.problem}"
    if not trial.n_drafted:
        return Effect.NO_EFFECT, "it drafted nothing"
    return Effect.PROVED, f"{trial.n_drafted} drafted, {trial.n_accepted} accepted at {PLAIN}"


def _differs(before: Completion, after: Completion, change: str) -> tuple[Effect, str]:
    if after.problem is not None:
        return Effect.FAILED, after.problem
    counts = f"{before.n_drafted} drafted, with {change} {after.n_drafted or 0}"
    return Effect.PROVED if after.n_drafted != before.n_drafted else Effect.NO_EFFECT, counts


_REGION = "creative"
_PROMPT = f"please go on with {_REGION}"
_N_PREDICT = 65
_START_S = 60.0
_ANSWER_S = 60.0
_POLL_S = 0.05
_LONGEST_TRIAL_S = _START_S + 4 * _ANSWER_S
_LIMITS = {"CPU": 300, "DATA": 8 << 30, "FSIZE": 64 << 20, "NOFILE": 1024}
# Trials must not take VRAM from the server that runs.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "GGML_VK_VISIBLE_DEVICES": ""}


def prove_engine(ctx: Context, engine: Engine) -> Engine:
    """The engine with its proofs, tried now; one that cannot be probed is left as it is.

    Raises:
        HostError: the designed model cannot be written.
    """
    if engine.capabilities is None or engine.identity is None:
        return engine
    ctx.say(f"trying {engine.name} on a designed model")
    has_mtp = engine.capabilities.spec_word("mtp") is not None
    model, expected = _designed_model(ctx, has_mtp=has_mtp)
    trials = dict(_trials(ctx, engine, model, has_mtp=has_mtp))
    proofs = judge_trials(trials, expected)
    if not is_unchanged(engine.identity):
        ctx.say(f"{engine.name} was replaced meanwhile: the result is not kept")
        return engine
    remember_proofs(ctx.paths.cache_dir, ctx.files, engine.identity, proofs)
    return replace(engine, proofs=proofs)


def _designed_model(ctx: Context, *, has_mtp: bool) -> tuple[Path, str]:
    """A tiny designed model, and the text that it must write."""
    from tunerd.tryout.designed import SHAPES, design, vocabulary, write

    shape = "tiny" if has_mtp else "tiny-nomtp"
    made, path = design(SHAPES[shape]), ctx.paths.cache_dir / f"designed-{shape}.gguf"
    ctx.files.make_folder(ctx.paths.cache_dir)
    write(made, path, force=True)
    return path, made.text(vocabulary().region(_REGION).first, _N_PREDICT)


def _trials(
    ctx: Context, engine: Engine, model: Path, *, has_mtp: bool
) -> Iterator[tuple[str, Completion]]:
    if not has_mtp:
        with _server(ctx, engine, model, {"speculation.type": "off"}) as server:
            yield OFF, _ask(server)
        return
    mtp = {"speculation.type": "mtp", "speculation.n_max": 3, "speculation.p_min": 0.0}
    with _server(ctx, engine, model, mtp) as server:
        first = _ask(server)
        yield PLAIN, first
        if first.problem is not None:
            return
        yield NATIVE, _ask(server, route="/completion")
        yield OVERRIDDEN, _ask(server, options={"speculative.n_max": 1})
        yield GATED_BY_REQUEST, _ask(server, options={"speculative.p_min": 0.75})
    for name, change in ((GATED, {"speculation.p_min": 0.75}), (SHALLOW, {"speculation.n_max": 1})):
        with _server(ctx, engine, model, {**mtp, **change}) as server:
            yield name, _ask(server)


@contextmanager
def _server(
    ctx: Context, engine: Engine, model: Path, options: Mapping[str, Any]
) -> Iterator[LlamaServer | str]:
    """A trial server, or why it does not serve."""
    is_ours = engine.is_embedded and loads_its_own(engine.environment)
    place = Sandbox(None) if is_ours else sandbox(ctx)
    try:
        with place.lent(model) as lent:
            port = free_port()
            command = _command(engine, lent, {**options, "serving.port": port})
            environment = {**BARE_ENVIRONMENT, "GGML_NO_BACKTRACE": "1", **_NO_GPU}
            environment |= engine.environment
            with place.serve(
                command, env=environment, limits=_LIMITS, at_most_s=_LONGEST_TRIAL_S
            ) as child:
                server = LlamaServer(Address("127.0.0.1", port), ctx.clock)
                yield _wait(ctx, server, child) or server
    except (HostError, ServiceError) as error:
        yield error.cause or error.message


def _command(engine: Engine, model: Path, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The trial's command line, by the same renderer as production's."""
    keys = {
        "serving.alias": "trial",
        "serving.ctx_size": 2048,
        "serving.threads": 1,
        "serving.threads_batch": 1,
        "serving.warmup": False,
        "serving.log_verbosity": "default",
        **options,
    }
    layer = LayerFile(Layer.TUNERD, "trial", nest(keys))
    made: object = resolve("trial", (default_layer(), layer))
    capabilities = engine.capabilities
    context = RenderContext(str(engine.program), str(model), False, 1, subcommand=engine.subcommand)
    if isinstance(made, Resolved) and capabilities is not None:
        made = render(made, capabilities, context)
    if not isinstance(made, CommandLine):
        why = "; ".join(map(str, made)) if isinstance(made, tuple) else str(made)
        raise HostError(f"a trial of {engine.name} cannot be set up", cause=why)
    # With a GPU hidden, ik would still ask for layers on it.
    is_ik = capabilities is not None and capabilities.family is Family.IK
    return (*made.argv, *(("--n-gpu-layers", "0") if is_ik else ()))


def _wait(ctx: Context, server: LlamaServer, child: Child) -> str | None:
    """None when it is ready, else why it will not be."""
    for _ in polls(ctx.clock, _START_S, every_s=_POLL_S):
        ended = child.poll()
        if ended is not None:
            lines = cut_lines(child.log_tail())
            is_exit = ended.signal is None
            how, status = ("exited", ended.code) if is_exit else ("killed", ended.signal)
            failure = classify(lines, exit_kind=how, exit_status=status)
            return f"{failure.kind}: {failure.words}"
        if server.health(timeout_s=1.0) is HttpState.READY:
            return None
    return f"not ready after {_START_S:.0f} s"


def _ask(
    server: LlamaServer | str,
    *,
    route: str = "/v1/completions",
    options: Mapping[str, Any] | None = None,
) -> Completion:
    """One generation; the OpenAI route, since some builds count drafts only there."""
    if isinstance(server, str):
        return Completion(problem=server)
    return server.complete(
        _PROMPT,
        n_predict=_N_PREDICT,
        timeout_s=_ANSWER_S,
        options={"max_tokens": _N_PREDICT, **(options or {})},
        route=route,
    )
