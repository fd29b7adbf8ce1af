"""Commands that measure: bench, compare, workload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from tunerd.cli.complete import keys, names_of
from tunerd.cli.deploy import set_option
from tunerd.cli.output import bar, columns, histogram, legend, section_lines
from tunerd.operations import PROFILE, SEED, SETTING, SIDE, SPAN, WORKLOAD, Call, operation
from tunerd.result import ActionResult
from tunerd.web.view import NOT_ASKED
from tunerd.web.workload_view import workload_section
from tunerd.words import UNKNOWN, format_duration


def render_bench_view(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"run {payload['run']}: {payload['suite']} of {payload['target']}, seed {payload['seed']}"
    yield ""
    yield from _SUITES[payload["suite"]](payload)
    yield from _positions(payload)
    if payload["against"] is not None:
        yield ""
        yield from _against(payload["against"])


def _mtp(payload: Mapping[str, Any]) -> Iterator[str]:
    for arm, table in payload["tables"].items():
        if len(payload["tables"]) > 1:
            yield f"{arm}:"
        for row in table["rows"]:
            counts = " ".join(
                f"{name}={_whole(row[key]):>4}"
                for name, key in (("pred", "predicted"), ("draft", "drafted"), ("acc", "accepted"))
            )
            rate, tok_s = _figure(row["acceptance_ratio"], 3), _figure(row["tok_s"], 1)
            left = f"  ({row['n']} requests{_left_out(row['n_left_out'])})"
            yield f"  {row['kind']:<18} {counts} rate={rate} tok/s={tok_s}{left}"
        yield "Aggregate: " + json.dumps(
            {
                "n_requests": table["n_requests"],
                "total_predicted": table["predicted"],
                "total_draft": table["drafted"],
                "total_draft_accepted": table["accepted"],
                "aggregate_accept_rate": _rounded(table["acceptance_ratio"], 4),
                "wall_s_total": _rounded(table["wall_s"], 2),
            }
        )
        yield (
            f"tok/s: {_figure(table['tok_s'], 2)} (all tokens over all time{_without(table)}), "
            f"{_figure(table['mean_tok_s'], 2)} (mean of the kinds); "
            f"wall of one round {_figure(table['wall_s'], 2)} s"
        )
        yield from _by_client(payload, arm)


def _without(table: Mapping[str, Any]) -> str:
    return f", without {', '.join(table['missing'])}" if table["missing"] else ""


def _lengths(payload: Mapping[str, Any]) -> Iterator[str]:
    yield from _cases(payload, "tokens")
    if payload["crossover"] is None and len(payload["arms"]) < 2:  # noqa: PLR2004
        return
    yield ""
    for row in payload["lengths"]:
        lead = row["lead_ms"]
        if lead is None:
            said = "not measured for both"
        elif row["arm"] is None:
            said = f"a tie (within {lead / 1000:.2f} s)"
        else:
            said = f"{row['arm']} by {lead / 1000:.2f} s"
        yield f"{row['n_tokens']:>6} tokens: {said}"
    yield _crossing(payload["crossover"])


def _crossing(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "no crossing: a figure is missing"
    arm, than = found["arm"], found["than"]
    if found["n_tokens"] is None:
        return f"{arm} is faster than {than} at no length that was measured"
    if found["n_tokens"] == 0:
        return f"{arm} is faster than {than} at every length that was measured"
    low, high = (_figure(found[key], 0) for key in ("low", "high"))
    high = "without end" if found["high"] is None else high
    return (
        f"{arm} is faster than {than} from about {found['n_tokens']:.0f} tokens on "
        f"({found['level']:.0%} interval {low} to {high})"
    )


def _cache(payload: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for arm, case, samples in _grouped(payload):
        usable = [one for one in samples if one["usable"]]
        rows.append(
            (
                case,
                str(len(usable)),
                _median(usable, lambda one: one["timings"] and one["timings"]["prompt_ms"], 1),
                _median(usable, lambda one: one["details"].get("cached"), 0),
                _median(usable, lambda one: one["client"] and one["client"]["ttft_ms"], 1),
                arm,
            )
        )
    heads = ("case", "requests", "prompt ms", "tokens reused", "TTFT ms", "arm")
    yield from columns(rows, heads)
    for found in payload["reuse"].values():
        for one in found:
            yield f"{one['case']}: {one['text']}"


def _deep(payload: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (
            _figure(sample["details"].get("depth"), 0),
            _rate(sample, "predicted", 1),
            _rate(sample, "prompt", 0),
            _figure(sample["vram_free_min_mib"], 0),
            sample["problem"] or ", ".join(sample["marks"]),
        )
        for sample in payload["samples"]
        if sample["case"] != "warm-up"
    ]
    yield from columns(rows, ("tokens", "tok/s", "prompt tok/s", "free VRAM MiB", ""))
    for found in payload["depth"].values():
        if found["failed_tokens"] is not None:
            yield f"it ends at about {found['failed_tokens']:.0f} tokens: {found['why']}"
        elif found["spill_tokens"] is not None:
            yield f"it spills from {found['spill_tokens']:.0f} tokens on: {found['why']}"
        else:
            yield f"filled up to {_figure(found['filled_tokens'], 0)} tokens: {found['why']}"


def _quality(payload: Mapping[str, Any]) -> Iterator[str]:
    gates = [found for key in ("quality", "against_serving") if (found := payload[key]) is not None]
    if not gates:
        yield from _cases(payload, "case")
        yield "one arm alone: there is nothing to compare its answers with"
    for number, found in enumerate(gates):
        if number:
            yield ""
        yield from quality_lines(found, found["candidate"], found["reference"])


def quality_lines(found: Mapping[str, Any], candidate: str, reference: str) -> Iterator[str]:
    """The quality gate: a row for each case, and what it came to."""
    rows = [
        (
            one["case"],
            f"{one['n_same']} of {one['n']}" + _left_out(one["n_missing"] + one["n_left_out"]),
            NOT_ASKED if one["n_called"] is None else f"{one['n_called']} of {one['n']}",
            NOT_ASKED if one["n_valid"] is None else f"{one['n_valid']} of {one['n']}",
            _figure(one["drift_letters"], 0),
            " / ".join(_figure(n, 0) for n in one["reasoning_letters"]),
        )
        for one in found["cases"]
    ]
    heads = ("case", "same", "with calls", "valid JSON", "drift in letters", "letters of thoughts")
    yield from columns(rows, heads)
    words = {True: "passed", False: "failed", None: "no verdict"}
    yield f"gate, {candidate} against {reference}: {words[found['passes']]}"
    yield from (f"  {reason}" for reason in found["reasons"])


def _concurrency(payload: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (row["case"], str(row["n_groups"]), _figure(row["together_tok_s"], 1),
         _figure(row["each_tok_s"], 1), _figure(row["ttft_ms"], 1), row["arm"])
        for row in payload["streams"]
    ]  # fmt: skip
    heads = ("case", "rounds", "together tok/s", "each tok/s", "TTFT ms", "arm")
    yield from columns(rows, heads)


def _workload(payload: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (row["request_class"] or "the whole mix", _figure(row["prefill_s"], 2),
         _figure(row["reasoning_s"], 2), _figure(row["decode_s"], 2),
         _figure(row["waiting_s"], 2), _figure(row["total_s"], 2),
         UNKNOWN if row["weight"] is None else f"{row['weight']:.0%}", row["arm"])
        for row in payload["turns"]
    ]  # fmt: skip
    heads = ("class", "prefill s", "reasoning s", "decode s", "waiting s", "turn s", "share", "arm")
    yield from columns(rows, heads)


def _cases(payload: Mapping[str, Any], head: str) -> Iterator[str]:
    rows = [
        (
            row["case"],
            row["arm"],
            f"{row['n']}{_left_out(row['n_unusable'])}",
            _figure(row["ttft_ms"]["median"], 1),
            _figure(row["decode"]["tok_s"] or _client(row), 1),
            _spread(row["decode_tok_s"]),
            _figure(row["wall_ms"]["median"], 0),
        )
        for row in sorted(payload["summary"], key=lambda row: _as_number(row["case"]))
    ]
    heads = (head, "arm", "requests", "TTFT ms", "tok/s", "each", "wall ms")
    yield from columns(rows, heads)


def _as_number(case: str) -> int:
    return int(case) if case.isdigit() else 0


def _by_client(payload: Mapping[str, Any], arm: str) -> Iterator[str]:
    """Of a server that reports no timings, what the client's clock saw."""
    rows = [row for row in payload["summary"] if row["arm"] == arm and row["client_tok_s"]]
    if rows:
        yield ""
        yield "by the client's clock, since the server reports no timings:"
        yield from columns(
            [(row["case"], _figure(_client(row), 1), _figure(row["ttft_ms"]["median"], 1),
              _figure(row["wall_ms"]["median"], 0)) for row in rows],
            ("kind", "tok/s", "TTFT ms", "wall ms"),
        )  # fmt: skip


