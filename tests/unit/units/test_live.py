"""What a unit on this machine would run: its own text with its drop-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunerd.units.live import LiveUnit, is_same_command, read_live, serving_of

UNIT = "llama-server.service"
SPECIFIERS = {"h": "/home/me", "%": "%", "d": "/run/credentials/llama-server.service"}
BY_HAND = """[Unit]
Description=Qwen with MTP
After=network.target

[Service]
Environment=CUDA_VISIBLE_DEVICES=0 LLAMA_ARG_PORT=9000
ExecStart=%h/llama.cpp/build-mtp/bin/llama-server \\
    -m %h/models/q.gguf \\
    --alias qwen3.6-27b-q4_k_m --host 0.0.0.0
Restart=always
Nice=-5
IOSchedulingClass=realtime

[Install]
WantedBy=default.target
"""


def live(
    text: str | None = BY_HAND,
    *drop_ins: tuple[str, str],
    file_environment: dict[str, str] | None = None,
) -> LiveUnit:
    return read_live(
        unit=UNIT,
        text=text,
        drop_ins=[(Path(name), content) for name, content in drop_ins],
        of_files=lambda _: file_environment or {},
        specifiers=SPECIFIERS,
    )


def test_a_hand_written_unit_is_read_as_systemd_does() -> None:
    found = live()
    assert found.program == "/home/me/llama.cpp/build-mtp/bin/llama-server"
    assert found.argv is not None
    assert found.argv[1:5] == ("-m", "/home/me/models/q.gguf", "--alias", "qwen3.6-27b-q4_k_m")
    assert not found.is_ours
    serving = found.serving
    assert (serving.host, serving.port, serving.alias) == ("0.0.0.0", 9000, "qwen3.6-27b-q4_k_m")  # noqa: S104
    assert serving.model == "/home/me/models/q.gguf"


@pytest.mark.parametrize(
    ("before", "prefix"),
    [
        ("/usr/bin/taskset -c 0", ("/usr/bin/taskset", "-c", "0")),
        ("/usr/bin/env FOO=bar LLAMA_ARG_PORT=9001", ()),
        ("/usr/bin/numactl -m 0 /usr/bin/env FOO=bar", ("/usr/bin/numactl", "-m", "0", "/usr/bin/env")),
        ("/usr/bin/nice -n 5 env FOO=bar", ("/usr/bin/nice", "-n", "5", "env")),
    ],
)  # fmt: skip
def test_what_only_starts_the_server_is_not_taken_for_it(
    before: str, prefix: tuple[str, ...]
) -> None:
    """`taskset` was probed as an engine, and the server ran "with other arguments than its file has"."""
    found = live(f"[Service]\nExecStart={before} /opt/llama-server -m /q.gguf --alias mine\n")
    assert found.program == "/opt/llama-server"
    assert found.argv == ("/opt/llama-server", "-m", "/q.gguf", "--alias", "mine")
    assert found.prefix == prefix
    assert found.environment.get("FOO") == ("bar" if "env" in before else None)


@pytest.mark.parametrize(
    "before", ["/usr/bin/env", "/usr/bin/env PATH=/opt/bin", "/usr/bin/nice -n 5"]
)
def test_a_server_by_its_bare_name_is_told_from_the_model_that_it_is_given(before: str) -> None:
    """The model was taken for the program, and run to look at it; the server was said to be a router."""
    found = live(f"[Service]\nExecStart={before} llama-server -m /q.gguf --port 1\n")
    assert (found.program, found.serving.model) == ("llama-server", "/q.gguf")
    assert found.search_path == ("/opt/bin" if "PATH" in before else None)
    other = live("[Service]\nExecStart=/usr/bin/nice -n 5 my-server -m /q.gguf\n")
    assert (other.program, other.prefix) == ("/usr/bin/nice", ())


def test_where_systemd_looks_for_a_bare_name_is_not_what_the_server_is_told() -> None:
    text = "[Service]\nEnvironment=PATH=/opt/bin\nExecStart=llama-server -m q.gguf\n"
    assert live(text).search_path is None
    assert (
        live(text + "ExecSearchPath=/usr/lib/ik:/usr/bin\n").search_path == "/usr/lib/ik:/usr/bin"
    )


def test_account_and_folder_are_those_of_the_instance() -> None:
    """A template's `User=%i` was looked for as an account of that name."""
    text = "[Service]\nUser=%h\nGroup=%h\nWorkingDirectory=-%h/app\nExecStart=/bin/x\n"
    found = live(text)
    assert (found.user, found.group) == ("/home/me", "/home/me")
    assert found.work_dir == "/home/me/app"
    assert (live().user, live().work_dir) == (None, None)


