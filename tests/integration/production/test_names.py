"""Names that people type never lead out of the folder that they belong in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.local_box import Box
from tunerd.errors import UsageError
from tunerd.measure.compare import side_of
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
