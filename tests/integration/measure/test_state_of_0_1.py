"""A STATE folder that tunerd 0.1 wrote on a real box is read as it was meant.

`data/state-0.1` was made by applying a profile, going back, a bench, a sweep and its promotion; it was
cut to a few rows of each kind, and folders were renamed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.folders import DATA
from tests.support.local_box import Box
from tests.support.stores import queried, written
from tunerd.engine.capabilities import EngineIdentity, Proof
from tunerd.engine.probe import read_proofs
from tunerd.measure.answer import Mark
from tunerd.measure.evidence import RunOutcome
from tunerd.measure.results import export
from tunerd.measure.store import open_to_read
from tunerd.profile.arm import as_samples
from tunerd.profile.files import read_tuned
from tunerd.sweep.record import find_sweep
from tunerd.units.generations import Outcome

WRITTEN = DATA / "state-0.1"
ENGINE = "ca46b7227c672a687549c168c67f890152a9f74032b01f3d2cfd081eb35d6fd3"


@pytest.fixture
def box(tmp_path: Path) -> Box:
    state = tmp_path / "state"
    shutil.copytree(WRITTEN, state)
    written(state / "evidence.db", state / "evidence.sql")
    return Box(tmp_path)


def test_its_generations_are_read(box: Box) -> None:
    generations = box.context.generations
    entry = generations.serving("llama-server.service")
    assert entry is not None
    assert (entry.generation.number, entry.generation.reason) == (4, "promote")
    assert entry.generation.engine_sha256 == ENGINE
    assert len(entry.generation.engine_components) == 2
    assert entry.generation.argv[:2] == ("/srv/box/engine/llama-server", "--model")
    assert entry.generation.with_tuned
    assert entry.ending.outcome is Outcome.SERVING
    assert entry.ending.drop_ins == ()
    before = generations.read(3)
    assert before is not None
    assert (before.generation.reason, before.generation.from_generation) == ("rollback", 1)


def test_its_tuned_layer_and_proofs_are_read(box: Box) -> None:
    ctx = box.context
    record = read_tuned(ctx, "night")
    assert record is not None
    assert (record.sweep, record.generation, record.values) == (2, 4, {"speculation.type": "off"})
    proofs: tuple[Proof, ...] = read_proofs(
        ctx.paths.cache_dir, ctx.files, EngineIdentity(ENGINE, ())
    )
    assert [(one.feature, str(one.effect)) for one in proofs] == [
        ("mtp", "proved"), ("n-max", "proved"), ("p-min", "proved"),
    ]  # fmt: skip


def test_its_evidence_is_taken_over_once_and_is_what_it_was(box: Box) -> None:
    path = box.context.paths.evidence
    arms = "select name, sha256 from arms join fingerprints on fingerprints.id = fingerprint_id"
    prints = queried(path, arms)
    ((details,),) = queried(path, "select details from samples where id = 2")

    assert open_to_read(path.with_name("none.db")) is None
    path.with_name("empty.db").touch()  # what a reader meets who comes while it is made
    assert open_to_read(path.with_name("empty.db")) is None
    store = open_to_read(path)
    assert store is not None
    with store:
        sweep, bench = store.runs()
        assert (bench.number, bench.outcome, bench.n_samples, bench.n_unusable) == (
            1, RunOutcome.DONE, 4, 1,
        )  # fmt: skip
        found_arms = [*bench.record.arms, *sweep.record.arms]
        assert [(arm.name, arm.fingerprint.sha256) for arm in found_arms] == prints
        first, second, *_ = store.samples(1)
        assert first.marks == (Mark.WARM_UP,)
        assert first.timings is not None
        assert (first.timings.predicted_n, first.timings.draft_n) == (64, 223)
        assert first.client is not None
        assert first.client.wall_ms == pytest.approx(484.2046969999956, abs=0)
        assert second.details == json.loads(details)
        found = find_sweep(box.context, store, 2)
        assert found.verdict is not None
        assert found.verdict.outcome == "promote"
        assert found.decision is not None
        events = as_samples(store.sweep_events(2))
        assert [one.event for one in events[:2]] == ["boot", "request"]
        assert events[1].reading is not None
        assert store.damage == ()

    tables = {name for (name,) in queried(path, "select name from sqlite_master")}
    versions = queried(path, "select version from schema_versions order by 1")
    assert {"run", "entry", "schema_versions"} <= tables
    assert not {"runs", "samples", "fingerprints", "memory_loads"} & tables
    assert versions == [(3,), (4,)]
    assert len(export(box.context, [1]).payload["runs"][0]["samples"]) == 4
