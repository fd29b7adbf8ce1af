"""Rules about the build, its flags, its port, and what was measured of it."""

from __future__ import annotations

from collections.abc import Iterator

from tunerd.core.doctor import sources
from tunerd.core.doctor.diagnosis import Missing, Rule, Seen, need
from tunerd.core.doctor.facts import NO_GRAPHS, Facts, GraphControl
from tunerd.core.doctor.questions import (
    capabilities_of,
    card_of,
    log_of,
    served_card,
    server_of,
    settings_of,
)
from tunerd.core.result import Level

_LOAD_FLAGS = frozenset(
    {"--mlock", "--mmap", "--no-mmap", "-dio", "--direct-io", "-ndio", "--no-direct-io"}
)


def _removed_flags(facts: Facts) -> Iterator[Seen | Missing]:
    capabilities = capabilities_of(facts)
    server = server_of(facts)
    foreign = server.foreign_flags
    load = [flag for flag in foreign if flag in _LOAD_FLAGS]
    rest = [flag for flag in foreign if flag not in _LOAD_FLAGS]
    if load:
        way = (
            'use `--load-mode`; `--no-mmap --mlock` is now "mlock"'
            if capabilities.has_load_mode
            else ""
        )
        yield Seen(
            Level.ERROR,
            f"this build does not take {', '.join(load)}: {server.unit} cannot start with it",
            f"{way or 'leave it out'}: tunerd profiles new NAME --from-unit {server.unit}, then apply it",
        )
    if rest:
        yield Seen(
            Level.ERROR,
            f"this build does not take {', '.join(rest)}: {server.unit} cannot start with it",
            f"tunerd profiles new NAME --from-unit {server.unit} says what takes its place",
        )