def _positions(payload: Mapping[str, Any]) -> Iterator[str]:
    for arm, ratios in payload["by_position"].items():
        if ratios:
            shown = " / ".join(f"{ratio:.3f}" for ratio in ratios)
            yield f"accepted by position of the draft ({arm}): {shown}"


def _against(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "beside the published numbers:"
    shown = [
        (row["what"], _figure(row["here"], 3), _figure(row["published"], 3),
         UNKNOWN if row["ratio"] is None else f"{row['ratio']:.2f}x", row["unit"])
        for row in rows
    ]  # fmt: skip
    yield from columns(shown, ("", "here", "published", "ratio", ""))


def _grouped(payload: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Mapping[str, Any]]]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for sample in payload["samples"]:
        if sample["case"] != "warm-up":
            groups.setdefault((sample["arm"], sample["case"]), []).append(sample)
    for (arm, case), samples in groups.items():
        yield arm, case, samples


def _rate(sample: Mapping[str, Any], kind: str, digits: int) -> str:
    timings = sample["timings"] or {}
    n, ms = timings.get(f"{kind}_n"), timings.get(f"{kind}_ms")
    if not n or not ms:
        return UNKNOWN
    n -= kind == "predicted"
    return _figure(n / ms * 1000, digits)


def _median(
    samples: Sequence[Mapping[str, Any]], take: Callable[[Mapping[str, Any]], Any], digits: int
) -> str:
    from statistics import median

    known = [value for one in samples if (value := take(one)) is not None]
    return _figure(median(known), digits) if known else UNKNOWN


