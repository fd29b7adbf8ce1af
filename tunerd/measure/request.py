"""What a bench asks: suites, requests, and the texts that are composed for them."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from tunerd.errors import BenchError
from tunerd.profile.workload import KINDS, MIXED, RequestClass, WorkloadShape, fitted
from tunerd.result import Message, note

# The texts that are sent: forms with words to fill in, and filler of any length.
# A prompt is never sent twice within one server life. Each begins with a reference number of its own,
# so that no cache knows its first tokens, and is filled in otherwise than those before it as long as
# the form has words left, so that no drafter can replay an earlier answer. Its last word never changes.

MTP_KINDS = (
    "code_python",
    "code_cpp",
    "explain_concept",
    "summarize",
    "qa_factual",
    "translation",
    "creative_short",
    "stepwise_math",
    "long_code_review",
)
# The kinds of which workloads speak, by the form that stands for each.
_SAME_KIND = MappingProxyType(
    {
        "code": "code_python",
        "tool": "code_python",  # the arguments of a call are nearest to code
        "chat": "explain_concept",
        "summary": "summarize",
        "math": "stepwise_math",
        "creative": "creative_short",
    }
)
_FILLER_PARTS = ("opening", "subject", "verb", "object", "ending")
_NONCE_LETTERS = 8
_REFERENCE = "Reference {nonce}."


@dataclass(frozen=True, slots=True)
class Form:
    """One text with words to fill in.

    `words` are the lists by name; `least_tokens` is what a filled-in text has at least in a common
    vocabulary, without the reference number.
    """

    kind: str
    text: str
    words: Mapping[str, tuple[str, ...]]
    least_tokens: int

    @property
    def n_variants(self) -> int:
        """How many texts it gives."""
        return math.prod(len(words) for words in self.words.values())

    def variant(self, number: int) -> str:
        """One of them, without a reference number; `number` counts from 0."""
        chosen = {}
        for name, words in self.words.items():
            number, at = divmod(number, len(words))
            chosen[name] = words[at]
        return self.text.format(**chosen)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text as it is sent; `prompt_id` is unlike that of every other one.

    `shared_ratio` is the share of its letters that an earlier text begins with too, where it shares one.
    """

    prompt_id: str
    text: str
    shared_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class PromptBook:
    """All forms by kind, and the parts of filler sentences."""

    forms: Mapping[str, Form]
    filler: Mapping[str, tuple[str, ...]]

    def form(self, kind: str) -> Form:
        """The form of a kind, by its own name or by that which workloads use."""
        return self.forms[_SAME_KIND.get(kind, kind)]


def read_prompts(data: Mapping[str, Any]) -> PromptBook:
    """The book that the parsed prompt file holds, which is shipped with this very code."""
    forms = {row["kind"]: _form(row) for row in data["prompt"]}
    filler = {part: tuple(data["filler"][part]) for part in _FILLER_PARTS}
    return PromptBook(MappingProxyType(forms), MappingProxyType(filler))


def _form(row: Mapping[str, Any]) -> Form:
    words = {name: tuple(row[name]) for name in row if name not in {"kind", "text", "tokens"}}
    return Form(row["kind"], row["text"], MappingProxyType(words), min(row["tokens"]))


