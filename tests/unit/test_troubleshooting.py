"""docs/troubleshooting.md quotes what the program says today."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


def test_each_heading_is_something_that_the_program_says() -> None:
    texts = [
        node.value
        for path in (ROOT / "tunerd").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    quoted = re.findall(r"^### `(.+)`$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(quoted) > 15
    assert [words for words in quoted if not any(words in text for text in texts)] == []
