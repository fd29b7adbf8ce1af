"""What stands against a plan, and what a person should know before it is carried out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import capabilities_of
from tests.support.doctor_facts import HOST as A_HOST
from tests.support.fake_gpu import a_card
from tests.support.profiles import context, profile_of
from tunerd.engine.flags import CommandLine, render
from tunerd.engine.help import Effect, Engine, OffloadDevice, Proof
from tunerd.machine.facts import Cpu, Host
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
    check_written,
    environment_conflicts,
    explain,
    lost_lines,
    masked,
    serving_after,
)
from tunerd.profile.layers import Resolved
from tunerd.result import Level, Message
from tunerd.tryout.designed import SHAPES, design, write
from tunerd.units.live import LiveUnit, Serving, read_live, with_drop_ins
from tunerd.units.text import environment_of, parse_unit, unified_diff
from tunerd.words import MiB, Mode

DEBIAN_PORT = 9931
CARD = a_card("NVIDIA GeForce RTX 3090 Ti", total_mib=24564)
HOST = replace(A_HOST, gpus=(CARD,))
BLIND = replace(HOST, cpu=Cpu(None, None, None, None))
UNMEASURED = replace(HOST, gpus=(replace(CARD, total_mib=None),))


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


@pytest.mark.parametrize(
    ("match", "host", "expected"),
    [
        ({"gpu": "*rtx 3090*", "vram_min_mib": 23000, "vram_max_mib": 25000}, HOST, []),
        ({}, HOST, []),
        ({"gpu": "*RTX 4070 SUPER*"}, HOST, [("warning", "other-gpu")]),
        ({"gpu": "*RTX 3090*", "vram_min_mib": 30000}, HOST, [("warning", "small-gpu")]),
        ({"gpu": "*RTX 3090*", "vram_max_mib": 13000}, HOST, [("warning", "large-gpu")]),
        ({"gpu": "*RTX 3090*", "vram_min_mib": 30000}, UNMEASURED, []),
        ({"gpu": "*RTX*"}, replace(HOST, gpus=()), [("warning", "no-gpu")]),
        ({"gpu": "*RTX*"}, replace(HOST, gpus=None), [("warning", "no-gpu")]),
        ({"gpu": "none"}, HOST, [("note", "gpu-unused")]),
        ({"gpu": "none"}, replace(HOST, gpus=()), []),
    ],
)
def test_a_profile_for_another_machine_is_told_of(
    match: dict[str, Any], host: Host, expected: list[tuple[str, str]]
) -> None:
    wanted = profile(**{f"match__{key}": value for key, value in match.items()})
    assert codes(check_machine(wanted, host, (), has_gpu=bool(host.gpus))) == expected


def test_a_card_that_only_the_engine_sees_counts() -> None:
    device = OffloadDevice("Vulkan0", "AMD Radeon RX 7900", MiB(24000), None)
    blind = replace(HOST, gpus=())
    assert (
        codes(check_machine(profile(match__gpu="*RADEON*"), blind, (device,), has_gpu=True)) == []
    )


# The model.


def test_mtp_without_a_block_is_refused_with_what_to_get_instead(facts: ModelFacts) -> None:
    wanted = profile(speculation__type="mtp", model__hf_repo="user/x-MTP-GGUF")
    assert codes(check_model(wanted, facts)) == []
    (message,) = check_model(wanted, replace(facts, n_nextn=0, mtp_problem=None))
    assert (message.level, message.code) == (Level.ERROR, "no-mtp-block")
    assert "user/x-MTP-GGUF" in (message.hint or "")
    assert codes(check_model(profile(), replace(facts, n_nextn=0))) == []


@pytest.mark.parametrize(
    ("data", "changes", "expected"),
    [
        ({}, {"no_model": "it is an adapter"}, [("error", "no-model")]),
        ({"serving__ctx_size": 4096}, {"context_length": 4096}, []),
        ({"serving__ctx_size": 4097}, {"context_length": 4096}, [("warning", "long-context")]),
        ({"serving__ctx_size": 4097}, {"context_length": None}, []),
        ({}, {"chat_template_sha256": None}, [("warning", "no-template")]),
        ({"serving__chat_template": "chatml"}, {"chat_template_sha256": None}, []),
        ({"serving__jinja": False}, {"chat_template_sha256": None}, []),
    ],
)
def test_what_a_model_cannot_do_is_told(
    facts: ModelFacts, data: dict[str, Any], changes: dict[str, Any], expected: list[Any]
) -> None:
    assert codes(check_model(profile(**data), replace(facts, **changes))) == expected


# Values.


@pytest.mark.parametrize(
    ("data", "host", "expected"),
    [
        ({}, HOST, []),
        ({"speculation__type": "mtp", "speculation__n_min": 4, "speculation__n_max": 3}, HOST,
         [("error", "n-min")]),
        ({"speculation__type": "ngram-mod", "speculation__n_min": 48}, HOST, []),
        ({"speculation__n_min": 4, "speculation__n_max": 3}, HOST, []),
        ({"serving__n_ubatch": 513, "serving__n_batch": 512}, HOST, [("error", "ubatch")]),
        ({"speculation__type": "mtp", "serving__n_parallel": 2}, HOST, [("warning", "slots")]),
        ({"serving__n_parallel": 2}, HOST, []),
        ({"serving__threads": 9}, HOST, [("warning", "threads")]),
        ({"serving__threads": 9}, BLIND, []),
        ({"serving__threads": "physical"}, HOST, []),
        ({"serving__threads": "physical"}, BLIND, [("error", "cores")]),
    ],
)  # fmt: skip
def test_values_that_exclude_each_other_are_found(
    data: dict[str, Any], host: Host, expected: list[tuple[str, str]]
) -> None:
    assert codes(check_values(profile(**data), host)) == expected


@pytest.mark.parametrize("host", ["/run/llama.sock", "127.0.0.1, llama.sock"])
def test_a_unix_socket_is_refused_before_anything_stops(host: str) -> None:
    (refused,) = check_values(profile(serving__host=host), HOST)

    assert (refused.level, refused.code) == (Level.ERROR, "unix-socket")
    assert "127.0.0.1" in (refused.hint or "")


@pytest.mark.parametrize("flag", ["--api-prefix", "--ssl-cert-file"])
def test_a_server_that_is_asked_otherwise_is_refused_before_anything_stops(flag: str) -> None:
    """It was swapped in and taken back, since nobody answered where it was asked."""
    (refused,) = check_values(profile(extra_args=["--ssl-key-file", "/k", flag, "/x"]), HOST)

    assert (refused.level, refused.code) == (Level.ERROR, "asked-otherwise")
    assert flag in refused.text


@pytest.mark.parametrize(
    ("host", "is_open"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("localhost", False),
        ("default", False),
        ("0.0.0.0", True),  # noqa: S104
        ("127.0.0.1,0.0.0.0", True),
        ("localhost.example.org", True),
        ("127.example.org", True),
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


@pytest.mark.parametrize(
    ("dialect", "types", "is_told"),
    [
        ("ik-now", {"speculation__cache_type_k": "q8_0"}, True),
        ("main-mid", {"speculation__cache_type_v": "q8_0"}, True),
        ("ik-may", {"serving__cache_type_k": "q8_0", "speculation__cache_type_k": "q8_0"}, False),
        ("ik-now", {"serving__cache_type_k": "q8_0"}, False),
        ("main-lm", {"speculation__cache_type_k": "q8_0"}, False),
    ],
)
def test_cache_types_that_mtp_takes_no_notice_of_are_told(
    dialect: str, types: dict[str, str], is_told: bool
) -> None:
    build = replace(engine(Proof("mtp", Effect.PROVED, "x")), capabilities=capabilities_of(dialect))

    found = codes(check_proofs(profile(speculation__type="mtp", **types), build))

    assert found == [("warning", "mtp-cache-type")] * is_told


# What serves now.

OLD = "[Service]\nExecStart=/bin/x --alias a --host 127.0.0.1 --port 8080\nNice=5\n"


def live(text: str | None, *drop_ins: tuple[Path, str]) -> LiveUnit:
    return read_live(unit="u.service", text=text, drop_ins=drop_ins, specifiers={})


def serving(host: str | None, port: int | None, alias: str | None) -> Serving:
    return replace(live(None).serving, host=host, port=port, alias=alias)


def test_what_changes_for_clients_is_warned_about() -> None:
    same = serving("127.0.0.1", 8080, "a")
    text = "# Written by tunerd: x\n" + OLD.replace("Nice=5\n", "")
    assert codes(check_live(same, live(text))) == []
    other = codes(check_live(serving("0.0.0.0", 9, "b"), live(text)))  # noqa: S104
    assert other == [("warning", f"{what}-changes") for what in ("alias", "host", "port")]
    assert codes(check_live(serving(None, None, None), live(text))) == []
    assert codes(check_live(serving("x", 1, "y"), live(None))) == [], "nothing stood before"


@pytest.mark.parametrize(
    ("text", "drop_in", "key_file", "is_told"),
    [
        ("ExecStart=/bin/x --api-key hunter2", "Nice=1", None, True),
        ("ExecStart=/bin/x\nEnvironment=LLAMA_API_KEY=hunter2", "Nice=1", None, True),
        ("ExecStart=/bin/x --api-key-file /k", "Nice=1", None, True),
        ("ExecStart=/bin/x --api-key-file /k", "Nice=1", "/k", False),
        ("ExecStart=/bin/x", "Environment=LLAMA_API_KEY=hunter2", None, False),
        ("Environment=LLAMA_API_KEY=old", "Environment=LLAMA_API_KEY=hunter2", None, False),
        ("ExecStart=/bin/x", "Nice=1", None, False),
    ],
)
def test_a_server_that_will_ask_for_no_key_any_more_is_told(
    text: str, drop_in: str, key_file: str | None, is_told: bool
) -> None:
    """A key in an environment file went with the file, and the new server answered everybody."""
    old = live(f"[Service]\n{text}\n", (Path("/d/x.conf"), f"[Service]\n{drop_in}\n"))
    new = replace(serving(None, None, None), api_key_file=key_file)
    stays = environment_of(parse_unit(f"[Service]\n{drop_in}\n"), {})
    assert (("warning", "key-gone") in codes(check_live(new, old, environment=stays))) is is_told


def test_a_hand_written_unit_is_adopted_and_its_lines_are_shown() -> None:
    found = list(check_live(serving("127.0.0.1", 8080, "a"), live(OLD), lost=("Nice=5",)))
    assert codes(found) == [("note", "adopted"), ("warning", "foreign-directives")]
    assert "Nice=5" in found[1].text


def test_a_drop_in_that_would_win_is_an_error() -> None:
    drop_in = (Path("/d/x.conf"), "[Service]\nExecStart=\nExecStart=/bin/y\n")
    found = codes(check_live(serving(None, None, None), live(OLD, drop_in)))
    assert ("error", "drop-in-exec") in found
    harmless = (Path("/d/x.conf"), "[Service]\nNice=1\n")
    assert ("note", "drop-ins") in codes(check_live(serving(None, None, None), live(OLD, harmless)))


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


@pytest.mark.parametrize(
    ("words", "drop_in", "expected"),
    [
        ("--log-file /var/log/llama.log", "", ["not-written"]),
        ("--log-file /var/log/llama.log -lcd /srv/drafts", "", ["not-written"] * 2),
        ("--slot-save-path /var/lib/llama-server/slots", "", []),
        ("--slot-save-path /var/lib/llama-server-of-another", "", ["not-written"]),
        ("--log-file /var/log/llama.log", "ReadWritePaths=-/srv /var/log", []),
        ("--log-file llama.log", "", []),
        ("--lora /srv/adapter.gguf", "", []),
        ("--log-file /var/log/llama.log", "ProtectSystem=no", []),
    ],
)
def test_what_the_unit_keeps_the_server_from_writing_is_told(
    words: str, drop_in: str, expected: list[str]
) -> None:
    own = "[Service]\nProtectSystem=strict\nStateDirectory=llama-server\n"
    unit = with_drop_ins(own, [f"[Service]\n{drop_in}\n"])
    assert [one.code for one in check_written(words.split(), unit, "llama-server")] == expected


# The environment.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES", []),
        ("GGML_CUDA_ENABLE_UNIFIED_MEMORY", [("warning", "unified-memory")]),
        ("LLAMA_ARG_CTX_SIZE", [("error", "hidden-option")]),
        ("LLAMA_API_KEY", [("error", "secret")]),
        ("HF_TOKEN", [("error", "secret")]),
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


def test_the_address_after_the_plan_is_that_of_its_line_or_of_the_build() -> None:
    capabilities = capabilities_of("main-0x")
    line = render(
        profile(serving__port=9, serving__alias="x"), capabilities, context(has_gpu=False)
    )
    assert isinstance(line, CommandLine)
    after = serving_after(line, capabilities)
    assert (after.host, after.port, after.alias) == ("127.0.0.1", 9, "x")
    unnamed = replace(line, arguments=tuple(a for a in line.arguments if a.key != "serving.port"))

    assert capabilities.default_port == DEBIAN_PORT
    assert serving_after(unnamed, capabilities).port == DEBIAN_PORT
    assert serving_after(unnamed, None).port is None


def test_a_diff_says_which_side_is_no_unit_and_is_empty_where_nothing_changes() -> None:
    assert unified_diff("a\n", "a\n", "u") == ""
    assert unified_diff("a\nb\n", "a\nc\n", "u").splitlines()[:2] == [
        "--- u (live)",
        "+++ u (planned)",
    ]
    assert unified_diff(None, "a\n", "u").startswith("--- (no unit)")
    assert "+++ (no unit)" in unified_diff("a\n", None, "u")


# What a unit by hand loses.

PLANNED = """# Written by tunerd: profile x, engine y
[Unit]
Description=llama-server, profile x
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=300
[Service]
Type=exec
Environment=HOME=%S/llama-server
Environment="CUDA_VISIBLE_DEVICES=0"
ExecStart=/bin/x --ctx-size 4096
User=llama
Restart=on-failure
RestartSec=2
NoNewPrivileges=yes
[Install]
WantedBy=multi-user.target
"""
ARGV = ("/bin/x", "--ctx-size", "4096", "--parallel", "1", "--no-mmap")


def by_hand(
    service: str, *drop_ins: str, files: Mapping[str, str] | None = None, unit: str = ""
) -> LiveUnit:
    text = f"[Unit]\n{unit}\n[Service]\nExecStart=/bin/x\n{service}\n[Install]\nWantedBy=default.target"
    return read_live(
        unit="u.service",
        text=text,
        drop_ins=[(Path(f"/d/{n}"), content) for n, content in enumerate(drop_ins)],
        file_environment=files,
        specifiers={"h": "/home/me"},
    )


@pytest.mark.parametrize(
    ("service", "lost"),
    [
        ("Restart=always", ("Restart=always",)),
        ("RestartSec=2s", ()),
        ("RestartSec=10", ("RestartSec=10",)),
        ("NoNewPrivileges=true", ()),
        ("Type=simple", ()),
        ("Type=notify", ("Type=notify",)),
        ("Nice=-5\nLimitMEMLOCK=infinity", ("Nice=-5", "LimitMEMLOCK=infinity")),
        ("Environment=CUDA_VISIBLE_DEVICES=0", ()),
        ("Environment=CUDA_VISIBLE_DEVICES=1 A=%h", (
            "Environment=CUDA_VISIBLE_DEVICES=1", "Environment=A=/home/me")),
        ("Environment=HOME=/srv", ()),
        ("Environment=LLAMA_ARG_CTX_SIZE=4096 LLAMA_ARG_N_PARALLEL=1 LLAMA_ARG_NO_MMAP=1", ()),
        ("Environment=LLAMA_ARG_CTX_SIZE=8192", ("Environment=LLAMA_ARG_CTX_SIZE=8192",)),
        ("Environment=LLAMA_ARG_MMAP=off", ()),
        ("Environment=LLAMA_ARG_MMAP=on", ("Environment=LLAMA_ARG_MMAP=on",)),
        ("StandardOutput=journal\nStandardError=inherit", ()),
        ("StandardOutput=append:/l", ("StandardOutput=append:/l",)),
    ],
)  # fmt: skip
def test_a_line_whose_value_is_not_taken_over_is_named(service: str, lost: tuple[str, ...]) -> None:
    assert lost_lines(by_hand(service), PLANNED, ARGV) == lost


def test_only_what_is_waited_for_beside_the_network_is_named() -> None:
    unit = "Description=mine\nAfter=network.target nvidia-persistenced.service\nRequires=x.mount"
    found = lost_lines(by_hand("", unit=unit), PLANNED, ARGV)
    assert found == ("After=nvidia-persistenced.service", "Requires=x.mount")


def test_an_environment_file_is_named_with_what_it_would_have_set() -> None:
    files = {"LLAMA_ARG_CTX_SIZE": "4096", "LLAMA_ARG_CACHE_TYPE_V": "q8_0"}
    old = by_hand("EnvironmentFile=-/etc/default/llama", files=files)
    found = lost_lines(old, PLANNED, ARGV)
    assert found == ("EnvironmentFile=/etc/default/llama (with LLAMA_ARG_CACHE_TYPE_V)",)
    taken = by_hand("EnvironmentFile=/e", files={"LLAMA_ARG_CTX_SIZE": "4096"})
    assert lost_lines(taken, PLANNED, ARGV) == ()
    assert lost_lines(by_hand("EnvironmentFile=-/e"), PLANNED, ARGV) == ("EnvironmentFile=/e",)


def test_what_starts_the_server_for_the_unit_is_named() -> None:
    old = replace(by_hand(""), prefix=("/usr/bin/taskset", "-c", "0"))
    (found,) = lost_lines(old, PLANNED, ARGV)
    assert found.startswith("ExecStart=/usr/bin/taskset -c 0 ...")


def test_a_variable_that_the_command_line_gives_as_a_key_is_not_shown() -> None:
    text = "[Service]\nEnvironment=MY_KEY=hunter2\nExecStart=/bin/x --api-key ${MY_KEY}\n"
    assert lost_lines(live(text), "", ()) == ("Environment=MY_KEY=...",)


def test_no_secret_is_shown() -> None:
    service = """
