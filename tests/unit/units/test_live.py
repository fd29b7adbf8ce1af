"""What a unit on this machine would run: its own text with its drop-ins."""

from __future__ import annotations

from pathlib import Path

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
    text: str = BY_HAND,
    *drop_ins: tuple[str, str],
    file_environment: dict[str, str] | None = None,
    specifiers: dict[str, str] = SPECIFIERS,
) -> LiveUnit:
    return read_live(
        unit=UNIT,
        text=text,
        drop_ins=[(Path(name), content) for name, content in drop_ins],
        of_files=lambda _: file_environment or {},
        specifiers=specifiers,
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


def test_what_only_starts_the_server_is_not_taken_for_it() -> None:
    """`taskset` was probed as an engine, and the server ran "with other arguments than its file has"."""
    for before, prefix in (
        ("/usr/bin/taskset -c 0", ("/usr/bin/taskset", "-c", "0")),
        ("/usr/bin/env FOO=bar LLAMA_ARG_PORT=9001", ()),
        ("/usr/bin/numactl -m 0 /usr/bin/env FOO=bar", ("/usr/bin/numactl", "-m", "0", "/usr/bin/env")),
        ("/usr/bin/nice -n 5 env FOO=bar", ("/usr/bin/nice", "-n", "5", "env")),
    ):  # fmt: skip
        found = live(f"[Service]\nExecStart={before} /opt/llama-server -m /q.gguf --alias mine\n")
        assert (found.program, found.prefix) == ("/opt/llama-server", prefix)
        assert found.argv == ("/opt/llama-server", "-m", "/q.gguf", "--alias", "mine")
        assert found.environment.get("FOO") == ("bar" if "env" in before else None)


def test_a_server_by_its_bare_name_is_told_from_the_model_that_it_is_given() -> None:
    """The model was taken for the program, and run to look at it; the server was said to be a router."""
    for before, path in (("env", None), ("env PATH=/opt/bin", "/opt/bin"), ("nice -n 5", None)):
        found = live(f"[Service]\nExecStart=/usr/bin/{before} llama-server -m /q.gguf --port 1\n")
        assert (found.program, found.serving.model) == ("llama-server", "/q.gguf")
        assert found.search_path == path
    other = live("[Service]\nExecStart=/usr/bin/nice -n 5 my-server -m /q.gguf\n")
    assert (other.program, other.prefix) == ("/usr/bin/nice", ())
    # What it binds was run as a program.
    image = "apptainer run --bind /srv/ai:/srv/ai /srv/ai/x.sif -m /srv/ai/q.gguf"
    led = live(f"[Service]\nExecStart=/usr/bin/numactl -i all {image}\n")
    assert (led.program, led.has_own_root) == ("apptainer", True)


def test_where_systemd_looks_for_a_bare_name_is_not_what_the_server_is_told() -> None:
    text = "[Service]\nEnvironment=PATH=/opt/bin\nExecStart=llama-server -m q.gguf\n"
    assert live(text).search_path is None
    assert live(f"{text}ExecSearchPath=/usr/lib/ik:/bin\n").search_path == "/usr/lib/ik:/bin"


def test_account_and_folder_are_those_of_the_instance() -> None:
    """A template's `User=%i` was looked for as an account of that name."""
    text = "[Service]\nUser=%h\nGroup=%h\nWorkingDirectory=-%h/app\nExecStart=/bin/x\n"
    found = live(text)
    assert (found.user, found.group, found.work_dir) == ("/home/me", "/home/me", "/home/me/app")
    assert (live().user, live().work_dir) == (None, None)


def test_a_drop_in_that_replaces_the_command_is_named() -> None:
    drop_in = "[Service]\nExecStart=\nExecStart=/bin/other --port 1\n"
    found = live(BY_HAND, ("/d/10.conf", "[Service]\nNice=1\n"), ("/d/20.conf", drop_in))
    assert found.argv == ("/bin/other", "--port", "1")
    assert found.drop_in_exec == (Path("/d/20.conf"),)
    assert found.drop_ins == (Path("/d/10.conf"), Path("/d/20.conf"))


def test_no_or_a_second_command_is_a_problem_and_no_guess() -> None:
    """As is one that is empty where the file that sets its variable is gone."""
    found = live(BY_HAND, ("/d/1.conf", "[Service]\nExecStart=/bin/second\n"))
    assert (found.argv, found.problem) == (None, "it has 2 ExecStart= lines")
    assert live("[Service]\nType=simple\n").problem == "it has 0 ExecStart= lines"
    for program in ("/opt/llama-server", "/usr/bin/env"):
        empty = live(f"[Service]\nEnvironmentFile=-/etc/gone\nExecStart=@{program} $LLAMA_ARGS\n")
        assert empty.argv is None
        assert "empty without its variables" in (empty.problem or "")


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


def test_a_credential_is_the_same_word_wherever_the_unit_found_it() -> None:
    """Each server with a key was told as edited since it started, and nothing was measured of it."""
    head = "[Service]\nLoadCredential=api-key:/k\nExecStart=/x/llama-server --api-key-file"
    for path in ("%d/api-key", "${CREDENTIALS_DIRECTORY}/api-key"):
        argv = live(f"{head} {path}\n", specifiers={}).argv
        assert argv is not None
        for folder in (f"/run/credentials/{UNIT}", f"/run/user/1000/credentials/{UNIT}"):
            assert is_same_command(argv, ("/x/llama-server", "--api-key-file", f"{folder}/api-key"))
        assert not is_same_command(argv, ("/x/llama-server", "--api-key-file", "/k"))


ADDRESSES: list[tuple[str, dict[str, str], int | None, str | None]] = [
    ("--port 1 --port 2", {}, 2, None),
    ("--port 1", {"LLAMA_ARG_PORT": "2"}, 1, None),
    ("", {"LLAMA_ARG_PORT": "2", "LLAMA_ARG_ALIAS": "a"}, 2, "a"),
    ("", {"LLAMA_ARG_MODEL_ALIAS": "ik"}, None, "ik"),
    ("-a x --alias y", {}, None, "x,y"),
    ("-a x", {"LLAMA_ARG_ALIAS": "z"}, None, "z,x"),
    *((f"--port {wrong}", {}, None, None) for wrong in ("", "\u00b2", "9" * 5000, "-1", "0")),
    ("", {"LLAMA_ARG_PORT": "\u0663"}, None, None),
]


def test_the_address_is_what_counts_for_the_server() -> None:
    for arguments, environment, *address in ADDRESSES:
        found = serving_of(arguments.split(), environment)
        assert [found.port, found.alias] == address, arguments


def test_a_router_with_the_usual_speculation_is_one_still() -> None:
    text = "[Service]\nExecStart=/usr/bin/llama-server --models-dir /srv --spec-default\n"
    assert not live(text).names_a_model


def test_a_process_behind_its_interpreter_runs_the_same_command() -> None:
    argv = ("/usr/bin/llama-server", "-c", "4096")

    assert is_same_command(argv, ("python3", "/x/llama-server", "-c", "4096")) is True
    assert is_same_command(argv, ("/usr/bin/llama-server", "-c", "8192")) is False
    assert is_same_command(argv, ("llama-server", "-c", "4096", "--verbose")) is False
    assert is_same_command(argv, None) is None
    by_starter = ("/usr/bin/env", "A=1", "my-server", "-c", "4096")
    assert is_same_command(by_starter, ("my-server", "-c", "4096")) is None
