"""What an engine itself says of a command line: a run that ends where it looks for the model."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.actions.context import Context
from tunerd.actions.find_engines import prober
from tunerd.core.failure import argument_error
from tunerd.system.engine_programs import Found


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
