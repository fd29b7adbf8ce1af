"""What is refused before anything is read or touched, in whole; names never lead out of the folder they belong in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.bench_box import BenchBox
from tests.support.local_box import Box
from tests.support.transcripts import refusal, transcript
from tunerd.app import Context
from tunerd.errors import UsageError
from tunerd.measure.compare import side_of, sides_of
from tunerd.measure.learn import learn_workload
from tunerd.measure.request import Suite
from tunerd.production.profiles import new_profile
from tunerd.production.rollback import find_target
from tunerd.profile.files import load_profile
from tunerd.settings_file import set_setting
from tunerd.sweep.plan import check_setting
from tunerd.web.report import report
from tunerd.words import Mode

NAMES = ("../tunerd", "a b/c", "a/b", "a b", "..", ".hidden", "-x", "", "x" * 101, "a\n", "é")
ADDRESSES = (
    "https://example.org",
    "http://127.0.0.1:1/other",
    "ftp://x",
    "http://:80",
    "http://me:secret@127.0.0.1:1",
    "http://[::1:8080",
    " ",
)
SETTINGS = (
    "sweep.promot auto", "sweep.promote perhaps", "serving.ctx_size 4096", "sweep.workload codng-agent",
    "sweep.space nosuch=1", "page.listen 0.0.0.0:8765", "page.listen here", "backups.keep 1 2",
    "models.dirs relative", "sweep.space serving.threads=x", "sweep.budget_s -3", "models.dirs /srv/Mod\udce8les",
    "sweep.timezone \udcff",
)  # fmt: skip
BROKEN = "[serving]\nport = 0\n"


def calls(ctx: Context, bench: BenchBox) -> dict[str, Callable[[], object]]:
    """What is called, by what it asks for."""
    unnamed = partial(new_profile, ctx, model="/no/such/file", from_unit=None, force=True)
    from_it = partial(sides_of, ctx, base="cpu-embedded", options=("speculation.n_max=2",))
    return {
        **{f"A profile of the name {name!r}": partial(unnamed, name) for name in NAMES},
        **{f"A workload of the name {name!r}": partial(learn_workload, ctx, name=name) for name in NAMES},
        **{f"A profile from which none of {words} starts": partial(from_it, words)
           for words in ((), ("live",), ("cpu-embedded", "13"))},
        "A unit that is not there": partial(new_profile, ctx, "mine", from_unit="lama-server.service"),
        **{f"A unit of another manager than that of {mode} mode": partial(
            new_profile, replace(ctx, mode=mode), "mine", from_unit="elsewhere") for mode in (Mode.SYSTEM, Mode.USER)},
        "A profile that is misspelt": partial(load_profile, ctx, "cpu-embeded", options={}),
        "A profile that is broken": partial(load_profile, ctx, "broken", options={}),
        "An option that is no list": partial(load_profile, ctx, "cpu-embedded", options={"engine.prefer": "mainline"}),
        **{f"The setting {typed}": partial(set_setting, ctx, typed.split()[0], typed.split()[1:], check=check_setting)
           for typed in SETTINGS},
        **{f"A bench of {url}": partial(bench.bench, url) for url in ADDRESSES},
        **{f"Published figures of {suite} for who knows what": partial(
            bench.bench, "http://127.0.0.1:1", suite, is_against_published=True) for suite in (Suite.CACHE, Suite.MTP)},
        "A report of nothing": partial(report, ctx, ()),
    }  # fmt: skip


def test_what_is_refused_before_anything_is_touched_is_the_golden_text(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.put_unit("[Service]\nExecStart=/bin/true\n")
    box.configure(BROKEN, "profiles/broken.toml")
    written = box.configure("# mine\n")

    told = {asked: refusal(call) for asked, call in calls(box.context, BenchBox(tmp_path)).items()}

    assert written.read_text() == "# mine\n"
    transcript("errors/refused", (
        (asked, [line.replace(str(tmp_path), "FOLDER") for line in lines]) for asked, lines in told.items()
    ))  # fmt: skip


@pytest.mark.parametrize("number", ["²", "\u0661", "9" * 5000, "../000001", "-1"])
def test_what_is_no_number_of_a_generation_is_refused(tmp_path: Path, number: str) -> None:
    with pytest.raises(UsageError):
        find_target(Box(tmp_path).context, number)
    with pytest.raises(UsageError):
        side_of(Box(tmp_path).context, number, base=None)
