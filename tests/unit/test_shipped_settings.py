"""The settings file that install.sh writes: every line in it that can be uncommented is a default."""

from __future__ import annotations

import re
from pathlib import Path

from tunerd.paths import paths_for
from tunerd.settings import load_settings
from tunerd.words import Mode

SHIPPED = Path(__file__).parents[2] / "units" / "tunerd.toml"


def test_the_shipped_settings_are_the_defaults(tmp_path: Path) -> None:
    paths = paths_for(Mode.SYSTEM, {"TUNERD_CONFIG_DIR": str(tmp_path)})
    defaults = load_settings(paths, {})

    text = SHIPPED.read_text()
    own = "".join(f"[{table}]\n" for table in re.findall(r"(?m)^#\[([a-z]+)\]$", text))
    assert own.count("[") >= 8, "and each may be begun anew below"
    for content in (text, re.sub(r"(?m)^#(?=\[|[a-z_]+ = )", "", text), text + own):
        paths.settings_file.write_text(content)
        assert load_settings(paths, {}) == defaults
    assert len(re.findall(r"(?m)^#[a-z_]+ = ", text)) >= 5
