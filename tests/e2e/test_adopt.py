"""What stood before tunerd came, a packaged unit or one by hand, is kept, and comes back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import KeptMachine
from tests.support.deployment import MODEL, UNIT, Deployment, UnitFile, profile
from tests.support.folders import SUPPORT
from tests.support.machine import Machine
from tests.support.nvml_stub import compiler
from tests.support.overlay import Root
from tests.support.programs import program

BAD = '[engines.bad]\npath = "/srv/bad/llama-server"\n'
PROFILES = {
    "plain": profile("/usr/bin/llama-server", serving__alias="plain"),
    "bad": profile("bad", serving__alias="bad"),
}
# Source: the package llama.cpp-services of Debian sid, November 2026.
PACKAGED = """\
[Unit]
Description=llama.cpp server
After=network-online.target

[Service]
User=_llama-server
Group=_llama-server
ExecStart=/usr/bin/llama-server
Environment=LLAMA_CACHE=/var/cache/llama-server
EnvironmentFile=/etc/default/llama-server

[Install]
WantedBy=multi-user.target
"""
DEFAULTS = f"""\
# Options of the server
LLAMA_ARG_MODEL={MODEL}
LLAMA_ARG_ALIAS=packaged
LLAMA_ARG_THREADS=1
LLAMA_ARG_CTX_SIZE=1024
LLAMA_ARG_N_PARALLEL=1
LLAMA_ARG_ENDPOINT_METRICS=1
"""
DEBIAN_PORT = 9931
INSTANCE = "llama@alice.service"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA_SERVE = "/usr/local/bin/llama serve -hf maker/usual --offline"
SCRIPTED = f"-m {MODEL} --port 8099 -a scripted -t 1 -c 512"
BY_HAND = f"""\
# my own, do not touch
[Unit]
Description=my llama
After=network.target

[Service]
Type=simple
User=alice
Group=alice
WorkingDirectory=/home/alice
Environment="GGML_NO_BACKTRACE=1" MINE=%h
EnvironmentFile=-/etc/default/my-llama
ExecStartPre=/bin/true
ExecStart=/usr/bin/llama-server -m {MODEL} \\
    --alias "my own model" -c 1024 -np 1 -t 1 --host 127.0.0.1 --port 8099 \\
    --no-warmup --temp 0.7 --metrics \\
    --spec-type draft-mtp --spec-draft-n-max 2 --spec-draft-p-min 0.5
Restart=always
RestartSec=1
Nice=3

