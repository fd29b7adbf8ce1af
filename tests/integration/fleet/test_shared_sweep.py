"""Two boxes that share a store, each with a sweep as a user calls it: the second begins with what the first has proved."""

from __future__ import annotations

import pytest

from tests.support.postgres import Postgres, name_of
from tests.support.sweep_box import SweepBox, swept
from tunerd.measure.store import EvidenceStore
from tunerd.profile.arm import OFF

# Nothing that is drafted is ever right there, so off is much faster; a sweep needs the processors to itself.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(1200)]


def share(box: SweepBox, url: str, build: SweepBox) -> None:
    """The store, and another's build, which is the same by its hash."""
    settings = box.box.folder / "config" / "tunerd.toml"
    text = settings.read_text().replace(str(box.engine.program), str(build.engine.program))
    settings.write_text(f'{text}[store]\nurl = "{url}"\n')
    box.call("apply", "night", "--yes")


def test_a_box_tries_first_what_won_on_another_and_proves_it_itself(postgres: Postgres) -> None:
    url = postgres.database()
    with swept() as first, swept() as second:
        share(first, url, first)
        share(second, url, first)
        found = first.sweep(budget="80s")
        assert found["verdict"] == "promote", found
        kinds = postgres.query("select distinct kind from told order by 1", name_of(url))
        assert kinds == ["arm", "law", "winner"]
        assert postgres.query("select count(*) from claim", name_of(url)) == ["0"]

        found = second.sweep(budget="80s")
        with EvidenceStore(second.box.context.paths.evidence) as store:
            starts = [one for one in store.sweep_events(found["sweep"]) if one["event"] == "boot"]
        assert [one["purpose"] for one in starts[:2]] == ["incumbent", "seed"]
        assert starts[1]["arm"]["spec"] == OFF
        shown = second.json("sweep", "show")
        assert found["verdict"] == "promote", found
        assert shown["verdict_record"]["n_pairs"] >= 3, "proved here"
        assert second.serves
