"""What others measured is what a sweep tries first, never evidence, and can be taken back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.folders import ROOT
from tests.support.sweep_box import swept
from tunerd.machine.net import free_port


def a_bundle(model: str, *settings: dict[str, Any]) -> str:
    entry = {"source": "a friend", "card": None, "engine": {"family": "mainline"}, "model": {"name": model},
             "figures": [{"case": "code", "tok_s": 99.0}]}  # fmt: skip
    entries = [{**entry, "settings": one} for one in settings]
    return json.dumps({"format": "tunerd-results", "version": 1, "written_by": "x", "entries": entries})  # fmt: skip


def test_a_bundle_gives_a_sweep_its_first_candidates_until_it_is_forgotten(tmp_path: Path) -> None:
    with swept(free_port()) as box:
        before = box.json("sweep", "run", "--dry-run")["plan"]["seeds"]
        model = box.json("plan", "night")["model"]["name"]
        file = tmp_path / "friend.json"
        off, deep = {"speculation.type": "off"}, {"speculation.type": "mtp", "speculation.n_max": 2}
        file.write_text(a_bundle(model, off, deep))
        made = box.json("results", "import", str(file))
        assert [row["fits"] for row in made["entries"]] == [True, True]
        (name,) = {row["bundle"] for row in made["entries"]}
        (kept,) = box.box.folder.rglob(f"imported/{name}.json")
        assert kept.stat().st_mode & 0o777 == 0o644, "looking is for everybody"
        kept.with_name("ffffffffffff.json").mkdir()  # as good as one that may not be read

        seeds = box.json("sweep", "run", "--dry-run")["plan"]["seeds"]
        assert len(seeds) == len(before) + 2
        assert any("no speculation" in seed for seed in seeds)
        listed = box.json("results", "list")
        assert listed["results"] == [], "nothing of it counts as measured here"
        assert listed["imported"] == [{"bundle": name, "entries": 2, "sources": ["a friend"]}]
        assert f"imported {name}: 2 configurations from a friend" in box.call("results", "list").stdout  # fmt: skip

        file.write_text(a_bundle("another model", off))
        other = box.json("results", "import", str(file))
        assert other["entries"][0]["why_not"] == "it is of another model: another model"
        assert box.json("sweep", "run", "--dry-run")["plan"]["seeds"] == seeds
        assert "it is of another model" in box.call("results", "import", str(file)).stdout

        file.write_text('{"format": "tunerd-results", "version": 2}')
        refused = box.call("results", "import", str(file), code=None)
        assert refused.returncode == 1
        assert "of version '2', and this tunerd reads version 1" in refused.stderr
        assert "nothing was imported" in refused.stderr

        box.call("results", "forget", name)
        assert box.json("sweep", "run", "--dry-run")["plan"]["seeds"] == before
        assert box.call("results", "forget", "../../x", code=None).returncode == 2

        shipped = box.json("results", "import", "--shipped")["entries"]
        assert len(shipped) == sum(len(json.loads(one.read_text())["entries"]) for one in (ROOT / "profiles/evidence").glob("*.json"))  # fmt: skip
        assert all("another card" in row["why_not"] or "did not serve" in row["why_not"] for row in shipped)  # fmt: skip

        box.call("bench", "--suite", "mtp", "--repeats", "1", "--yes")
        run = str(box.json("results", "list")["results"][0]["run"])
        out = box.call("results", "export", run, "--format", "bundle").stdout
        assert str(box.box.folder) not in out
        file.write_text(out)
        mine = box.json("results", "import", str(file))["entries"]
        assert [row["why_not"] for row in mine] == [None]
        assert mine[0]["settings"]["speculation.n_max"] == 4