[Install]
WantedBy=multi-user.target
"""


@pytest.fixture(scope="module")
def machine(kept_machine: KeptMachine) -> Machine:
    made = kept_machine("sid")
    made.sh("useradd --system --home-dir /var/lib/llama-server --create-home _llama-server")
    return made


@pytest.fixture
def tunerd(machine: Machine) -> Iterator[Deployment]:
    """tunerd as on its first day: it has deployed nothing, and no unit is there."""
    made = Deployment(machine, settings=BAD, profiles=PROFILES, stop_timeout_s=2)
    made.stand_ins(bad={"fail": "oom-weights"})
    yield made
    made.systemctl("stop", UNIT, check=False)
    made.systemctl("disable", UNIT, check=False)
    made.systemctl("stop", INSTANCE, check=False)
    machine.sh(
        "rm -rf /etc/systemd/system/llama@* /etc/systemd/system/llama-server.service* /usr/lib/systemd/system/llama-server.*"
        " /var/lib/tunerd/generations /var/lib/tunerd/journal /etc/default/*llama*"
        " /etc/tunerd/profiles/mine.toml"
    )
    made.systemctl("daemon-reload")
    made.systemctl("reset-failed")


def start_packaged(tunerd: Deployment) -> None:
    machine = tunerd.machine
    machine.write(f"/usr/lib/systemd/system/{UNIT}", PACKAGED)
    machine.write("/etc/default/llama-server", DEFAULTS)
    machine.sh("mkdir -p /var/cache/llama-server; chown _llama-server: /var/cache/llama-server")
    tunerd.systemctl("daemon-reload")
    tunerd.systemctl("enable", "--now", UNIT)
    wait_for(tunerd, DEBIAN_PORT)


def start_by_hand(tunerd: Deployment, text: str = BY_HAND) -> UnitFile:
    tunerd.write_unit(text)
    tunerd.machine.write("/etc/default/my-llama", "LLAMA_ARG_N_PREDICT=77\n")
    tunerd.machine.sh(f"chmod 640 {tunerd.units}/{UNIT}; chgrp tunerd {tunerd.units}/{UNIT}")
    tunerd.systemctl("enable", "--now", UNIT)
    wait_for(tunerd, 8099)
    unit = tunerd.unit()
    assert unit is not None
    return unit


def start_script(tunerd: Deployment, *more: str, starts: str = "") -> None:
    """Its unit names a script, and does not say when it starts."""
    words = " ".join(("/usr/bin/llama-server", SCRIPTED, *more))
    tunerd.machine.write("/srv/scripts/serve", f"#!/bin/sh\n{starts}{words}\n", mode=0o755)
    tunerd.write_unit("[Service]\nExecStart=/srv/scripts/serve\nUser=alice\nTimeoutStopSec=2\n")
    tunerd.systemctl("start", UNIT)
    wait_for(tunerd, 8099)


def wait_for(tunerd: Deployment, port: int) -> None:
    tunerd.until(lambda: tunerd.ask("/health", port=port)[0] == 200, f"it serves on {port}")


def codes(said: dict[str, Any]) -> set[str]:
    return {message["code"] for message in said["messages"]}


def texts(said: dict[str, Any]) -> str:
    return "\n".join(f"{message['text']} ({message['hint']})" for message in said["messages"])


def command_line(tunerd: Deployment, unit: str = UNIT) -> list[str]:
    """What the server's process was started with."""
    raw = tunerd.machine.read(f"/proc/{tunerd.show('MainPID', unit)}/cmdline")
    return raw.removesuffix("\0").split("\0")


def test_a_packaged_unit_serves_again_after_going_back(tunerd: Deployment) -> None:
    start_packaged(tunerd)
    before = tunerd.tree(tunerd.units)
    status = tunerd.json("status")
    assert (status["healthy"], status["alias"]) == (True, "packaged"), status
    assert status["address"] == f"http://127.0.0.1:{DEBIAN_PORT}"
    detected = {unit["unit"]: unit for unit in tunerd.json("detect")["units"]}
    assert detected[UNIT]["written_by_tunerd"] is False

    planned = tunerd.json("plan", "plain")
    assert codes(planned) >= {"alias-changes", "port-changes", "adopted"}, texts(planned)
    assert "from 9931 to 8080" in texts(planned)
    done = tunerd.apply("plain")

    assert done["without_service_s"] > 0
    assert tunerd.show("User") == "_llama-server", "the packaged unit's account is kept"
    assert tunerd.show("FragmentPath") == f"{tunerd.units}/{UNIT}"
    assert tunerd.alias() == "plain"
    assert tunerd("verify").code == 0

    back = tunerd.json("rollback")
    assert back["serving"] is True
    assert tunerd.alias(port=DEBIAN_PORT) == "packaged"
    assert tunerd.alias() is None
    assert tunerd.show("FragmentPath") == f"/usr/lib/systemd/system/{UNIT}"
    left = set(tunerd.tree(tunerd.units).splitlines()) ^ set(before.splitlines())
    assert all(f"{UNIT}.pre-" in line or line.startswith(tunerd.units + " ") for line in left), left
    assert tunerd.show("UnitFileState") == "enabled"

    tunerd.json("rollback")
    assert tunerd.alias() == "plain"