@dataclass
class PromptStock:
    """Hands out prompts that this server life has not seen.

    `used` are the prompt ids that the life has seen before, from earlier runs.
    """

    book: PromptBook
    rng: random.Random
    used: Collection[str] = ()
    repeated_kinds: set[str] = field(default_factory=set)
    _nonces: set[str] = field(default_factory=set)
    _left: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take the reference numbers of earlier runs out of the stock."""
        self._nonces |= {name.rpartition("#")[2] for name in self.used}

    def take(self, kind: str) -> Prompt:
        """A fresh prompt; kinds whose words are used up are noted in `repeated_kinds`."""
        form = self.book.form(kind)
        number = self._variant(form.kind, form.n_variants)
        nonce = self._nonce()
        text = f"{_REFERENCE.format(nonce=nonce)}\n\n{form.variant(number)}"
        return Prompt(f"{form.kind}-{number}#{nonce}", text)

    def take_long(self, kind: str, n_letters: int) -> Prompt:
        """A fresh prompt that is preceded by filler, about `n_letters` long altogether."""
        prompt = self.take(kind)
        head, _, question = prompt.text.partition("\n\n")
        filler = self.filler(max(0, n_letters - len(prompt.text)))
        return Prompt(f"long-{prompt.prompt_id}", f"{head}\n\n{filler}\n\n{question}")

    def filler(self, n_letters: int) -> str:
        """Sentences that no other text has, to fill about `n_letters`."""
        sentences: list[str] = []
        length = 0
        while length < n_letters:
            parts = [self.rng.choice(self.book.filler[part]) for part in _FILLER_PARTS]
            sentence = " ".join(parts).format(n=self.rng.randrange(2, 9000))
            sentences.append(sentence.replace("  ", " "))
            length += len(sentences[-1]) + 1
        return " ".join(sentences)

    def _variant(self, kind: str, n_variants: int) -> int:
        if kind not in self._left:
            seen = self._seen(kind)
            self._left[kind] = [n for n in range(n_variants) if n not in seen]
            self.rng.shuffle(self._left[kind])
        if not self._left[kind]:
            self.repeated_kinds.add(kind)
            self._left[kind] = self.rng.sample(range(n_variants), n_variants)
        return self._left[kind].pop()

    def _seen(self, kind: str) -> set[int]:
        head = f"{kind}-"
        names = (name.removeprefix("long-").rpartition("#")[0] for name in self.used)
        numbers = (name[len(head) :] for name in names if name.startswith(head))
        return {int(number) for number in numbers if number.isdigit()}

    def _nonce(self) -> str:
        while True:
            nonce = f"{self.rng.getrandbits(4 * _NONCE_LETTERS):0{_NONCE_LETTERS}x}"
            if nonce not in self._nonces:
                self._nonces.add(nonce)
                return nonce


# What is asked of a server, in which order, and what is held against the answer.


class Suite(StrEnum):
    """What a bench looks at."""

    MTP = "mtp"
    LENGTHS = "lengths"
    CACHE = "cache"
    DEEP = "deep"
    QUALITY = "quality"
    WORKLOAD = "workload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request before its text is chosen.

    Attributes:
        suite: The suite.
        case: Under which name its figures are gathered.
        kind: Kind of text.
        n_predict: Tokens to generate; exactly so many where `is_fixed_length`.
        depth_tokens: About how long the prompt is [tok]; None for that of its kind.
        is_warm: Whether it may find again what the server still holds; a cold one must find nothing.
        shares: Name of a text that several requests of a step begin with, so that a later one may find
            it cached; None where the text is its own.
        shared_ratio: Share of the prompt that is that common text; 1 is the identical prompt.
        has_question: False where the prompt is nothing but the text that it shares.
        is_fixed_length: Whether generation goes on whatever the model says.
        streams: How many such requests run at once.
        is_chat: Whether it is asked as a conversation, with the model's template.
        has_tools: Whether tools are offered with it.
        has_own_sampling: Whether the server chooses tokens by its own settings instead of at temperature 0.
        is_framed: Whether a text route gets it as a conversation would: within the model's template.
        seed: Of the sampler.
        tells_steps: Whether every event is to tell the timings so far, for single verification steps.
        is_measured: False for requests that only prepare others.
        details: What else is to be kept with the sample.
    """

    suite: Suite
    case: str
    kind: str
    n_predict: int
    depth_tokens: int | None = None
    is_warm: bool = False
    shares: str | None = None
    shared_ratio: float = 1.0
    has_question: bool = True
    is_fixed_length: bool = True
    streams: int = 1
    is_chat: bool = False
    has_tools: bool = False
    has_own_sampling: bool = False
    is_framed: bool = False
    seed: int = 42
    tells_steps: bool = False
    is_measured: bool = True
    details: Mapping[str, Any] | None = None

    @property
    def least_tokens(self) -> int:
        """With fewer an answer of free length says too little of the pace of a longer one."""
        return min(self.n_predict, FEW_TOKENS) if self.is_framed else 0

    @property
    def held(self) -> Request:
        """The same, generated to its length whatever the model says, where its pace is what is asked for."""
        return replace(self, is_fixed_length=True) if self.is_framed else self


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that belong together: one after another, or all at once."""

    requests: tuple[Request, ...]

    @property
    def weight(self) -> float:
        """How long it takes, in arbitrary units: a prompt token counts a twentieth of a generated one."""
        return sum(one.n_predict + (one.depth_tokens or 0) / 20 for one in self.requests)


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps of one suite in the order in which they are taken.

    `seed` gives the same order and the same texts again, on a server that has not seen them.
    """

    suite: Suite
    seed: int
    steps: tuple[Step, ...]

    @property
    def requests(self) -> Iterator[Request]:
        """Every request after the warm-up."""
        return (request for step in self.steps for request in step.requests)


