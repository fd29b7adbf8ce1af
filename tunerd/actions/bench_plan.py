"""What a bench will send: the prompts, the suite with its defaults, and how long it may take."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.core.bench import suites
from tunerd.core.bench.fitting import fitting, prompt_tokens, with_short_question
from tunerd.core.bench.prompts import PromptBook, read_prompts
from tunerd.core.bench.request import Plan, Suite
from tunerd.core.metrics import summarise
from tunerd.core.result import Message, note
from tunerd.core.workload_shape import Rates, WorkloadShape, fitted
from tunerd.errors import BenchError
from tunerd.system.store import EvidenceStore

_PROMPTS = Path(__file__).parents[1] / "data/prompts.toml"
_REPEATS = {
    Suite.MTP: 3,
    Suite.LENGTHS: 3,
    Suite.CACHE: 3,
    Suite.DEEP: 1,
    Suite.QUALITY: 3,
    Suite.CONCURRENCY: 3,
    Suite.WORKLOAD: 3,
}
_MARGIN_TOKENS = 128
_USUAL_RATES = Rates(prompt_tok_s=500.0, decode_tok_s=30.0)
_LOOK_BACK = 50
# Warm-up, tokens of prompts without a stated length, and what is measured again.
_ALLOWANCE = 1.25
_PROMPT_TOKENS = 100


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What was asked for on the command line; None is the usual.

    `repeats` is how often each case is measured, `depth` the tokens of long prompts, `seed` that of
    order and texts. `with_own_sampling` asks the questions of `quality` by the server's own sampling too.
    """

    suite: Suite = Suite.MTP
    repeats: int | None = None
    depth: int | None = None
    seed: int | None = None
    workload: str | None = None
    is_against_published: bool = False
    with_own_sampling: bool = False


def prompt_book(ctx: Context) -> PromptBook:
    """The shipped prompts.

    Raises:
        BenchError: the file is missing.
        ConfigError: it is damaged.
    """
    content = ctx.files.read(_PROMPTS)
    if content is None:
        raise BenchError(f"no prompts: `{_PROMPTS}` is missing", hint="install tunerd again")
    return read_prompts(tomllib.loads(content.decode()))


def fitting_plan(
    asked: BenchRequest,
    seed: int,
    shape: WorkloadShape | None,
    book: PromptBook,
    *,
    n_ctx: int | None,
    n_slots: int | None = None,
    most_tokens: int | None = None,
    letters_per_token: float | None = None,
) -> tuple[Plan, tuple[Message, ...]]:
    """`suite_plan` without what the context cannot hold.

    Args:
        asked: The suite.
        seed: Of order and texts.
        shape: The workload, for that suite.
        book: The questions.
        n_ctx: Context of one request; None where unknown.
        n_slots: How many requests the server works on at once; None where unknown.
        most_tokens: The longest answer that it gives; None for no limit.
        letters_per_token: What its vocabulary does; None before it was asked.

    Raises:
        BenchError: this server cannot have the suite.
    """
    plan, told = suite_plan(
        asked, seed, shape, n_ctx=n_ctx, n_slots=n_slots, most_tokens=most_tokens
    )
    more = list(told)
    if asked.suite is Suite.LENGTHS:
        shorter = with_short_question(plan, book, n_ctx, letters_per_token)
        if shorter is not plan:
            more.append(note("short-question", f"a context of {n_ctx} has no room for the long "
                             "review, so a shorter question is asked"))  # fmt: skip
        plan = shorter
    plan, lost = fitting(plan, book, n_ctx, letters_per_token)
    if lost:
        more.append(note("no-room", f"a context of {n_ctx} has no room for {', '.join(lost)}"))
    wanted = asked.depth
    real = max(prompt_tokens(one, book, letters_per_token) for one in plan.requests)
    if wanted is not None and real > wanted:
        text = f"the question alone has {real} tokens: prompts are so long, and not {wanted}"
        more.append(note("question-longer", text))
    return plan, tuple(more)