def test_a_unit_by_hand_is_kept_to_the_byte_and_comes_back(tunerd: Deployment) -> None:
    old = start_by_hand(tunerd)
    machine = tunerd.machine
    machine.write(
        f"{tunerd.units}/{UNIT}.d/mine.conf",
        "[Service]\nEnvironment=FROM_DROP_IN=1\nMemoryMax=4G\n",
    )
    # As the write-ups do it.
    for name in ("pre-mtp", "pre-q8"):
        machine.run("cp", f"{tunerd.units}/{UNIT}", f"{tunerd.units}/{UNIT}.{name}")
    tunerd.systemctl("daemon-reload")

    planned = tunerd.json("plan", "plain")
    assert codes(planned) >= {"adopted", "foreign-directives", "drop-ins", "alias-changes"}
    for line in ("WorkingDirectory=/home/alice", "ExecStartPre=/bin/true", "Nice=3"):
        assert line in texts(planned), texts(planned)
    assert "mine.conf" in texts(planned)
    greedy = tunerd.json("plan", "plain", "--set", "serving.cache_ram_mib=8192")
    limit = f"{UNIT} may use 4096 MiB (MemoryMax= in `{tunerd.units}/{UNIT}.d/mine.conf`)"
    assert limit in texts(greedy)
    assert limit not in texts(planned)
    assert "-# my own, do not touch" in planned["diff"]

    done = tunerd.apply("plain")
    assert re.fullmatch(rf"{UNIT}\.pre-\d{{8}}T\d{{6}}Z-apply", done["backup"])
    assert tunerd.unit(done["backup"]) == old
    assert "640 root:tunerd" in old.look
    assert tunerd.show("User") == "alice"
    environment = machine.read(f"/proc/{tunerd.show('MainPID')}/environ").split("\0")
    assert "FROM_DROP_IN=1" in environment, "the drop-in stays in force"
    assert tunerd("verify").code == 0, "a drop-in that was there before is no drift"

    names = [row["name"] for row in tunerd.json("rollback", "--list")["backups"]]
    assert names[0] == done["backup"]
    assert set(names[1:]) == {f"{UNIT}.pre-mtp", f"{UNIT}.pre-q8"}, "those made by hand come last"

    tunerd.json("rollback")
    assert tunerd.unit() == old
    assert tunerd.alias(port=8099) == "my own model"
    assert tunerd.generate(port=8099)["timings"]["draft_n"] > 0

    tunerd.apply("plain")
    back = tunerd.json("rollback", "--to", f"{UNIT}.pre-mtp")
    assert back["to"] == f"{UNIT}.pre-mtp"
    assert tunerd.alias(port=8099) == "my own model"


def test_a_unit_by_hand_becomes_a_profile_with_the_same_flags(tunerd: Deployment) -> None:
    start_by_hand(tunerd)
    before = command_line(tunerd)

    said = tunerd.json("profiles", "new", "mine", "--from-unit", UNIT)
    assert said["unplaced"] == [], said
    assert codes(said) >= {"foreign-directives"}
    tunerd.apply("mine")

    after = command_line(tunerd)
    long = {"-m": "--model", "-c": "--ctx-size", "-np": "--parallel", "-t": "--threads"}
    wanted = [long.get(word, word) for word in before]
    missing = [word for word in wanted if word not in after]
    assert not missing, f"lost: {missing}\nbefore {before}\nafter  {after}"
    assert after[after.index("--predict") + 1] == "77", "from the file of variables"
    # What nobody had set is left to the engine: the new line has nothing but the old one's flags.
    flags = [word for word in after if word.startswith("--")]
    assert set(flags) - set(wanted) == {"--predict"}, flags
    assert tunerd.alias(port=8099) == "my own model"
    assert tunerd.generate(port=8099)["timings"]["draft_n"] > 0


