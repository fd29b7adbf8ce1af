"""Builds and models that are replaced below a server that runs: what is said of it, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.build_box import BuildBox, build_box
from tests.support.fake_gpu import FakeGpuReader, rtx_4070_super
from tests.support.folders import open_folder
from tunerd.engine.choice import PlanRequest
from tunerd.engine.conditions import FingerprintReader
from tunerd.errors import DeployError, LeaseEnded
from tunerd.measure.target import open_live
from tunerd.production.lease import demand_return, hold
from tunerd.production.plan import make_plan
from tunerd.production.rollback import rollback
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.watch.guarding import restart_server

OLD, NEW = "mainline-2026-04-26", "mainline-2026-08-18"


def install(folder: Path, name: str) -> None:
    """Put a build into a folder, in the place of the one before, as an installation does."""
    folder.mkdir(exist_ok=True)
    shutil.copy(needs.engine(name), folder / "fresh")
    (folder / "fresh").replace(folder / "llama-server")


def lead(link: Path, to: Path) -> None:
    """A link leads there from now on, as with `ln -sfn`."""
    link.with_name("fresh").symlink_to(to)
    link.with_name("fresh").replace(link)


@contextmanager
def a_box() -> Iterator[tuple[BuildBox, Path]]:
    """Its engine is the old build by `current/llama-server`, its model a link as in the cache of Hugging Face."""
    with open_folder() as builds:
        install(builds / "b1", OLD)
        lead(builds / "current", builds / "b1")
        with build_box(builds / "current/llama-server", shape="tiny-nomtp") as box:
            box.model.rename(box.model.with_name("blob"))
            lead(box.model, box.model.with_name("blob"))
            yield box, builds


def serve(box: BuildBox, name: str, **values: object) -> None:
    box.profile(name, **values)
    box.apply(name)


def drift(box: BuildBox) -> str:
    """What `verify` says is not as deployed."""
    return "; ".join(one["text"] for one in box.json("verify", expect=6)["drift"])


def test_an_older_unit_with_flags_that_the_build_takes_no_more_is_refused_before_anything_stops() -> (
    None
):
    """It was tried: the server was away for it, and came back only where its own flags were still taken."""
    with a_box() as (box, builds):
        serve(box, "before", serving__checkpoint_spacing=256)
        serve(box, "now", serving__checkpoint_spacing=512)
        pid = box.json("status")["pid"]
        assert "no-way-back" not in {one["code"] for one in box.json("plan", "now")["messages"]}
        install(builds / "b1", NEW)

        refused = box.json("rollback", "--yes", expect=1)["error"]
        planned = box.json("plan", "now")

        assert "no longer accepts --checkpoint-every-n-tokens" in refused["cause"]
        assert refused["state"] == "nothing was changed"
        assert box.json("status")["pid"] == pid
        told = next(one for one in planned["messages"] if one["code"] == "no-way-back")
        assert "--checkpoint-every-n-tokens" in told["text"]


def test_a_variable_that_the_build_takes_no_more_is_told_before_the_server_is_started_on_it() -> (
    None
):
    """As in the defaults file of Debian's unit: a server with it ends at once, with any argument."""
    with a_box() as (box, builds):
        serve(box, "now")
        unit = box.box.unit
        with_variable = "[Service]\nEnvironment=LLAMA_ARG_DRAFT_MAX=3\n"
        unit.write_text(unit.read_text().replace("[Service]\n", with_variable, 1))

        def told() -> dict[str, str]:
            found = box.box.json("doctor", code=None)["findings"]
            return {one["code"]: one["seen"] for one in found}

        assert not {"flags-removed", "server-down"} & told().keys()
        install(builds / "b1", NEW)
        found = told()
        assert "does not accept LLAMA_ARG_DRAFT_MAX" in found["flags-removed"]
        assert "server-down" not in found  # which says the same


