"""Names that people type never lead out of the folder that they belong in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.local_box import Box
from tunerd.errors import UsageError
from tunerd.measure.learn import learn_workload
from tunerd.measure.sides import side_of
from tunerd.production.adopt import new_profile
from tunerd.production.rollback import find_target
from tunerd.words import NAME_PATTERN

BAD = ("../tunerd", "a b/c", "a/b", "a b", "..", ".hidden", "-x", "", "x" * 101, "a\n", "é")
SETTINGS = "[service]\ndrain_s = 1.0\n"


@pytest.fixture
def box(tmp_path: Path) -> Box:
    box = Box(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "tunerd.toml").write_text(SETTINGS)
    (tmp_path / "m.gguf").write_bytes(b"")
    return box


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_new_profile_is_written_nowhere_but_among_the_profiles(box: Box) -> None:
    before = everything_in(box.folder)
    outside = box.folder.parent / f"{box.folder.name}-evil"
    for name in ("../tunerd", str(outside), "a b/c"):
        done = box.call("profiles", "new", "--model", str(box.folder / "m.gguf"), "--force", "--",
                        name)  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert NAME_PATTERN in done.stderr
        assert everything_in(box.folder) == before
    assert not outside.with_suffix(".toml").exists()


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_name_is_refused_before_anything_is_read(box: Box, name: str) -> None:
    with pytest.raises(UsageError, match="the name of a profile"):
        new_profile(box.context, name, model="/no/such/file", from_unit=None, force=True)
    with pytest.raises(UsageError, match="the name of a workload"):
        learn_workload(box.context, name=name)


@pytest.mark.parametrize("number", ["²", "\u0661", "9" * 5000, "../000001", "-1"])
def test_what_is_no_number_of_a_generation_is_refused(box: Box, number: str) -> None:
    with pytest.raises(UsageError):
        find_target(box.context, number)
    with pytest.raises(UsageError):
        side_of(box.context, number, base=None)
