"""`tunerd workload list / show / learn`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from tunerd.cli.complete import names_of
from tunerd.cli.output import columns, finish, json_option, progress_sink
from tunerd.core.quantity import format_duration

_TOKEN_PARTS = ("cached prompt", "new prompt", "reasoning", "answer")
_TIME_PARTS = ("prefill", "reasoning", "decode")


@click.group(name="workload", short_help="The mix of requests that the server is tuned for.")
def command() -> None:
    """The mix of requests that the server is tuned for: classes with their lengths and weights.

    \b
    Example:
      tunerd workload list
      tunerd workload show coding-agent
      tunerd workload learn
    """  # noqa: D301


@command.command(name="list", short_help="Every workload.")
@json_option
@click.pass_obj
def list_command(mode: str | None, as_json: bool) -> None:
    """Every workload: shipped, learned, and of this site.

    \b
    Example:
      tunerd workload list
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.workloads import list_workloads
    from tunerd.cli.remote import from_daemon

    found = from_daemon(mode, "workloads", as_json=as_json)
    finish(found or list_workloads(build_context(mode=mode)), render_list, as_json=as_json)


@command.command(name="show", short_help="Its classes, drawn.")
@click.argument("workload", shell_complete=names_of("workloads"))
@json_option
@click.pass_obj
def show_command(mode: str | None, workload: str, as_json: bool) -> None:
    """The classes of a workload, and what a turn takes at the speed that the live server had.

    \b
    Example:
      tunerd workload show coding-agent
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.workloads import show_workload
    from tunerd.cli.remote import acts_through_daemon, from_daemon
    from tunerd.core.names import check_name

    if acts_through_daemon(mode):
        check_name(workload, of="a workload")
    found = from_daemon(mode, "workloads", workload, as_json=as_json)
    finish(found or show_workload(build_context(mode=mode), workload), render_show, as_json=as_json)


@command.command(name="learn", short_help="Derive one from the server's own log.")
@click.option("--name", default="learned", show_default=True, help="Name of the new workload.")
@click.option(
    "--unit",
    shell_complete=names_of("units"),
    help="Whose log to read; the deployed unit by default.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    help="How many days of the log to read; by default the newest lines, whatever their age.",
)
@click.option("--dry-run", is_flag=True, help="Show it and write nothing.")
@json_option
@click.pass_obj
def learn_command(
    mode: str | None, name: str, unit: str | None, days: int | None, dry_run: bool, as_json: bool
) -> None:
    """Derive a workload from the log of the server: lengths and counts only, no text is kept.

    \b
    Example:
      tunerd workload learn --days 7
      tunerd workload learn --unit my-llama.service --name office --dry-run
    """  # noqa: D301
    from tunerd.actions.context import build_context
    from tunerd.actions.workloads import learn_workload
    from tunerd.cli.remote import by_daemon, demand_root
    from tunerd.core.names import check_name

    check_name(name, of="a workload")
    if unit is not None:
        demand_root(mode, "workload learn --unit", "logs of other units are not a member's to read")
    body = {"name": name, "days": days, "write": not dry_run}
    done = by_daemon(mode, "workload/learn", body, as_json=as_json)
    if done is not None:
        finish(done, render_show, as_json=as_json)
        return
    context = build_context(mode=mode, progress=progress_sink(as_json=as_json))
    result = learn_workload(context, name=name, unit=unit, days=days, write=not dry_run)
    finish(result, render_show, as_json=as_json)


def render_list(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = [
        (row["name"], row["layer"], str(row["classes"]), row["description"])
        for row in payload["workloads"]
    ]
    yield from columns(rows, ("workload", "from", "classes", "what"))


def render_show(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    from tunerd.cli.bars import bar, legend

    yield f"{payload['name']}: {payload['description']}"
    yield f"source: {payload['source'] or 'not said'}"
    yield ""
    yield f"tokens of one request   {legend(_TOKEN_PARTS)}"
    sizes = [_token_parts(one) for one in payload["classes"]]
    largest = max(sum(size for _, size in parts) for parts in sizes)
    name_width = max(len(one["name"]) for one in payload["classes"])
    for one, parts in zip(payload["classes"], sizes, strict=True):
        total = sum(size for _, size in parts)
        drawn = bar(parts, largest=largest)
        yield f"  {one['name'].ljust(name_width)}  {one['share']:>4.0%}  {drawn}  {_about(one, total)}"
    yield ""
    yield from _turns(payload, name_width)
    yield from _learned(payload)
    if payload.get("written"):
        yield f"written: {payload['path']}"


def _token_parts(one: Mapping[str, Any]) -> list[tuple[str, float]]:
    mean = one["mean"]
    sizes = (
        mean["cached_tokens"],
        mean["new_tokens"],
        mean["reasoning_tokens"] or 0,
        mean["answer_tokens"],
    )
    return list(zip(_TOKEN_PARTS, map(float, sizes), strict=True))


def _about(one: Mapping[str, Any], total: float) -> str:
    mean = one["mean"]
    thoughts = mean["reasoning_tokens"]
    parts = [f"{mean['cached_tokens']} + {mean['new_tokens']} prompt"]
    parts += [f"{thoughts} reasoning"] if thoughts else []
    parts.append(f"{mean['answer_tokens']} answer")
    if thoughts is None:
        parts[-1] += ", reasoning included"
    if one["concurrency"] > 1:
        parts.append(f"{one['concurrency']} at once")
    return f"{total:.0f}: {', '.join(parts)} ({one['kind']})"


def _turns(payload: Mapping[str, Any], name_width: int) -> Iterator[str]:
    from tunerd.cli.bars import bar, legend

    rates = payload["rates"]
    if payload["turn"] is None:
        yield "turn times: unknown, since no log shows how fast the live server is"
        return
    yield (
        f"turn time at {rates['prompt_tok_s']:.0f} tok/s of prompt and {rates['decode_tok_s']:.1f} "
        f"tok/s of answer   {legend(_TIME_PARTS)}"
    )
    rows = [(one["name"], one["turn"]) for one in payload["classes"]]
    largest = max(turn["total_s"] for _, turn in rows)
    for name, turn in [*rows, ("expected", payload["turn"])]:
        parts = [(part, turn[f"{part}_s"] or 0.0) for part in _TIME_PARTS]
        yield (
            f"  {name.ljust(max(name_width, len('expected')))}  {bar(parts, largest=largest)}  "
            f"{format_duration(turn['total_s'])}"
        )


def _learned(payload: Mapping[str, Any]) -> Iterator[str]:
    from tunerd.cli.bars import histogram

    learned = payload["learned"]
    if not learned:
        return
    for key, name in (
        ("prompt_tokens", "prompts, tokens from"),
        ("new_prompt_tokens", "of them new, tokens from"),
        ("answer_tokens", "answers, tokens from"),
        ("concurrency", "requests at once"),
    ):
        counts = learned.get(key)
        if counts:
            yield ""
            yield name
            yield from (f"  {line}" for line in histogram(list(counts.items())))
    if learned.get("acceptance_ratio") is not None:
        yield ""
        yield f"drafts accepted: {learned['acceptance_ratio']:.1%}"
