"""`tunerd settings`: every setting, its value, and where it comes from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tunerd.actions.context import Context
from tunerd.core.result import ActionResult
from tunerd.settings_sources import sources_of


def show_settings(ctx: Context) -> ActionResult:
    """All settings with their sources, and the folders in use."""
    values: dict[str, Any] = ctx.settings.model_dump(mode="json")
    rows = []
    for name, source in sources_of(ctx.paths, ctx.environment).items():
        value: Any = values
        for part in name.split("."):
            value = value[part]
        rows.append({"name": name, "value": value, "source": source})
    paths = {name: str(path) for name, path in asdict(ctx.paths).items()}
    return ActionResult("settings", {"settings": rows, "paths": paths, "mode": str(ctx.mode)})
