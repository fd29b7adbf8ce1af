"""What is said before a rollback where the older unit cannot serve any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.local_box import Box
from tunerd.errors import DeployError
from tunerd.production.rollback import find_target


def hint_for(folder: Path, program: str, model: Path) -> str:
    box = Box(folder)
    box.unit.parent.mkdir(parents=True)
    name = f"{box.unit.name}.pre-mine"
    box.unit.with_name(name).write_text(f"[Service]\nExecStart={program} -m {model} --port 1\n")
    with pytest.raises(DeployError) as caught:
        find_target(box.context, name)
    assert caught.value.hint is not None
    return caught.value.hint


def test_where_the_model_is_gone_the_hint_is_about_the_model(tmp_path: Path) -> None:
    model = tmp_path / "gone.gguf"
    hint = hint_for(tmp_path, "/bin/true", model)
    assert f"put the model back to `{model}`" in hint
    assert "engine" not in hint


def test_where_only_the_program_is_gone_the_hint_is_about_programs(tmp_path: Path) -> None:
    model = tmp_path / "here.gguf"
    model.write_bytes(b"")
    assert "`tunerd engines keep` keeps programs" in hint_for(tmp_path, "/no/such/server", model)
