"""A profile file that cannot be read is never left out silently."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_box import Box
from tunerd.app import Context
from tunerd.errors import ConfigError
from tunerd.machine.files import Files
from tunerd.measure.learn import find_workload, list_workloads
from tunerd.production.profiles import check_profile, fitting_profiles, list_profiles
from tunerd.profile.files import load_profile

BROKEN = "[serving\nport = 1\n"


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    made = Box(tmp_path).context
    made.paths.site_profiles.mkdir(parents=True)
    made.paths.tuned_dir.mkdir(parents=True)
    return made


def test_a_broken_tuned_layer_is_an_error_unless_it_is_left_out(ctx: Context) -> None:
    (ctx.paths.tuned_dir / "cpu-embedded.toml").write_text(BROKEN)
    with pytest.raises(ConfigError):
        load_profile(ctx, "cpu-embedded", options={})
    assert load_profile(ctx, "cpu-embedded", options={}, with_tuned=False).name == "cpu-embedded"
    # a child takes nothing from the tuned layer of its parent
    assert load_profile(ctx, "cpu-embedded-baseline", options={}).name == "cpu-embedded-baseline"


def test_what_is_broken_or_no_file_is_named_and_stands_in_nobodys_way(ctx: Context) -> None:
    (ctx.paths.site_profiles / "other.toml").write_text(BROKEN)
    stray = ctx.paths.site_profiles / "stray.toml"
    stray.mkdir()
    os.mkfifo(ctx.paths.site_profiles / "pipe.toml")
    for name in ("my own.toml", "loud.TOML"):
        (ctx.paths.site_profiles / name).write_text('extends = "cpu-embedded"')
    (ctx.paths.site_profiles / ".#mine.toml").symlink_to("an editor's")
    (ctx.paths.site_profiles / "wrong.toml").write_text('[serving]\nctx_size = "a lot"')
    assert load_profile(ctx, "cpu-embedded", options={}).name == "cpu-embedded"
    listed = list_profiles(ctx)
    assert [m.code for m in listed.messages] == ["unreadable-profile"] * 5 + ["wrong-profile"]
    assert any(str(stray) in m.text for m in listed.messages)
    assert check_profile(ctx, str(stray)).exit_code == 1
    for name in ("stray.toml", "my own.toml", "loud.TOML"):
        with pytest.raises(ConfigError) as caught:
            load_profile(ctx, name[:-5], options={})
        assert f"{ctx.paths.site_profiles}/{name}" in (caught.value.cause or "")


class Counting(Files):
    """Counts how often each file is read."""

    def __init__(self) -> None:
        super().__init__()
        self.times = Counter[str]()

    def read(self, path: Path, **more: Any) -> bytes | None:
        self.times[path.name] += 1
        return super().read(path, **more)


def test_who_goes_through_all_profiles_reads_each_file_once(ctx: Context) -> None:
    """All were read again for each: a list of 72 took three times as long as now."""
    for look in (list_profiles, fitting_profiles):
        files = Counting()
        look(replace(ctx, files=files))
        assert files.times["cpu-embedded.toml"] == 1


def test_a_file_that_extends_what_is_not_there_is_a_problem_before_it_is_installed(
    ctx: Context, tmp_path: Path
) -> None:
    new = tmp_path / "new.toml"
    new.write_text('extends = "cpu-embeded"')
    (problem,) = check_profile(ctx, str(new)).payload["problems"]
    assert (problem["file"], problem["key"]) == (str(new), "extends")
    assert problem["nearest"] == "cpu-embedded"
    new.write_text('extends = "cpu-embedded"')
    assert check_profile(ctx, str(new)).exit_code == 0


def test_a_workload_that_is_none_is_told_where_a_profile_is_checked(ctx: Context) -> None:
    new = ctx.paths.site_profiles / "mine.toml"
    new.write_text('extends = "cpu-embedded"\nworkload = "coding-agnt"\n')
    for what in ("mine", str(new)):
        checked = check_profile(ctx, what)
        assert [one.code for one in checked.messages] == ["unknown-workload"]
        assert "did you mean `coding-agent`?" in checked.messages[0].text
    new.write_text('extends = "cpu-embedded"\nworkload = "rag"\n')
    assert check_profile(ctx, "mine").messages == ()


def test_what_is_wrong_within_a_workload_is_not_told_of_the_whole_as_well(ctx: Context) -> None:
    """A table was told to be a text in quotes, and one class to be none."""
    new = ctx.paths.site_profiles / "mine.toml"
    for text, keys in (
        ("[workload]\nx = 1\n", {"workload.classes", "workload.x"}),
        ("workload = 7\n", {"workload"}),
        ("[[workload.classes]]\nprompt_tokens = 5\n", {"workload.classes.0.answer_tokens"}),
    ):
        new.write_text(text)
        assert {one["key"] for one in check_profile(ctx, "mine").payload["problems"]} == keys


def test_what_can_be_no_workload_is_named_among_them_and_by_its_name_and_the_others_are_listed(
    ctx: Context,
) -> None:
    folder = ctx.paths.site_profiles / "workloads"
    (folder / "stray.toml").mkdir(parents=True)
    (folder / "gone.toml").symlink_to("nowhere")
    for name in ("my own.toml", "loud.TOML"):
        (folder / name).write_text("[[classes]]\nprompt_tokens = 77\nanswer_tokens = 7\n")
    (folder / "mine.toml~").write_text("an editor's")
    listed = list_workloads(ctx)
    assert [m.code for m in listed.messages] == ["bad-workload"] * 4
    for name in ("stray.toml", "gone.toml", "my own.toml", "loud.TOML"):
        assert any(f"`{folder / name}`" in m.text for m in listed.messages)
        with pytest.raises(ConfigError) as caught:
            find_workload(ctx, name[:-5])
        assert f"`{folder / name}` is wrong" in caught.value.message
    assert "chat" in [row["name"] for row in listed.payload["workloads"]]


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 5000, "\xff", BROKEN])
@pytest.mark.parametrize("name", ["mine", "cpu-embedded"])
def test_a_file_that_breaks_the_parser_is_a_problem_and_no_crash(
    ctx: Context, name: str, text: str
) -> None:
    """Also where the shipped profile of that name is whole."""
    path = ctx.paths.site_profiles / f"{name}.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load_profile(ctx, name, options={})
    assert str(path) in (caught.value.cause or "")
