"""What servers send, from their first byte to their last: what it comes to, and what stays unknown.

The forms are those of the servers named, read in their sources and issue threads in August and November 2026.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.bench_samples import a_request, sample
from tunerd.engine.server import Arrivals, read_events
from tunerd.measure.answer import Answer, ClientTimes, Mark, read_answer
from tunerd.measure.trust import Speculation, marks_of

N_TOKENS = 64
FIRST_MS = 100.0
TOKEN_MS = 8.0
TOK_S = 1000 / TOKEN_MS
WORDS = tuple(f" word{at % 100:02}" for at in range(N_TOKENS))
DONE = b"data: [DONE]\n\n"
Pieces = list[tuple[float, bytes]]


def data(**values: Any) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def chunk(delta: dict[str, Any], ends: str | None = None, **more: Any) -> bytes:
    return data(choices=[{"index": 0, "delta": delta, "finish_reason": ends}], **more)


def usage(n: int = N_TOKENS, **more: Any) -> bytes:
    return data(choices=[], usage={"prompt_tokens": 100, "completion_tokens": n, **more})


def by(key: str, words: Sequence[str] = WORDS) -> list[bytes]:
    return [chunk({key: word}) for word in words]


def streamed(
    pieces: Sequence[bytes] | None = None,
    *,
    first_ms: float = FIRST_MS,
    each: float = 1,
    ends: bytes = chunk({}, "length") + usage() + DONE,
) -> Pieces:
    """Each piece after as many tokens as it has, and what ends it with the last."""
    pieces = by("content") if pieces is None else pieces
    times = [first_ms + at * each * TOKEN_MS for at in range(len(pieces))]
    before = [(first_ms - 1, chunk({"role": "assistant", "content": ""}))]
    return [*before, *zip(times, pieces, strict=True), (times[-1], ends)]


def at_once(pieces: Pieces, every_ms: float = 0.0) -> Pieces:
    """By a proxy that waits for the end, and hands on what came as it came, or at once."""
    return [(pieces[-1][0] + at * every_ms, piece) for at, (_, piece) in enumerate(pieces)]


def in_blocks(pieces: Pieces, n_bytes: int) -> Iterator[tuple[float, bytes]]:
    """By a proxy that hands on whole buffers, as nginx does where nothing turns that off."""
    held = b""
    for at_ms, piece in pieces:
        held += piece
        while len(held) >= n_bytes:
            yield at_ms, held[:n_bytes]
            held = held[n_bytes:]
    yield pieces[-1][0], held


def answer_of(pieces: Pieces) -> tuple[Answer, str | None]:
    arrivals = Arrivals()
    for at_ms, piece in pieces:
        arrivals.add(at_ms, piece)
    events, problem = read_events(arrivals)
    return read_answer(events, is_whole=problem is None), problem


def tok_s(pieces: Pieces) -> float | None:
    answer, problem = answer_of(pieces)
    assert problem is None
    assert not answer.is_cut
    return sample(
        timings=None,
        client=ClientTimes(pieces[-1][0], answer.first_ms, answer.rest_ratio),
        details={"usage_completion_n": answer.n_completion},
    ).client_tok_s


def grouped(size: int) -> list[str]:
    return ["".join(WORDS[at : at + size]) for at in range(0, N_TOKENS, size)]


THOUGHTS, REST = "".join(WORDS[:48]), WORDS[48:]
TOLD: dict[str, Any] = {"completion_tokens_details": {"reasoning_tokens": 48}}

PACED: dict[str, Pieces] = {
    "vLLM, SGLang, TGI, TabbyAPI": streamed(),
    "usage in each chunk": streamed(
        [chunk({"content": word}, usage={"completion_tokens": at + 1, "prompt_tokens": 100})
         for at, word in enumerate(WORDS)]
    ),
    "Ollama and mlx_lm, thinking": streamed(by("reasoning")),
    "LM Studio and llama-server, thinking": streamed(by("reasoning_content")),
    "LiteLLM, thoughts by two names": streamed(
        [chunk({"reasoning_content": word, "reasoning": word}) for word in WORDS]
    ),
    "Ollama of 2024, no reason is an empty one": streamed([chunk({"content": w}, "") for w in WORDS]),
    "no [DONE]": streamed(ends=chunk({}, "stop") + usage()),
    "comments": streamed([b": ping\n\n" + one for one in by("content")]),
    "names of events": streamed([b"event: message\nid: 3\n" + one for one in by("content")]),
    "CRLF": [(at, piece.replace(b"\n", b"\r\n")) for at, piece in streamed()],
    "empty data": streamed([b"data:\n\n" + one for one in by("content")]),
    "four tokens a chunk": streamed(by("content", grouped(4)), each=4),
    "thoughts in one chunk": streamed(
        [chunk({"reasoning_content": THOUGHTS}), *by("content", REST)], first_ms=FIRST_MS + 47 * TOKEN_MS
    ),
    "thoughts that are shown": streamed(
        [*by("reasoning", WORDS[:48]), *by("content", REST)], ends=chunk({}, "stop") + usage(**TOLD) + DONE
    ),
    "nginx, buffers of 4 KiB": list(in_blocks(streamed(), 4096)),
    "nginx, buffers of 2 KiB": list(in_blocks(streamed(), 2048)),
}  # fmt: skip


@pytest.mark.parametrize("name", PACED)
def test_the_pace_of_a_stream_is_that_of_generation(name: str) -> None:
    # A buffer that is not full waits for the next token, and for the last one nobody waits.
    assert tok_s(PACED[name]) == pytest.approx(TOK_S, rel=0.05 if "nginx" in name else 0.02)


UNSEEN: dict[str, Pieces] = {
    "no usage (llama-cpp-python)": streamed(ends=chunk({}, "stop") + DONE),
    "usage of zeros": streamed(ends=chunk({}, "stop") + usage(0) + DONE),
    "held back to the end": at_once(streamed()),
    "held back, and handed on piece by piece": at_once(streamed(), 0.5),
    "held back, and stopped in between": [
        (at + (30.0 if number > 32 else 0.0), piece)
        for number, (at, piece) in enumerate(at_once(streamed()))
    ],
    "thoughts that are counted and not shown": streamed(
        by("content", REST), first_ms=FIRST_MS + 48 * TOKEN_MS,
        ends=chunk({}, "stop") + usage(**TOLD) + DONE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN)
def test_a_pace_that_nobody_saw_is_unknown(name: str) -> None:
    """A stream that a proxy held back came to half a million tokens a second, and won every table."""
    assert tok_s(UNSEEN[name]) is None


BROKEN: dict[str, bytes] = {
    "nothing more": b"",
    "vLLM and SGLang, aborted": chunk({}, "abort") + usage(32) + DONE,
    "vLLM and LiteLLM, an error as reason": chunk({}, "error") + usage(32) + DONE,
    "an error": data(error={"message": "CUDA out of memory", "code": 500}) + DONE,
    "an error in an event of its own": b"event: error\n" + data(message="x", code=500),
    "llama-server of 2024": b'error: {"code": 500, "message": "x"}\n\n',
    "Ollama, which makes an empty chunk of it": chunk({"role": "assistant", "content": ""}),
}


@pytest.mark.parametrize("ends", [None, ""])
@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_that_broke_off_is_none(name: str, ends: str | None) -> None:
    pieces = streamed([chunk({"content": word}, ends) for word in WORDS[:32]], ends=BROKEN[name])
    answer, problem = answer_of(pieces)

    assert answer.is_cut or problem is not None


OF_10_000: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "Ollama, beyond its context": ({"prompt_tokens": 2050}, {}, True),
    "a vocabulary of long tokens": ({"prompt_tokens": 7700}, {}, False),
    "whole": ({"prompt_tokens": 10_150}, {}, False),
    "said nothing": ({}, {}, False),
    "llama-server, found in its cache": ({"prompt_tokens": 10_150}, {"prompt_n": 50, "cache_n": 10_100}, False),
    "ik, which does not say what it found": ({}, {"prompt_n": 50}, False),
    "llama-server of 2024, which cut it": ({}, {"prompt_n": 2050, "cache_n": 0}, True),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_10_000)
def test_a_prompt_that_was_read_in_part_is_marked(name: str) -> None:
    """Ollama reads half its context of what is too long for it, without a word: it seemed to be the fastest."""
    usage, timings, is_cut = OF_10_000[name]
    event = {
        "choices": [{"text": "x", "finish_reason": "stop"}],
        "usage": usage,
        "timings": timings,
    }
    answer = read_answer([(9.0, event)], is_whole=True)
    request = a_request(n_predict=1, depth_tokens=10_000, is_warm=True)
    marks = marks_of(request, answer, ClientTimes(9.0), looks=(), quiet_mib=None, speculation=Speculation(None))  # fmt: skip

    assert (Mark.CUT_PROMPT in marks) == is_cut


def test_a_turn_whose_answer_has_an_unknown_length_is_unknown() -> None:
    """It ended when the model did, and was counted as a turn of the whole length."""
    client = ClientTimes(600.0, 100.0)

    def counted(n: int) -> float | None:
        return sample(timings=None, client=client, details={"usage_completion_n": n}).turn_ms

    assert sample(timings=None, client=client).turn_ms is None
    assert counted(101) == 600.0
    assert counted(51) == pytest.approx(600.0 + 50 / 50 * 500)