def test_a_server_whose_build_was_replaced_under_it_lends_its_figures_to_no_other_build() -> None:
    """A bench kept what the old build did as what the new one does."""
    with a_box() as (box, builds):
        serve(box, "serves")
        ctx = box.box.context
        then = open_live(ctx).arm.fingerprint
        demand_return(ctx, ctx.services.state(ctx.unit))

        install(builds / "b2", NEW)
        lead(builds / "current", builds / "b2")
        target = open_live(ctx)
        assert (target.arm.fingerprint.engine_sha256, then.engine_sha256 is None) == (None, False)
        assert target.arm.fingerprint.model_sha256 == then.model_sha256
        assert "was replaced after the server started" in target.messages[0].text
        told = [one["code"] for one in box.json("plan", "serves")["messages"]]
        assert "way-back-replaced" in told, "the old unit starts that build too"
        assert f"leads to {builds}/b2/llama-server" in drift(box)
        told_of_status = box.box.call("status").stdout
        assert "none; `tunerd verify` reads the engine's files as well" in told_of_status
        with pytest.raises(DeployError, match="is not stopped for a measurement"):
            demand_return(ctx, ctx.services.state(ctx.unit))

        ctx.services.restart(ctx.unit)
        demand_return(ctx, ctx.services.state(ctx.unit))


def test_nobody_is_told_to_restart_the_server_whose_model_is_gone() -> None:
    """It still served, and would not have come back."""
    with a_box() as (box, _):
        serve(box, "serves")
        box.box.model.unlink()

        ctx = box.box.context
        with pytest.raises(DeployError, match="is not stopped for a measurement") as refused:
            demand_return(ctx, ctx.services.state(ctx.unit))

        assert f"`{box.box.model}` is gone" in str(refused.value.cause)
        assert refused.value.hint == f"put `{box.box.model}` back, then try again"


def test_what_a_server_does_is_no_evidence_of_variables_that_its_unit_got_since() -> None:
    """A bench kept it as of the new ones: of the command line alone it was seen that it is what runs."""
    with a_box() as (box, _):
        serve(box, "serves")
        ctx, unit = box.box.context, box.box.unit
        then = open_live(ctx)
        assert then.arm.fingerprint.arguments_sha256 is not None

        more = "[Service]\nEnvironment=LLAMA_ARG_DRAFT_MAX=3\n"
        unit.write_text(unit.read_text().replace("[Service]\n", more, 1))
        ctx.services.reload()

        target = open_live(ctx)
        assert target.arm.fingerprint.arguments_sha256 is None
        assert "was edited after the server started" in target.messages[0].text


def test_files_that_are_replaced_are_told_are_no_evidence_of_what_stands_and_end_a_measurement() -> (
    None
):
    """Only engine and model were looked at: what another template, grammar or adapter did counted as of the one before."""
    with a_box() as (box, builds):
        template = box.box.folder / "chat.jinja"
        template.write_text("{{ messages[0].content }}")
        grammar = box.box.folder / "words.gbnf"
        grammar.write_text("root ::= [a-z ]+")
        serve(
            box,
            "serves",
            model__chat_template_file=str(template),
            extra_args=["--grammar-file", str(grammar)],
        )
        template.chmod(0o664)  # only touched
        ctx = box.box.context
        assert None not in {
            open_live(ctx).arm.fingerprint.model_sha256,
            open_live(ctx).arm.fingerprint.template_sha256,
        }
        box.json("verify")

        write(design(SHAPES["tiny-moe-nomtp"]), box.model.with_name("other.gguf"))
        lead(box.model, box.model.with_name("other.gguf"))
        template.write_text("{{ messages[-1].content }}")

        found = open_live(ctx).arm.fingerprint
        assert (found.model_sha256, found.template_sha256) == (None, None)
        assert found.engine_sha256 is not None
        assert str(box.model) in drift(box)
        assert str(template) in drift(box)
        argv = open_live(ctx).arm.argv
        then = FingerprintReader(ctx).of(argv).fingerprint.model_sha256

        grammar.write_text("root ::= [a-z ]* ")

        assert str(grammar) in drift(box)
        assert FingerprintReader(ctx).of(argv).fingerprint.model_sha256 not in {None, then}

        box.apply("serves")
        for path in (template, grammar, box.model, builds / "current/llama-server"):
            plan = make_plan(ctx, PlanRequest("serves", {}))
            with hold(ctx, purpose="a test", budget_s=60) as held:
                with held.serve(plan) as candidate:
                    assert candidate.fault is None
                with path.open("ab") as file:
                    file.write(b" ")
                with (
                    pytest.raises(LeaseEnded, match="replaced during the measurement") as ended,
                    held.serve(plan),
                ):
                    pass
            assert str(path) in str(ended.value.cause)
            assert box.json("status")["healthy"]


