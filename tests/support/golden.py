"""The golden command lines: what each shipped profile is on each dialect, as words or as a refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.support.builders import HELP_OF
from tests.support.folders import DATA

FOLDER = DATA / "golden/cmdline"
NO_MODEL = "/nonexistent/none.gguf"

_NO_MTP = dict.fromkeys(
    ("cpu-embedded", "rtx-3090-ti-24gb", "rtx-4070-super-12gb", "rtx-5060-ti-16gb"),
    "speculation.type = mtp",
)
_NO_DFLASH = {"rtx-3090-ti-24gb-dflash": "speculation.type = dflash"}

# Which profiles a dialect cannot serve, and the setting that it lacks something for.
REFUSED: Mapping[str, Mapping[str, str]] = {
    **{dialect: {} for dialect in HELP_OF},
    "main-old": {**_NO_MTP, **_NO_DFLASH},
    "main-pr": _NO_DFLASH,
    "main-mid": _NO_DFLASH,
    "bee-01": _NO_MTP,
    "bee-04": {"rtx-3090-ti-24gb-dflash": "speculation.cross_ctx = 1024"},
}


def golden_lines(dialect: str) -> dict[str, list[str]]:
    """The words of every profile that this dialect can serve, without the program.

    Raises:
        AssertionError: another profile is refused than `REFUSED` says, or for another reason.
    """
    lines: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    for path in sorted((FOLDER / dialect).glob("*.txt")):
        rows = path.read_text().splitlines()
        if rows[0].startswith("REFUSED "):
            refused[path.stem] = rows[0].removeprefix("REFUSED ").partition(" (from ")[0]
            continue
        flags = [row for row in rows if not row.startswith("# ")]
        lines[path.stem] = [word for row in flags for word in row.split(" ", 1)]
    assert refused == REFUSED[dialect]
    return lines


def dry(words: Sequence[str], port: int) -> list[str]:
    """The same line for a dry run: a model that is nowhere, and a port of its own."""
    line = [NO_MODEL if word.startswith("/models/") else word for word in words]
    line[line.index("--port") + 1] = str(port)
    return line