WARM_UP_TOKENS = 32
THOUGHT_TOKENS = 2048


def warm_up(suite: Suite, kind: str) -> Request:
    """What a fresh server answers first: it pays for lazy initialisation, and is discarded."""
    return Request(suite=suite, case="warm-up", kind=kind, n_predict=WARM_UP_TOKENS)


# From what is wanted to what is sent: the text of each request, and the body of its HTTP call.

TEMPERATURE = 0.0
_SEEDS = 1 << 31
FEW_TOKENS = 32
# Before a server has said how it cuts text: what common vocabularies do to English prose.
USUAL_LETTERS_PER_TOKEN = 4.0


class Route(StrEnum):
    """By which route a server is asked.

    NATIVE is llama-server's own, TEXT the OpenAI one without a chat template, which some builds need
    to count their drafts, CHAT what every OpenAI-compatible server has.
    """

    NATIVE = "/completion"
    TEXT = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass
class Composer:
    """Chooses the texts of requests; texts that several share are remembered."""

    stock: PromptStock
    letters_per_token: float = USUAL_LETTERS_PER_TOKEN
    _shared: dict[str, _Shared] = field(default_factory=dict)

    def compose(self, request: Request) -> Prompt:
        """The text of a request, about as long as it asks for."""
        letters = round((request.depth_tokens or 0) * self.letters_per_token)
        if request.shares is None:
            if request.depth_tokens is None:
                return self.stock.take(request.kind)
            return self.stock.take_long(request.kind, letters)
        shared = self._shared_text(request)
        # In tokens first, so that the same prefix is cut at the same letter whatever comes behind it.
        n_shared = round((request.depth_tokens or 0) * request.shared_ratio)
        body = shared.first(round(n_shared * self.letters_per_token), self.stock)
        begin = f"{shared.head}\n\n{body}"
        if not request.has_question:
            return Prompt(f"{shared.name}-{letters}", begin)
        if request.shared_ratio == 1:
            return Prompt(f"{shared.name}-{letters}", f"{begin}\n\n{shared.question}")
        own = self.stock.take(request.kind)
        question = own.text.partition("\n\n")[2]
        left = letters - len(shared.head) - len(body) - len(question)
        text = f"{begin}\n\n{self.stock.filler(max(0, left))}\n\n{question}"
        # A question that is longer than its part of a short prompt leaves less to share than was asked for.
        return Prompt(f"tail-{own.prompt_id}", text, len(begin) / len(text))

    def compose_again(self, request: Request, attempt: str) -> Prompt:
        """Another text for a request that is measured again, what it shares included."""
        if request.shares is None:
            return self.compose(request)
        return self.compose(replace(request, shares=f"{request.shares} {attempt}"))

    def _shared_text(self, request: Request) -> _Shared:
        name = request.shares or ""
        if name not in self._shared:
            first = self.stock.take(request.kind)
            head, _, question = first.text.partition("\n\n")
            self._shared[name] = _Shared(f"shared-{first.prompt_id}", head, question)
        return self._shared[name]


