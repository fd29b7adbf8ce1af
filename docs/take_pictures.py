"""Takes the pictures of the README: the page over a server that was watched for hours, and a report of a real bench.

usage: python docs/take_pictures.py

The server is the embedded one on a designed model, deployed and measured here; the card, its last hours and the night are
those of the tests. Needs what the tests of the page need: chromium, and `pip install tunerd[browser,embedded]`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from playwright.sync_api import ViewportSize

from tests.support.api_box import serving
from tests.support.browser import Chromium, Page, browser
from tests.support.fake_gpu import FakeGpuReader, rtx_4070_super
from tests.support.local_box import Box, deployed
from tests.support.made_sweep import put_sweep
from tests.support.readings import a_reading, served, watched_hours
from tunerd.cli.main import cli
from tunerd.machine.facts import GpuProcess
from tunerd.machine.net import free_port
from tunerd.operations import entered_by
from tunerd.watch.figures import gpu_now
from tunerd.words import MiB

FOLDER = Path(__file__).parent / "pictures"
SIZE: ViewportSize = {"width": 1000, "height": 760}
MOST_BYTES = 150_000
SERVER_PID = 4242


def page(chromium: Chromium, box: Box) -> None:
    """The page's first view."""
    put_sweep(box)
    watched_hours(box.context)
    held = GpuProcess(SERVER_PID, MiB(9600), "compute", "llama-server", "llama-server.service")
    card = replace(rtx_4070_super(used_mib=9900), processes=(held,))
    ctx = replace(box.context, gpu=FakeGpuReader(card))
    work = served(600, 51.5, n_drafted=900, n_accepted=700)
    newest = a_reading(ctx.clock.now_s(), served=work, pid=SERVER_PID)
    with serving(box=box, context=ctx) as api:
        api.telemetry.add(replace(newest, gpus=(gpu_now(card, [SERVER_PID]),)))
        first_view(chromium.open(api.url, allow=api.url), "page.png")


def report(chromium: Chromium, box: Box) -> None:
    """The first view of a report about a bench of the server."""
    for words in (("bench", "--repeats", "1"), ("report", "1", "--output", "report.html")):
        command = [sys.executable, "-m", "tunerd", *words]
        subprocess.run(command, env=box.environment, cwd=box.folder, check=True)
    first_view(chromium.open(box.folder / "report.html"), "report.png")


def first_view(shown: Page, name: str) -> None:
    """Keep what is seen without scrolling."""
    shown.inner.set_viewport_size(SIZE)
    shown.inner.screenshot(path=FOLDER / name)
    shown.close()


def main() -> None:
    """Take both."""
    FOLDER.mkdir(exist_ok=True)
    entered_by(cli)
    with (
        tempfile.TemporaryDirectory(prefix="tunerd-pictures-") as folder,
        deployed(Path(folder), free_port()) as box,
        browser() as chromium,
    ):
        report(chromium, box)
        page(chromium, box)
    for picture in sorted(FOLDER.glob("*.png")):
        n_bytes = picture.stat().st_size
        sys.stdout.write(f"{picture}: {n_bytes:,} bytes\n")
        if n_bytes > MOST_BYTES:
            sys.exit("too large")


if __name__ == "__main__":
    main()
