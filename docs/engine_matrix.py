"""Tries engines with what tunerd does with them, and writes the table of docs/engines.md.

usage: python docs/engine_matrix.py NAME=PROGRAM ... [embedded] [debian-sid=sid:/usr/bin/llama-server]

Each is probed, proved, planned, deployed on a designed model and asked; then it is made to fail. On a quiet machine a
build takes about half a minute. A program behind `sid:` is that of the Debian sid root of the tests, tried within it (as
root). Rows of engines that are not named stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import layers
from tests.support.build_box import BuildBox, build_box
from tests.support.designed import read_truth
from tests.support.roots import PREFIX, SOURCES_INSIDE, cache_folder, sid_root
from tunerd.engine.choice import PlanRequest
from tunerd.errors import RolledBack, TunerdError
from tunerd.production.apply import apply
from tunerd.tryout.designed import vocabulary

PAGE = Path(__file__).parent / "engines.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
FEATURES = ("mtp", "p-min", "n-max", "per-request", "counts")
HEADS = ("engine", "version", "dialect", "serves, text right", *FEATURES, "drafts as designed",
         "taken port", "damaged model", "wrong KV type", "unknown flag")  # fmt: skip
N_PREDICT, N_MAX = 65, 3


def row(name: str, program: Path | None) -> list[str]:
    """What came of one engine."""
    drafts = _takes_mtp(program)
    with build_box(program, shape="tiny" if drafts else "tiny-nomtp") as box:
        (engine,) = [
            one for one in box.json("engines", "--prove")["engines"] if one["name"] == box.engine
        ]
        proofs = {proof["feature"]: proof["effect"] for proof in engine["proofs"]}
        box.profile("plain")
        box.profile("drafting", speculation__type="mtp", speculation__n_max=N_MAX,
                    speculation__p_min=0)  # fmt: skip
        box.profile("odd", serving__cache_type_v="iq4_xs")
        box.profile("unknown", extra_args=["--no-such-flag"])
        box.profile("other", model__path=str(box.box.folder / "other.gguf"))
        box.apply("plain")
        return [
            name, _version(engine["version"]), engine["dialect"], _says_it_right(box),
            *(proofs.get(feature, "-") for feature in FEATURES),
            _drafts(box) if drafts else "no MTP",
            _failure(box, "plain", _port_taken), _failure(box, "other", _model_cut),
            _refusal(box, "odd"), _refusal(box, "unknown"),
        ]  # fmt: skip


def _version(text: str | None) -> str:
    """Without the commit; builds from a folder without git say 0."""
    found = (text or "0").partition(" (")[0]
    return "-" if found == "0" else found


def _takes_mtp(program: Path | None) -> bool:
    with build_box(program, shape="tiny-nomtp") as box:
        found = box.json("engines")["engines"]
    return "speculation.type=mtp" not in next(o for o in found if o["name"] == box.engine)["lacks"]


def _says_it_right(box: BuildBox) -> str:
    token = vocabulary().region("code").first
    text = read_truth(box.model).text(token, N_PREDICT)
    answer = box.ask(vocabulary().decode([token]), N_PREDICT)
    return "yes" if text.startswith(answer["choices"][0]["text"]) else "no"


def _drafts(box: BuildBox) -> str:
    """Drafted and accepted tokens, beside what the model's weights say; ik proposes one freely."""
    box.apply("drafting")
    token = vocabulary().region("code").first
    timings = box.ask(vocabulary().decode([token]), N_PREDICT)["timings"]
    wanted = read_truth(box.model).speculate(token, N_PREDICT, N_MAX, 0.0)
    box.json("rollback")
    seen = (timings["draft_n"], timings["draft_n_accepted"])
    return f"{seen[1]} of {seen[0]}" + (
        "" if seen == (wanted.drafted, wanted.accepted) else f", not {wanted}"
    )


def _port_taken(_: BuildBox, holder: socket.socket) -> dict[str, Any]:
    holder.bind(("127.0.0.1", 0))
    return {"serving.port": holder.getsockname()[1]}


def _model_cut(box: BuildBox, _: socket.socket) -> dict[str, Any]:
    shutil.copy(box.model, box.box.folder / "other.gguf")
    return {}


def _failure(box: BuildBox, profile: str, prepare: Any) -> str:
    """The kind that a failure after the plan is told as."""
    with socket.socket() as holder:
        options = prepare(box, holder)

        def happens(_: object) -> None:
            if prepare is _port_taken:
                holder.listen()
            else:
                path = box.box.folder / "other.gguf"
                os.truncate(path, path.stat().st_size - 100_000)

        try:
            apply(box.box.context, PlanRequest(profile, options), drain=False, confirm=happens)
        except RolledBack as error:
            return error.message.rpartition(": ")[2]
        except TunerdError as error:
            return error.message
    return "it serves"


def _refusal(box: BuildBox, profile: str) -> str:
    """Whether it is refused before anything is touched, or how it fails."""
    done = box.box.call("apply", profile, "--yes", "--json")
    if done.returncode == 0:
        box.json("rollback")
        return "it serves"
    told = json.loads(done.stdout)["error"]["message"].rpartition(": ")[2]
    return "refused by plan" if done.returncode == 1 else told


def row_in_sid(name: str, program: str) -> list[str]:
    """What came of an engine of Debian sid: this script in there tells it."""
    script = f'cd {SOURCES_INSIDE} && {PREFIX}/bin/python docs/{Path(__file__).name} --json "$1" > /out/row'
    plain = sid_root()
    root = replace(plain, binds={**plain.binds, str(SOURCES_INSIDE / "docs"): PAGE.parent})
    with tempfile.TemporaryDirectory(prefix="tunerd-test-", dir=cache_folder()) as made:
        out = Path(made) / "out"
        out.mkdir()
        changed = Path(made) / "changed"
        layers.build(
            cache_folder(), changed, root, script, f"{name}={program}", writable={"/out": out}
        )
        cells: list[str] = json.loads((out / "row").read_text("utf-8"))
    return cells


def row_of(word: str) -> list[str]:
    """The row of an engine as it is named on the command line."""
    name, _, path = word.partition("=")
    root, _, inside = path.partition(":")
    return row_in_sid(name, inside) if root == "sid" else row(name, Path(path) if path else None)


def rows_of(table: str) -> dict[str, list[str]]:
    """The rows of the table as it is, by their engines."""
    found = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return {cells[0]: cells for cells in found}


def lines(rows: Mapping[str, list[str]]) -> Iterator[str]:
    """As Markdown."""
    yield f"| {' | '.join(HEADS)} |"
    yield f"|{'---|' * len(HEADS)}"
    for cells in rows.values():
        yield f"| {' | '.join(cells)} |"


def main(words: list[str]) -> None:
    """One row for each word."""
    if words[0] == "--json":
        sys.stdout.write(json.dumps(row_of(words[1])))
        return
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = rows_of(table)
    for word in words:
        cells = row_of(word)
        rows[cells[0]] = cells
        sys.stdout.write("  ".join(cells) + "\n")
    PAGE.write_text("\n".join([before + BEGIN, *lines(rows), END + after]), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or ["embedded"])
