"""Arguments, command lines and environment files that try to be misread; the same for one seed."""

from __future__ import annotations

import random

NASTY = (
    "", " ", "a b", "\t", "\n", "\r\n", "a\nExecStartPost=/bin/touch /pwned", "\\", "\\\\", "a\\", "\\n",
    "\\x41", "\\u0041", "\\d", '"', "'", '"a" "b"', "it's", '\\"', "$", "$$", "$HOME", "${HOME}",
    "x${HOME}y", "$HOME/x", "${HOME", "$}", "${}", "${A:-b}", "%", "%%", "%n", "%h/x", "100%", "%%n", "%z",
    ";", "\\;", "a;b", "#", "# no comment", "-", "--flag=value", "-@:+!x", "@", ":", "+", "!", "!!", "|",
    "~", "*", "?", "[a]", "{a,b}", "$(touch /pwned)", "`touch /pwned`", "a|b>c&d", "\x01\x02\x1b[31m\x7f",
    "\u2028\u2029\x85", "äöü€\U0001f600", "e\u0301\u202e", "=", "A=b", "[Install]", "x" * 4096,
)  # fmt: skip
_ALPHABET = "\"'\\%$ {}AB;#=-@:+!|\n\t\r\x01\x7fäé\u2028\U0001f600abfnrtvxuU0s/~*"
_RAW_ALPHABET = "\"'\\%$ {}AB;#=-@:+!ab041xuUns"


def argument_lists(n: int, seed: int) -> list[list[str]]:
    """The nasty ones one by one and together, then random ones."""
    chance = random.Random(seed)
    lists = [[text] for text in NASTY] + [list(NASTY)]
    while len(lists) < n:
        lengths = (chance.randrange(12) for _ in range(chance.randrange(1, 9)))
        lists.append(["".join(chance.choices(_ALPHABET, k=length)) for length in lengths])
    return lists


def raw_values(n: int, seed: int) -> list[str]:
    """What may stand in a hand-written `ExecStart=` behind its program, well-formed or not."""
    chance = random.Random(seed)
    texts = ("".join(chance.choices(_RAW_ALPHABET, k=chance.randrange(1, 16))) for _ in range(n))
    # A trailing backslash would swallow the next line, which is the unit's and not the value's.
    return [text.strip().rstrip("\\") or "x" for text in texts]


def environment_texts(n: int, seed: int) -> list[str]:
    """Environment files, well-formed or not."""
    chance = random.Random(seed)
    alphabet = "\"'\\\n\r #;$`=  ab"
    return [
        "".join(
            f"V{number}=" + "".join(chance.choices(alphabet, k=chance.randrange(14))) + "\n"
            for number in range(6)
        )
        for _ in range(n)
    ]