def _client(row: Mapping[str, Any]) -> float | None:
    found = row["client_tok_s"]
    return None if found is None else found["median"]


def _spread(found: Mapping[str, Any]) -> str:
    if found["least"] is None:
        return UNKNOWN
    return f"{found['least']:.1f} to {found['most']:.1f}"


def _figure(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _left_out(n: int) -> str:
    return f", {n} left out" if n else ""


_SUITES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "mtp": _mtp,
    "lengths": _lengths,
    "cache": _cache,
    "deep": _deep,
    "quality": _quality,
    "concurrency": _concurrency,
    "workload": _workload,
}


@click.command(name="bench", short_help="How fast a server is, measured honestly.")
@click.argument("profile", required=False, type=PROFILE, shell_complete=names_of("profiles"))
@click.option("--url", help="A server by its address: http://HOST:PORT.")
@click.option("--suite", type=click.Choice(list(_SUITES)), default="mtp", show_default=True,
              help="What to look at.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1, 1000), help="How often each case is measured.")
@click.option("--depth", type=click.IntRange(16, 10_000_000),
              help="Tokens of the long prompt (lengths, cache).")  # fmt: skip
@click.option("--workload", type=WORKLOAD, shell_complete=names_of("workloads"),
              help="The mix of requests (workload) [default: the profile's own].")  # fmt: skip
@click.option("--against", type=click.Choice(["published"]),
              help="Show the profile's published numbers beside (mtp, lengths).")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**31 - 1),
              help="Of texts and order, to repeat a bench.")  # fmt: skip
