"""How the stand-in engine behaves: the fields of its settings file."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Behaviour:
    """What to play. Times are wall-clock seconds, rates are per simulated second.

    `fail` and `reply` may be lists: `fail` goes by the number of this load (counted in `record`;
    questions and checks of arguments load nothing), `reply` by the number of the completion; the
    last entry repeats, None is no failure. The names of failures are in failures.py; replies are
    normal, hang and error.

    `flags` are the spellings that are taken, each with whether it takes a value (None where the help does
    not tell); of None any is taken.

    The model is recurrent as the designed ones are, unless `is_recurrent` says otherwise: of a prompt that
    another end follows only what lies before a checkpoint is found again.

    `drips` sends the heads of all answers a byte every half second, without end.

    `device` are the lines about a GPU: name, description, total_mib, free_mib, model_mib, context_mib,
    compute_mib, and n_layers, offloaded, and of those by the fit overflowing.

    Traps for whoever measures: `finds_all_cached` reuses prompts although a request forbids it,
    `ignores_overrides` takes settings of speculation with a request and does
    nothing with them, `openai_only` is another kind of server: OpenAI routes alone, without timings.
    `told_timings` are told instead of the true ones (of an object, its keys alone), `told_props` are keys
    of `/props`, `slots_are_busy` says
    that of every slot for ever, `counts_after_s` is how late it tells what it is at.
    A prompt of more than `breaks_beyond` tokens is answered by `breaks_into` over and over; from the share
    `loops_from` of every answer on it says its last words again and again.
    `by_length` are prompt time [ms] and tok/s for answers of that many tokens. `answer_text`,
    `reasoning` and `tool_calls` (name, arguments) are what a chat is answered with, the calls where
    tools are offered.

    `rules` are `{"when": {flag: value}, "set": {field: value}}`: where the command line has those
    values (names as in `Arguments.facts`), the fields are set; later rules win.
    """

    dialect: str = "main-0x"
    help_file: str | None = None
    flags: dict[str, bool | None] | None = None
    record: str | None = None
    # Life.
    needs_model: bool = True
    load_s: float = 0.0
    load_never_ends: bool = False
    drips: bool = False
    fail: str | list[str | None] | None = None
    exit_after_requests: int | None = None
    exit_status: int = 1
    exit_signal: int | None = None
    ignore_sigterm: bool = False
    leave_child: bool = False
    # What it says.
    alias: str | None = None
    reply: str | list[str] = "normal"
    device: dict[str, Any] | None = None
    # How fast it is.
    time_scale: float = 0.0
    pp_tok_s: float = 1000.0
    tg_tok_s: float = 50.0
    decay_per_request: float = 0.0
    # How it speculates: costs are shares of one plain step.
    is_recurrent: bool = True
    speculation_works: bool = True
    acceptance: float = 0.75
    draft_cost: float = 0.08
    prefill_tax: float = 0.12
    by_length: dict[str, list[float]] | None = None
    # Traps.
    finds_all_cached: bool = False
    ignores_overrides: bool = False
    openai_only: bool = False
    told_timings: Any = None
    told_props: dict[str, Any] = field(default_factory=dict)
    slots_are_busy: bool = False
    counts_after_s: float = 0.0
    breaks_beyond: int | None = None
    breaks_into: str = "<"
    loops_from: float | None = None
    # Chats.
    answer_text: str | None = None
    reasoning: str | None = None
    tool_calls: list[list[str]] | None = None
    rules: list[dict[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def is_ik(self) -> bool:
        return self.dialect.startswith("ik-")


def read_behaviour(path: str) -> Behaviour:
    """The settings file; a field that does not exist ends the program."""
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    unknown = set(settings) - {item.name for item in dataclasses.fields(Behaviour)}
    if unknown:
        sys.exit(f"stand-in: unknown fields in {path}: {sorted(unknown)}")
    return Behaviour(**settings)