@dataclass
class _Shared:
    """A text that grows: what it gives for a smaller length begins what it gives for a larger."""

    name: str
    head: str
    question: str
    _text: str = ""

    def first(self, n_letters: int, stock: PromptStock) -> str:
        if len(self._text) < n_letters:
            more = stock.filler(n_letters - len(self._text))
            self._text = f"{self._text} {more}" if self._text else more
        return self._text[:n_letters].rstrip()


@dataclass(frozen=True, slots=True)
class Frame:
    """What a server's template puts before and after what a user says; thinking that it begins included."""

    head: str
    tail: str


def body_of(
    request: Request,
    prompt: Prompt,
    route: Route,
    *,
    model: str | None = None,
    frame: Frame | None = None,
    overrides: Mapping[str, Any] | None = None,
    is_llama: bool = True,
) -> dict[str, Any]:
    """The JSON of the call; always streamed, so that the time to the first token is seen.

    Args:
        request: What is asked.
        prompt: Its text.
        route: How the server is asked.
        model: The name to ask for on OpenAI routes; None where the server has only one.
        frame: What the server's template adds; None where it is not known.
        overrides: Settings of speculation for this request alone, where they were proved.
        is_llama: False for servers that would refuse llama.cpp's own keys.
    """
    body: dict[str, Any] = {"stream": True, "seed": request.seed}
    body |= {} if request.has_own_sampling else {"temperature": TEMPERATURE}
    text = prompt.text
    if request.is_framed and frame is not None:  # what has no question may go on otherwise
        text = f"{frame.head}{text}{frame.tail if request.has_question else ''}"
    if route is Route.NATIVE:
        body |= {"prompt": text, "n_predict": request.n_predict}
    elif route is Route.TEXT:
        body |= {"prompt": text, "max_tokens": request.n_predict}
    else:
        message = {"role": "user", "content": prompt.text}
        body |= {"messages": [message], "max_tokens": request.n_predict}
    if route is not Route.NATIVE:
        body["stream_options"] = {"include_usage": True}
        body |= {} if model is None else {"model": model}
    if is_llama:
        body["cache_prompt"] = request.is_warm
        body |= {"ignore_eos": True} if request.is_fixed_length else {}
        body |= {"timings_per_token": True} if request.tells_steps else {}
    if request.has_tools:
        body |= {"tools": list(TOOL_KINDS), "tool_choice": "auto"}
    return body | dict(overrides or {})


