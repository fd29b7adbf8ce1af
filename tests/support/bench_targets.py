"""Targets with something else expected of them than their address tells."""

from __future__ import annotations

from dataclasses import replace

from tests.support.bench_box import BenchBox
from tunerd.measure.bench import OFF, ON, Session, result_of
from tunerd.measure.request import BenchRequest, Suite
from tunerd.measure.store import EvidenceStore
from tunerd.measure.target import open_url
from tunerd.measure.trust import Speculation
from tunerd.result import ActionResult


def asked_to_draft(box: BenchBox, url: str, *, drafts: bool) -> Session:
    """Bench a server of which it is known whether it is meant to draft."""
    ctx = box.context()
    target = replace(open_url(ctx, url), speculation=Speculation(drafts))
    session = Session(ctx, BenchRequest(repeats=1, seed=11))
    with EvidenceStore(ctx.paths.evidence) as session.store:
        session.on_server(target, url)
    return session


def bench_two(box: BenchBox, on: str, off: str, suite: Suite) -> ActionResult:
    """Bench two servers that run already as the arms of one profile."""
    ctx = box.context()
    session = Session(ctx, BenchRequest(suite=suite, repeats=1, seed=11))
    with EvidenceStore(ctx.paths.evidence) as session.store:
        for name, url, drafts in ((ON, on, True), (OFF, off, False)):
            opened = open_url(ctx, url)
            target = replace(opened, arm=replace(opened.arm, name=name),
                             speculation=Speculation(drafts))  # fmt: skip
            session.on_arm(target, "two stand-ins")
        return result_of(session, "two stand-ins", None)
