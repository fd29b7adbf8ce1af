"""`tunerd report`: its figures, what is missing from them, and the file, from a real store."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from html import unescape
from pathlib import Path

import pytest

from tests.support.folders import DATA
from tests.support.local_box import Box as LocalBox
from tests.support.made_sweep import put_sweep
from tests.support.reports import evidence_of, page_of
from tests.support.stores import filled
from tests.support.synthetic_runs import START_S, Box, MadeRun, made_runs
from tests.support.transcripts import compare
from tunerd.cli.measure import render_list
from tunerd.cli.output import sections_lines
from tunerd.errors import HostError, UsageError
from tunerd.measure.answer import Sample, Timings
from tunerd.measure.evidence import AcceptanceByPosition, RunRecord, SummaryRecord, Validity
from tunerd.measure.findings import Depth
from tunerd.measure.results import results
from tunerd.measure.store import EvidenceStore
from tunerd.web.charts import draw, in_words
from tunerd.web.report import gather_evidence, report, sections_of, write_report
from tunerd.web.view import Chart, Lines, Section, Table

Sections = tuple[Section, ...]
BOX = Box("only", "mainline", 3)


def report_on(folder: Path, *runs: MadeRun) -> Sections:
    return sections_of(evidence_of(folder, runs), {})


def a_run(*samples: Sample) -> MadeRun:
    record = RunRecord(kind="bench", suites=("mtp",), started_s=START_S, target="made up, not measured",
                       arms=(BOX.arm(),))  # fmt: skip
    return MadeRun(record, {BOX.name: samples})


def a_sample(timings: Timings | None) -> Sample:
    kind = "translation"
    made = BOX.sample("mtp", kind, kind, 1, n_predict=192)
    return replace(made, timings=timings, client=None, vram_free_min_mib=None)


def table(shown: Sections, caption: str) -> Table:
    found = [one for section in shown for one in section.tables]
    (chosen,) = (one for one in found if one.caption.startswith(caption))
    return chosen


def row(found: Table, name: str) -> dict[str, str | None]:
    (cells,) = (cells for cells in (*found.rows, *found.foot) if cells[0] == name)
    return dict(zip((column.title for column in found.columns), cells, strict=True))


def chart_of(shown: Sections, name: str) -> Chart:
    return next(one for section in shown for one in section.charts if one.name == name)


def shares(chart: Chart) -> list[float | None]:
    assert isinstance(chart.plot, Lines)
    return [point.y for point in chart.plot.lines[0].points]


def words_of(page: str) -> str:
    """The visible text of a page."""
    return unescape(re.sub(r"(?s)<(script|style)>.*?</\1>|<[^>]*>", "", page))


def test_what_was_measured_is_told_as_in_the_golden_text(tmp_path: Path) -> None:
    deep = next(run for run in made_runs() if run.record.suites == ("deep",))
    spilled = Depth(90000, 81920, 98304, 12, "40% slower than the depths before")
    kept = SummaryRecord("deep", Depth.NAME, next(iter(deep.samples)), asdict(spilled))
    runs = [*made_runs(), replace(deep, summaries=(kept,))]

    shown = [one for one in report_on(tmp_path, *runs) if one.name != "runs"]  # which has times
    compare(DATA / "golden/report.txt", "\n".join(sections_lines(shown)) + "\n")


def test_what_is_missing_is_said_and_never_zero(tmp_path: Path) -> None:
    shown = report_on(tmp_path, a_run(a_sample(None), a_sample(Timings(predicted_n=50))))

    figures = row(table(shown, "only: by kind"), "translation")

    assert figures["tok/s, client's clock"] is None
    assert figures["wall [s]"] is None
    chart = chart_of(shown, "speed-by-kind")
    assert ">unknown<" in draw(chart.plot, chart.title), (
        "a missing figure is not only a bar of length zero"
    )
    assert "only unknown" in in_words(chart.plot, chart.title)


def test_what_the_golden_text_has_reaches_the_page_as_words(tmp_path: Path) -> None:
    words = words_of(page_of(tmp_path, [*made_runs(), a_run()]).read_text())

    for wanted in ("B is 4.1 % faster on chat, 95 %", "450 W", "no answer", "--spec-draft-n-max"):
        assert wanted in words, wanted
    assert not re.search(r"\b(nan|None|inf)\b", words)


def test_acceptance_by_position_comes_from_counters_where_requests_do_not_have_it(
    tmp_path: Path,
) -> None:
    drafted = Timings(predicted_n=50, predicted_ms=900, draft_n=40, draft_n_accepted=20)
    counted = AcceptanceByPosition(BOX.name, (0.75, 0.5, 0.25)).to_record("mtp")
    run = replace(a_run(a_sample(drafted)), summaries=(counted,))

    shown = report_on(tmp_path, run)

    chart = chart_of(shown, "acceptance")
    assert shares(chart) == [0.75, 0.5, 0.25]


def test_what_was_measured_at_another_power_limit_is_said_to_hold_at_that(tmp_path: Path) -> None:
    """A night that tries limits measures the winner at each, and all but one were said to hold no longer."""
    evidence = evidence_of(tmp_path, [a_run()])
    at = Validity(
        False, ("power limit changed: 200 W -> 450 W",), holds_at="a power limit of 200 W"
    )
    shown = sections_of(
        evidence, {(one.run.number, arm): at for one in evidence for arm in one.samples}
    )
    of = {one.name: one for one in shown}
    assert any(
        "holds on this machine at a power limit of 200 W" in one for one in of["summary"].remarks
    )
    assert not any("no longer holds" in one for one in of["summary"].remarks)


def test_what_is_so_of_many_configurations_of_a_night_is_said_once(tmp_path: Path) -> None:
    box = LocalBox(tmp_path)
    night = put_sweep(box)
    with EvidenceStore(box.context.paths.evidence) as store:
        numbers = [night, *(run.put(store) for run in made_runs())]
        plan = {
            "seed": 7,
            "incumbent": {"n_max": 0},
            "left_out": [{"what": "ik, mtp", "reason": "no MTP block"}],
        }
        store.add_summary(night, SummaryRecord("sweep", "sweep plan", None, plan))
        for text in ("the promotion was cut short", "in service a turn takes 0.5 s"):
            store.add_summary(night, SummaryRecord("sweep", "sweep decision", None, {"text": text}))
    evidence, _ = gather_evidence(box.context, numbers)
    stale = Validity(holds=False, texts=("driver 570.86.16 -> 580.10",))
    arms = [(one.run.number, arm) for one in evidence for arm in one.samples]
    assert len(arms) > 20

    shown = sections_of(evidence, dict.fromkeys(arms, stale))

    of = {one.name: one for one in shown}
    n = len(of["conditions"].tables[0].rows)
    (said,) = (text for text in of["summary"].remarks if "no longer holds" in text)
    assert said.startswith(f"All {n} configurations: no longer holds on this machine (driver 570")
    assert of["acceptance"].text.count("reported nothing by position") == 1
    verdict = of[f"verdict-{night}"]
    assert "faster over" in verdict.text
    assert verdict.remarks == (), "the sentence has them"
    (decided,) = (one for one in of["more"].tables if "decision" in one.caption)
    assert decided.rows == (("all", "in service a turn takes 0.5 s"),)
    assert ("ik, mtp", "no MTP block") in table(shown, "Not tried").rows
    assert not [one.caption for one in of["more"].tables if "sweep plan" in one.caption]
    listed = list(render_list(results(box.context).payload))
    assert max(map(len, listed)) < 200, "a terminal is not wider than its windows"
    assert len({one.title for one in shown}) == len(shown), "contents and landmarks are told apart"
    margins = chart_of(shown, f"sweep-{night}-margins")
    assert set(shares(margins)[1::2]) == {None}, "no line joins what is of different configurations"
    assert "out of memory" in in_words(margins.plot, margins.title), "a first look was"


def test_the_newest_runs_of_every_suite_are_in_a_report_and_named_ones_alone(
    tmp_path: Path,
) -> None:
    old = next(run for run in made_runs() if run.record.suites == ("mtp",))
    old = replace(old, record=replace(old.record, started_s=START_S - 9000))
    box = LocalBox(tmp_path)
    context = box.context
    context.files.make_folder(context.paths.state_dir)
    filled(context.paths.evidence, (old, *made_runs()))

    newest = report(context, ())
    assert sorted(newest.payload["runs"]) == [2, 3, 4, 5, 6], (
        "1 has only a suite that is newer in 4"
    )
    assert "Checked when this report was made" in words_of(newest.payload["html"])
    path = tmp_path / "report.html"
    assert write_report(path, newest).payload["bytes"] == path.stat().st_size <= 400_000, (
        "is mailed"
    )
    with pytest.raises(HostError, match="no such folder"):
        write_report(tmp_path / "no/where.html", newest)

    words = words_of(report(context, [4]).payload["html"])
    assert "Speed by kind of text" in words
    assert "Time of a turn" not in words
    with pytest.raises(UsageError, match="there is no run 99"):
        report(context, [99])
    assert box.json("report", "4")["path"] == str(tmp_path / "tunerd-report.html")
    lines = box.call("results", "export", "4", "--format", "csv").stdout.splitlines()
    assert len(lines) > 30
    assert any(",translation," in line for line in lines)