def _tool(name: str, about: str, /, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


TOOL_KINDS: tuple[dict[str, Any], ...] = (
    _tool("get_weather", "Weather of a place on a day.", place="string", day="string"),
    _tool("set_timer", "Start a timer.", minutes="integer", name="string"),
    _tool("find_files", "Files by name.", pattern="string", folder="string", limit="integer"),
    _tool("book_table", "Reserve in a restaurant.", people="integer", time="string"),
    _tool("send_message", "Send a text to a person.", to="string", text="string"),
    _tool("convert", "Convert a quantity.", value="number", unit="string", into="string"),
)


# The suites: which requests each one sends, how often, and in which order.

MTP_TOKENS = 192
LENGTHS = (100, 500, 1000, 2000)
LENGTHS_DEPTH = 43_000
COLD = "cold"
IDENTICAL = "warm, identical"
CHANGED_TAIL = "warm, changed tail"
TOOLS = "tool calls"
SHORT = "short answers"
PROSE = "prose"
_CACHE_DEPTH = 4096
_CACHE_TOKENS = 16
_SHARED_RATIO = 0.95
_DEEP_STEPS = 8
_DEEP_TOKENS = 64
_ESTIMATE_ERROR = 0.02
_SHORT_TOKENS = 32
_TOOL_TOKENS = 256
_PROSE_TOKENS = 512
# Room for a chat template, the reference number and tokens that an estimate of letters missed.
_SPARE_TOKENS = 256
_REPEATS = 3
_MARGIN_TOKENS = 128
_SHORT = "code_python"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What was asked for on the command line; None is the usual.

    `repeats` is how often each case is measured, `depth` the tokens of long prompts, `seed` that of
    order and texts. `with_own_sampling` asks each question of `quality` as often again by the server's own
    sampling, the seed alone fixed.
    """

    suite: Suite = Suite.MTP
    repeats: int | None = None
    depth: int | None = None
    seed: int | None = None
    workload: str | None = None
    is_against_published: bool = False
    with_own_sampling: bool = False

    @property
    def n_blocks(self) -> int:
        """How often each case is measured."""
        return self.repeats or _REPEATS


@dataclass(frozen=True, slots=True)
class Room:
    """What a server can be asked, as far as it is known.

    Attributes:
        book: The questions.
        n_ctx: Context of one request [tok]; None where unknown: then everything fits.
        most_tokens: The longest answer that it gives; None for no limit.
        letters_per_token: What its vocabulary does; None for a common one.
    """

    book: PromptBook
    n_ctx: int | None = None
    most_tokens: int | None = None
    letters_per_token: float | None = None

    def prompt_tokens(self, request: Request) -> int:
        """The least that a prompt has [tok]: its depth, or the question alone where that is longer."""
        depth = request.depth_tokens or 0
        if not request.has_question:
            return depth
        form = self.book.form(request.kind)
        if self.letters_per_token is None:
            return max(depth, form.least_tokens)
        return max(depth, int(len(form.variant(0)) / self.letters_per_token))

    def needed(self, step: Step) -> int:
        """The context that the longest request of a step takes, answer included [tok]."""
        return max(self.prompt_tokens(one) + one.n_predict for one in step.requests)

    def holds(self, step: Step) -> bool:
        """Whether it fits."""
        return self.n_ctx is None or self.needed(step) <= self.n_ctx


def suite_plan(
    asked: BenchRequest, seed: int, shape: WorkloadShape | None, room: Room
) -> tuple[Plan, tuple[Message, ...]]:
    """The plan of a suite for a server, without what its context cannot hold.

    Block by block in random order, so that drift hits every case alike.

    Args:
        asked: The suite.
        seed: Of order and texts.
        shape: The workload, for that suite.
        room: What the server can be asked.

    Raises:
        BenchError: this server cannot have the suite.
    """
    told: list[Message] = []
    rng = random.Random(f"order {seed}")  # noqa: S311 -- an order that can be had again
    steps: list[Step] = []
    for block in _blocks(asked, shape, room, told):
        mixed = list(block)
        rng.shuffle(mixed)
        steps += mixed
    if asked.suite is Suite.LENGTHS and not all(map(room.holds, steps)):
        # A vocabulary of short tokens can make the long question longer than a whole small context.
        steps = [Step((replace(step.requests[0], kind=_SHORT),)) for step in steps]
        told.append(note("short-question", f"a context of {room.n_ctx} has no room for the long "
                         "review, so a shorter question is asked"))  # fmt: skip
    kept = tuple(step for step in steps if room.holds(step))
    if not kept:
        raise BenchError(
            f"a context of {room.n_ctx} tokens has no room for suite `{asked.suite}`",
            cause=f"its shortest request needs about {min(map(room.needed, steps))}, answer included",
            hint="give the server a larger context, or use another suite",
        )
    lost = dict.fromkeys(step.requests[-1].case for step in steps if step not in kept)
    plan = Plan(asked.suite, seed, kept)
    real = max(map(room.prompt_tokens, plan.requests))
    if asked.suite is Suite.LENGTHS:
        asked_for = {one.n_predict for one in plan.requests}
        missing = ", ".join(str(n) for n in LENGTHS if n not in asked_for)
        without = f"; no room for answers of {missing} tokens" if missing else ""
        told.append(note("depth", f"prompts of about {real} tokens{without}"))
    elif lost:
        told.append(note("no-room", f"a context of {room.n_ctx} has no room for {', '.join(lost)}"))
    if asked.depth is not None and real > asked.depth:
        text = f"the question alone has {real} tokens: prompts are that long, not {asked.depth}"
        told.append(note("question-longer", text))
    return plan, tuple(told)


def _blocks(
    asked: BenchRequest, shape: WorkloadShape | None, room: Room, told: list[Message]
) -> list[list[Step]]:
    """The steps of a suite; what must be said of them is added to `told`."""
    if asked.suite is Suite.MTP:  # as the community's mtp-bench asks
        return [[_one(Suite.MTP, kind, kind, MTP_TOKENS) for kind in MTP_KINDS]] * asked.n_blocks
    if asked.suite is Suite.LENGTHS:
        return _lengths(asked, room)
    if asked.suite is Suite.CACHE:
        return _cache(asked, room)
    if asked.suite is Suite.DEEP:
        return _deep(room)
    if asked.suite is Suite.QUALITY:
        return _quality(asked)
    return _workload(asked, shape, room, told)


def _one(suite: Suite, case: str, kind: str, n_predict: int, **more: Any) -> Step:
    """A step of one request."""
    return Step((Request(suite=suite, case=case, kind=kind, n_predict=n_predict, **more),))


def _lengths(asked: BenchRequest, room: Room) -> list[list[Step]]:
    """Answers of several lengths after a long cold prompt: 43,000 tokens, or what the context leaves."""
    n_ctx, most, least = room.n_ctx, room.most_tokens, (asked.depth or 0) + _SPARE_TOKENS
    roomy = [n for n in LENGTHS if n_ctx is None or n + least <= n_ctx]
    lengths = [n for n in roomy if most is None or n <= most]
    if not lengths:
        limit = "" if most is None else f" and answers of at most {most}"
        raise BenchError(
            f"a context of {n_ctx} tokens{limit} has no room for suite `lengths`",
            cause=f"it needs prompts of {least} tokens and answers of {LENGTHS[0]} and more",
            hint="use a smaller --depth",
        )
    left = LENGTHS_DEPTH if n_ctx is None else _roomy(n_ctx - lengths[-1] - _SPARE_TOKENS)
    depth = asked.depth if asked.depth is not None else max(1, min(LENGTHS_DEPTH, left))
    kind = "long_code_review"
    block = [_one(Suite.LENGTHS, str(n), kind, n, depth_tokens=depth) for n in lengths]
    return [block] * asked.n_blocks


def _roomy(n_tokens: int) -> int:
    """So many tokens that they fit although their number is an estimate from letters."""
    return int(n_tokens * (1 - _ESTIMATE_ERROR))


def _cache(asked: BenchRequest, room: Room) -> list[list[Step]]:
    """A cold prompt, the same again, and the same with another end."""
    most = _CACHE_DEPTH if room.n_ctx is None else room.n_ctx // 2
    cold = Request(
        suite=Suite.CACHE, case=COLD, kind="code_python", n_predict=_CACHE_TOKENS,
        depth_tokens=asked.depth or min(_CACHE_DEPTH, most),
    )  # fmt: skip
    warm = replace(cold, case=IDENTICAL, is_warm=True)
    each = (cold, warm, replace(warm, case=CHANGED_TAIL, shared_ratio=_SHARED_RATIO))
    return [[Step(tuple(replace(one, shares=f"cache {number}") for one in each))
             for number in range(asked.n_blocks)]]  # fmt: skip


def _deep(room: Room) -> list[list[Step]]:
    """One conversation that grows until the context is full, in the order of its depths."""
    if room.n_ctx is None:
        raise BenchError(
            "the size of the context is not known",
            cause="the server does not report it",
            hint="this suite needs a llama-server",
        )
    most = _roomy(room.n_ctx - _DEEP_TOKENS - min(_SPARE_TOKENS, room.n_ctx // 16))
    depths = [most * number // _DEEP_STEPS for number in range(1, _DEEP_STEPS + 1)]
    return [
        [_one(Suite.DEEP, f"{depth} tokens", "code_python", _DEEP_TOKENS, depth_tokens=depth,
              is_warm=True, shares="deep", has_question=False, details={"wanted_depth": depth})]
        for depth in depths
    ]  # fmt: skip


def _quality(asked: BenchRequest) -> list[list[Step]]:
    """Tool calls, short answers and prose, of free length, at temperature 0 with one seed."""
    cases = ((TOOLS, "tool", _TOOL_TOKENS), (SHORT, "short_answer", _SHORT_TOKENS),
             (PROSE, "prose", _PROSE_TOKENS))  # fmt: skip
    block = [
        _one(Suite.QUALITY, *case, is_fixed_length=False, is_chat=True, has_tools=case[0] == TOOLS,
             has_own_sampling=is_own)
        for is_own in ((False, True) if asked.with_own_sampling else (False,))
        for case in cases
    ]  # fmt: skip
    return [block] * asked.n_blocks


def is_warm_class(one: RequestClass) -> bool:
    """Whether it finds its prefix; what one slot holds is of no use to requests beside it."""
    return one.cached_tokens > 0 and one.concurrency == 1


def class_request(one: RequestClass, name: str, *, shares: str, **told: Any) -> Request:
    """A request of a class as production gets it: in the model's template, by the server's own sampling.

    What a class generates on average is the most that is generated here; a turn is that long by
    `Sample.turn_ms`.

    Args:
        one: The class; without new tokens its prefix alone.
        name: Of its text, for a seed that is as fixed as the text is.
        shares: The name of the prefix that it finds, if it finds one.
        told: What it has otherwise.
    """
    depth, is_warm = one.cached_tokens + one.new_tokens, is_warm_class(one)
    request = Request(
        suite=Suite.WORKLOAD,
        case="",
        kind=one.kind,
        n_predict=one.n_predict,
        depth_tokens=depth,
        is_warm=is_warm,
        shares=shares if is_warm else None,
        shared_ratio=one.cached_tokens / depth if depth else 1.0,
        streams=one.concurrency,
        has_question=one.new_tokens > 0,
        is_framed=True,
        has_own_sampling=True,
        is_fixed_length=False,
        seed=random.Random(name).randrange(_SEEDS),  # noqa: S311 -- no secret
    )
    return replace(request, **told)


def _workload(
    asked: BenchRequest, shape: WorkloadShape | None, room: Room, told: list[Message]
) -> list[list[Step]]:
    """Each class of a mix, cut to the context: first what the server would still hold, then the turn itself."""
    if shape is None:
        raise BenchError("no workload was given")
    mix, n_ctx = shape.plain(), room.n_ctx
    if n_ctx is not None:
        mix, cut = fitted(mix, n_ctx, margin_tokens=_MARGIN_TOKENS)
        told += [note("cut", f"class `{shape.classes[at].name}` was cut to the context of {n_ctx}")
                 for at in cut]  # fmt: skip
    both = list(zip(shape.classes, mix.classes, strict=True))
    return [
        [_turn(number, shown.name, one, turn) for number, (shown, one) in enumerate(both)]
        for turn in range(asked.n_blocks)
    ]


def _turn(number: int, name: str, one: RequestClass, turn: int) -> Step:
    measured = class_request(
        one,
        f"{number} {turn}",
        shares=f"turn {number} {turn}",
        case=name,
        kind=KINDS[(number + turn) % len(KINDS)] if one.kind == MIXED else one.kind,
        details={"class": number},
    )
    if not is_warm_class(one):
        return Step((measured,) * one.concurrency)
    before = replace(
        measured,
        case=f"{name}, turn before",
        n_predict=1,
        depth_tokens=one.cached_tokens,
        shared_ratio=1.0,
        has_question=False,
        is_fixed_length=True,
        is_measured=False,
        details=None,
    )
    return Step((before, measured))
