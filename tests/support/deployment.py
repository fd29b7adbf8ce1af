"""tunerd inside a test machine, used as its operator uses it: by the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.machine import Machine
from tests.support.roots import PREFIX, SOURCES_INSIDE
from tests.support.waiting import until

UNIT = "llama-server.service"
MODEL = "/srv/models/tiny.gguf"
WAITS = {
    "drain_s": 0.0,
    "settle_s": 0.3,
    "stall_s": 20.0,
    "start_limit_s": 60.0,
    "generation_limit_s": 20.0,
}
"""Waits of a swap, short enough for tests [s]."""
# The stand-in needs nothing but the standard library; `-S` leaves the packages of tunerd out.
_INSTALL = """
import json, sys
from pathlib import Path
from tests.support.stand_in import install
for folder, behaviour in json.loads(sys.argv[1]).items():
    install(Path(folder), **behaviour)
"""
_TREE = """
set -e
for folder; do [ -e "$folder" ] && find "$folder" -xdev -printf '%p %y %m %U:%G %l\\n'; done | sort
for folder; do [ -e "$folder" ] && find "$folder" -xdev -type f -exec sha256sum {} + ; done | sort -k 2
"""


@dataclass(frozen=True, repr=False)
class Said:
    """What a call of tunerd left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object that `--json` prints."""
        try:
            found = json.loads(self.out)
        except ValueError:
            raise AssertionError(f"no JSON object:\n{self}") from None
        assert found["schema"] == 1, self
        return found

    def __repr__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def place_units(machine: Machine, *names: str, user: str | None = None) -> None:
    """Units of these names, as they are shipped, for root's manager or a user's; not started."""
    for name in names:
        if user is None:
            machine.run("cp", SOURCES_INSIDE / "units" / name, "/etc/systemd/system/")
        else:
            stem = name.removesuffix(".service")
            text = machine.read(SOURCES_INSIDE / f"units/{stem}-user.service.in")
            text = text.replace("@TUNERD@", str(PREFIX / "bin/tunerd"))
            machine.write(f"/etc/systemd/user/{name}", text)
    machine.systemctl("daemon-reload", user=user)


@dataclass(frozen=True)
class UnitFile:
    """A unit file as it stands: text, permission bits, owner; None where there is none."""

    text: str
    look: str


class Deployment:
    """tunerd in a machine: in system mode, or in that of a user.

    Its waits are those of `WAITS`; `settings` are further lines of `tunerd.toml`, `profiles` are
    site profiles by name.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        user: str | None = None,
        settings: str = "",
        profiles: Mapping[str, str] | None = None,
        **waits: float,
    ) -> None:
        self.machine = machine
        self.user = user
        self.config = f"/home/{user}/.config/tunerd" if user else "/etc/tunerd"
        self.state = f"/home/{user}/.local/state/tunerd" if user else "/var/lib/tunerd"
        self.units = f"/home/{user}/.config/systemd/user" if user else "/etc/systemd/system"
        if user is None:
            machine.run("systemd-sysusers", SOURCES_INSIDE / "units/tunerd.sysusers")
        self.settings(settings, **waits)
        for name, text in (profiles or {}).items():
            self.profile(name, text)

    def settings(self, text: str = "", **waits: float) -> None:
        """Write `tunerd.toml`, with the waits of tests and these.

        New servers are watched only where the text says how: that writes to the state now and then.
        """
        lines = [f"{name} = {value}" for name, value in {**WAITS, **waits}.items()]
        content = "[service]\n" + "\n".join(lines) + '\n[models]\ndirs = ["/srv/models"]\n'
        if "[probation]" not in text:
            content += "[probation]\nenabled = false\n"
        self._write(f"{self.config}/tunerd.toml", content + text)

    def profile(self, name: str, text: str) -> None:
        """Write a site profile."""
        self._write(f"{self.config}/profiles/{name}.toml", text)

    def _write(self, path: str, text: str) -> None:
        owner = self.user or "root"
        self.machine.run("mkdir", "-p", str(Path(path).parent), user=self.user)
        self.machine.write(path, text, owner=owner)

    # Calls

    def __call__(
        self,
        *words: str | Path,
        expect: int | None = 0,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        limit_s: float = 400.0,
    ) -> Said:
        """Call `tunerd WORDS`; the exit code must be `expect`, unless that is None."""
        done = self.machine.tunerd(*words, user=self.user, env=env, stdin=stdin, limit_s=limit_s)
        said = Said(done.returncode, done.stdout, done.stderr)
        told = " ".join(str(word) for word in words)
        assert expect is None or said.code == expect, f"tunerd {told}: wanted {expect}, got {said}"
        assert "Traceback" not in said.err, f"tunerd {told}: {said}"
        return said

    def json(self, *words: str | Path, expect: int | None = 0) -> Any:
        """What `tunerd WORDS --json` prints."""
        return self(*words, "--json", expect=expect).json

    def apply(self, profile: str, *words: str, expect: int = 0) -> Any:
        """What `tunerd apply PROFILE --yes --json` prints."""
        return self.json("apply", profile, "--yes", *words, expect=expect)

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Call `tunerd WORDS` and go on."""
        return self.machine.start("tunerd", *words, user=self.user, env=env)

    # What there is

    def systemctl(self, *words: str, check: bool = True) -> str:
        """systemctl of the manager that the server runs under."""
        return self.machine.systemctl(*words, user=self.user, check=check)

    def show(self, name: str, unit: str = UNIT) -> str:
        """One property of the unit."""
        return self.machine.show(unit, name, user=self.user)

    def unit(self, name: str = UNIT) -> UnitFile | None:
        """The unit file, or the backup of this name."""
        path = f"{self.units}/{name}"
        if not self.machine.exists(path):
            return None
        look = self.machine.run("stat", "--format=%F %a %U:%G", path).stdout
        return UnitFile(self.machine.read(path), look)

    def write_unit(self, text: str) -> None:
        """Write a unit by hand and have it read."""
        self._write(f"{self.units}/{UNIT}", text)
        self.systemctl("daemon-reload")

    def backups(self) -> list[str]:
        """Names of the `.pre-*` files."""
        return [name for name in self.machine.files(self.units) if name.startswith(f"{UNIT}.pre-")]

    def journal_files(self) -> list[str]:
        """Intent records: none but while a swap is under way or was cut short."""
        return self.machine.files(f"{self.state}/journal")

    def tree(self, *folders: str) -> str:
        """Every file below, with type, mode, owner and content."""
        wanted = folders or (self.units, self.state, self.config)
        return self.machine.run("sh", "-c", _TREE, "sh", *wanted, check=False).stdout

    def processes(self) -> str:
        """All processes whose command line has to do with a server of a test."""
        found = self.machine.sh("ps -eo pid,args | grep -E '[l]lama|[/]srv/' || true")
        return found.stdout

    # The server

    def ask(
        self, path: str, body: Mapping[str, Any] | None = None, *, port: int = 8080, key: str = ""
    ) -> tuple[int, Any]:
        """Status and JSON of one request; status 0 where nobody answers."""
        words = ["curl", "--silent", "--show-error", "--max-time", "30",
                 "--write-out", "\\n%{http_code}"]  # fmt: skip
        words += ["--header", f"Authorization: Bearer {key}"] if key else []
        if body is not None:
            words += ["--header", "Content-Type: application/json", "--data-binary", "@-"]
        done = self.machine.run(
            *words, f"http://127.0.0.1:{port}{path}",
            stdin="" if body is None else json.dumps(body), check=False, limit_s=400,
        )  # fmt: skip
        if done.returncode:
            return 0, done.stderr
        text, _, status = done.stdout.rpartition("\n")
        return int(status), json.loads(text) if status == "200" else None

    def alias(self, *, port: int = 8080) -> str | None:
        """The name of the model that answers; None where nobody does."""
        status, answer = self.ask("/v1/models", port=port)
        return answer["data"][0]["id"] if status == 200 else None

    def generate(
        self,
        prompt: str = "please go on with code",
        *,
        n: int = 33,
        port: int = 8080,
        key: str = "",
        route: str = "/completion",
    ) -> dict[str, Any]:
        """The answer to a real request, which must be one."""
        body = {"prompt": prompt, "n_predict": n, "max_tokens": n, "temperature": 0}
        status, answer = self.ask(route, body, port=port, key=key)
        assert status == 200, f"no generation on port {port}: {status} {answer}\n{self.processes()}"
        assert answer["timings"]["predicted_n"] > 0, answer
        found: dict[str, Any] = answer
        return found

    # The stand-in

    def stand_ins(self, **behaviours: Mapping[str, Any]) -> None:
        """Install stand-in engines as /srv/NAME/llama-server."""
        told = {f"/srv/{name}": {"record": None, **how} for name, how in behaviours.items()}
        self.machine.python("-c", _INSTALL, json.dumps(told))

    def behave(self, name: str, **behaviour: Any) -> None:
        """How a stand-in behaves from its next start on; what is not said is as by default."""
        path = f"/srv/{name}/llama-server.json"
        told = json.loads(self.machine.read(path))
        kept = {field: told[field] for field in ("dialect", "help_file", "flags")}
        self.machine.write(path, json.dumps(kept | behaviour))

    def until(
        self,
        holds: Callable[[], Any],
        what: str | Callable[[], str],
        *,
        unit: str = "tunerd.service",
        limit_s: float = 400.0,
    ) -> Any:
        """Wait until something holds, and return it; else show the end of that unit's journal."""

        def told() -> str:
            lines = self.machine.journal(f"--unit={unit}", "--lines=30", user=self.user)
            return "\n".join((what if isinstance(what, str) else what(), *lines, self.logs()))

        return until(holds, told, limit_s)

    def logs(self) -> str:
        """The end of the unit's journal."""
        return "\n".join(self.machine.journal(f"--unit={UNIT}", "--lines=40", user=self.user))


def profile(engine: str, *, extends: str = "cpu-embedded", **values: Any) -> str:
    """The text of a site profile on the designed model, with dotted keys spelled with two lines.

    `serving__alias="x"` sets `serving.alias`. Speculation is off unless a value says otherwise.
    """
    keys: dict[str, Any] = {
        "engine.prefer": [engine],
        "model.path": MODEL,
        "speculation.type": "off",
        **{name.replace("__", "."): value for name, value in values.items()},
    }
    lines = [f'extends = "{extends}"']
    lines += [f"{key} = {_toml(value)}" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value)
