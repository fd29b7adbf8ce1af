"""The evidence store: what goes in comes out, in one process and in two."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.bench_samples import sample, sweep_event
from tests.support.forked import Forked
from tests.support.postgres import Postgres
from tests.support.stores import open_store
from tests.support.synthetic_runs import MadeRun, made_runs
from tunerd.engine.fingerprint import Fingerprint
from tunerd.errors import Busy, HostError
from tunerd.machine.process import Interrupts
from tunerd.measure.answer import ClientTimes, Mark, Sample, Timings
from tunerd.measure.evidence import ArmRecord, RunOutcome, RunRecord, SummaryRecord
from tunerd.measure.store import EvidenceStore, StoreFile, entry
from tunerd.sweep.record import KIND, history_of

PRINT = Fingerprint(engine_sha256="e", gpu_names=(), model_sha256="m", arguments_sha256="a")
ARM = ArmRecord(name="live", fingerprint=PRINT)
RUN = RunRecord(kind="bench", suites=("mtp",), started_s=10.0, target="live unit", arms=(ARM,))
SAMPLE = sample(timings=None, client=None, at_s=1_795_000_000.25)

COUNTS = st.none() | st.integers(0, 2**31 - 1)
TIMES = st.none() | st.floats(0, 1e9)
COUNTED = ("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted")
TIMINGS = st.builds(
    Timings,
    **dict.fromkeys(COUNTED, COUNTS),
    **dict.fromkeys(("prompt_ms", "predicted_ms"), TIMES),
    accepted_by_position=st.none() | st.lists(st.integers(0, 1000), max_size=4).map(tuple),
)
SAMPLES = st.builds(
    replace,
    st.just(SAMPLE),
    timings=st.none() | TIMINGS,
    client=st.none() | st.builds(ClientTimes, st.floats(0, 1e9), TIMES),
    vram_free_min_mib=COUNTS,
    energy_j=TIMES,
    marks=st.lists(st.sampled_from(Mark), max_size=3, unique=True).map(tuple),
    problem=st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    details=st.dictionaries(
        st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=20)
    ),
)


@pytest.fixture
def store(place: str) -> Iterator[EvidenceStore]:
    with open_store(place) as opened:
        yield opened


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(measured=st.lists(SAMPLES, min_size=1, max_size=5))
def test_samples_come_back_as_they_were_measured(
    store: EvidenceStore, measured: list[Sample]
) -> None:
    run = store.add_run(RUN)
    store.add_samples(run, measured, arm="live")
    assert list(store.samples(run)) == measured


def test_joules_a_token_are_told_by_arm_and_unknown_where_nothing_told_them(
    store: EvidenceStore,
) -> None:
    other = replace(ARM, name="other")
    run = store.add_run(replace(RUN, arms=(ARM, other)))
    told = replace(SAMPLE, timings=Timings(predicted_n=50), energy_j=100.0)
    store.add_samples(run, [told, replace(told, energy_j=None)], arm="live")
    store.add_samples(run, [SAMPLE], arm="other")

    assert store.joules_per_token(run) == {"live": 2.0, "other": None}


def test_nobody_else_can_hold_a_lock_on_a_file(tmp_path: Path) -> None:
    with EvidenceStore(tmp_path / "state" / "evidence.db") as store:
        assert store.runs() == ()
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "state").glob("evidence.db*")}
    assert modes == {0o600}


def test_a_number_that_is_none_is_missing(store: EvidenceStore) -> None:
    run = store.add_run(RUN)
    odd = replace(SAMPLE, timings=Timings(prompt_ms=float("nan"), predicted_ms=float("inf")),
                  details={"ratio": float("nan")})  # fmt: skip
    store.add_samples(run, [odd], arm="live")
    (back,) = store.samples(run)
    assert back.timings == Timings()
    assert back.details == {"ratio": None}


def test_no_long_text_is_kept(store: EvidenceStore) -> None:
    secret = "the answer of the model, word for word. " * 10
    run = store.add_run(RUN)
    store.add_samples(run, [replace(SAMPLE, details={"answer": secret, "tool": "ls"})], arm="live")
    store.add_summary(run, SummaryRecord("quality", "prose", None, {"texts": [secret]}))
    (back,) = store.samples(run)
    assert back.details == {"answer": f"[{len(secret)} letters left out]", "tool": "ls"}
    assert secret[:20] not in str(store.summaries(run))


def test_a_run_comes_back_with_its_arms_and_how_it_ended(store: EvidenceStore) -> None:
    made = made_runs(repeats=1)[0]
    number = made.put(store)
    run = store.run(number)
    assert run is not None
    assert run.record == made.record
    assert (run.outcome, run.reason) == (RunOutcome.DONE, None)
    assert store.summaries(number) == tuple(made.summaries)
    assert store.verdicts(number) == tuple(made.verdicts)
    assert {name for name, _ in store.arm_samples(number)} == {"A", "B"}


def test_runs_are_listed_newest_first_with_their_counts(store: EvidenceStore) -> None:
    """By their numbers: a clock that had been ahead made the run of that night the newest for as long."""
    made: list[MadeRun] = list(made_runs(repeats=1))
    numbers = [run.put(store) for run in made]
    assert sorted(run.record.started_s for run in made) != [run.record.started_s for run in made]
    newest = list(zip(numbers, made, strict=True))[::-1]
    listed = store.runs()
    assert [run.number for run in listed] == [number for number, _ in newest]
    for run, (_, original) in zip(listed, newest, strict=True):
        samples = [sample for arm in original.samples.values() for sample in arm]
        assert run.n_samples == len(samples)
        assert run.n_unusable == sum(not sample.is_usable for sample in samples)
    assert [run.number for run in store.runs(limit=2)] == [number for number, _ in newest[:2]]
    assert {run.record.kind for run in store.runs(kind="compare")} == {"compare"}
    assert store.count_runs() == len(made)


def test_arms_may_be_added_to_a_run_and_samples_need_one(store: EvidenceStore) -> None:
    number = store.add_run(replace(RUN, arms=()))
    with pytest.raises(ValueError, match="no arm `live`"):
        store.add_samples(number, [SAMPLE], arm="live")
    store.add_arm(number, ARM)
    store.add_samples(number, [SAMPLE], arm="live")
    store.add_arm(number, replace(ARM, name="other"))
    store.add_samples(number, [SAMPLE, SAMPLE], arm="other")
    assert [name for name, _ in store.arm_samples(number)].count("other") == 2
    assert len(store.samples(number)) == 3


def test_no_secret_reaches_the_store(
    store: EvidenceStore, place: str, request: pytest.FixtureRequest
) -> None:
    arm = replace(ARM, argv=("p", "--api-key", "hush-1"), environment={"TOKEN": "hush-2"},
                  origins=(("--api-key hush-3", "extra_args", "--set"),))  # fmt: skip
    store.add_run(replace(RUN, arms=(arm,)))
    store.close()
    if "://" in place:
        server: Postgres = request.getfixturevalue("postgres")
        content = server.dump(place).encode()
    else:
        content = b"".join(path.read_bytes() for path in Path(place).parent.iterdir())
    assert b"live unit" in content
    assert b"hush" not in content


def put_sweep(
    store: EvidenceStore,
    generation: int,
    basis: str,
    *challenges: int | None,
    started_s: float = 0.0,
) -> int:
    """A sweep of one process, which took its part in these challenges of a generation; its number."""
    number = store.add_run(replace(RUN, kind=KIND, started_s=started_s))
    plan = {"basis": basis, "generation": generation}
    store.add_summary(number, SummaryRecord(KIND, "sweep plan", None, plan))
    for one in challenges:
        pair = None if one is None else (one, 1)
        store.add_sweep_event(number, sweep_event(f"p{number}", pair))
    return number


def test_challenges_of_before_what_serves_was_deployed_spend_nothing_of_its_alpha(
    store: EvidenceStore,
) -> None:
    """By whatever clock: one that was years ahead for a night gave each later challenge the whole of it again."""
    put_sweep(store, 3, "other", 9, started_s=1000.0)
    put_sweep(store, 3, "same", 8, started_s=4e9)
    put_sweep(store, 4, "same", 1, started_s=0.0)
    own = put_sweep(store, 4, "same", 2, started_s=1001.0)
    found = history_of(store, "same", 4, but=own)
    told = [(one["process"], one["pair"]) for one in found.samples]
    assert told == [("p2", None), ("p3", [1, 1])]
    assert all(one["is_earlier"] for one in found.samples)
    assert found.n_challenges == 1


def test_alpha_is_that_of_what_serves_whatever_its_challenges_were_measured_under(
    store: EvidenceStore,
) -> None:
    """Each workload that was learned anew, and a search for a context, began with the first share again."""
    for basis, challenge in [("mine", 1), ("other", 3), *[("mine", None)] * 60]:
        put_sweep(store, 4, basis, challenge)
    found = history_of(store, "mine", 4)
    assert found.n_challenges == 3
    assert not any(one["process"] == "p2" for one in found.samples)
    assert len(found.samples) == 61


def test_what_a_challenge_spent_is_remembered_however_much_was_measured_since(
    store: EvidenceStore,
) -> None:
    for generation, challenge in ((3, 9), (4, 1), (4, None), (4, None)):
        put_sweep(store, generation, "same", challenge, None, None)
    found = history_of(store, "same", 4, most=2)
    assert [one["pair"] for one in found.samples] == [[1, 1], None, None, None]


@pytest.mark.parametrize(
    "body",
    ["[1", {"pair": [1, 1]}, {**sweep_event("p"), "answer": {"predicted_n": []}}],
    ids=["text", "without its arm", "with an answer that is none"],
)
def test_a_damaged_event_is_held_for_another_challenge_and_stops_no_night(
    store: EvidenceStore, body: object
) -> None:
    """Of one that was JSON the next sweep ended in a traceback."""
    put_sweep(store, 4, "other", 1, 2)
    number = put_sweep(store, 4, "same", 1, 2)
    with store._file.writing() as connection:
        last = sa.select(sa.func.max(entry.c.id)).group_by(entry.c.run_id, entry.c.kind)
        spoilt = sa.update(entry).where(entry.c.kind == "event", entry.c.id.in_(last))
        connection.execute(spoilt.values(body=body))
    found = history_of(store, "same", 4)
    assert (found.samples, found.n_challenges) == ([], 3)
    with pytest.raises(HostError, match="damaged event"):
        store.sweep_events(number)


def test_several_processes_make_and_fill_one_store(place: str) -> None:
    def write(tell: Callable[[object], None]) -> None:
        with open_store(place) as store:
            run = store.add_run(RUN)
            for _ in range(25):
                store.add_samples(run, [SAMPLE], arm="live")
        tell(run)

    ends = [writer.end() for writer in [Forked(write) for _ in range(4)]]
    assert [code for code, _ in ends] == [0] * 4, ends
    with open_store(place, writable=False) as store:
        assert {run.number for run in store.runs()} == {int(said) for _, said in ends}
        assert [run.n_samples for run in store.runs()] == [25] * 4


def test_a_reader_sees_what_a_writer_has_stored_and_does_not_wait_for_it(
    store: EvidenceStore, place: str
) -> None:
    number = store.add_run(RUN)
    with open_store(place, writable=False) as reader, store._file.writing() as connection:
        connection.execute(sa.text("update run set outcome = 'failed'"))
        run = reader.run(number)
        assert run is not None
        assert run.outcome is None


@pytest.mark.parametrize("half", ["\ud83d", "\0"], ids=ascii)
def test_what_is_no_text_in_the_words_of_a_server_ends_a_run_all_the_same(
    store: EvidenceStore, half: str
) -> None:
    number = store.add_run(RUN)
    store.end_run(number, RunOutcome.FAILED, ended_s=1.0, reason=f"it says {half}")
    (found,) = store.runs()
    assert (found.reason or "").startswith("it says \ufffd")


def test_a_reader_changes_nothing(store: EvidenceStore, place: str) -> None:
    number = store.add_run(RUN)
    with open_store(place, writable=False) as reader:
        assert reader.count_runs() == 1
        with pytest.raises(HostError, match="cannot write the"):
            reader.end_run(number, RunOutcome.DONE, ended_s=1.0)
    assert [run.outcome for run in store.runs()] == [None]


def test_a_writer_that_stays_busy_is_named_as_the_reason(store: EvidenceStore, place: str) -> None:
    with open_store(place, wait_s=0.3) as hasty:
        why = "another process keeps it locked|it is busy with other work"
        with store._file.writing(), pytest.raises(Busy, match=why):
            hasty.add_run(RUN)
        assert hasty.count_runs() == 0
        assert hasty.add_run(RUN) > 0


def test_a_signal_amid_a_write_is_raised_after_it_and_no_lock_is_left(tmp_path: Path) -> None:
    path = tmp_path / "evidence.db"
    file = StoreFile(path, writable=True, check=False, wait_s=0.1)
    with EvidenceStore(file) as store, EvidenceStore(path, wait_s=0.1) as other:
        number = store.add_run(RUN)
        sa.event.listen(file.engine, "begin", lambda _: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit, match="143"), Interrupts():
            store.end_run(number, RunOutcome.STOPPED, ended_s=20.0)
        ended = other.run(number)
        assert ended is not None
        assert ended.outcome is RunOutcome.STOPPED
        other.reopen_run(number)