def test_a_server_that_runs_as_nobody_is_taken_over(tunerd: Deployment) -> None:
    """systemd advises against that account, and runs it all the same."""
    as_nobody = BY_HAND.replace("User=alice", "User=nobody").replace("Group=alice\n", "")
    start_by_hand(tunerd, as_nobody.replace("WorkingDirectory=/home/alice", "WorkingDirectory=/"))
    tunerd("profiles", "new", "mine", "--from-unit", UNIT)

    assert "unit-advice" in codes(tunerd.apply("mine"))

    assert tunerd.show("User") == "nobody"
    assert tunerd.alias(port=8099) == "my own model"


def test_llama_serve_with_a_repository_is_adopted_planned_deployed_and_comes_back(
    tunerd: Deployment, sid_root: Root, tmp_path: Path
) -> None:
    machine = tunerd.machine
    machine.write("/usr/local/bin/llama", llama_app(sid_root, tmp_path).read_bytes(), mode=0o755)
    hub = "/home/alice/.cache/huggingface/hub/models--maker--usual"
    machine.sh(
        f"mkdir -p {hub}/refs {hub}/snapshots/{COMMIT}; printf {COMMIT} > {hub}/refs/main;"
        f" ln -s {MODEL} {hub}/snapshots/{COMMIT}/usual-Q4_K_M.gguf; chmod 755 /home/alice"
    )
    old = start_by_hand(tunerd, BY_HAND.replace(f"/usr/bin/llama-server -m {MODEL}", LLAMA_SERVE))

    (found,) = [one for one in tunerd.json("detect")["units"] if one["unit"] == UNIT]
    assert (found["program"], found["port"]) == ("/usr/local/bin/llama", 8099)
    said = tunerd.json("profiles", "new", "mine", "--from-unit", UNIT)
    assert said["unplaced"] == [], said
    planned = tunerd.json("plan", "mine")
    assert planned["argv"][:3] == ["/usr/local/bin/llama", "serve", "--model"]
    assert planned["model"]["path"] == f"{hub}/snapshots/{COMMIT}/usual-Q4_K_M.gguf"

    tunerd.apply("mine")

    assert command_line(tunerd)[1:3] == ["serve", "--model"]
    assert tunerd.generate(port=8099)["timings"]["draft_n"] > 0
    assert tunerd("verify").code == 0
    assert "no-daemon" in {one["code"] for one in tunerd.json("doctor", expect=6)["findings"]}
    tunerd.json("rollback")
    assert tunerd.unit() == old
    assert tunerd.alias(port=8099) == "my own model"


def llama_app(root: Root, folder: Path) -> Path:
    """llama.cpp's one program for everything, around this root's own server."""
    made, library = folder / "llama", "/usr/lib/x86_64-linux-gnu/llama"
    program(
        *(compiler(), "-Wall", "-Werror", "-o", made, SUPPORT / "llama_app.c"),
        *("-L", f"{root.lowers[-1]}{library}", f"-Wl,-rpath,{library}"),
        *("-Wl,--allow-shlib-undefined", "-l:libllama-server-impl.so"),
    )
    return made


def test_a_build_of_the_account_that_serves_is_adopted_and_measured_once_it_is_allowed(
    tunerd: Deployment,
) -> None:
    """What the settings allow was refused where a unit named it, and each candidate was another build."""
    machine, build = tunerd.machine, "/home/alice/llama.cpp/build/bin/llama-server"
    machine.sh(
        f"mkdir -p {Path(build).parent}; chmod 755 /home/alice; cp /usr/bin/llama-server {build};"
        " chown -R alice: /home/alice"
    )
    start_by_hand(tunerd, BY_HAND.replace("/usr/bin/llama-server", build))

    refused = tunerd("profiles", "new", "mine", "--from-unit", UNIT, expect=1)
    told = re.findall(r"`tunerd (settings set \S+ \S+)`", refused.err)
    assert len(told) == 2, refused
    for command in told:
        tunerd(*command.replace("NAME", "mine").split())
    tunerd("profiles", "new", "mine", "--from-unit", UNIT)
    tunerd.apply("mine")
    measured = tunerd.json("compare", "--set", "speculation.n_max=1", "--budget", "5s", "--yes",
                           expect=None)  # fmt: skip

    assert "another build" not in str(measured), measured
    assert tunerd.generate(port=8099)["content"]