def test_a_drop_in_that_replaces_the_command_is_named() -> None:
    drop_in = "[Service]\nExecStart=\nExecStart=/bin/other --port 1\n"
    found = live(BY_HAND, ("/d/10.conf", "[Service]\nNice=1\n"), ("/d/20.conf", drop_in))
    assert found.argv == ("/bin/other", "--port", "1")
    assert found.drop_in_exec == (Path("/d/20.conf"),)
    assert found.drop_ins == (Path("/d/10.conf"), Path("/d/20.conf"))


def test_a_second_command_is_a_problem_and_no_guess() -> None:
    found = live(BY_HAND, ("/d/1.conf", "[Service]\nExecStart=/bin/second\n"))
    assert found.argv is None
    assert found.problem == "it has 2 ExecStart= lines"
    nothing = live("[Service]\nType=simple\n")
    assert nothing.problem == "it has 0 ExecStart= lines"


def test_an_environment_file_wins_over_the_units_own() -> None:
    found = live(BY_HAND, file_environment={"LLAMA_ARG_PORT": "9001", "X": "y"})
    assert found.environment["LLAMA_ARG_PORT"] == "9001"
    assert found.serving.port == 9001
    assert found.environment["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_file_behind_a_credential_is_found() -> None:
    credential = "[Service]\nLoadCredential=other:/x\nLoadCredential=api-key:/etc/k%%1\n"
    found = live(BY_HAND, ("/d/1.conf", credential))
    paths = ("%d/api-key", "/run/credentials/llama-server.service/other", "/etc/other", "%d/x")
    assert [found.source_of(path) for path in paths] == ["/etc/k%1", "/x", "/etc/other", "%d/x"]


@pytest.mark.parametrize("path", ["%d/api-key", "${CREDENTIALS_DIRECTORY}/api-key"])
def test_a_credential_is_the_same_word_wherever_the_unit_found_it(path: str) -> None:
    """Each server with a key was told as edited since it started, and nothing was measured of it."""
    text = (
        f"[Service]\nLoadCredential=api-key:/k\nExecStart=/x/llama-server --api-key-file {path}\n"
    )
    unit = read_live(unit="u.service", text=text, specifiers={})

    assert unit.argv is not None
    for folder in ("/run/credentials/u.service", "/run/user/1000/credentials/u.service"):
        runs = ("/x/llama-server", "--api-key-file", f"{folder}/api-key")
        assert is_same_command(unit.argv, runs)
    assert not is_same_command(unit.argv, ("/x/llama-server", "--api-key-file", "/k"))


@pytest.mark.parametrize(
    ("arguments", "environment", "port", "alias"),
    [
        (["--port", "1", "--port", "2"], {}, 2, None),
        (["--port", "1"], {"LLAMA_ARG_PORT": "2"}, 1, None),
        ([], {"LLAMA_ARG_PORT": "2", "LLAMA_ARG_ALIAS": "a"}, 2, "a"),
        ([], {"LLAMA_ARG_MODEL_ALIAS": "ik"}, None, "ik"),
        (["-a", "x", "--alias", "y"], {}, None, "x,y"),
        (["-a", "x"], {"LLAMA_ARG_ALIAS": "z"}, None, "z,x"),
        (["--port"], {}, None, None),
        (["--port", "\u00b2"], {}, None, None),
        (["--port", "9" * 5000], {}, None, None),
        (["--port", "-1"], {}, None, None),
        (["--port", "0"], {}, None, None),
        ([], {"LLAMA_ARG_PORT": "\u0663"}, None, None),
    ],
)
def test_the_address_is_what_counts_for_the_server(
    arguments: list[str], environment: dict[str, str], port: int | None, alias: str | None
) -> None:
    found = serving_of(arguments, environment)
    assert (found.port, found.alias) == (port, alias)


def test_a_router_with_the_usual_speculation_is_one_still() -> None:
    text = "[Service]\nExecStart=/usr/bin/llama-server --models-dir /srv --spec-default\n"
    found = read_live(unit="llama-server.service", text=text, specifiers={})
    assert not found.names_a_model


def test_a_process_behind_its_interpreter_runs_the_same_command() -> None:
    argv = ("/usr/bin/llama-server", "-c", "4096")

    assert is_same_command(argv, ("python3", "/x/llama-server", "-c", "4096")) is True
    assert is_same_command(argv, ("/usr/bin/llama-server", "-c", "8192")) is False
    assert is_same_command(argv, ("llama-server", "-c", "4096", "--verbose")) is False
    assert is_same_command(argv, None) is None


@pytest.mark.parametrize("program", ["/opt/llama-server", "/usr/bin/env"])
def test_a_command_line_that_is_empty_for_want_of_a_variable_is_a_problem_and_no_crash(
    program: str,
) -> None:
    """As where the file that sets it is gone."""
    found = live(f"[Service]\nEnvironmentFile=-/etc/gone\nExecStart=@{program} $LLAMA_ARGS\n")
    assert found.argv is None
    assert "empty without its variables" in (found.problem or "")
