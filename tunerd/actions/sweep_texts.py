"""The texts of a sweep: the same name gives the same text, whatever was asked before it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tunerd.core.bench.composing import TOOLS, USUAL_LETTERS_PER_TOKEN, Composer
from tunerd.core.bench.prompts import Prompt, PromptBook, PromptStock
from tunerd.core.bench.reading import Answer
from tunerd.core.bench.request import Prefix, Request, Suite
from tunerd.core.sweep import Request as Wanted
from tunerd.core.workload_shape import MIXED

_WARM_UP_TOKENS = 32
# A call with its arguments does not fit into fewer.
_TOOL_TOKENS = 256
_SHARED = "prefix"
_ANY_KIND = ("code", "chat", "summary", "math", "creative")


@dataclass
class SweepTexts:
    """Makes requests of a bench from those of the search.

    The shared prefix is one text for the whole sweep: every process reads it anew.
    """

    book: PromptBook
    seed: int
    letters_per_token: float | None = None
    _composer: Composer | None = field(default=None, repr=False)

    def learn(self, measure: Callable[[str], float], n_letters: int) -> None:
        """Ask one server how many letters a token has; the first that was asked holds for all."""
        if self.letters_per_token is None:
            self.letters_per_token = measure(self._stock("letters").filler(n_letters))

    def warm_up(self, kind: str, name: str) -> tuple[Request, Prompt]:
        """A first request, which counts for nothing."""
        request = Request(
            suite=Suite.WORKLOAD, case="warm-up", kind=kind, n_predict=_WARM_UP_TOKENS,
            is_measured=False,
        )  # fmt: skip
        return request, self._stock(f"warm-up {name}").take(kind)

    def compose(
        self, wanted: Wanted, attempt: int
    ) -> tuple[tuple[Request, ...], tuple[Prompt, ...]]:
        """The requests, as many as run at once, each with a text of its own."""
        name = wanted.prompt_id if not attempt else f"{wanted.prompt_id} again {attempt}"
        is_call = wanted.kind == "tool" and not wanted.ignore_eos
        kind = random.Random(name).choice(_ANY_KIND) if wanted.kind == MIXED else wanted.kind  # noqa: S311 -- no secret
        depth = wanted.cached_tokens + wanted.new_tokens
        is_warm = wanted.cached_tokens > 0 and wanted.concurrency == 1
        request = Request(
            suite=Suite.WORKLOAD,
            case="tool call" if is_call else wanted.kind,
            kind=kind,
            n_predict=max(wanted.n_predict, _TOOL_TOKENS) if is_call else wanted.n_predict,
            depth_tokens=depth,
            prefix=Prefix.WARM if is_warm else Prefix.COLD,
            shares=_SHARED if is_warm else None,
            shared_ratio=wanted.cached_tokens / depth if depth else 1.0,
            is_fixed_length=wanted.ignore_eos,
            streams=wanted.concurrency,
            is_chat=is_call,
            has_tools=is_call,
            details={"prompt": wanted.prompt_id, "attempt": attempt},
        )
        composer = self._prepared(wanted.cached_tokens if is_warm else 0)
        composer.stock = self._stock(name)
        requests = (request,) * wanted.concurrency
        return requests, tuple(composer.compose(one) for one in requests)

    def _prepared(self, cached_tokens: int) -> Composer:
        """The composer, its shared text long enough to be cut from and grown from its own words."""
        if self._composer is None:
            letters = self.letters_per_token or USUAL_LETTERS_PER_TOKEN
            self._composer = Composer(self._stock(_SHARED), letters)
        if cached_tokens:
            self._composer.stock = self._stock(f"{_SHARED} {cached_tokens}")
            self._composer.compose(
                Request(
                    suite=Suite.WORKLOAD,
                    case="prefix",
                    kind="code",
                    n_predict=1,
                    depth_tokens=cached_tokens,
                    prefix=Prefix.WARM,
                    shares=_SHARED,
                    has_question=False,
                    is_measured=False,
                )
            )
        return self._composer

    def _stock(self, name: str) -> PromptStock:
        return PromptStock(self.book, random.Random(f"{self.seed} {name}"))  # noqa: S311 -- no secret


_KNOWN = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in TOOLS}


def tool_call_is_whole(answer: Answer | None) -> bool | None:
    """Whether the calls of an answer name a known tool with arguments it has; None without a call."""
    if answer is None or not answer.tool_calls:
        return None
    for call in answer.tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            return False
        known = _KNOWN.get(call.name)
        if known is None or not isinstance(arguments, dict) or not set(arguments) <= set(known):
            return False
    return True
