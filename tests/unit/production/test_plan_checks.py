"""What stands against a plan, and what a person should know before it is carried out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import capabilities_of
from tests.support.profiles import context, profile_of
from tunerd.engine.commandline import CommandLine, render
from tunerd.engine.help import Effect, Engine, OffloadDevice, Proof
from tunerd.machine.facts import Cpu, Gpu, Host, HostMemory
from tunerd.machine.files import Files
from tunerd.model.facts import ModelFacts
from tunerd.model.files import ModelFiles
from tunerd.production.checks import (
    UserFacts,
    check_live,
    check_machine,
    check_model,
    check_proofs,
    check_user,
    check_values,
    environment_conflicts,
    explain,
    serving_after,
)
from tunerd.profile.layers import Resolved
from tunerd.result import Level, Message
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.units.live import LiveUnit, Serving, read_live
from tunerd.units.text import unified_diff
from tunerd.words import MiB, Mode

CARD = Gpu(
    index=0, name="NVIDIA GeForce RTX 3090 Ti", uuid=None, total_mib=MiB(24564), used_mib=None,
    reserved_mib=None, free_mib=None, processes=None, display_active=None, power_limit_w=None,
    power_default_w=None, power_max_w=None, pcie_generation=None, pcie_generation_max=None,
    pcie_width=None, pcie_width_max=None, compute_capability=None, is_mig=None,
)  # fmt: skip
DEBIAN_PORT = 9931
HOST = Host(
    gpus=(CARD,), gpu_problem=None, driver_version=None, cuda_version=None,
    cpu=Cpu(None, 8, 16, None), memory=HostMemory(None, None, None, None, None, None), kernel=None,
    hostname=None, in_container=None,
)  # fmt: skip


def codes(messages: Iterable[Message]) -> list[tuple[str, str]]:
    return [(str(message.level), message.code) for message in messages]


def profile(**data: Any) -> Resolved:
    return profile_of({key.replace("__", "."): value for key, value in data.items()})


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write(design(SHAPES["tiny"]), path)
    return ModelFiles(None, Files()).read_facts(path)


# The machine.


def machine(host: Host = HOST, devices: tuple[OffloadDevice, ...] = (), **match: Any) -> list[Any]:
    wanted = profile(**{f"match__{key}": value for key, value in match.items()})
    return codes(check_machine(wanted, host, devices, has_gpu=bool(host.gpus or devices)))


def test_the_card_that_the_profile_names_is_right() -> None:
    assert machine(gpu="*RTX 3090*", vram_min_mib=23000, vram_max_mib=25000) == []
    assert machine(gpu="*rtx 3090 ti*") == []
    assert machine() == []


def test_another_card_and_a_smaller_one_are_warned_about() -> None:
    assert machine(gpu="*RTX 4070 SUPER*") == [("warning", "other-gpu")]
    assert machine(gpu="*RTX 3090*", vram_min_mib=30000) == [("warning", "small-gpu")]
    assert machine(gpu="*RTX 3090*", vram_max_mib=13000) == [("warning", "large-gpu")]
    unknown = replace(HOST, gpus=(replace(CARD, total_mib=None),))
    assert machine(unknown, gpu="*RTX 3090*", vram_min_mib=30000) == []


def test_a_card_that_only_the_engine_sees_counts() -> None:
    device = OffloadDevice("Vulkan0", "AMD Radeon RX 7900", MiB(24000), None)
    blind = replace(HOST, gpus=())
    assert machine(blind, (device,), gpu="*RADEON*") == []


@pytest.mark.parametrize("gpus", [(), None])
def test_no_card_where_one_is_wanted_is_warned_about(gpus: tuple[Gpu, ...] | None) -> None:
    assert machine(replace(HOST, gpus=gpus), gpu="*RTX*") == [("warning", "no-gpu")]


def test_a_card_that_stays_idle_is_noted() -> None:
    assert machine(gpu="none") == [("note", "gpu-unused")]
    assert machine(replace(HOST, gpus=()), gpu="none") == []


# The model.


def test_mtp_without_a_block_is_refused_with_what_to_get_instead(facts: ModelFacts) -> None:
    wanted = profile(speculation__type="mtp", model__hf_repo="user/x-MTP-GGUF")
    assert codes(check_model(wanted, facts)) == []
    (message,) = check_model(wanted, replace(facts, n_nextn=0, mtp_problem=None))
    assert (message.level, message.code) == (Level.ERROR, "no-mtp-block")
    assert "user/x-MTP-GGUF" in (message.hint or "")
    assert codes(check_model(profile(), replace(facts, n_nextn=0))) == []


def test_a_companion_file_is_no_model(facts: ModelFacts) -> None:
    assert ("error", "draft-only") in codes(
        check_model(profile(), replace(facts, is_companion=True))
    )


def test_more_context_than_trained_is_warned_about(facts: ModelFacts) -> None:
    trained = facts.context_length or 0
    assert codes(check_model(profile(serving__ctx_size=trained), facts)) == []
    found = codes(check_model(profile(serving__ctx_size=trained + 1), facts))
    assert found == [("warning", "long-context")]
    unknown = replace(facts, context_length=None)
    assert codes(check_model(profile(serving__ctx_size=trained + 1), unknown)) == []


def test_a_model_without_a_template_is_warned_about_unless_one_is_given(facts: ModelFacts) -> None:
    bare = replace(facts, chat_template_sha256=None)
    assert codes(check_model(profile(), bare)) == [("warning", "no-template")]
    assert codes(check_model(profile(serving__chat_template="chatml"), bare)) == []
    assert codes(check_model(profile(serving__jinja=False), bare)) == []


# Values.


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, []),
        ({"speculation__type": "mtp", "speculation__n_min": 4, "speculation__n_max": 3},
         [("error", "n-min")]),
        ({"speculation__n_min": 4, "speculation__n_max": 3}, []),
        ({"speculation__type": "mtp", "speculation__n_min": 3, "speculation__n_max": 3}, []),
        ({"serving__n_ubatch": 513, "serving__n_batch": 512}, [("error", "ubatch")]),
        ({"serving__n_ubatch": 512, "serving__n_batch": 512}, []),
        ({"speculation__type": "mtp", "serving__n_parallel": 2}, [("warning", "slots")]),
        ({"serving__n_parallel": 2}, []),
        ({"serving__threads": 8}, []),
        ({"serving__threads": 9}, [("warning", "threads")]),
        ({"serving__threads": "physical"}, []),
    ],
)  # fmt: skip
def test_values_that_exclude_each_other_are_found(
    data: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert codes(check_values(profile(**data), HOST)) == expected


def test_physical_cores_must_be_known() -> None:
    blind = replace(HOST, cpu=Cpu(None, None, None, None))
    assert codes(check_values(profile(serving__threads="physical"), blind)) == [("error", "cores")]
    assert codes(check_values(profile(serving__threads=99), blind)) == []


@pytest.mark.parametrize("host", ["/run/llama.sock", "127.0.0.1, llama.sock"])
def test_a_unix_socket_is_refused_before_anything_stops(host: str) -> None:
    (refused,) = check_values(profile(serving__host=host), HOST)

    assert (refused.level, refused.code) == (Level.ERROR, "unix-socket")
    assert "127.0.0.1" in (refused.hint or "")


@pytest.mark.parametrize(
    ("host", "is_open"),
    [
        ("127.0.0.1", False),
        ("127.5.0.1", False),
        ("::1", False),
        ("localhost", False),
        ("127.0.0.1, ::1", False),
        ("default", False),
        ("0.0.0.0", True),  # noqa: S104
        ("::", True),
        ("192.168.2.2", True),
        ("127.0.0.1,0.0.0.0", True),
        ("localhost.example.org", True),
        ("127.example.org", True),
        ("::1f", True),
    ],
)
def test_an_address_that_others_reach_is_warned_about(host: str, is_open: bool) -> None:
    found = codes(check_values(profile(serving__host=host), HOST))
    assert found == ([("warning", "open-port")] if is_open else [])
    keyed = profile(serving__host=host, serving__api_key_file="/etc/key")
    assert codes(check_values(keyed, HOST)) == []


# Proofs.


def engine(*proofs: Proof) -> Engine:
    return Engine(
        "mine", Path("/e"), "test", identity=None, version=None, capabilities=None, proofs=proofs,
        problem=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("effect", "expected"),
    [
        (Effect.PROVED, []),
        (Effect.UNTRIED, [("note", "mtp-untried")]),
        (Effect.NO_EFFECT, [("error", "mtp-unproved")]),
        (Effect.FAILED, [("error", "mtp-unproved")]),
    ],
)
def test_what_a_build_was_seen_not_to_do_is_refused(
    effect: Effect, expected: list[tuple[str, str]]
) -> None:
    wanted = profile(speculation__type="mtp")
    assert codes(check_proofs(wanted, engine(Proof("mtp", effect, "x")))) == expected
    assert codes(check_proofs(profile(), engine(Proof("mtp", effect, "x")))) == []


def test_a_probability_that_is_ignored_is_warned_about_where_it_matters() -> None:
    build = engine(Proof("mtp", Effect.PROVED, "x"), Proof("p-min", Effect.NO_EFFECT, "y"))
    gated = profile(speculation__type="mtp", speculation__p_min=0.75)
    assert codes(check_proofs(gated, build)) == [("warning", "p-min-ignored")]
    assert (
        codes(check_proofs(profile(speculation__type="mtp", speculation__p_min=0.0), build)) == []
    )


# What serves now.

OLD = "[Service]\nExecStart=/bin/x --alias a --host 127.0.0.1 --port 8080\nNice=5\n"


def live(text: str | None, *drop_ins: tuple[Path, str]) -> LiveUnit:
    return read_live(
        unit="u.service", path=None, text=text, drop_ins=drop_ins, file_environment={},
        specifiers={},
    )  # fmt: skip


def serving(host: str | None, port: int | None, alias: str | None) -> Serving:
    return replace(live(None).serving, host=host, port=port, alias=alias)


def test_what_changes_for_clients_is_warned_about() -> None:
    same = serving("127.0.0.1", 8080, "a")
    text = "# Written by tunerd: x\n" + OLD.replace("Nice=5\n", "")
    assert codes(check_live(same, live(text))) == []
    other = codes(check_live(serving("0.0.0.0", 9, "b"), live(text)))  # noqa: S104
    assert other == [("warning", f"{what}-changes") for what in ("alias", "host", "port")]
    assert codes(check_live(serving(None, None, None), live(text))) == []


def test_a_hand_written_unit_is_adopted_and_its_lines_are_shown() -> None:
    found = list(check_live(serving("127.0.0.1", 8080, "a"), live(OLD), lost=("Nice=5",)))
    assert codes(found) == [("note", "adopted"), ("warning", "foreign-directives")]
    assert "Nice=5" in found[1].text


def test_a_packaged_unit_stays_and_is_not_said_to_be_kept_elsewhere() -> None:
    ours = Path("/etc/systemd/system/u.service")
    packaged = replace(live(OLD), path=Path("/usr/lib/systemd/system/u.service"), shadowed_by=ours)
    found = next(iter(check_live(serving("127.0.0.1", 8080, "a"), packaged)))
    assert found.code == "adopted"
    assert ".pre-" not in found.text
    assert "`/usr/lib/systemd/system/u.service` stays" in found.text
    assert str(ours) in found.text
    assert found.hint is not None
    assert "rollback" in found.hint


def test_a_drop_in_that_would_win_is_an_error() -> None:
    drop_in = (Path("/d/x.conf"), "[Service]\nExecStart=\nExecStart=/bin/y\n")
    found = codes(check_live(serving(None, None, None), live(OLD, drop_in)))
    assert ("error", "drop-in-exec") in found
    harmless = (Path("/d/x.conf"), "[Service]\nNice=1\n")
    assert ("note", "drop-ins") in codes(check_live(serving(None, None, None), live(OLD, harmless)))


def test_a_first_deployment_changes_nothing_for_anybody() -> None:
    assert list(check_live(serving("x", 1, "y"), live(None))) == []


# The account.


def user(**changes: Any) -> UserFacts:
    return replace(UserFacts(Mode.SYSTEM, "llama", False, (), None, None), **changes)


@pytest.mark.parametrize(
    ("changes", "mlock", "expected"),
    [
        ({}, True, []),
        ({"is_missing": True}, False, [("error", "no-account")]),
        ({"unreadable": ("/m", "/d")}, False, [("error", "unreadable")] * 2),
        ({"mode": Mode.USER, "lingers": False}, False, [("warning", "no-linger")]),
        ({"mode": Mode.USER, "lingers": None}, False, []),
        ({"mode": Mode.USER, "memlock_unlimited": False}, True, [("warning", "memlock")]),
        ({"mode": Mode.USER, "memlock_unlimited": False}, False, []),
        ({"mode": Mode.LOCAL, "memlock_unlimited": None}, True, []),
        ({"mode": Mode.LOCAL, "lacks_manager": True}, False, [("warning", "no-user-manager")]),
    ],
)
def test_the_account_must_be_able_to_serve(
    changes: dict[str, Any], mlock: bool, expected: list[tuple[str, str]]
) -> None:
    assert codes(check_user(user(**changes), wants_mlock=mlock)) == expected


# The environment.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES", []),
        ("GGML_CUDA_ENABLE_UNIFIED_MEMORY", [("warning", "unified-memory")]),
        ("LLAMA_ARG_CTX_SIZE", [("error", "hidden-option")]),
        ("LLAMA_API_KEY", [("error", "secret")]),
        ("LLAMA_ARG_API_KEY", [("error", "secret")]),
        ("HF_TOKEN", [("error", "secret")]),
        ("TOKENIZERS_PARALLELISM", []),
    ],
)
def test_variables_that_hide_something_are_found(name: str, expected: list[Any]) -> None:
    found = list(environment_conflicts({name: "hunter2"}))
    assert codes(found) == expected
    assert "hunter2" not in str(found)


# What is shown.


def test_every_flag_is_explained_with_its_origin() -> None:
    wanted = profile(speculation__type="mtp", serving__port="default", serving__alias="x")
    command = render(wanted, capabilities_of("main-0x"), context(has_gpu=False))
    assert isinstance(command, CommandLine)
    rows = explain(command, wanted)
    shown = {words: (key, origin) for words, key, origin in rows}
    assert shown["--alias x"] == ("serving.alias", "site.toml")
    assert shown["--jinja"][1].startswith("tunerd: ")
    assert ("(left to the engine)", "serving.port", "site.toml") in rows
    keys = {key for _, key, _ in rows}
    assert set(wanted.settings) <= keys
    fit = next(words for words, key, _ in rows if key == "memory.fit_mib")
    assert fit.startswith("(left out")


def test_the_address_after_the_plan_is_that_of_its_line() -> None:
    command = render(
        profile(serving__port=9, serving__alias="x"), capabilities_of("main-0x"),
        context(has_gpu=False),
    )  # fmt: skip
    assert isinstance(command, CommandLine)
    after = serving_after(command, capabilities_of("main-0x"))
    assert (after.host, after.port, after.alias) == ("127.0.0.1", 9, "x")


def test_a_port_that_the_line_does_not_name_is_that_of_the_build() -> None:
    capabilities = capabilities_of("main-0x")
    assert capabilities.default_port == DEBIAN_PORT
    line = render(profile(), capabilities, context(has_gpu=False))
    assert isinstance(line, CommandLine)
    unnamed = replace(line, arguments=tuple(a for a in line.arguments if a.key != "serving.port"))

    assert serving_after(unnamed, capabilities).port == DEBIAN_PORT
    assert serving_after(unnamed, None).port is None


def test_a_diff_is_what_people_know_and_empty_where_nothing_changes() -> None:
    assert unified_diff("a\n", "a\n", "u") == ""
    assert unified_diff(None, None, "u") == ""
    text = unified_diff("a\nb\n", "a\nc\n", "u")
    assert text.splitlines()[:2] == ["--- u (live)", "+++ u (planned)"]
    assert "-b" in text
    assert "+c" in text
    assert unified_diff(None, "a\n", "u").startswith("--- (no unit)")
    assert "+++ (no unit)" in unified_diff("a\n", None, "u")