def suite_plan(
    asked: BenchRequest,
    seed: int,
    shape: WorkloadShape | None,
    *,
    n_ctx: int | None,
    n_slots: int | None = None,
    most_tokens: int | None = None,
) -> tuple[Plan, tuple[Message, ...]]:
    """The plan of a suite for a server, and what had to be left out of it.

    Raises:
        BenchError: this server cannot have the suite.
    """
    repeats = asked.repeats or _REPEATS[asked.suite]
    if asked.suite is Suite.MTP:
        return suites.mtp(seed, repeats=repeats), ()
    if asked.suite is Suite.LENGTHS:
        plan = suites.lengths(
            seed, repeats=repeats, n_ctx=n_ctx, depth=asked.depth, most_tokens=most_tokens
        )
        return plan, _left_out(plan)
    if asked.suite is Suite.CACHE:
        return suites.cache(seed, repeats=repeats, n_ctx=n_ctx, depth=asked.depth), ()
    if asked.suite is Suite.DEEP:
        return suites.deep(seed, n_ctx=n_ctx), ()
    if asked.suite is Suite.QUALITY:
        own = asked.with_own_sampling
        return suites.quality(seed, repeats=repeats, with_own_sampling=own), ()
    if asked.suite is Suite.CONCURRENCY:
        return suites.concurrency(seed, repeats=repeats), _waiting(n_slots)
    if shape is None:
        raise BenchError("no workload was given")
    mix, cut = shape.plain(), tuple[int, ...]()
    if n_ctx is not None:
        mix, cut = fitted(mix, n_ctx, margin_tokens=_MARGIN_TOKENS)
    told = [note("cut", f"class `{shape.classes[index].name}` was cut to the context of {n_ctx}")
            for index in cut]  # fmt: skip
    return suites.workload(seed, shape, mix, repeats=repeats), tuple(told)


def _left_out(plan: Plan) -> tuple[Message, ...]:
    measured = {request.n_predict for request in plan.requests}
    missing = [str(n) for n in suites.LENGTHS if n not in measured]
    depth = next(request.depth_tokens for request in plan.requests)
    text = f"prompts of about {depth} tokens"
    if missing:
        text += f"; no room for answers of {', '.join(missing)} tokens"
    return (note("depth", text),)


def _waiting(n_slots: int | None) -> tuple[Message, ...]:
    if n_slots is None or n_slots >= max(suites.STREAMS):
        return ()
    text = f"the server works on {n_slots} requests at once; more of them wait"
    return (note("slots", text),)


def expected_s(plan: Plan, rates: Rates) -> float:
    """About how long a plan takes at these rates [s]."""
    prompts = sum(request.depth_tokens or _PROMPT_TOKENS for request in plan.requests)
    tokens = sum(request.n_predict for request in plan.requests)
    prompt_s = prompts / (rates.prompt_tok_s or _USUAL_RATES.prompt_tok_s or 1.0)
    decode_s = tokens / (rates.decode_tok_s or _USUAL_RATES.decode_tok_s or 1.0)
    return (prompt_s + decode_s) * _ALLOWANCE


def rates_seen(store: EvidenceStore, profile: str | None) -> Rates:
    """How fast the profile was when it was measured last; usual speeds where it never was."""
    for run in store.runs(limit=_LOOK_BACK):
        if profile is None or run.record.profile != profile or not run.n_samples:
            continue
        found = summarise(store.samples(run.number))
        if found.decode.tok_s is not None:
            return Rates(found.prompt.tok_s, found.decode.tok_s)
    return _USUAL_RATES


def seen_prompts(store: EvidenceStore, life: str | None) -> frozenset[str]:
    """Ids of the prompts that a server life was asked in earlier runs."""
    if life is None:
        return frozenset()
    return frozenset(
        sample.prompt_id
        for run in store.runs(limit=_LOOK_BACK)
        for sample in store.samples(run.number)
        if sample.process == life
    )