def test_a_server_started_by_a_script_comes_back_too(tunerd: Deployment) -> None:
    # Its server answers a probe, which waits a minute for a script that does not (test_starters.py).
    start_script(tunerd, '"$@"')
    old = tunerd.unit()

    said = tunerd.apply("bad", expect=3)
    assert "serves again" in said["error"]["state"], said
    assert tunerd.unit() == old
    assert tunerd.alias(port=8099) == "scripted"

    assert "script" in codes(tunerd.json("profiles", "new", "mine", "--from-unit", UNIT))
    assert "--alias scripted" in " ".join(tunerd.json("plan", "mine")["argv"])
    assert "unit-enabled" in codes(tunerd.json("plan", "plain"))
    tunerd.apply("plain")
    assert tunerd.show("UnitFileState") == "enabled"
    assert tunerd.alias(port=8099) is None, "the script's child has ended too"
    assert "unit-disabled" in codes(tunerd.json("rollback"))
    assert tunerd.alias(port=8099) == "scripted"
    assert tunerd.show("UnitFileState") == "static"
    assert tunerd.json("verify")["drift"] == [], "which it was before"


def test_a_server_names_no_key_file_that_its_account_may_not_read(tunerd: Deployment) -> None:
    """Its process writes its own words, and root would read the file for it, as a credential of the new unit."""
    key = "/home/alice/key"
    tunerd.machine.write(key, "s3cret\n")
    start_script(tunerd, "--api-key-file", key, starts="exec ")

    own = tunerd.json("profiles", "new", "own", "--from-unit", UNIT)
    tunerd.machine.run("chmod", "600", key)
    theirs = tunerd.json("profiles", "new", "theirs", "--from-unit", UNIT)

    assert f'api_key_file = "{key}"' in own["text"]
    assert "key-file-open" in codes(tunerd.json("plan", "own")), "alice may put a link there"
    assert key not in theirs["text"]
    assert key in str([one for one in theirs["messages"] if one["code"] == "unplaced"])


# Units as people have them

BY_INSTANCE = """\
[Service]
User=%i
Group=%i
AmbientCapabilities=CAP_NET_BIND_SERVICE
WorkingDirectory=~
EnvironmentFile=/etc/default/my-llama
ExecStart=/usr/bin/env llama-server -m models/tiny.gguf --alias %i -c 1024 -np -1 -t 1 -ngl -1 \\
    --host 127.0.0.1 --port 90 --no-warmup --api-key ${MINE}
    --metrics

[Install]
WantedBy=multi-user.target
"""


