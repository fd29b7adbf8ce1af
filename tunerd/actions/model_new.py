"""`tunerd model new`: writes a small designed model, whose answers are known to the token."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.core.result import ActionResult
from tunerd.errors import UsageError


def model_new(ctx: Context, path: Path, *, shape: str, seed: int, force: bool) -> ActionResult:
    """Write the model and its ground truth.

    Raises:
        UsageError: there is no such shape or folder, or the file exists and `force` is not given.
        HostError: the file cannot be written.
    """
    from tunerd.core.designed import SHAPES, design
    from tunerd.system.designed_file import write

    if shape not in SHAPES:
        raise UsageError(f"no such shape: `{shape}`", hint=f"one of {', '.join(SHAPES)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"no such folder: `{path.parent}`", hint=f"mkdir -p {path.parent}")
    ctx.say(f"designing {shape}")
    made = design(SHAPES[shape], seed)
    ctx.say(f"writing {path}")
    written = write(made, path, force=force)
    payload = {
        "path": str(written.path),
        "truth": str(written.truth_path),
        "bytes": written.n_bytes,
        "shape": shape,
        "seed": seed,
        "details": {k: str(v) for k, v in asdict(SHAPES[shape]).items()},
    }
    return ActionResult("model new", payload, has_acted=True)
