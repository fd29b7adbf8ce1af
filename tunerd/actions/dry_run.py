"""What an engine itself says of a command line: a run that ends where it looks for the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.actions.find_engines import prober
from tunerd.core.failure import argument_error
from tunerd.core.unit import CREDENTIAL_PATH
from tunerd.system.engine_programs import Found
from tunerd.system.ports import free_port


def refusal(ctx: Context, found: Found, arguments: Sequence[str]) -> str | None:
    """Why the engine refuses arguments whose model file does not exist; None if it does not.

    One that a signal ended is tried once more: what is wrong with an argument is wrong each time.

    Raises:
        EngineError: it could not be run, or did not end.
    """
    done = prober(ctx).check_arguments(found, arguments)
    if done.returncode is None:
        done = prober(ctx).check_arguments(found, arguments)
    return argument_error(done.returncode, f"{done.stdout}\n{done.stderr}")


def dry_arguments(arguments: Sequence[str], model_path: str) -> list[str]:
    """The arguments of a server as a dry run takes them: no model, no key file, a port of its own.

    Builds bind their port before they look for the model; a key file is there only while the unit
    runs.
    """
    changed = [_nowhere(word) if word == model_path else word for word in arguments]
    if "--port" not in changed:
        changed += ["--port", ""]
    changed[changed.index("--port") + 1] = str(free_port())
    if CREDENTIAL_PATH in changed:
        index = changed.index(CREDENTIAL_PATH)
        del changed[index - 1 : index + 1]
    return changed


def _nowhere(path: str) -> str:
    return f"/nonexistent/{Path(path).name}"
