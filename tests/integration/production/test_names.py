"""Names that people type never lead out of the folder that they belong in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.local_box import Box
from tunerd.errors import UsageError
from tunerd.measure.compare import side_of, sides_of
from tunerd.measure.learn import learn_workload
from tunerd.production.profiles import new_profile
from tunerd.production.rollback import find_target

BAD = ("../tunerd", "a b/c", "a/b", "a b", "..", ".hidden", "-x", "", "x" * 101, "a\n", "é")


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_name_is_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="the name of a profile"):
        new_profile(Box(tmp_path).context, name, model="/no/such/file", from_unit=None, force=True)
    with pytest.raises(UsageError, match="the name of a workload"):
        learn_workload(Box(tmp_path).context, name=name)


@pytest.mark.parametrize("number", ["²", "\u0661", "9" * 5000, "../000001", "-1"])
def test_what_is_no_number_of_a_generation_is_refused(tmp_path: Path, number: str) -> None:
    with pytest.raises(UsageError):
        find_target(Box(tmp_path).context, number)
    with pytest.raises(UsageError):
        side_of(Box(tmp_path).context, number, base=None)


@pytest.mark.parametrize("words", [(), ("live",), ("cpu-embedded", "13")])
def test_a_profile_to_start_from_is_refused_where_no_side_starts_from_it(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError, match="has no effect"):
        sides_of(
            Box(tmp_path).context, words, base="cpu-embedded", options=("speculation.n_max=2",)
        )


def test_a_unit_that_is_not_there_is_refused_with_the_nearest_that_is(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.unit.parent.mkdir(parents=True)
    box.unit.write_text("[Service]\nExecStart=/bin/true\n")

    with pytest.raises(UsageError, match="there is no unit") as caught:
        new_profile(box.context, "mine", from_unit="lama-server.service")

    assert caught.value.state == "nothing was written"
    assert "did you mean `llama-server.service`?" in (caught.value.hint or "")


def test_a_folder_of_models_that_is_not_there_is_named_with_the_file_that_is_missing(
    tmp_path: Path,
) -> None:
    box = Box(
        tmp_path, {"TUNERD_MODELS__DIRS": json.dumps([str(tmp_path), str(tmp_path / "gone")])}
    )

    told = [one["hint"] for one in box.json("plan", "cpu-embedded", code=None)["messages"]]

    assert any(f"names `{tmp_path}/gone`, which does not exist" in (hint or "") for hint in told)
