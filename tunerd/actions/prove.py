"""Tries once per build what it does with speculation, on a tiny designed model whose answers are known."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunerd.actions.context import Context
from tunerd.core.cmdline import CommandLine, render
from tunerd.core.cmdline_parts import RenderContext
from tunerd.core.defaults import default_layer
from tunerd.core.engine import Engine, Family
from tunerd.core.failure import classify
from tunerd.core.health import HttpState
from tunerd.core.proof import (
    GATED,
    GATED_BY_REQUEST,
    NATIVE,
    OFF,
    OVERRIDDEN,
    PLAIN,
    SHALLOW,
    Trial,
    judge_trials,
)
from tunerd.core.resolve import Layer, LayerFile, Resolved, resolve
from tunerd.errors import HostError
from tunerd.system.accounts import probe_account
from tunerd.system.confine import Limits, User
from tunerd.system.llama import Address, LlamaServer
from tunerd.system.ports import free_port
from tunerd.system.process import Child, Setting, start
from tunerd.system.proofs import remember_proofs

_REGION = "creative"
_PROMPT = f"please go on with {_REGION}"
_N_PREDICT = 65
_START_S = 60.0
_ANSWER_S = 60.0
_LIMITS = Limits(cpu_s=300, data_mib=8192, file_mib=64, n_files=1024)
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
    remember_proofs(ctx.paths.cache_dir, ctx.files, engine.identity, proofs)
    return replace(engine, proofs=proofs)


def _designed_model(ctx: Context, *, has_mtp: bool) -> tuple[Path, str]:
    """A tiny designed model, written once, and the text that it must write."""
    from tunerd.core.designed import SHAPES, design, vocabulary
    from tunerd.system.designed_file import read_truth, write

    shape = "tiny" if has_mtp else "tiny-nomtp"
    ctx.files.make_folder(ctx.paths.cache_dir)
    path = ctx.paths.cache_dir / f"designed-{shape}.gguf"
    if not path.exists():
        write(design(SHAPES[shape]), path, force=True)
    truth = read_truth(path)
    return path, truth.text(vocabulary().encode(_PROMPT)[-1], _N_PREDICT)


def _trials(
    ctx: Context, engine: Engine, model: Path, *, has_mtp: bool
) -> Iterator[tuple[str, Trial]]:
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
    account = None if engine.is_embedded else probe_account(ctx.settings.service.user)
    folder = Path(tempfile.mkdtemp(prefix="tunerd-trial-"))  # ik leaves a log where it runs
    try:
        own = Path(shutil.copyfile(model, folder / model.name))  # ours may lie in a closed home
        if account is not None:
            for path in (folder, own):
                os.chown(path, account.uid, account.gid)
        port = free_port()
        command = _command(engine, own, {**options, "serving.port": port})
        with start(command, _setting(engine, account, folder)) as child:
            server = ctx.connect(Address("127.0.0.1", port))
            yield _wait(ctx, server, child) or server
            child.terminate(2.0)
    except HostError as error:
        yield error.cause or error.message
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _setting(engine: Engine, account: User | None, folder: Path) -> Setting:
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(folder)}
    return Setting(
        env={**environment, **_NO_GPU, **engine.environment},
        cwd=folder,
        user=account,
        limits=_LIMITS,
        dies_with_parent=True,
    )


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
    layer = LayerFile(Layer.TUNERD, "trial", _nested(keys))
    resolved = resolve("trial", (default_layer(), layer))
    if not isinstance(resolved, Resolved) or engine.capabilities is None:
        raise HostError(f"a trial of {engine.name} cannot be set up", cause=str(resolved))
    context = RenderContext(str(engine.program), str(model), has_gpu=False, physical_cores=1)
    command = render(resolved, engine.capabilities, context)
    if not isinstance(command, CommandLine):
        raise HostError(
            f"a trial of {engine.name} cannot be set up",
            cause="; ".join(str(refusal) for refusal in command),
        )
    # With a GPU hidden, ik would still ask for layers on it.
    hidden = ("--n-gpu-layers", "0") if engine.capabilities.family is Family.IK else ()
    return (*command.argv, *hidden)


def _nested(keys: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return nested


def _wait(ctx: Context, server: LlamaServer, child: Child) -> str | None:
    """None when it is ready, else why it will not be."""
    end_s = ctx.clock.monotonic_s() + _START_S
    while ctx.clock.monotonic_s() < end_s:
        ended = child.poll()
        if ended is not None:
            kind = "killed" if ended.signal is not None else "exited"
            status = ended.signal if ended.signal is not None else ended.code
            failure = classify(child.log_tail().splitlines(), exit_kind=kind, exit_status=status)
            return f"{failure.kind}: {failure.words}"
        if server.health(timeout_s=1.0) is HttpState.READY:
            return None
        ctx.clock.sleep(0.05)
    return f"not ready after {_START_S:.0f} s"


def _ask(
    server: LlamaServer | str,
    *,
    route: str = "/v1/completions",
    options: Mapping[str, Any] | None = None,
) -> Trial:
    """One generation; the OpenAI route, since some builds count drafts only there."""
    if isinstance(server, str):
        return Trial(None, None, None, server)
    body = {
        "prompt": _PROMPT,
        "n_predict": _N_PREDICT,
        "max_tokens": _N_PREDICT,
        "temperature": 0.0,
        "cache_prompt": False,
        **(options or {}),
    }
    reply = server.post(route, body, timeout_s=_ANSWER_S)
    if not isinstance(reply.body, dict) or "error" in reply.body:
        return Trial(None, None, None, reply.problem or f"status {reply.status}")
    timings = reply.body.get("timings") or {}
    text = reply.body.get("content")
    if text is None:
        choices = reply.body.get("choices") or [{}]
        text = choices[0].get("text")
    return Trial(text, timings.get("draft_n"), timings.get("draft_n_accepted"), None)