Environment=LLAMA_API_KEY=hunter2 HF_TOKEN=hunter2
EnvironmentFile=/etc/keys
ExecStartPre=/bin/warm --api-key hunter2 --hf-token=hunter2
ExecStartPost=/bin/sh -c 'LLAMA_API_KEY=hunter2 curl x'
ExecStop=/bin/warm "--api_key" "hunter2 hunter2" --api-key-file /k "X_TOKEN=1 hunter2"
SetCredential=key:hunter2
"""
    found = lost_lines(by_hand(service, files={"HF_TOKEN": "hunter2"}), PLANNED, ARGV)
    assert "hunter2" not in str(found)
    assert {line.partition("=")[0] for line in found} == {
        "Environment", "EnvironmentFile", "ExecStartPre", "ExecStartPost", "ExecStop",
        "SetCredential",
    }  # fmt: skip
    assert any("--api-key-file /k" in line for line in found)


@pytest.mark.parametrize(
    "text",
    [
        """Environment="LLAMA_API_KEY=it's-hunter2\"""", r'Environment="HF_TOKEN=ab\"hunter2"',
        'HF_TOKEN="abc"hunter2', 'HF_TOKEN=""hunter2', r"HF_TOKEN=a\ hunter2", "DB_PASSWD=hunter2",
        "PASSPHRASE=hunter2", '"LLAMA_API_KEY": "hunter2"', '--api-key "abc"hunter2',
        '"--api-key=my hunter2"', "SetCredential = k:hunter2", "SetCredential=k:abc\\\n  hunter2",
        "+SetCredential=k:hunter2", "SetCredential=k\\\n:hunter2",
    ],
)  # fmt: skip
def test_no_part_of_a_secret_is_shown_however_it_is_quoted(text: str) -> None:
    shown = masked(f"Nice=1\n{text}\nUser=me")
    assert "hunter2" not in shown
    assert shown.startswith("Nice=1\n")
    assert shown.endswith("\nUser=me")


@pytest.mark.parametrize("text", ["n_tokens=512", "MONKEY=1", "--api-key-file /k", "KEYMAP=us"])
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize(
    "part", ["_TOKEN", '"', "\\", "'HF_TOKEN=", '"TOKEN" ', "--api-key ", "SetCredential=", f"{'_TOKEN' * 66} "]
)  # fmt: skip
def test_a_large_text_takes_no_longer_than_its_size(part: str) -> None:
    begin_s = time.process_time()
    masked(part * (1_000_000 // len(part)))
    assert time.process_time() - begin_s < 3.0


def test_drop_ins_stay_and_a_unit_of_ours_or_a_copy_of_it_loses_nothing() -> None:
    drop_in = "[Service]\nNice=1\nEnvironment=B=1\n"
    assert lost_lines(by_hand("", drop_in), PLANNED, ARGV) == ()
    ours = live(PLANNED + "Nice=1\n")
    assert lost_lines(ours, "", ()) == ()
    planned = PLANNED + "Nice=1\n"
    copy = replace(ours, is_ours=False)
    assert lost_lines(copy, planned, ARGV) == ()
    assert lost_lines(copy, PLANNED, ARGV) == ("Nice=1",)
