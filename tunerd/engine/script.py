"""What a shell's script does with the words that it is started with, as far as its text shows.

Only a script that is seen to hand all of them on can be asked for the help of its server: any other would
start that once more. So in doubt it hands none on.
"""

from __future__ import annotations

import re

_ALL = rb"\$\{?(?:[@*]|argv\b(?!\[\d))"  # argv: csh, zsh and fish
# What may name the words and hands none of them on; each is left out before the next is looked for.
_NO_WORDS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        rb"\\\n",
        rb"(?:^|(?<=[ \t;]))#[^\n]*",
        rb"'[^'\n]*'",  # another program's, such as awk's
        rb"\$\{?(?:0|BASH_SOURCE(?:\[0\])?)\}?\"?(?:\)\"?)?[ \t]+\"?"
        + _ALL,  # to itself, with a lock or as somebody else
    )
)
# A function, whose words are its own: in one line, or to the line that ends it.
_FUNCTION = re.compile(
    rb"^([ \t]*)(?:function[ \t]+([\w:.-]+)|([\w:.-]+)[ \t]*\(\))"
    rb"([^\n]*(?:[})]|;[ \t]*end)[ \t]*$|.*?(?:^\1(?:[})]|end\b)|\Z))",
    re.MULTILINE | re.DOTALL,
)
_ASIDES = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        rb"\bcase[ \t][^\n]{1,99}?[ \t]in\b",
        rb"\bfor[ \t]+\w+[ \t]+in[ \t][^\n;]*",
        # What is said, or compared.
        (
            rb"(?:^|[;&|(){}!]|\b(?:if|elif|then|else|do|while|until|not)\b)[ \t]*"
            rb"(?:echo|printf|print|log\w*|test|\[\[?)[ \t][^\n;&|]*"
        ),
    )
)
_REPLACED = re.compile(rb"\bset[ \t]+(?:--|argv\b)(?![^\n;&|]*" + _ALL + rb")")
_HANDED_ON = re.compile(_ALL)
# Words that are taken one by one, and put behind others.
_LOOPS = re.compile(rb"\bfor[ \t]+(\w+)[ \t]*(?:[;\n]|do\b|in[ \t]+\"?" + _ALL + rb")")
_ADDED = re.compile(
    rb"(?:\+=[(\" \t]*|=\(?\"?\$\{?\w+(?:\[@\])?\}?\"?[ \t]+\"?)\$\{?(\w+)\}?(?![\w#%:])"
)
# More than a server's script has; each is looked for in all others.
_MOST_FUNCTIONS = 99
_CALL = (
    rb"(?<![\w$./:-])%b(?![\w./=:-])"
    rb"(?:\$\((?:[^()\n]|\([^()\n]*\))*\)|`[^`\n]*`|[^\n;&|()`])*"  # in the $() that it stands in
)


def hands_words_on(script: bytes) -> bool:
    """Whether the server that a script of any shell starts (sh(1), csh(1), fish(1)) gets all its words."""
    for aside in _NO_WORDS:
        script = aside.sub(b" ", script)
    texts = [(b"", script)]  # without a name, then its functions, those within functions too
    for at, (own, text) in enumerate(texts):
        texts += [(name or named, body) for _, name, named, body in _FUNCTION.findall(text)]
        texts[at] = own, _FUNCTION.sub(b" ", text)
        if len(texts) > _MOST_FUNCTIONS:
            return False
    while useless := next((one for one in texts[1:] if not _hands_on(one[1])), None):
        texts.remove(useless)  # so far alone go the words of a call
        call = re.compile(_CALL % re.escape(useless[0]))
        texts = [(name, call.sub(b" ", text)) for name, text in texts]
    return _hands_on(texts[0][1])


def _hands_on(text: bytes) -> bool:
    loops = {b"1", *_LOOPS.findall(text)}
    for aside in _ASIDES:
        text = aside.sub(b" ", text)
    if _REPLACED.search(text):
        return False
    return _HANDED_ON.search(text) is not None or not loops.isdisjoint(_ADDED.findall(text))