def test_with_keep_engine_the_build_that_was_deployed_is_there_after_it_was_replaced() -> None:
    """What was kept was the build that a swap replaced: of the one that served there was no copy."""
    with a_box() as (box, builds):
        box.profile("serves", serving__checkpoint_spacing=256)
        box.json("settings", "set", "swap.keep_engine", "true")
        box.apply("serves")
        install(builds / "b1", NEW)
        kept = box.json("guard", "check")["replanned"]["kept"]

        box.apply("serves", "--set", f'engine.prefer=["{kept}"]')

        assert "--checkpoint-every-n-tokens" in box.json("history", "show", "2")["unit"]
        assert box.json("status")["healthy"]
        assert box.json("guard", "check")["replanned"]["refusals"] == []
        assert box.json("plan", "serves", "--set", f'engine.prefer=["{kept}"]')["argv"]
        back = box.json("rollback", "--to", "1", "--dry-run")["messages"]
        (told,) = (one for one in back if one["code"] == "replaced")
        assert f'--set \'engine.prefer=["{kept}"]' in told["hint"], (
            "by which the old build comes back"
        )


def test_a_server_is_not_stopped_for_a_rollback_where_a_half_written_file_lets_nothing_start() -> (
    None
):
    """It was stopped, and neither unit started: the file that both name had been cut off by a copy."""
    with a_box() as (box, builds):
        serve(box, "before")
        serve(box, "now", serving__ctx_size=512)
        pid = box.json("status")["pid"]
        for path in (box.model, builds / "current/llama-server"):
            whole, half = path.with_name("whole"), path.with_name("half")
            shutil.copy(path, whole)
            half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            half.chmod(0o755)
            half.replace(path)

            refused = box.json("rollback", "--yes", expect=1)["error"]

            assert str(path) in refused["cause"]
            assert refused["state"] == "nothing was changed"
            assert box.json("status")["pid"] == pid
            whole.replace(path)


def test_a_rollback_is_tried_where_only_the_older_unit_may_not_start_and_what_serves_comes_back() -> (
    None
):
    """What tunerd knows against a start may be wrong, and going back is for trouble."""
    with a_box() as (box, _):
        other = box.model.with_name("other.gguf")
        write(design(SHAPES["tiny-nomtp"]), other)
        serve(box, "before", model__path=str(other))
        serve(box, "now")
        other.write_bytes(other.read_bytes()[: other.stat().st_size // 2])

        tried = box.json("rollback", "--yes", expect=3)

        assert "model" in tried["error"]["cause"]
        assert box.json("status")["healthy"]
        told = [one["text"] for one in box.json("rollback", "--dry-run")["messages"]]
        assert any("may no longer start" in one for one in told), told


def test_a_server_whose_driver_was_updated_under_it_is_not_stopped_before_a_reboot() -> None:
    """Nothing that starts finds the card: a night took the server away, and only a reboot brought it back."""
    with a_box() as (box, _):
        # The real engine with a library of that name: no build for a card is here.
        driver = box.box.folder / "libcuda.so.1"
        shutil.copy("/lib/x86_64-linux-gnu/libutil.so.1", driver)
        box.profile("on-the-card", environment__LD_PRELOAD=str(driver))
        named = box.model.with_name("nvidia_Llama-3_3-Nemotron.gguf")
        write(design(SHAPES["tiny-nomtp"]), named)
        box.profile("before", model__path=str(named))
        cards = FakeGpuReader(rtx_4070_super())
        ctx = replace(box.box.context, gpu=cards)
        box.apply("before")
        cards.update_driver()
        demand_return(ctx, ctx.services.state(ctx.unit))  # this one has nothing of the driver
        box.apply("on-the-card")
        pid = box.json("status")["pid"]

        changes: tuple[Callable[[], object], ...] = (
            lambda: rollback(ctx, to=None, drain=False),
            lambda: restart_server(ctx, ctx.services.state(ctx.unit).life),
            lambda: demand_return(ctx, ctx.services.state(ctx.unit)),
        )
        for change in changes:
            with pytest.raises(DeployError, match="could not start again") as refused:
                change()
            assert "is 580.95.05, the driver's library 581.1" in str(refused.value.cause)
        assert box.json("status")["pid"] == pid
        told = [one.code for one in make_plan(ctx, PlanRequest("before", {})).errors]
        assert told == [], "a plan for the processor"
        cards.show(rtx_4070_super())
        assert rollback(ctx, to=None, drain=False).exit_code == 0
