"""What is sent to who helps: enough to help with, and nothing of anybody's."""

from __future__ import annotations

import json
import platform
import stat
from pathlib import Path

import pytest

from tests.support.local_box import Box

UNIT = """\
[Service]
Environment=LLAMA_API_KEY=geheim1 HF_TOKEN=geheim2
Environment="HUGGING_TOKEN=geheim4 geheim5" 'A_SECRET=geheim6 geheim7'
SetCredential=api-key:geheim8
ExecStartPre=/bin/warm --api_key "geheim9 geheim10" --hf-token \\
  geheim11
ExecStart=/opt/llama-server -m /home/alice/m.gguf --api-key geheim3 --port 8099 --host 192.168.7.9,fd12:7::9
"""


@pytest.fixture
def box(tmp_path: Path) -> Box:
    made = Box(tmp_path, {"USER": "alice"})
    made.put_unit(UNIT)
    made.configure(
        '[notify]\nwebhook = "https://ntfy.sh/my-topic"\n'
        "[engines.mine]\npath = '/opt/llama-server'\nenvironment = {HF_TOKEN = 'geheim12', LANG = 'C'}\n"
        '[store]\nurl = "postgresql+psycopg://tunerd@db.my-lan/tunerd"\n'
    )
    return made


def test_names_addresses_links_and_secrets_are_taken_out(box: Box) -> None:
    said = box.call("support-bundle").stdout
    parts = json.loads(said)
    assert parts["status"]["unit"] == "llama-server.service"
    assert any("--port 8099" in line for line in parts["unit"])
    for private in (
        "geheim",
        "alice",
        "192.168.7.9",
        "fd12:",
        "my-topic",
        "my-lan",
        f'"{platform.node()}"',
    ):
        assert private not in said
    assert parts["detect"]["hostname"] == "HOST"


def test_it_is_shown_before_it_is_written_and_nobody_else_reads_it(box: Box) -> None:
    target = box.folder / "support.json"
    refused = box.call("support-bundle", "--output", str(target))
    assert refused.returncode == 2, "nobody there to look at it"
    assert not target.exists()

    done = box.call("support-bundle", "--output", str(target), "--yes")
    assert done.returncode == 0, done.stderr
    assert json.loads(target.read_text())["tunerd"]["version"]
    assert stat.S_IMODE(target.stat().st_mode) & 0o077 == 0
    box.configure("[notify\n")  # what cannot be read is told in its place
    assert json.loads(box.call("support-bundle").stdout)["detect"]["cpu"]
