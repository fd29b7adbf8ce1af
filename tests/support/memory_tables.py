"""What mainline's dry runs expect of memory: a breakdown table for the target, and one for what drafts.

Builds of summer 2026 measure what drafts first and say so afterwards.

Source: logs of builds of May to November 2026 (mainline, BeeLlama).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tunerd.model.memory import Device
from tunerd.model.report import device_of

_ROW = re.compile(
    r"\|\s+- (?P<label>[^|]++)\|(?:\s*\d+ =\s*\d+ \+ \()?\s*(?P<mib>\d+) =\s*(?P<model>\d+) \+"
)


def planned_mib(lines: Iterable[str], device: Device) -> int | None:
    """What the first dry run expects on a device, with what drafts; None without a dry run."""
    tables: list[list[tuple[Device, int, int]]] = []
    drafts: list[int] = []
    is_draft = False
    for line in lines:
        if "| memory breakdown [MiB]" in line:
            drafts += [len(tables)] * is_draft
            tables.append([])
        elif "cleaning up before exit" in line:
            break
        elif "memory data for the extra model" in line:
            is_draft = True
        elif "getting device memory data for" in line:
            is_draft = False
        elif "[spec] estimated memory usage" in line and tables:
            drafts.append(len(tables) - 1)
        elif tables and (row := _ROW.search(line)):
            place = device_of(row["label"].strip())
            tables[-1].append((place, int(row["mib"]), int(row["model"])))
    target = next((one for number, one in enumerate(tables) if number not in drafts), None)
    if target is None:
        return None
    total = sum(mib for place, mib, _ in target if place is device)
    for number in drafts[:1]:
        # A model that drafts for itself is there once.
        is_same = [model for *_, model in tables[number]] == [model for *_, model in target]
        rows = [row for row in tables[number] if row[0] is device]
        total += sum(mib - (model if is_same else 0) for _, mib, model in rows)
    return total
