"""The text of the llama-server unit: a template with places for values, each quoted as systemd parses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunerd.core.host import Mode
from tunerd.core.unit_file import MAX_LINE_BYTES, exec_words, plain_value, quote_environment
from tunerd.errors import ConfigError

MARK = "Written by tunerd"
_PLACE = re.compile(r"@([A-Z_]+)@")
_PLAIN = re.compile(r"[^ -~]+")
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./:=,+-]+")
_MAX_TEXT = 200


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Everything that goes into one unit.

    `unit_directives` and `service_directives` are (name, value) pairs whose values are already in
    systemd's syntax. `api_key_file` becomes a credential: its text is neither in the unit nor in
    the process list. `work_dir` is where a unit in local mode is started. `wanted_by` is None for
    a unit that is never enabled.
    """

    unit: str
    mode: Mode
    profile: str
    engine: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    group: str | None = None
    api_key_file: str | None = None
    work_dir: str | None = None
    wants_mlock: bool = False
    needs_home: bool = False
    restart: str = "on-failure"
    stop_timeout_s: int = 30
    unit_directives: Sequence[tuple[str, str]] = ()
    service_directives: Sequence[tuple[str, str]] = ()
    wanted_by: str | None = None


CREDENTIAL_PATH = "%d/api-key"


def render_unit(template: str, spec: UnitSpec) -> str:
    """The unit's text; the same spec always gives the same text.

    Raises:
        ConfigError: a value cannot be written in a unit file (NUL, or a program path that systemd
            refuses).
    """
    conditions = {
        **{str(mode): spec.mode is mode for mode in Mode},
        "mlock": spec.wants_mlock,
        "install": spec.wanted_by is not None,
    }
    values = {
        "HEADER": f" {MARK}: {_header(spec)}",
        "UNIT": spec.unit,
        "DESCRIPTION": _text(f"llama-server, profile {spec.profile}").replace("%", "%%"),
        "UNIT_DIRECTIVES": _lines(spec.unit_directives),
        "WORK_DIR": plain_value(spec.work_dir or "/"),
        "EXEC_START": _exec_start(spec),
        "SERVICE_DIRECTIVES": _lines(_service(spec)),
        "RESTART": spec.restart,
        "STOP_TIMEOUT_S": str(spec.stop_timeout_s),
        "PROTECT_HOME": "read-only" if spec.needs_home else "yes",
        "WANTED_BY": spec.wanted_by or "",
    }
    kept = _choose(template, conditions)
    for name, value in values.items():
        if not value:  # a place that stands alone on its line leaves no empty line behind
            kept = kept.replace(f"@{name}@\n", "")
    # One pass over the template: a value that looks like a place is not filled again.
    return _PLACE.sub(lambda place: values.get(place.group(1), place.group()), kept)


def is_ours(text: str) -> bool:
    """Whether a unit's text was rendered here."""
    return text.startswith(f"# {MARK}")


def _header(spec: UnitSpec) -> str:
    return _text(f"profile {spec.profile}, engine {spec.engine}")


def _service(spec: UnitSpec) -> list[tuple[str, str]]:
    directives = [
        ("Environment", quote_environment(name, value))
        for name, value in sorted(spec.environment.items())
    ]
    if spec.user is not None and spec.mode is not Mode.USER:
        directives.append(("User", plain_value(spec.user)))
    if spec.group is not None and spec.mode is not Mode.USER:
        directives.append(("Group", plain_value(spec.group)))
    if spec.api_key_file is not None:
        directives.append(("LoadCredential", f"api-key:{_credential_source(spec.api_key_file)}"))
    return [*directives, *spec.service_directives]


def _exec_start(spec: UnitSpec) -> str:
    """The command with one flag a line: people read the file, and compare it by diff."""
    words = exec_words(spec.argv)
    head = len(words) - len(spec.argv) + 1  # a program path with `$` takes two words
    is_plain = head == 1 and _PLAIN_WORD.fullmatch(spec.argv[0])
    lines = [spec.argv[0] if is_plain else " ".join(words[:head])]
    for raw, quoted in zip(spec.argv[1:], words[head:], strict=True):
        is_credential = raw == CREDENTIAL_PATH and spec.api_key_file is not None
        # systemd puts the credential's folder for %d; a plain word is easier to read unquoted
        word = raw if is_credential or _PLAIN_WORD.fullmatch(raw) else quoted
        if raw.startswith("-") and not _is_number(raw):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    text = " \\\n    ".join(lines)
    if len(text.encode("utf-8", "surrogateescape")) > MAX_LINE_BYTES:
        raise ConfigError(
            f"the command line is longer than a unit's line may be: {MAX_LINE_BYTES} bytes",
            hint="long texts belong in a file that the program reads",
        )
    return text


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None


def _choose(template: str, conditions: Mapping[str, bool]) -> str:
    """The template without the blocks whose condition does not hold."""
    kept: list[str] = []
    holds = True
    for line in template.splitlines():
        if line.startswith("#@if "):
            holds = conditions[line.removeprefix("#@if ").strip()]
        elif line == "#@end":
            holds = True
        elif holds:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _lines(directives: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name}={value}" for name, value in directives)


def _credential_source(path: str) -> str:
    """A path for `LoadCredential=`, whose value is split at colons and knows no quotes."""
    if ":" in path:
        raise ConfigError(f"systemd cannot take a path with a colon as a credential: `{path}`")
    if not path.startswith("/"):
        raise ConfigError(f"serving.api_key_file is not an absolute path: `{path}`")
    return plain_value(path)


def _text(text: str) -> str:
    """Words for a comment or description: printable ASCII, one line, bounded."""
    return _PLAIN.sub("?", text)[:_MAX_TEXT].rstrip("\\")
