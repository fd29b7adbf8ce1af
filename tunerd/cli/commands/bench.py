"""`tunerd bench`."""

from __future__ import annotations

import click

from tunerd.cli.commands.bench_view import render
from tunerd.cli.commands.plan import set_option
from tunerd.cli.complete import names_of
from tunerd.cli.output import ask_or_tell, finish, json_option, progress_sink

SUITES = ("mtp", "lengths", "cache", "deep", "quality", "concurrency", "workload")


@click.command(name="bench", short_help="How fast a server is, measured honestly.")
@click.argument("profile", required=False, shell_complete=names_of("profiles"))
@click.option("--url", help="A server by its address: http://HOST:PORT.")
@click.option("--suite", type=click.Choice(SUITES), default="mtp", show_default=True,
              help="What to look at.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1, 1000), help="How often each case is measured.")
@click.option("--depth", type=click.IntRange(16, 10_000_000),
              help="Tokens of the long prompt (lengths, cache).")  # fmt: skip
@click.option("--workload", shell_complete=names_of("workloads"),
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
@json_option
@click.pass_obj
def command(
    mode: str | None,
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
    as_json: bool,
) -> None:
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
    from tunerd.actions import bench
    from tunerd.actions.bench_plan import BenchRequest
    from tunerd.actions.choose_engine import PlanRequest
    from tunerd.actions.context import build_context
    from tunerd.actions.profile_layers import parse_options
    from tunerd.cli.remote import by_daemon, demand_root, options_for_daemon
    from tunerd.core.bench.request import Suite

    _check(profile, url, suite, options, depth, workload, start_after=start_after)
    if url is not None and mode is not None:
        demand_root(mode, "bench --url", "a service asks no addresses for others; without --system it "
                    "is measured from here")  # fmt: skip
    if url is None:
        body = {
            "profile": profile, "set": options_for_daemon(options, mode), "suite": suite,
            "repeats": repeats, "depth": depth, "workload": workload, "seed": seed,
            "published": against is not None, "start_after": start_after,
        }  # fmt: skip
        done = by_daemon(mode, "bench", body, as_json=as_json, yes=yes or profile is None)
        if done is not None:
            finish(done, render, as_json=as_json)
            return
    asked = BenchRequest(
        suite=Suite(suite),
        repeats=repeats,
        depth=depth,
        seed=seed,
        workload=workload,
        is_against_published=against is not None,
    )
    ctx = build_context(
        mode=mode,
        progress=progress_sink(as_json=as_json),
        start_supervisor=profile is not None,
    )
    if url is not None:
        result = bench.bench_url(ctx, asked, url)
    elif profile is None:
        result = bench.bench_live(ctx, asked)
    else:

        def ask(question: str) -> None:
            ask_or_tell(question, yes=yes)

        request = PlanRequest(profile, parse_options(options))
        result = bench.bench_profile(ctx, asked, request, ask, start_after=start_after)
    finish(result, render, as_json=as_json)


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