@set_option
@click.option(
    "--start-after", is_flag=True, help="Start the unit afterwards, even if it is down now."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@operation(render_bench_view, asks=lambda given: given["profile"] is not None)
def bench_command(
    call: Call,
    profile: str | None,
    url: str | None,
    suite: str,
    repeats: int | None,
    depth: int | None,
    workload: str | None,
    against: str | None,
    seed: int | None,
    options: tuple[str, ...],
    start_after: bool,
    yes: bool,
) -> ActionResult:
    """Measure the unit that serves, a PROFILE in its place, or a server by its address.

    mtp: the nine kinds of the community's mtp-bench. lengths: from which length of the answer on
    speculation pays. cache: whether what was read is found again. deep: fills the context, and finds
    where memory ends. quality: whether speculation changes answers. concurrency: 1, 2 and 4 clients.
    workload: seconds of a turn of your own kind of work.

    With PROFILE the unit does not serve meanwhile; it comes back whatever happens.

    \b
    Example:
      tunerd bench
      tunerd bench rtx-3090-ti-24gb --suite lengths --yes
      tunerd bench --url http://127.0.0.1:11434 --suite concurrency
    """  # noqa: D301
    from tunerd.engine.builds import PlanRequest
    from tunerd.measure.bench import BenchRequest, bench_live, bench_profile, bench_url
    from tunerd.measure.request import Suite
    from tunerd.profile.files import parse_options

    del yes  # `call.ask` knows it
    _check(profile, url, suite, options, depth, workload, start_after=start_after)
    asked = BenchRequest(
        suite=Suite(suite),
        repeats=repeats,
        depth=depth,
        seed=seed,
        workload=workload,
        is_against_published=against is not None,
    )
    ctx = call.context(acts=profile is not None, tells=True)
    if url is not None:
        return bench_url(ctx, asked, url)
    if profile is None:
        return bench_live(ctx, asked)
    request = PlanRequest(profile, parse_options(options))
    return bench_profile(ctx, asked, request, call.ask, start_after=start_after)


def _check(
    profile: str | None,
    url: str | None,
    suite: str,
    options: tuple[str, ...],
    depth: int | None,
    workload: str | None,
    *,
    start_after: bool,
) -> None:
    """Options that would have no effect are refused."""
    if profile is not None and url is not None:
        raise click.UsageError("Give a PROFILE or --url, not both.")
    if profile is None and (options or start_after):
        raise click.UsageError("--set and --start-after need a PROFILE.")
    if depth is not None and suite not in {"lengths", "cache"}:
        raise click.UsageError("--depth is for --suite lengths and cache.")
    if workload is not None and suite != "workload":
        raise click.UsageError("--workload is for --suite workload.")


_PARTS = ("prefill", "reasoning", "decode")


@click.command(name="compare", short_help="Which of two is faster on your kind of work.")
@click.argument("sides", nargs=-1, type=SIDE, metavar="[A [B]]", shell_complete=names_of("sides"))
@click.option("--set", "options", multiple=True, type=SETTING, metavar="KEY=VALUE",
              shell_complete=keys, help="Set a key for B alone.")  # fmt: skip
@click.option(
    "--profile",
    "base",
    type=PROFILE,
    shell_complete=names_of("profiles"),
    help="What engines and single settings change [default: what serves].",
)
@click.option("--workload", type=WORKLOAD, shell_complete=names_of("workloads"),
              help="The mix of requests [default: the profile's own].")  # fmt: skip
@click.option("--budget", type=SPAN, default="30m", show_default=True,
              help="The longest it may take.")  # fmt: skip
@click.option("--pairs", "max_pairs", type=click.IntRange(3, 1000), default=60, show_default=True,
              help="The most pairs of fresh servers.")  # fmt: skip
@click.option("--tolerance", type=click.FloatRange(0.1, 50.0), default=1.5, show_default=True,
              help="A difference in percent that does not matter.")  # fmt: skip
@click.option("--seed", type=SEED, help="Of texts and order, to repeat a comparison.")
@click.option(
    "--start-after", is_flag=True, help="Start the unit afterwards, even if it is down now."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@operation("render_compare")
def compare_command(  # one option each
    call: Call,
    sides: tuple[str, ...],
    options: tuple[str, ...],
    base: str | None,
    workload: str | None,
    budget: float,
    max_pairs: int,
    tolerance: float,
    seed: int | None,
    start_after: bool,
    yes: bool,
) -> ActionResult:
    """Which of two is faster: pairs of fresh servers, asked the same, until it is sure or time is up.

    A and B are profiles, numbers of generations, engines, single settings (KEY=VALUE), or `live`,
    what serves now. Without A it is `live`; without B it is A with --set. The unit is stopped
    meanwhile, and candidates answer in its place; afterwards it serves again, whatever happened.
    Where B may answer otherwise (another engine, model, template, KV type, reasoning, sampling), both are
    asked the same questions first, and a B that answers otherwise is not recommended.
    Exit code 0 whatever the verdict, 1 if it could not be measured.

    \b
    Example:
      tunerd compare --set speculation.n_max=2
      tunerd compare rtx-3090-ti-24gb rtx-3090-ti-24gb-dflash --workload coding-agent
      tunerd compare speculation.type=off speculation.n_max=3 --budget 2h
      tunerd compare 13 14
    """  # noqa: D301
    from tunerd.measure.compare import CompareRequest, check_limits, run_compare

    del yes  # `call.ask` knows it
    if len(sides) > 2:  # noqa: PLR2004 -- A and B
        raise click.UsageError("two sides can be compared, not more")
    request = CompareRequest(
        words=sides,
        base=base,
        options=options,
        workload=workload,
        limits=check_limits(budget, max_pairs, tolerance / 100),
        seed=seed,
        start_after=start_after,
    )
    return run_compare(
        call.context(acts=True),
        request,
        confirm=lambda prepared: call.ask(prepared.question, prepared.messages),
    )


def render_compare(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield payload["sentence"]
    yield from (f"  {reason}" for reason in payload["reasons"])
    if payload["changes"]:
        yield ""
        yield "what may change answers:"
        yield from (f"  {change['text']}" for change in payload["changes"])
        yield from quality_lines(payload["quality"], "B", "A")
    if payload["parts"]:
        yield ""
        rows = [
            (
                row["class"] or row["part"],
                f"{row['a_s']:.3f}",
                f"{row['b_s']:.3f}",
                f"{100 * row['gain']:+.1f} %",
                _interval(row),
            )
            for row in payload["parts"]
        ]
        yield from columns(rows, ("", "A [s]", "B [s]", "B faster by", "95 % interval"))
    yield from _bars(payload["turns"])
    yield ""
    took = format_duration(payload["elapsed_s"])
    away_s = payload["without_service_s"]
    away = "" if away_s is None else f"; the unit was away for {format_duration(away_s)}"
    yield f"run {payload['run']}: {payload['pairs']} pairs in {took}{away}"


def _interval(row: Mapping[str, Any]) -> str:
    if row["gain_low"] is None or row["gain_high"] is None:
        return "too few pairs"
    return f"{100 * row['gain_low']:+.1f} to {100 * row['gain_high']:+.1f}"


def _bars(turns: list[Mapping[str, Any]]) -> Iterator[str]:
    whole = [row for row in turns if row["request_class"] is None]
    if not whole:
        return
    drawn = [(row["arm"], [(part, row[f"{part}_s"] or 0.0) for part in _PARTS]) for row in whole]
    largest = max(sum(size for _, size in parts) for _, parts in drawn)
    yield ""
    yield f"expected turn   {legend(_PARTS)}"
    for name, parts in drawn:
        total = sum(size for _, size in parts)
        yield f"  {name}  {bar(parts, largest=largest)}  {total:.3f} s"


@click.group(name="workload", short_help="The mix of requests that the server is tuned for.")
def workload_command() -> None:
    """The mix of requests that the server is tuned for: classes with their lengths and weights.

    \b
    Example:
      tunerd workload list
      tunerd workload show coding-agent
      tunerd workload learn
    """  # noqa: D301


@workload_command.command(name="list", short_help="Every workload.")
@operation("render_list")
def list_command(call: Call) -> ActionResult:
    """Every workload: shipped, learned, and of this site.

    \b
    Example:
      tunerd workload list
    """  # noqa: D301
    from tunerd.measure.learn import list_workloads

    return list_workloads(call.context())


@workload_command.command(name="show", short_help="Its classes, drawn.")
@click.argument("workload", type=WORKLOAD, shell_complete=names_of("workloads"))
@operation("render_show")
def show_command(call: Call, workload: str) -> ActionResult:
    """The classes of a workload, and what a turn takes at the speed that the live server had.

    \b
    Example:
      tunerd workload show coding-agent
    """  # noqa: D301
    from tunerd.measure.learn import show_workload

    return show_workload(call.context(), workload)


@workload_command.command(name="learn", short_help="Derive one from the server's own log.")
@click.option("--name", default="learned", type=WORKLOAD, show_default=True,
              help="Name of the new workload.")  # fmt: skip
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
@operation("render_show")
def learn_command(
    call: Call, name: str, unit: str | None, days: int | None, dry_run: bool
) -> ActionResult:
    """Derive a workload from the log of the server: lengths and counts only, no text is kept.

    \b
    Example:
      tunerd workload learn --days 7
      tunerd workload learn --unit my-llama.service --name office --dry-run
    """  # noqa: D301
    from tunerd.measure.learn import learn_workload
    from tunerd.words import check_name

    check_name(name, of="a workload")
    ctx = call.context(tells=True)
    return learn_workload(ctx, name=name, unit=unit, days=days, write=not dry_run)


def render_list(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    rows = [
        (row["name"], row["layer"], str(row["classes"]), row["description"])
        for row in payload["workloads"]
    ]
    yield from columns(rows, ("workload", "from", "classes", "what"))


def render_show(payload: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"{payload['name']}: {payload['description']}"
    yield f"source: {payload['source'] or 'not said'}"
    yield from section_lines(workload_section(payload))
    yield from _learned(payload)
    if payload.get("written"):
        yield f"written: {payload['path']}"


def _learned(payload: Mapping[str, Any]) -> Iterator[str]:
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
