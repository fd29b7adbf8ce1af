"""From what is wanted to what is sent: the text of each request, and the body of its HTTP call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tunerd.core.bench.prompts import Prompt, PromptStock
from tunerd.core.bench.request import Prefix, Request

TEMPERATURE = 0.0
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
        body = shared.first(round(letters * request.shared_ratio), self.stock)
        if not request.has_question:
            return Prompt(f"{shared.name}-{letters}", request.kind, f"{shared.head}\n\n{body}")
        if request.shared_ratio == 1:
            text = f"{shared.head}\n\n{body}\n\n{shared.question}"
            return Prompt(f"{shared.name}-{letters}", request.kind, text)
        return self._with_own_tail(request, shared, body, letters)

    def compose_step(self, requests: Sequence[Request]) -> tuple[Prompt, ...]:
        """The texts of one step."""
        return tuple(self.compose(request) for request in requests)

    def compose_again(self, request: Request, attempt: str) -> Prompt:
        """Another text for a request that is measured again, what it shares included."""
        if request.shares is None:
            return self.compose(request)
        return self.compose(replace(request, shares=f"{request.shares} {attempt}"))

    def _with_own_tail(self, request: Request, shared: _Shared, body: str, letters: int) -> Prompt:
        own = self.stock.take(request.kind)
        question = own.text.partition("\n\n")[2]
        left = letters - len(shared.head) - len(body) - len(question)
        tail = self.stock.filler(max(0, left))
        text = f"{shared.head}\n\n{body}\n\n{tail}\n\n{question}"
        return Prompt(f"tail-{own.prompt_id}", request.kind, text)

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


def body_of(
    request: Request,
    prompt: Prompt,
    route: Route,
    *,
    model: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    is_llama: bool = True,
) -> dict[str, Any]:
    """The JSON of the call; always streamed, so that the time to the first token is seen.

    Args:
        request: What is asked.
        prompt: Its text.
        route: How the server is asked.
        model: The name to ask for on OpenAI routes; None where the server has only one.
        overrides: Settings of speculation for this request alone, where they were proved.
        is_llama: False for servers that would refuse llama.cpp's own keys.
    """
    body: dict[str, Any] = {"stream": True, "seed": request.seed}
    body |= {} if request.has_own_sampling else {"temperature": TEMPERATURE}
    if route is Route.NATIVE:
        body |= {"prompt": prompt.text, "n_predict": request.n_predict}
    elif route is Route.TEXT:
        body |= {"prompt": prompt.text, "max_tokens": request.n_predict}
    else:
        message = {"role": "user", "content": prompt.text}
        body |= {"messages": [message], "max_tokens": request.n_predict}
    if route is not Route.NATIVE:
        body["stream_options"] = {"include_usage": True}
        body |= {} if model is None else {"model": model}
    if is_llama:
        body["cache_prompt"] = request.prefix is Prefix.WARM
        body |= {"ignore_eos": True} if request.is_fixed_length else {}
    if request.has_tools:
        body |= {"tools": list(TOOLS), "tool_choice": "auto"}
    return body | dict(overrides or {})


def _tool(name: str, about: str, /, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


TOOLS: tuple[dict[str, Any], ...] = (
    _tool("get_weather", "Weather of a place on a day.", place="string", day="string"),
    _tool("set_timer", "Start a timer.", minutes="integer", name="string"),
    _tool("find_files", "Files by name.", pattern="string", folder="string", limit="integer"),
    _tool("book_table", "Reserve in a restaurant.", people="integer", time="string"),
    _tool("send_message", "Send a text to a person.", to="string", text="string"),
    _tool("convert", "Convert a quantity.", value="number", unit="string", into="string"),
)
