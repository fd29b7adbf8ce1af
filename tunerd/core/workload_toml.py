"""Writes a workload as a file that `workload_table.WorkloadTable` takes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomlkit

from tunerd.core.workload_shape import WorkloadShape
from tunerd.core.workload_table import UNKNOWN


def to_toml(shape: WorkloadShape, learned: Mapping[str, Any] | None = None) -> str:
    """The text of a workload file; `learned` is what it was learned from."""
    document = tomlkit.document()
    if shape.description:
        document["description"] = shape.description
    if shape.source:
        document["source"] = shape.source
    classes = tomlkit.aot()
    for one in shape.classes:
        table = tomlkit.table()
        for key, value in one.to_json().items():
            table[key] = _inline(value) if isinstance(value, Mapping) else value
        if one.reasoning is None:
            table["reasoning_tokens"] = UNKNOWN
        classes.append(table)
    document["classes"] = classes
    if learned:
        table = tomlkit.table()
        for key, value in learned.items():
            if value is not None:
                table[key] = _inline(value) if isinstance(value, Mapping) else value
        document["learned"] = table
    return tomlkit.dumps(document)


def _inline(value: Mapping[str, Any]) -> Any:
    table = tomlkit.inline_table()
    table.update(value)
    return table
