"""A study on a real PostgreSQL: what boxes of a class tell each other, and who tries what."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.fleet.test_hand_in import a_box
from tests.support.forked import Forked
from tests.support.local_box import Box
from tests.support.postgres import Postgres, name_of, password_file
from tests.support.sweep_box import swept
from tests.support.tcp_proxy import Proxy
from tests.support.waiting import LIMIT_S, until
from tunerd.fleet.shared import opened
from tunerd.fleet.study import SharedStudy, meet
from tunerd.profile.arm import DRAFT_MODEL, OFF, Arm
from tunerd.records import plain
from tunerd.sweep.known import Law, Told
from tunerd.sweep.laws import N_PROMPT_TERMS, N_STEP_TERMS, n_parameters
from tunerd.sweep.plan import SweepRequest, prepare

SERVES = Arm("mainline", "off", 0, 0.0, 1024, "q8_0", 512, 2048, 8)
ARM = Arm("mainline", "mtp", 4, 0.5, 1024, "q8_0", 512, 2048, 8)
LAW = Law((1.0,) * N_STEP_TERMS, (1.0,) * N_PROMPT_TERMS, (0.5,) * n_parameters(2))
CLASS = "0" * 64
MTP = ("mainline", "mtp")
BUILD = "a" * 64


class Boxes:
    """Boxes of one class, each with the builds that it has."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._known: dict[str, Box] = {}

    def box(self, name: str) -> Box:
        return self._known[name]

    @contextlib.contextmanager
    def meet(
        self,
        name: str,
        ours: str = CLASS,
        build: str = BUILD,
        engine: str = "mainline",
        url: str = "",
        draft: str = "/m/d.gguf",
    ) -> Iterator[SharedStudy]:
        if name not in self._known:
            self._known[name] = a_box(self._folder / name, url or self._url)
        ctx = self._known[name].context
        ctx.files.make_folder(ctx.paths.state_dir)
        with contextlib.closing(opened(ctx, writable=True)) as database:
            study = SharedStudy(ctx, database, ours, {engine: build}, 2, drafts={draft: "d" * 64})
            study.begin()
            try:
                yield study
            finally:
                study.close()


@pytest.fixture
def boxes(tmp_path: Path, url: str) -> Boxes:
    return Boxes(tmp_path, url)


def test_what_one_box_tells_the_others_hear_once_by_their_own_names_of_build_and_drafter(
    boxes: Boxes,
) -> None:
    own, other = (
        frozenset({(DRAFT_MODEL, name)}) for name in ("/m/d.gguf", "/elsewhere/small.gguf")
    )
    with (
        boxes.meet("one") as one,
        boxes.meet("two", engine="nightly", draft="/elsewhere/small.gguf") as two,
    ):
        one.tell(Told(replace(ARM, extra=own), SERVES, -0.25))
        assert one.news() == []
        (heard,) = two.news()
        assert two.news() == []
    assert heard.arm == replace(ARM, engine="nightly", extra=other).canonical()
    assert heard.control == replace(SERVES, engine="nightly").canonical()
    assert heard.log_ratio == -0.25
    assert heard.box


@pytest.mark.parametrize("apart", [{"build": "b" * 64}, {"ours": "1" * 64}])
def test_another_build_and_another_class_are_not_pooled(
    boxes: Boxes, apart: dict[str, Any]
) -> None:
    with boxes.meet("one") as one, boxes.meet("two", **apart) as two:
        one.tell(Told(ARM, SERVES, -0.25))
        one.end({MTP: LAW}, ARM)
        assert two.news() == []
        assert two.claim(ARM) is True
    with boxes.meet("three", **apart) as three:
        assert (dict(three.known), tuple(three.seeds)) == ({}, ())


def test_a_later_night_begins_with_the_laws_and_winners_of_others_and_not_with_its_own(
    boxes: Boxes,
) -> None:
    with boxes.meet("one") as one:
        one.end({MTP: LAW}, replace(ARM, n_max=3))
        one.end({MTP: LAW}, ARM)
    with boxes.meet("one") as one:
        assert (dict(one.known), tuple(one.seeds)) == ({}, ())
    with boxes.meet("two") as two:
        assert set(two.known) == {MTP}
        assert tuple(two.seeds) == (ARM.canonical(),)


