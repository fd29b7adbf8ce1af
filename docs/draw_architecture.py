"""Draws docs/architecture.svg from the sources: the packages from top to bottom, and who imports whom."""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tunerd"
PICTURE = ROOT / "docs" / "architecture.svg"
ROW, LEFT, CELL, TOP = 26, 590, 24, 96
LETTERS = 74

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f24 }
.name { font-weight: 600 } .quiet { fill: #57606a } .line { stroke: #d0d7de }
.dot { fill: #0969da }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .quiet { fill: #8b949e } .line { stroke: #30363d } .dot { fill: #58a6ff }
}
"""


def order() -> list[str]:
    """The packages from the bottom to the top, as the test of the architecture holds them."""
    test = ast.parse((ROOT / "tests/unit/test_architecture.py").read_text(encoding="utf-8"))
    for node in test.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ORDER":
            names: list[str] = list(ast.literal_eval(node.value))
            return [name for name in names if name != "__main__"]
    raise SystemExit("tests/unit/test_architecture.py has no ORDER")


def sources(part: str) -> list[Path]:
    """The files of a package, or the one of a module at the top."""
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]


def words(part: str) -> str:
    """What a package says that it is: the first sentence of its docstring."""
    folder = PACKAGE / part
    path = folder / "__init__.py" if folder.is_dir() else PACKAGE / f"{part}.py"
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return said.split(". ")[0].split("\n")[0].rstrip(".")


def imported(part: str) -> set[str]:
    """The packages that one imports."""
    found = set()
    for path in sources(part):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tunerd"):
                module = (node.module or "").split(".")
                found |= {module[1]} if len(module) > 1 else {one.name for one in node.names}
    return found - {part}


def picture() -> str:
    """The picture as SVG."""
    parts = [*reversed(order())]
    width, height = LEFT + CELL * len(parts) + 16, TOP + ROW * len(parts) + 12
    rows = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'aria-label="The packages of tunerd, top to bottom, and which of them each imports">'
        ),
        f"<style>{STYLE}</style>",
    ]
    for index, part in enumerate(parts):
        x = LEFT + index * CELL + CELL / 2
        rows.append(
            f'<text class="quiet" transform="translate({x + 4:.0f} {TOP - 10}) rotate(-60)">'
            f"{part}</text>"
        )
        y = TOP + index * ROW
        rows.append(f'<line class="line" x1="8" x2="{width - 8}" y1="{y}" y2="{y}"/>')
        rows.append(f'<text class="name" x="12" y="{y + 18}">{part}</text>')
        said = words(part)
        shown = (
            said
            if len(said) <= LETTERS
            else said[: LETTERS - 1].rsplit(" ", 1)[0].rstrip(",:;") + " ..."
        )
        rows.append(f'<text class="quiet" x="104" y="{y + 18}">{escape(shown)}</text>')
        for other in sorted(imported(part) & set(parts)):
            at = LEFT + parts.index(other) * CELL + CELL / 2
            rows.append(f'<circle class="dot" cx="{at:.0f}" cy="{y + 13}" r="5"/>')
    return "\n".join([*rows, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
