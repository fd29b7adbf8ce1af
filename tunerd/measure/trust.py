"""Whether a sample may be believed: each way in which a benchmark of a server lies, as a rule."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tunerd.engine.flags import drafts_with_probability, normal_spelling, owner_of
from tunerd.engine.log import LoggedRequest
from tunerd.machine.facts import Gpu
from tunerd.measure.answer import Answer, ClientTimes, Counters, Mark, Timings, step_of
from tunerd.measure.request import FEW_TOKENS, Request, Suite
from tunerd.profile.schema import own_kinds
from tunerd.words import all_known

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
# Readings of power lag by up to a second, so that their integral over less says nothing.
# Source: NVML API reference, nvmlDeviceGetPowerUsage (averaged over 1 s from Ampere on).
LEAST_POWER_S = 3.0
# A counter of energy moves every 20 to 100 ms: over less than a step it says nothing or too much, and leaving out
# what took nothing would leave the rest too high. Source: PETSc manual, PetscLogGpuEnergyMeter; Zeus 0.6.1.
LEAST_COUNTED_S = 0.2
# Memory in use jitters by some 30 MiB from load to load.
OTHERS_SLACK_MIB = 64
# Of the machine's processor time, while a request was under way; the kernel counts in ticks of 10 ms.
OTHERS_CPU_RATIO = 0.2
# While so much of it is idle nobody waits for a processor.
_IDLE_CPU_RATIO = 0.1
_LEAST_CPU_S = 4.0
_FEW_DRAFTS_TOKENS = 32
_FEW_REPEATED = 0.25
# Of the tokens that a prompt has by its letters: vocabularies differ by less, who cuts it keeps half.
_LEAST_READ = 0.6
# What the templates of chats have before the first word of a user, system part included.
TEMPLATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Speculation:
    """What an arm is meant to do.

    `drafts` is None where nobody knows. `always` where not even a short answer can do without a draft
    (a model's, with p-min 0): then a sample without one shows that speculation was off. Where it is not `by_model`,
    n-grams alone draft, and nothing where nothing repeats.
    """

    drafts: bool | None
    always: bool = False
    by_model: bool = True

    @property
    def must_draft(self) -> bool | None:
        """What a process must be seen to do; None where neither speaks against it."""
        return self.drafts if self.by_model or not self.drafts else None


@dataclass(frozen=True, slots=True)
class GpuLook:
    """The GPUs at one moment of a request.

    `others_mib` is what processes other than the server hold, None where that cannot be told.
    `throttled` are the reasons why a clock is held down; the owner's power limit, at which a card may
    run whenever its work is heavy enough, is none. `cards` are those on which the server is, and
    `energy_j` (a counter) and `power_w` are theirs as a whole, None where they cannot be told, and where
    somebody else computes there too. `at_s` is when, on any clock.
    """

    free_mib: int | None
    others_mib: int | None
    throttled: frozenset[str]
    at_s: float = 0.0
    cards: tuple[int, ...] = ()
    energy_j: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True)
class ProcessorLook:
    """Processor time until this moment: of the machine, of what it worked, and of server and tunerd.

    Time that a hypervisor gave to others is work of others.
    """

    total_s: float
    busy_s: float
    own_s: float


def look_at(
    gpus: Sequence[Gpu] | None, server_pids: Sequence[int], *, at_s: float = 0.0
) -> GpuLook:
    """What a reading says beside the server's own use, and what its cards take meanwhile."""
    if not gpus:
        return GpuLook(None, None, frozenset(), at_s)
    own = [gpu for gpu in gpus if any(one.pid in server_pids for one in gpu.processes or ())]
    seen = own or gpus  # where its processes cannot be told apart it may be on any
    shared = (one for gpu in own for one in gpu.processes or () if one.pid not in server_pids)
    is_alone = not any(one.computes for one in shared)
    others = all_known(_others(gpu, server_pids) for gpu in seen)
    return GpuLook(
        free_mib=min(all_known(gpu.free_mib for gpu in seen), default=None),
        others_mib=sum(others) if others else None,
        throttled=frozenset(reason for gpu in seen for reason in gpu.held_back_by),
        at_s=at_s,
        cards=tuple(gpu.index for gpu in own),
        energy_j=_sum(gpu.energy_j for gpu in own) if is_alone else None,
        power_w=_sum(gpu.power_w for gpu in own) if is_alone else None,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = all_known(values)
    return sum(known) if known else None


def energy_of(looks: Sequence[GpuLook]) -> float | None:
    """What the server's cards took as a whole from the first look to the last [J]; never 0.

    By the driver's counter, else by readings of power, over long enough. None where it
    cannot be told: the server is on none that can be seen, somebody else computed there meanwhile, or the counter
    began anew.
    """
    if len({look.cards for look in looks}) != 1:
        return None
    span_s = looks[-1].at_s - looks[0].at_s
    if counted := all_known(look.energy_j for look in looks):
        if span_s < LEAST_COUNTED_S or counted != sorted(counted):
            return None
        taken = counted[-1] - counted[0]
    elif None in [look.power_w for look in looks] or span_s < LEAST_POWER_S:
        return None
    else:
        taken = sum(
            ((one.power_w or 0.0) + (two.power_w or 0.0)) / 2 * (two.at_s - one.at_s)
            for one, two in itertools.pairwise(looks)
        )
    return taken if taken > 0 else None


def _others(gpu: Gpu, server_pids: Sequence[int]) -> int | None:
    """Memory of the processes that are not the server."""
    if gpu.processes is None:
        return None
    used = [process.used_mib for process in gpu.processes if process.pid not in server_pids]
    known = all_known(used)
    return sum(known) if len(known) == len(used) else None


def quiet_mib(looks: Sequence[GpuLook]) -> int | None:
    """What others held while nothing was disturbed, as seen during the warm-up; None if unknown."""
    return max(all_known(look.others_mib for look in looks), default=None)


def marks_of(
    request: Request,
    answer: Answer,
    client: ClientTimes,
    *,
    looks: Sequence[GpuLook],
    quiet_mib: int | None,
    speculation: Speculation,
    is_llama: bool = True,
    holds: bool = True,
) -> tuple[Mark, ...]:
    """What speaks against a sample by itself; foreign traffic shows only over several.

    Args:
        request: What was asked.
        answer: What came.
        client: What the client's clock saw.
        looks: The GPUs meanwhile.
        quiet_mib: What others held when the arm began; only more than that is a disturbance.
        speculation: What the arm is meant to do.
        is_llama: False for servers that can be told neither to go on to a length, nor to read a prompt
            anew: there a chat template may be found again, which all requests begin with.
        holds: False for a llama-server that was not told to go on to a length.
    """
    found = [
        *_answer_marks(request, answer, speculation, is_llama=is_llama, holds=holds),
        *_clock_marks(request, answer.timings, client),
        *_span_marks(answer),
        *_gpu_marks(looks, quiet_mib),
    ]
    return tuple(dict.fromkeys(found))


def _answer_marks(
    request: Request, answer: Answer, speculation: Speculation, *, is_llama: bool, holds: bool
) -> Iterator[Mark]:
    if answer.has_impossible:
        yield Mark.IMPOSSIBLE
    if not request.is_warm and (answer.n_cached or 0) > (0 if is_llama else TEMPLATE_TOKENS):
        yield Mark.NOT_COLD
    timings = answer.timings
    n_read = answer.n_prompt
    if timings is not None and timings.prompt_n is not None and answer.n_cached is not None:
        n_read = timings.prompt_n + answer.n_cached
    if n_read is not None and n_read < _LEAST_READ * (request.depth_tokens or 0):
        yield Mark.CUT_PROMPT
    n_predicted = answer.n_completion if timings is None else timings.predicted_n
    least = request.least_tokens
    if request.is_fixed_length and is_llama:
        is_exact = holds or request.suite is Suite.LENGTHS
        least = request.n_predict if is_exact else min(request.n_predict, FEW_TOKENS)
    if n_predicted is not None and n_predicted < least:
        yield Mark.SHORT
    if timings is None:
        return
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


def _gpu_marks(looks: Sequence[GpuLook], quiet_mib: int | None) -> Iterator[Mark]:
    for look in looks:
        if look.throttled:
            yield Mark.THROTTLED
        if (
            look.others_mib is not None
            and quiet_mib is not None
            and look.others_mib > quiet_mib + OTHERS_SLACK_MIB
        ):
            yield Mark.VRAM_TAKEN


def is_processor_taken(before: ProcessorLook | None, after: ProcessorLook | None) -> bool:
    """Whether others worked so much between two looks that the server had to wait for a processor."""
    if before is None or after is None or after.total_s - before.total_s < _LEAST_CPU_S:
        return False
    total_s, busy_s = after.total_s - before.total_s, after.busy_s - before.busy_s
    others_s = busy_s - (after.own_s - before.own_s)
    return others_s > OTHERS_CPU_RATIO * total_s and total_s - busy_s < _IDLE_CPU_RATIO * total_s


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
        if more > (step_of(then) + step_of(now)) / 2:
            return Traffic(True, f"it {verb} {more} tokens for somebody else")
    at_work = max(before.n_at_work, after.n_at_work)
    if at_work:
        return Traffic(True, f"{at_work} requests of somebody else were under way")
    return Traffic(False if is_told else None)


def not_as_meant(drafts: bool | None, drafted: Sequence[int | None]) -> str | None:
    """Why a process must not count for its side; None where nothing speaks against it.

    Args:
        drafts: Whether the side is meant to draft; None where nobody knows.
        drafted: Drafted tokens of each of its answers, the discarded ones too, as the process itself
            reported them; None where it reported nothing. A gate may keep single drafts back, so that
            only all answers together show that nothing drafts.
    """
    has_drafted = any(drafted)
    if drafts is True and not has_drafted:
        return f"it drafted nothing in {len(drafted)} answers, though it should"
    if drafts is False and has_drafted:
        return "it drafted, though it should not"
    return None


# Answers that only repeat themselves: every draft of such a text is right, so it comes fast and says nothing.

# One of some fifty arms of a night whose texts are as those of what serves, and one of five winners, where
# those of both often repeat themselves; where they seldom do, hardly any. Source: docs/benchmarks.md.
WHILE_SEARCHING, FOR_A_WINNER = 0.02, 0.2
# As long as none of the other side's repeats itself, as many more of it count as sane.
_USUALLY_SANE = 4
# Ends in a loop, and is one for the most part: past its end, held to a length, many an answer does the first.
_REPEATED_AT_LEAST = (1e-9, 0.5)


def repeats_more(
    mine: Sequence[float], usual: Sequence[float], *, chance: float, whose: str
) -> str | None:
    """Whether more answers repeat themselves than those of the other side to such requests, in words.

    Args:
        mine: Of each answer the share that only repeats what it said (`repeated_ratio`).
        usual: The same of the other side; whether its answers repeat themselves too is what counts.
        chance: That of saying so where both sides are alike (Fisher's exact test, one-sided).
        whose: What the other side is called.
    """
    for least in _REPEATED_AT_LEAST if usual else ():
        found, n_usual = [one for one in mine if one >= least], sum(one >= least for one in usual)
        n_mine = len(found)
        if found and _p_of_more(n_mine, len(mine), n_usual, len(usual)) <= chance:
            begin = 1 - max(found)
            return (
                f"{n_mine} of {len(mine)} of its answers only repeat themselves, from {begin:.0%} of their text on at "
                f"the earliest, and {n_usual} of {len(usual)} of {whose}"
            )
    return None


def _p_of_more(n_mine: int, of_mine: int, n_usual: int, of_usual: int) -> float:
    """How often chance alone would put so many of all that repeat themselves on this side."""
    of_usual += 0 if n_usual else _USUALLY_SANE
    n, most = n_mine + n_usual, min(of_mine, n_mine + n_usual)
    ways = (math.comb(of_mine, k) * math.comb(of_usual, n - k) for k in range(n_mine, most + 1))
    return sum(ways) / math.comb(of_mine + of_usual, n)


def those_that_repeat_more(told: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Which of several sides repeat themselves more than another, in words.

    Each is held against each, so that together they are as seldom wrong as two sides are.
    """
    found: dict[str, str] = {}
    chance = FOR_A_WINNER / max(math.comb(len(told), 2), 1)
    for (name, mine), (other, usual) in itertools.permutations(told.items(), 2):
        why = repeats_more(mine, usual, chance=chance, whose=f"those of {other}")
        if why is not None:
            found.setdefault(name, why)
    return found


FLATTERED = "only repeat themselves: drafts of that are easy, and gain less with your own requests"


def mostly_repeated(ratios: Iterable[float | None]) -> str | None:
    """How many of all known answers repeat themselves; None where so few do that speed by drafts is not flattered."""
    known = [one for one in ratios if one is not None]
    n = sum(one > 0 for one in known)
    return f"{n} of {len(known)}" if n > _FEW_REPEATED * len(known) else None


# What a command line asks for, as far as a measurement must know it.

_OFF_WORDS = frozenset({"none", "off"})
_MTP_SWITCHES = frozenset({"-mtp", "--multi-token-prediction"})
_STAGE_FLAGS = frozenset({"--spec-type", "--spec-stage"})
MTP = "mtp"
OFF_FOR_ONE_REQUEST = {"speculative.n_max": 0}
"""What ik takes with a request to draft nothing for it; mainline ignores it without a word."""


def speculation_of(argv: Sequence[str]) -> Speculation:
    """Whether a server with these arguments is meant to draft.

    None of the known flags leaves it open: a build may draft by itself, or by its environment.
    """
    drafts, has_model, has_file = None, False, False
    numbers: dict[str, float | None] = {}
    for word, value in itertools.pairwise([*argv[1:], ""]):
        key = owner_of(word) if word.startswith("-") else None
        if key == "speculation.type":
            stages = dict(stages_of((word, value)))
            drafts = bool(stages.keys() - _OFF_WORDS)
            has_model |= drafts_with_probability(stages)
            for numbered in stages.values():
                numbers |= {f"speculation.{name}": _number(text) for name, text in numbered.items()}
        elif key == "speculation.draft_model":
            has_file = True
        elif key is not None:
            numbers[key] = _number(value)
    # Beside kinds that are n-grams a build loads it, and does not ask it.
    if drafts is None and has_file:
        drafts = has_model = True
    if drafts and numbers.get("speculation.n_max") == 0:
        drafts = False
    always = bool(drafts) and has_model and numbers.get("speculation.p_min") == 0
    return Speculation(drafts, always, by_model=has_model or not drafts)


def stages_of(argv: Sequence[str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The kinds of speculation that a command line names, known to the build or not, with their own values.

    ik takes several, each in a flag of its own (`mtp:n_max=3,p_min=0.5`); mainline a list in one flag.
    """
    for word, value in itertools.pairwise((*argv, "")):
        flag = normal_spelling(word)
        if flag in _MTP_SWITCHES:
            yield MTP, {}
        elif flag in _STAGE_FLAGS:
            kinds, _, pairs = value.partition(":")
            values = dict(pair.split("=", 1) for pair in pairs.split(",") if "=" in pair)
            yield from ((own_kinds(kind), values) for kind in kinds.split(","))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_DECIMALS_MS = 0.011  # of two decimals, rounded or cut


def of_others(
    requests: Sequence[LoggedRequest], own: Iterable[Timings]
) -> tuple[LoggedRequest, ...]:
    """The requests that are not among those measured; each of these stands for one at most."""
    by_counts: dict[tuple[int | None, int | None], list[Timings]] = defaultdict(list)
    for one in own:
        by_counts[one.prompt_n, one.predicted_n].append(one)
    kept = []
    for request in requests:
        alike = by_counts.get((request.prompt_n, request.predicted_n), [])
        found = next((one for one in alike if _is_same(request, one)), None)
        if found is None:
            kept.append(request)
        else:
            alike.remove(found)
    return tuple(kept)


def _is_same(request: LoggedRequest, own: Timings) -> bool:
    pairs = ((request.prompt_ms, own.prompt_ms), (request.predicted_ms, own.predicted_ms))
    return all(ms is not None and abs(logged - ms) <= _DECIMALS_MS for logged, ms in pairs)