def test_an_arm_is_tried_by_one_box_until_it_tried_another_or_went(boxes: Boxes) -> None:
    other = replace(ARM, n_max=6)
    with boxes.meet("two") as two:
        with boxes.meet("one") as one:
            assert one.claim(ARM)
            assert one.claim(ARM), "its own"
            assert not two.claim(ARM)
            assert not two.claim(replace(ARM, fit_mib=2048)), "the same with another margin"
            assert one.claim(other)
            assert two.claim(ARM)
            assert not two.claim(other)
        assert two.claim(other)


def test_of_boxes_that_claim_at_the_same_moment_one_gets_the_arm(boxes: Boxes) -> None:
    names = ["one", "two", "three", "four"]
    with contextlib.ExitStack() as stack:
        studies = [stack.enter_context(boxes.meet(name)) for name in names]
        for n_max in range(1, 9):
            arm = replace(ARM, n_max=n_max)
            with ThreadPoolExecutor(len(names)) as pool:
                got = list(pool.map(lambda study, arm=arm: study.claim(arm), studies))
            assert got.count(True) == 1


def test_the_claim_of_a_box_that_was_killed_returns_and_while_it_lives_is_its_own(
    boxes: Boxes,
) -> None:
    def claims(tell: Callable[[object], None]) -> None:
        with boxes.meet("one") as one:
            tell(one.claim(ARM))
            time.sleep(LIMIT_S)

    killed = Forked(claims)
    assert killed.told.readline() == "True\n"
    with boxes.meet("two") as two:
        assert not two.claim(ARM)
        killed.kill()
        until(lambda: two.claim(ARM), "the claim returns")


def test_a_claim_is_kept_while_its_arm_is_measured_and_a_lost_line_costs_it_alone(
    boxes: Boxes, tmp_path: Path, postgres: Postgres, url: str
) -> None:
    noticed = "select current_setting('tcp_keepalives_idle')"
    more = f"?passfile={password_file(tmp_path)}"
    with (
        boxes.meet("one", url=postgres.tcp_url(name_of(url), more=more)) as one,
        boxes.meet("two") as two,
    ):
        assert one.claim(ARM)
        one.tell(Told(replace(ARM, n_max=5), SERVES, -0.1))
        assert not two.claim(ARM)
        one.news()  # it goes on to another
        assert two.claim(ARM)
        assert not one.claim(ARM)

        postgres.query(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'tunerd'"
        )
        assert one.claim(ARM), "the database was started again, or cut what stands idle"
        assert not two.claim(ARM)
        ctx = boxes.box("one").context
        with contextlib.closing(opened(ctx, writable=False)) as there, there.reading() as line:
            assert line.scalar(sa.text(noticed)) == "30", "or a box without power keeps its claim"


def test_what_a_lost_answer_leaves_in_doubt_is_told_once(
    boxes: Boxes, tmp_path: Path, postgres: Postgres, url: str
) -> None:
    with boxes.meet("zero"):
        pass  # who comes first makes the tables
    more = f"?passfile={password_file(tmp_path)}&sslmode=disable"
    with Proxy(postgres.port, drop_answer_to=b"COMMIT", at=3) as proxy:
        way = postgres.tcp_url(name_of(url), port=proxy.port, more=more)
        with boxes.meet("one", url=way) as one:
            for n_max in range(1, 6):
                one.tell(Told(replace(ARM, n_max=n_max), SERVES, -0.1))
                one.lose()
        assert proxy.n_dropped == 1
    rows = postgres.query("select body->'arm'->>'n_max' from told order by 1", name_of(url))
    assert rows == ["1", "2", "3", "4", "5"]


@contextlib.contextmanager
def away(postgres: Postgres) -> Iterator[None]:
    postgres.stop()
    try:
        yield
    finally:
        postgres.start()


def test_without_the_database_a_night_goes_on_and_asks_nobody_for_a_while(
    boxes: Boxes, postgres: Postgres, url: str
) -> None:
    with boxes.meet("one") as one:
        with away(postgres):
            one.tell(Told(ARM, SERVES, -0.1))
            assert list(one.news()) == []
            assert one.claim(ARM) is True
        assert list(one.news()) == [], "not asked again so soon"
        one.lose()
        assert one.news() == []
        one.tell(Told(replace(ARM, n_max=5), SERVES, -0.1))
        assert len(postgres.query("select 1 from told", name_of(url))) == 2
        with away(postgres):
            one.tell(Told(replace(ARM, n_max=6), SERVES, -0.1))
        one.end({MTP: LAW}, ARM)
    told = postgres.query("select kind from told order by id", name_of(url))
    assert told == ["arm", "arm", "arm", "law", "winner"], "what was not taken, when the night ends"