def test_an_instance_on_a_low_port_is_taken_over_with_account_folder_and_file(
    tunerd: Deployment,
) -> None:
    """The model was run as a program; another file of its name was served; the key stood in the unit."""
    machine = tunerd.machine
    machine.sh(
        f"mkdir -p /home/alice/models; chmod 755 /home/alice;"
        f" cp {MODEL} /home/alice/models/tiny.gguf; chown -R alice: /home/alice/models"
    )
    machine.write("/etc/default/my-llama", "MINE=hunter2\n", mode=0o600)
    machine.write(f"{tunerd.units}/llama@.service", BY_INSTANCE)
    tunerd.systemctl("daemon-reload")
    tunerd.systemctl("start", INSTANCE)
    wait_for(tunerd, 90)

    (found,) = [one for one in tunerd.json("detect")["units"] if one["unit"] == INSTANCE]
    assert (found["program"], found["router"]) == ("/usr/bin/llama-server", False)
    said = tunerd.json("profiles", "new", "mine", "--from-unit", INSTANCE)
    assert codes(said) >= {"other-unit", "ignored-lines", "unplaced"}, texts(said)
    assert "--metrics" in texts(said), "which systemd never read"
    unplaced = {word for one in said["unplaced"] for word in one["words"]}
    assert unplaced == {"--api-key", "MINE=...", "..."}
    assert "hunter2" not in machine.read(f"{tunerd.config}/profiles/mine.toml") + texts(said)
    planned = tunerd.json("plan", "mine", expect=1)
    assert f"service.unit {INSTANCE}" in texts(planned), texts(planned)
    tunerd("settings", "set", "service.unit", INSTANCE)
    machine.write("/etc/tunerd/key", "hunter2\n", mode=0o600)
    # Of the template; what it names by the instance must be there, and its instances have a slice of their own.
    machine.write("/etc/default/alice.env", "CARD=1\n")
    lines = ("EnvironmentFile=/etc/default/%i.env",
             "ExecStartPost=+/bin/sh -c 'grep service /proc/self/cgroup >>/run/groups'")  # fmt: skip
    card = "\n".join(("[Service]", *lines, ""))
    machine.write(f"{tunerd.units}/llama@.service.d/card.conf", card)
    tunerd.systemctl("daemon-reload")
    tunerd.apply("mine", "--set", "serving.api_key_file=/etc/tunerd/key")

    pid = tunerd.show("MainPID", INSTANCE)
    words = command_line(tunerd, INSTANCE)
    assert words[:3] == ["/usr/bin/llama-server", "--model", "/home/alice/models/tiny.gguf"]
    assert machine.run("stat", "--format=%U", f"/proc/{pid}").stdout == "alice\n"
    assert "hunter2" not in machine.read(f"{tunerd.units}/{INSTANCE}")
    assert tunerd.ask("/props", port=90)[0] == 401
    assert tunerd.generate(port=90, key="hunter2")["content"]
    tunerd.json("bench", "--suite", "cache", "--repeats", "1")  # where its key is a credential
    asked = ("--suite", "cache", "--repeats", "1", "--yes")
    tunerd.json("bench", "mine", *asked, "--set", "serving.api_key_file=/etc/tunerd/key")
    groups = machine.read("/run/groups").splitlines()
    assert any("tunerd-candidate-" in one for one in groups)
    assert all("/system-llama.slice/" in one for one in groups), groups
    tunerd.json("rollback")
    assert tunerd.show("FragmentPath", INSTANCE) == f"{tunerd.units}/llama@.service"
    assert tunerd.generate(port=90, key="hunter2")["content"]


# Units that are no plain files


def test_a_masked_unit_is_left_alone(tunerd: Deployment) -> None:
    tunerd.systemctl("mask", UNIT)
    before = tunerd.tree(tunerd.units)

    said = tunerd("apply", "plain", "--yes", expect=1)

    assert "masked" in said.err, str(said)
    assert "unmask" in said.err, str(said)
    assert tunerd.tree(tunerd.units) == before
    tunerd("status")
    tunerd("detect")


def test_a_broken_unit_is_replaced_and_kept(tunerd: Deployment) -> None:
    text = "[Service]\nUser=alice\n"
    tunerd.write_unit(text)
    for words in (("status",), ("detect",), ("plan", "plain")):
        tunerd(*words)
    failed = tunerd.apply("bad", expect=3)
    assert "machine is as before" in failed["error"]["state"]

    done = tunerd.apply("plain")

    kept = tunerd.unit(done["backup"])
    assert kept is not None
    assert kept.text == text
    assert tunerd.alias() == "plain"
    assert tunerd("verify").code == 0
    back = tunerd("rollback", expect=1)
    assert "nothing was changed" in back.err, str(back)
    assert tunerd.alias() == "plain"
