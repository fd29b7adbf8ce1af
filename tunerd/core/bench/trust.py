"""Whether a sample may be believed: each way in which a benchmark of a server lies, as a rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tunerd.core.bench.counters import Counters
from tunerd.core.bench.reading import Answer
from tunerd.core.bench.request import Prefix, Request
from tunerd.core.host import POWER_CAP, Gpu
from tunerd.core.sample import ClientTimes, Mark, Sample, Timings

# What a client's wall may have beside the server's own times: cutting the text into tokens, waiting for
# the loop of the server, and for a processor on a busy machine.
WALL_SLACK_MS = 500.0
WALL_SLACK_RATIO = 0.05
# From the first token to the last the client sees what the server says that it generated for. Above it,
# with four busy processes on two cores: at most 4 ms with a real server (tiny model, 32 and 192
# tokens), and 0.25 ms a token with 106 ms at 192 with a stand-in that sleeps for each token.
SPAN_SLACK_MS = 150.0
SPAN_SLACK_TOKEN_MS = 0.5
SPAN_SLACK_RATIO = 0.05
# A client cannot have seen less time than the server worked, but for the resolution of both clocks.
CLOCK_SLACK_MS = 20.0
CLOCK_SLACK_RATIO = 0.01
# Memory in use jitters by some 30 MiB from load to load.
OTHERS_SLACK_MIB = 64
_FEW_DRAFTS_TOKENS = 32
# What the templates of chats have before the first word of a user, system part included.
TEMPLATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Speculation:
    """What an arm is meant to do.

    `drafts` is None where nobody knows. `always` where not even a short answer can do without a draft
    (p-min 0): then a sample without one shows that speculation was off.
    """

    drafts: bool | None
    always: bool = False


@dataclass(frozen=True, slots=True)
class GpuLook:
    """The GPUs at one moment of a request.

    `others_mib` is what processes other than the server hold, None where that cannot be told.
    `throttled` are the reasons why a clock is held down.
    """

    free_mib: int | None
    others_mib: int | None
    throttled: frozenset[str]


@dataclass(frozen=True, slots=True)
class Quiet:
    """How the machine was when the arm began; only what differs from it is a disturbance.

    `usual_throttling` are reasons that already held while it was warmed up, and that the owner set.
    """

    others_mib: int | None = None
    usual_throttling: frozenset[str] = frozenset()


def look_at(gpus: Sequence[Gpu] | None, server_pids: Sequence[int]) -> GpuLook:
    """What a reading says beside the server's own use."""
    if not gpus:
        return GpuLook(None, None, frozenset())
    free = [gpu.free_mib for gpu in gpus]
    others = [_others(gpu, server_pids) for gpu in gpus]
    return GpuLook(
        free_mib=None if None in free else min(mib for mib in free if mib is not None),
        others_mib=None if None in others else sum(mib for mib in others if mib is not None),
        throttled=frozenset(reason for gpu in gpus for reason in gpu.throttle_reasons or ()),
    )


def _others(gpu: Gpu, server_pids: Sequence[int]) -> int | None:
    """Memory of the processes that are not the server."""
    if gpu.processes is None:
        return None
    others = [process for process in gpu.processes if process.pid not in server_pids]
    known = [process.used_mib for process in others]
    if None in known:
        return None
    return sum(mib for mib in known if mib is not None)


def quiet_from(looks: Sequence[GpuLook]) -> Quiet:
    """The state of the machine from what was seen during the warm-up."""
    others = [look.others_mib for look in looks]
    usual = frozenset.union(frozenset(), *(look.throttled for look in looks))
    return Quiet(
        others_mib=None
        if not others or None in others
        else max(mib for mib in others if mib is not None),
        usual_throttling=usual & {POWER_CAP},
    )


def marks_of(
    request: Request,
    answer: Answer,
    client: ClientTimes,
    *,
    looks: Sequence[GpuLook],
    quiet: Quiet,
    speculation: Speculation,
    can_forbid_cache: bool = True,
) -> tuple[Mark, ...]:
    """What speaks against a sample by itself; foreign traffic shows only over several.

    Args:
        request: What was asked.
        answer: What came.
        client: What the client's clock saw.
        looks: The GPUs meanwhile.
        quiet: The machine as it was when the arm began.
        speculation: What the arm is meant to do.
        can_forbid_cache: False for servers that cannot be told to read a prompt anew: there a chat
            template may be found again, which all requests begin with.
    """
    found = [
        *_answer_marks(request, answer, speculation, 0 if can_forbid_cache else TEMPLATE_TOKENS),
        *_clock_marks(request, answer.timings, client),
        *_span_marks(answer),
        *_gpu_marks(looks, quiet),
    ]
    return tuple(dict.fromkeys(found))


