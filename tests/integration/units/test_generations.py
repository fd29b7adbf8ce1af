"""Generations: numbered once, written before anything changes, and read one by one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_box import Box
from tunerd.errors import HostError
from tunerd.machine.files import Files
from tunerd.production.status import history
from tunerd.records import plain
from tunerd.units.generations import SCHEMA, Ending, Generation, Generations, Outcome

GENERATION = Generation(
    number=1,
    unit="llama-server.service",
    reason="apply",
    created_s=1_790_000_000.0,
    profile="rtx",
    engine="mainline",
    engine_sha256="e" * 64,
    engine_components=(("/usr/bin/llama-server", "a" * 64),),
    model_path="/models/\udcff.gguf",
    model_identity={"size": 5},
    argv=("/usr/bin/llama-server", "--model", "/models/\udcff.gguf"),
    origins=(("--model /m", "model.path", "rtx.toml"),),
    pins={"speculation.n_max": 2},
    unit_sha256="b" * 64,
    replaced_absent=True,
)
SERVING = Ending(Outcome.SERVING, 1_790_000_010.0, 3.5, None, None)


@pytest.fixture
def generations(tmp_path: Path) -> Generations:
    return Generations(tmp_path / "generations", Files())


def make(generations: Generations, ending: Ending | None = None, **changes: Any) -> int:
    number = generations.next_number()
    generations.create(replace(GENERATION, number=number, **changes), b"[Unit]\n")
    if ending is not None:
        generations.end(number, ending)
    return number


def test_a_generation_is_read_as_it_was_written(generations: Generations) -> None:
    number = make(generations, SERVING)
    entry = generations.read(number)
    assert entry is not None
    assert entry.generation == GENERATION
    assert entry.ending == SERVING
    assert generations.unit_text(number) == b"[Unit]\n"
    assert generations.has_ended(number)


def test_numbers_grow_and_are_not_used_twice(generations: Generations, tmp_path: Path) -> None:
    assert generations.next_number() == 1
    assert [make(generations) for _ in range(3)] == [1, 2, 3]
    shutil.rmtree(tmp_path / "generations" / "000002")
    assert generations.next_number() == 4
    # one that was put aside as the error about it says keeps its number
    (tmp_path / "generations" / "000003").rename(tmp_path / "generations" / "000003.damaged")
    assert generations.next_number() == 4
    assert generations.numbers() == (1,)


def test_a_number_that_was_cut_short_is_used_up(tmp_path: Path) -> None:
    steps: list[str] = []

    def before(step: str) -> None:
        steps.append(step)
        if step == "rename to generation.json":
            raise KeyboardInterrupt

    generations = Generations(tmp_path / "generations", Files(before))
    with pytest.raises(KeyboardInterrupt):
        make(generations)
    assert generations.read(1) is None
    assert generations.next_number() == 2
    assert generations.has_ended(1)  # there is nothing to settle


def test_the_serving_one_is_the_newest_that_ended_well(generations: Generations) -> None:
    make(generations, SERVING)
    make(generations, SERVING, unit="other.service")
    make(generations, replace(SERVING, outcome=Outcome.ROLLED_BACK))
    make(generations)
    entry = generations.serving("llama-server.service")
    assert entry is not None
    assert entry.generation.number == 1
    assert generations.serving("nobody.service") is None


def tampered(**changes: Any) -> str:
    """A record as written, but for this."""
    return json.dumps({**plain(replace(GENERATION, number=2), schema=SCHEMA), **changes})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            ("generation.json", text)
            for text in ("", "{", "[]", "5", '{"schema": 1}', "[" * 99_999)
        ),
        ("generation.json", tampered(schema=2)),
        ("generation.json", tampered(number=7)),
        ("generation.json", tampered(argv=None)),
        ("generation.json", tampered(origins=[["a", "b"]])),
        *(("outcome.json", text) for text in ("[]", '"x"', '{"outcome": "nonsense"}', "{}")),
    ],
)
def test_a_damaged_record_is_named_until_it_was_put_aside_and_stands_in_nobodys_way(
    name: str, text: str, tmp_path: Path
) -> None:
    ctx = Box(tmp_path).context
    for _ in range(2):
        make(ctx.generations, SERVING)
    folder = ctx.paths.generations_dir / "000002"
    (folder / name).write_text(text)

    with pytest.raises(HostError):
        ctx.generations.read(2)
    assert ctx.generations.find(2) is None
    assert [entry.generation.number for entry in ctx.generations.entries()] == [1]
    assert ctx.generations.next_number() == 3
    told = history(ctx)
    assert [(one.code, one.hint) for one in told.messages] == [
        ("damaged", "`tunerd history show 2` says why")
    ]
    assert [row["number"] for row in told.payload["generations"]] == [1]
    assert told.payload["total"] == 1, "no older one that --all would show"
    folder.rename(folder.with_name("000002.damaged"))
    assert history(ctx).messages == ()


def test_what_cut_short_writes_left_is_removed_back_to_the_last_good_one(
    generations: Generations, tmp_path: Path
) -> None:
    for _ in range(2):
        make(generations, SERVING)
    make(generations)
    for name in ("000001", "000002", "000003"):
        (tmp_path / "generations" / name / ".outcome.json.1a2b3c4d.tmp").touch()
    generations.remove_temporaries()
    left = [path.parent.name for path in (tmp_path / "generations").rglob("*.tmp")]
    assert left == ["000001"]


def test_what_a_later_version_added_to_a_record_is_passed_over(
    generations: Generations, tmp_path: Path
) -> None:
    make(generations)
    path = tmp_path / "generations" / "000001" / "generation.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "surprise": 1}))
    entry = generations.read(1)
    assert entry is not None
    assert (entry.generation.with_tuned, entry.generation.enable) == (True, True)
    new = {"with_tuned", "enable"}
    assert not new & set(json.loads(path.read_bytes())), "which an earlier version cannot read"