def _architecture(facts: Facts) -> Iterator[Seen | Missing]:
    card = card_of(facts)
    if card is None:
        return
    server = server_of(facts)
    log = server.log
    if log is not None and log.lacks_kernels:
        yield Seen(
            Level.ERROR,
            "the log says that there is no kernel image for this card in the build",
            _rebuild(card.compute_capability),
        )
        return
    is_cpu_build = server.devices == () or (
        server.devices is None and log is not None and log.has_cuda is False
    )
    if is_cpu_build:
        yield Seen(
            Level.WARNING,
            f"there is a {card.name}, and this build sees no device to offload to",
            "serve with a build for the card: tunerd engines lists what is here",
        )
        return
    if log is not None and log.has_cuda is False:
        return  # another backend, which compiles for the card when it starts
    built = need(
        log_of(facts).cuda_architectures, "the card's architectures that the build has (ARCHS)"
    )
    capability = need(card.compute_capability, f"the compute capability of GPU {card.index}")
    own = capability[0] * 10 + capability[1]
    # Code for X.y runs on X.z with z >= y.
    if any(one // 10 == own // 10 and one <= own for one in built):
        return
    is_newer = any(one < own for one in built)
    yield Seen(
        Level.WARNING if is_newer else Level.ERROR,
        f"the build has code for {', '.join(_dotted(one) for one in built)}, and the card is {_dotted(own)}",
        _rebuild(capability),
    )


def _dotted(architecture: int) -> str:
    return f"{architecture // 10}.{architecture % 10}"


def _rebuild(capability: tuple[int, int] | None) -> str:
    wanted = "native" if capability is None else f"{capability[0]}{capability[1]}"
    return f"build with -DCMAKE_CUDA_ARCHITECTURES={wanted}, or take a package made for this card"


def _graphs(facts: Facts) -> Iterator[Seen | Missing]:
    if served_card(facts) is None:
        return
    server = server_of(facts)
    if NO_GRAPHS in server.environment:
        return
    control = need(facts.graphs or _kept_control(facts), _no_control(facts))
    few = f"more than {control.n_pairs} pairs of a control run"
    low, high = need(control.low, few), need(control.high, few)
    if low > 0:
        yield Seen(
            Level.WARNING,
            f"without CUDA graphs decoding is {control.gain:.1%} faster (95 % interval {low:.1%} to "
            f"{high:.1%}, {control.n_pairs} pairs{_of_run(facts)})",
            f'a newer build, or [environment] {NO_GRAPHS} = "1" in the profile',
        )


def _kept_control(facts: Facts) -> GraphControl | None:
    """What an earlier control run showed, where nothing changed since."""
    kept = facts.evidence.graphs if facts.evidence is not None else None
    return kept.control if kept is not None and kept.holds else None


def _no_control(facts: Facts) -> str:
    kept = facts.evidence.graphs if facts.evidence is not None else None
    if kept is None:
        return "a control run without CUDA graphs (tunerd doctor --deep)"
    why = ", ".join(kept.changes) or "it cannot be told what changed"
    return (
        f"a control run that holds; that of run {kept.run} does not: {why} (tunerd doctor --deep)"
    )


def _of_run(facts: Facts) -> str:
    kept = facts.evidence.graphs if facts.evidence is not None else None
    return "" if facts.graphs is not None or kept is None else f", run {kept.run}"


def _port(facts: Facts) -> Iterator[Seen | Missing]:
    port = need(facts.port, "the port of the server")
    if port.others:
        is_active = facts.server is not None and facts.server.is_active
        who = ", ".join(port.others)
        both = (
            "listens there too, and clients reach either" if is_active else "listens there already"
        )
        level = Level.ERROR if facts.server is not None else Level.NOTE
        yield Seen(level, f"port {port.port}: {who} {both}",
                   "end it, or tunerd plan PROFILE --set serving.port=PORT")  # fmt: skip
    if facts.server is not None and settings_of(facts).serving.port is None:
        yield Seen(
            Level.NOTE,
            f"the command line names no port, so it is the build's own ({port.port})",
            f"tunerd plan PROFILE --set serving.port={port.port}",
        )


def _stale(facts: Facts) -> Iterator[Seen | Missing]:
    evidence = need(facts.evidence, "stored measurements")
    if evidence.newest_run is None:
        yield Missing("a stored run of what serves")
    elif evidence.holds is None:
        reasons = "; ".join(evidence.changes) or "parts of its conditions are unknown"
        yield Missing(f"whether run {evidence.newest_run} still holds: {reasons}")
    elif not evidence.holds:
        yield Seen(
            Level.WARNING,
            f"run {evidence.newest_run}, the newest of what serves, does not hold any more: "
            f"{'; '.join(evidence.changes)}",
            "tunerd bench",
        )


RULES = (
    Rule(
        "flags-removed",
        "flags on the unit's command line that its build does not take",
        "the server ends at its next start; mainline dropped the old load-mode flags in September 2026",
        sources.issue(20834, 28334),
        _removed_flags,
    ),
    Rule(
        "engine-architecture",
        "a build without code for the card",
        "the driver then compiles for minutes at the first start, or the first request ends the server",
        "NVIDIA CUDA Compatibility Guide, binary compatibility; the build's own `system_info` line",
        _architecture,
    ),
    Rule(
        "cuda-graphs",
        "CUDA graphs that are captured anew in every step (only with a control run)",
        "drafts of changing length change the graph; capturing it each time costs more than it saves",
        f"{sources.CARD_12_GB}, checklist point 3; {sources.issue(28549, 23957)}",
        _graphs,
    ),
    Rule(
        "port-clash",
        "another program on the server's port, or a port that is left to the build",
        "the second server cannot start, or (ik_llama.cpp shares its port) answers half of the requests; "
        "builds have different ports of their own",
        "help texts: 8080 in mainline and ik_llama.cpp, 9931 in Debian's package",
        _port,
    ),
    Rule(
        "evidence-stale",
        "measurements of what serves that do not hold any more",
        "a driver, build or power limit that changed may have changed what is fastest",
        "fingerprints of stored runs",
        _stale,
    ),
)
