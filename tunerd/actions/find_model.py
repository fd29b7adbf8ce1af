"""Finds the weights that a profile names; a missing file is an error that says how to fetch it."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from tunerd.actions.context import Context
from tunerd.core.model import ModelFacts
from tunerd.core.resolve import Resolved
from tunerd.core.result import Message, warning
from tunerd.errors import ConfigError, ModelFileError
from tunerd.system.model_files import ModelFiles
from tunerd.system.model_search import ModelQuery, find_model, find_models


def find_weights(ctx: Context, resolved: Resolved) -> tuple[Path, ModelFacts]:
    """The model file of a profile and what its header says.

    Raises:
        ConfigError: the profile names no file.
        ModelFileError: it is missing, damaged, or not unique.
    """
    model = resolved.profile.model
    wanted = model.path or model.hf_file
    if wanted is None and model.name is None:
        raise ConfigError(
            f"profile `{resolved.name}` names no model",
            hint="--set model.path=FILE",
            state="nothing was touched",
        )
    models = ModelFiles(ctx.paths.cache_dir, ctx.files)
    path = locate(ctx, models, wanted, resolved)
    return path, models.read_facts(path)


def locate(ctx: Context, models: ModelFiles, wanted: str | None, resolved: Resolved) -> Path:
    """A file named by a profile: an absolute path, or a name or glob below `models.dirs`.

    Where no file has that name, the one whose metadata fits `model.name` is taken, if there is
    exactly one.
    """
    if wanted is not None and wanted.startswith(("/", "~")):
        path = Path(wanted).expanduser()
        if not path.exists():
            raise ModelFileError(
                f"model file is missing: `{path}`",
                state="nothing was touched",
                hint=_fetch_hint(ctx, resolved),
            )
        return path
    folders = ctx.settings.models.dirs
    try:
        if wanted is None:
            return find_model(folders, _by_metadata(resolved), models)
        return find_model(folders, ModelQuery(file_name=wanted), models)
    except ModelFileError as problem:
        fitting: tuple[Path, ...] = ()
        if resolved.profile.model.name is not None and wanted is not None:
            fitting = find_models(folders, _by_metadata(resolved), models).paths
        if len(fitting) == 1:
            return fitting[0]
        several = ", ".join(f"`{path}`" for path in fitting)
        cause = f"more than one has metadata that fits: {several}" if several else problem.cause
        raise ModelFileError(
            problem.message,
            cause=cause,
            state="nothing was touched",
            hint=_fetch_hint(ctx, resolved),
        ) from problem


def found_by_metadata(resolved: Resolved, path: Path) -> list[Message]:
    """A warning where another file than the one that the profile names is served."""
    model = resolved.profile.model
    wanted = model.path or model.hf_file
    if wanted is None or fnmatch(path.name.lower(), Path(wanted).name.lower()):
        return []
    return [
        warning(
            "model-by-name",
            f"no file is called `{wanted}`; `{path}` is the one whose metadata names "
            f"`{model.name}`, and it may be another quantisation",
            hint="--set model.path=FILE names one",
        )
    ]


def _by_metadata(resolved: Resolved) -> ModelQuery:
    needs_mtp = resolved.profile.speculation.type == "mtp"
    return ModelQuery(model_name=resolved.profile.model.name, needs_mtp=needs_mtp)


def _fetch_hint(ctx: Context, resolved: Resolved) -> str:
    model = resolved.profile.model
    folder = ctx.settings.models.dirs[0] if ctx.settings.models.dirs else "FOLDER"
    if model.hf_repo is not None:
        what = model.hf_file or model.path or ""
        fetch = f"hf download {model.hf_repo} {what} --local-dir {folder}".replace("  ", " ")
    elif model.source is not None:
        fetch = f"get it: {model.source}"
    elif resolved.profile.match.gpu == "none" and model.path is not None:
        fetch = f"tunerd model new {Path(folder) / model.path}"
    else:
        fetch = "fetch the file"
    where = (
        ""
        if ctx.settings.models.dirs
        else (f"; `models.dirs` in `{ctx.paths.settings_file}` names the folders that are searched")
    )
    return f"{fetch}; or give a path with --set model.path=FILE{where}"