def _answer_marks(
    request: Request, answer: Answer, speculation: Speculation, most_cached: int
) -> Iterator[Mark]:
    if answer.has_impossible:
        yield Mark.IMPOSSIBLE
    if request.prefix is Prefix.COLD and (answer.n_cached or 0) > most_cached:
        yield Mark.NOT_COLD
    timings = answer.timings
    if timings is None:
        return
    n_predicted = timings.predicted_n
    if request.is_fixed_length and n_predicted is not None and n_predicted < request.n_predict:
        yield Mark.SHORT
    if speculation.drafts is False and timings.draft_n:
        yield Mark.DRAFTED
    is_long = (n_predicted or 0) >= _FEW_DRAFTS_TOKENS
    if speculation.drafts and speculation.always and is_long and not timings.draft_n:
        yield Mark.NOT_DRAFTED


def _clock_marks(request: Request, timings: Timings | None, client: ClientTimes) -> Iterator[Mark]:
    """The server's own times against the client's wall.

    Of several clients at once the server's times may overlap with waiting, so there only the
    impossible is marked.
    """
    if timings is None or timings.predicted_ms is None or timings.prompt_ms is None:
        return
    server_ms = timings.prompt_ms + timings.predicted_ms
    if server_ms > client.wall_ms * (1 + CLOCK_SLACK_RATIO) + CLOCK_SLACK_MS:
        yield Mark.CLOCKS_DISAGREE
    most = server_ms * (1 + WALL_SLACK_RATIO) + WALL_SLACK_MS
    if request.streams == 1 and client.wall_ms > most:
        yield Mark.CLOCKS_DISAGREE


def _span_marks(answer: Answer) -> Iterator[Mark]:
    """The time of generation against the client's first and last token.

    The wall leaves room that a short answer is lost in; between two tokens there is none. Less than the
    server says is no lie: what was held back came at once.
    """
    timings, first_ms, last_ms = answer.timings, answer.first_ms, answer.last_ms
    if timings is None or first_ms is None or last_ms is None:
        return
    if timings.predicted_ms is None or timings.predicted_n is None:
        return
    slack_ms = SPAN_SLACK_MS + SPAN_SLACK_TOKEN_MS * timings.predicted_n
    if last_ms - first_ms > timings.predicted_ms * (1 + SPAN_SLACK_RATIO) + slack_ms:
        yield Mark.CLOCKS_DISAGREE


def _gpu_marks(looks: Sequence[GpuLook], quiet: Quiet) -> Iterator[Mark]:
    for look in looks:
        if look.throttled - quiet.usual_throttling:
            yield Mark.THROTTLED
        if (
            look.others_mib is not None
            and quiet.others_mib is not None
            and look.others_mib > quiet.others_mib + OTHERS_SLACK_MIB
        ):
            yield Mark.VRAM_TAKEN


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was counted between two looks at the server's counters.

    `is_foreign` is None where it cannot be told; `text` says what was seen.
    """

    is_foreign: bool | None
    text: str = ""


def judge_traffic(before: Counters, after: Counters, own: Sequence[Timings | None]) -> Traffic:
    """Whether the server did more than what was asked of it here, or is at work at either end.

    No request of these is under way when the counters are read: whatever is, is somebody else's.

    Args:
        before: Its counters before the first of these requests.
        after: Its counters after the last.
        own: What it reported of each request in between; None for one that it reported nothing of.
    """
    pairs = (
        (before.n_predicted, after.n_predicted, "predicted_n", "generated"),
        (before.n_prompt, after.n_prompt, "prompt_n", "read"),
    )
    is_told = False
    for then, now, name, verb in pairs:
        counts = [None if one is None else getattr(one, name) for one in own]
        known = [int(count) for count in counts if count is not None]
        if then is None or now is None or len(known) < len(counts):
            continue
        if now < then:
            return Traffic(None, "its counters went back: it was started again")
        is_told = True
        more = now - then - sum(known)
        if more > 0:
            return Traffic(True, f"it {verb} {more} tokens for somebody else")
    at_work = max(before.n_at_work, after.n_at_work)
    if at_work:
        return Traffic(True, f"{at_work} requests of somebody else were under way")
    return Traffic(False if is_told else None)


def with_mark(sample_marks: Sequence[Mark], mark: Mark) -> tuple[Mark, ...]:
    """The marks with one more."""
    return tuple(dict.fromkeys([*sample_marks, mark]))


def count_marks(samples: Sequence[Sample]) -> Mapping[str, int]:
    """How many samples each reason speaks against, the warm-up left out."""
    counts: dict[str, int] = {}
    for sample in samples:
        reasons = [str(mark) for mark in sample.marks if mark is not Mark.WARM_UP]
        if sample.problem is not None:
            reasons.append("no answer")
        for reason in reasons:
            counts[reason] = counts.get(reason, 0) + 1
    return counts
