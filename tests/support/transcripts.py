"""Golden texts: what is made of made-up inputs, compared whole with a file that `make golden` rewrites."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.folders import DATA
from tunerd.errors import TunerdError
from tunerd.result import Message
from tunerd.watch.guards import Decision


def compare(path: Path, text: str) -> None:
    """A text is what its file says, byte for byte, but for what UTF-8 cannot hold."""
    found = text.encode("utf-8", "backslashreplace")
    if os.environ.get("TUNERD_TEST_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found)
    assert found.decode() == path.read_bytes().decode()


def transcript(name: str, cases: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Sentences, and under each the lines that came of its input; the text is compared with golden/NAME.txt.

    Control characters are shown, so that no line can look like two or like a sentence.
    """
    parts: dict[str, str] = {}
    for heading, lines in cases:
        assert heading not in parts, "two inputs have one heading"
        shown = [
            "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
            for text in lines
            for line in text.split("\n")
        ]
        indented = [f"    {line}" if line else "" for line in shown or ["(nothing)"]]
        parts[heading] = "\n".join([f"{heading}:", *indented])
    text = "\n\n".join(parts.values()) + "\n"
    compare(DATA / "golden" / f"{name}.txt", text)
    return text


def inputs_of(name: str) -> Iterator[tuple[str, list[str]]]:
    """The sentences of a transcript that holds its own inputs, and the lines that are put in under each.

    What came of a line stands four blanks further in. Whoever adds an input writes it there, for `make golden`.
    """
    text = (DATA / "golden" / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n")
    for heading, *lines in (block.split("\n") for block in text.split("\n\n")):
        inputs = [line[4:] for line in lines if not line.startswith(" " * 8)]
        yield (
            heading.removesuffix(":"),
            [line.replace(r"\n", "\n").replace(r"\t", "\t") for line in inputs],
        )


def answered(name: str, answer: Callable[[str], Iterable[str]]) -> None:
    """A transcript that holds its own inputs, in which each line has under it what comes of it."""
    transcript(name, [
        (heading, [text for line in lines for text in (line, *(f"    {one}" for one in answer(line) if one))])
        for heading, lines in inputs_of(name)
    ])  # fmt: skip


def messages_lines(messages: Iterable[Message]) -> list[str]:
    """Messages with all that is in them."""
    return [f"{one.level} {one.code}: {one.text}{_hinted(one.hint)}" for one in messages]


def decisions_lines(decisions: Iterable[Decision | None]) -> list[str]:
    """What guards decided, and all that they tell of it."""
    return [
        f"{one.level} {one.kind} ({one.act}): {one.text}\n  {one.evidence}{_hinted(one.hint)}"
        for one in decisions
        if one is not None
    ]


def _hinted(hint: str | None) -> str:
    return "" if hint is None else f"\n  hint: {hint}"


def refusal(act: Callable[..., object], *args: object, **options: object) -> list[str]:
    """All that is said where this call is refused."""
    with pytest.raises(TunerdError) as caught:
        act(*args, **options)
    error = caught.value
    beside = {"cause": error.cause, "state": error.state, "hint": error.hint}
    told = [f"{name}: {text}" for name, text in beside.items() if text is not None]
    return [f"{error.code}: {error.message}", *told]