def hostile(log_ratio: float = 0.1, **changed: object) -> str:
    """An arm of which something is not what it should be."""
    known = {**plain(ARM), "engine": BUILD}
    return json.dumps({"arm": known | changed, "control": known, "log_ratio": log_ratio})


HOSTILE = (
    hostile(log_ratio=-9.5),  # a gain that no server has
    hostile(log_ratio=9.5),
    "{}",
    '{"engine": [], "spec": {}}',
    hostile(spec=["mtp"]),
    hostile(kv={"k": "q8_0"}),
    hostile(kv=[["q8_0"], "f16"]),
    hostile(n_max=2.5),
    hostile(n_max="many"),
    hostile(n_max=1 << 20),  # its neighbours are believed infinitely slow, which ended the night
    hostile(p_min=2.0),
    hostile(defrag=1),  # of a newer tunerd: another arm than it would be here
    hostile(extra=[["memory.n_cpu_moe", "many"]]),
    hostile(extra=[["speculation.draft_model", ["a"]]]),
    hostile(extra=[["serving.ctx_size", 10**200]]),
    "[]",
    '{"arm": 1, "control": 2, "log_ratio": 3}',
    '{"arm": {"engine": "x"}, "control": null, "log_ratio": "NaN"}',
)


def test_what_makes_no_sense_in_the_database_is_left_out(
    boxes: Boxes, postgres: Postgres, url: str
) -> None:
    with boxes.meet("two") as two:
        # Read as it is, a thousand such rows end a night for want of memory.
        long = f"""{hostile()[:-1]}, "beside": "' || repeat('x', 1 << 20) || '"}}"""
        rows = ", ".join(f"('{CLASS}', 'x', '{kind}{at}', '{kind}', ('{body}')::json, 'infinity')"
                         for at, body in enumerate((*HOSTILE, long)) for kind in ("arm", "law", "winner"))  # fmt: skip
        columns = "class_id, box_id, key, kind, body, told_at"
        postgres.query(f"insert into told ({columns}) values {rows}", name_of(url))  # noqa: S608  of tests
        two.tell(Told(ARM, SERVES, -0.1))
        assert two.news() == []
        with boxes.meet("four") as four:
            assert len(four.news()) == 1, "the rest is heard"
    with boxes.meet("three") as three:
        assert (dict(three.known), tuple(three.seeds)) == ({}, ())


def test_what_a_box_knows_now_replaces_what_it_knew_and_arms_of_long_ago_go(
    boxes: Boxes, postgres: Postgres, url: str
) -> None:
    def told() -> list[str]:
        return postgres.query(
            "select kind || ' ' || count(*) from told group by kind order by 1", name_of(url)
        )

    with boxes.meet("one") as one, boxes.meet("two") as two:
        two.end({MTP: LAW}, ARM)
        one.tell(Told(ARM, SERVES, -0.1))
        one.end({MTP: LAW}, ARM)
        one.end({MTP: LAW, ("mainline", "off"): LAW}, None)
        assert told() == ["arm 1", "law 3", "winner 2"]
        postgres.query(
            "update told set told_at = clock_timestamp() - interval '91 days'", name_of(url)
        )
        one.tell(Told(replace(ARM, n_max=2), SERVES, -0.1))
        assert told() == ["arm 1", "law 1", "winner 1"], (
            "another's stay until it tells something itself"
        )


@pytest.mark.alone  # a sweep needs the processors to itself
@pytest.mark.timeout(900)
def test_another_box_begins_with_what_a_sweep_has_proved(postgres: Postgres) -> None:
    """Nothing that is drafted is ever right there, so off is much faster."""
    url = postgres.database()
    with swept() as box:
        ctx, settings = box.box.context, box.box.folder / "config/tunerd.toml"
        settings.write_text(f'{settings.read_text()}[store]\nurl = "{url}"\n')
        assert box.sweep(budget="80s")["verdict"] == "promote"
        kinds = postgres.query("select distinct kind from told order by 1", name_of(url))
        assert kinds == ["arm", "law", "winner"]
        claims = "select count(*) from pg_locks where locktype = 'advisory'"
        assert postgres.query(claims, name_of(url)) == ["0"]

        ctx.paths.box.unlink()  # another box
        ctx = box.box.context
        prepared = prepare(ctx, SweepRequest(budget_s=600.0), proves=False)
        with meet(ctx, prepared) as study:
            assert [arm.spec for arm in study.seeds] == [OFF]
