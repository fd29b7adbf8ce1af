"""What speaks against a plan, and what the unit that it replaces had besides."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import PurePath

from tunerd.engine.capabilities import (
    Capabilities,
    Effect,
    Engine,
    OffloadDevice,
    laws_of,
)
from tunerd.engine.flags import (
    NO_GPU,
    SECRET_FLAGS,
    CommandLine,
    has_depth,
    holds_secret,
    is_secret_variable,
    normal_spelling,
    owner_of,
    secrets_in,
)
from tunerd.engine.importer import FALSE, PREFIX, TRUE, flag_of
from tunerd.machine.facts import Host
from tunerd.model.facts import ModelFacts
from tunerd.model.memory import CELL_STEP
from tunerd.profile.layers import Layer, Resolved
from tunerd.profile.schema import ProfileFile
from tunerd.result import Message, error, note, warning
from tunerd.units.live import UNIX_SOCKET, LiveUnit, Serving, serving_of
from tunerd.units.manager import lacks_manager
from tunerd.units.text import UnitFile, environment_of, parse_unit
from tunerd.words import Family, Mode, format_mib

# Flags whose files and folders a server writes; source: --help of the builds from April to November 2026.
_WRITING = frozenset({"--log-file", "--logdir", "-ld", "--log-prompts-dir", "--slot-save-path",
                      "-lcd", "--lookup-cache-dynamic", "--sql-save-file"})  # fmt: skip
# What systemd makes for a unit and lets it write (systemd.exec(5)).
_PLACES = {"StateDirectory": "/var/lib", "CacheDirectory": "/var/cache", "LogsDirectory": "/var/log",
           "RuntimeDirectory": "/run"}  # fmt: skip
_PRIVATE = ("/tmp", "/var/tmp", "/dev")  # noqa: S108 -- of the unit's own
# With these its clients ask for vectors or ranks; builds of April to August 2026 write text all the same.
_NOT_FOR_TEXT = {"--embedding", "--embeddings", "--rerank", "--reranking"}
_LOOPBACK = re.compile(r"127(\.\d+){3}|::1|localhost")


def check_machine(
    resolved: Resolved, host: Host, devices: Sequence[OffloadDevice]
) -> Iterator[Message]:
    """Whether this is the kind of machine that the profile was written for, and its card can be had."""
    wanted = resolved.profile.match
    if wanted.gpu != "none" and not devices:
        yield from check_driver(host, warning if wanted.gpu is None else error)
    if wanted.gpu == "none":
        if host.gpus:
            yield note("gpu-unused", "this profile is for machines without a GPU; yours stays idle")
        return
    if wanted.gpu is None:
        return
    named = {gpu.name: gpu.total_mib for gpu in host.gpus or ()}
    named |= {device.description: device.total_mib for device in devices}
    if not named:
        why = host.gpu_problem or "there is none"
        yield warning("no-gpu", f"the profile is for `{wanted.gpu}`, but no GPU can be read: {why}",
                      "`tunerd detect` shows what is here")  # fmt: skip
        return
    pattern = wanted.gpu.upper()
    fitting = [mib for name, mib in named.items() if fnmatch.fnmatchcase(name.upper(), pattern)]
    if not fitting:
        yield warning("other-gpu", f"the profile is for `{wanted.gpu}`, and this machine has "
                      f"{', '.join(named)}", "`tunerd profiles new` writes one for this machine")  # fmt: skip
    total = max((mib for mib in fitting or named.values() if mib is not None), default=None)
    if total is not None and wanted.vram_min_mib is not None and total < wanted.vram_min_mib:
        yield warning("small-gpu", f"the profile wants {wanted.vram_min_mib} MiB of VRAM, "
                      f"and the card has {format_mib(total)}")  # fmt: skip
    if total is not None and wanted.vram_max_mib is not None and total > wanted.vram_max_mib:
        yield warning("large-gpu", f"the profile is for cards of up to {wanted.vram_max_mib} MiB of "
                      f"VRAM, and this one has {format_mib(total)}",
                      "`tunerd profiles list` shows those for larger cards")  # fmt: skip


def check_driver(
    host: Host, level: Callable[[str, str, str], Message] = error
) -> Iterator[Message]:
    """Whether the card can be had before a reboot."""
    if host.awaits_reboot is not None:
        yield level("reboot-first", f"a program that starts now cannot find the card: {host.awaits_reboot}",
                    "reboot, which loads the installed driver's kernel module")  # fmt: skip


def check_left_out(resolved: Resolved, command: CommandLine, host: Host) -> Iterator[Message]:
    """Which keys of the card that somebody set leave no flag, because the build sees nothing to offload to.

    A profile that names its card is told of that by `check_machine`.
    """
    left = [
        one.key
        for one in command.notes
        if one.text == NO_GPU and resolved.settings[one.key].origin.layer is not Layer.TUNERD
    ]
    if left and resolved.profile.match.gpu is None:
        level = note if host.gpus == () else warning
        yield level("gpu-left-out", f"the build sees nothing to offload to, so no flag says {', '.join(left)}",
                    "`tunerd doctor` may say why")  # fmt: skip


# Of these ik reads no file with an MTP block alone. Source: its builds of June and August 2026, which end at the start.
_WHOLE_IN_IK = frozenset({"qwen35", "qwen35moe"})


def check_model(
    resolved: Resolved, engine: Engine, facts: ModelFacts, draft: ModelFacts | None
) -> Iterator[Message]:
    """What the profile asks of its files that they cannot do; `draft` is the drafter's, where it is one of its own."""
    yield from check_mtp_block(resolved.profile, facts if draft is None else draft)
    uses_mtp = "mtp" in resolved.profile.speculation.kinds
    if uses_mtp and draft is not None and draft.has_mtp and not draft.drafts_by_mtp(facts):
        yield error("no-mtp-block", "the MTP block of speculation.draft_model is that of another model: "
                    f"its rows have {draft.n_embd} values, the model's {facts.n_embd}",
                    "name the `mtp-*.gguf` of this model")  # fmt: skip
    is_ik = engine.capabilities is not None and engine.capabilities.family is Family.IK
    if is_ik and draft is not None and draft.no_model and draft.architecture in _WHOLE_IN_IK:
        yield error("no-mtp-block", f"{engine.name} reads no file with an MTP block alone for this kind of model ({draft.architecture})",
                    "use a build of mainline, or a model file with the block in it")  # fmt: skip
    if facts.no_model is not None:
        yield error("no-model", f"the file is not a model that can be served: {facts.no_model}",
                    "set model.path to the main file")  # fmt: skip
    serving = resolved.profile.serving
    template = resolved.profile.model.chat_template_file or serving.chat_template
    if serving.jinja and facts.chat_template_sha256 is None and not template:
        yield warning(
            "no-template", "the model file has no chat template; chat requests get a default"
        )


def check_mtp_block(profile: ProfileFile, facts: ModelFacts) -> Iterator[Message]:
    """Whether the file that MTP drafts with, the model's or one of its own, has the block for it."""
    if "mtp" in profile.speculation.kinds and not facts.has_mtp:
        reason = f": {facts.mtp_problem}" if facts.mtp_problem else ""
        if profile.speculation.draft_model is not None:
            yield error("no-mtp-block", f"speculation.draft_model has no MTP block{reason}",
                        "name the model's `mtp-*.gguf`; or, for a block in the model's own file, "
                        "tunerd plan PROFILE --set speculation.draft_model=default")  # fmt: skip
            return
        repo = profile.model.hf_repo
        where = f" (the profile names {repo})" if repo else ""
        yield error(
            "no-mtp-block",
            f"the model has no MTP block, so speculation.type = mtp is impossible{reason}",
            f"get the MTP variant of `{facts.name or 'this model'}`{where}, usually named `*-MTP-*`, "
            "or its `mtp-*.gguf` for speculation.draft_model; or tunerd plan PROFILE --set speculation.type=off",
        )


def check_context(n_ctx_slot: int | None, facts: ModelFacts) -> Iterator[Message]:
    """Whether a slot has more context than the model can use; engines round it up to whole steps."""
    trained = facts.context_length
    if n_ctx_slot is not None and trained is not None and n_ctx_slot >= trained + CELL_STEP:
        yield warning("long-context", f"a slot has {n_ctx_slot} tokens of context, but the model was trained for {trained}",
                      f"tunerd plan PROFILE --set serving.ctx_size={trained}")  # fmt: skip


def check_slots(profile: ProfileFile, n_slots: int | None) -> Iterator[Message]:
    """Whether several requests at once would be drafted for."""
    if profile.speculation.kinds and (n_slots or 1) > 1:
        yield warning("slots", f"speculation with {n_slots} slots is unsafe or refused on several builds",
                      "tunerd plan PROFILE --set serving.n_parallel=1")  # fmt: skip


def check_threads(profile: ProfileFile, cores: int | None) -> Iterator[Message]:
    """Whether threads would wait for each other."""
    serving = profile.serving
    for key, threads, level in (
        ("threads", serving.threads, warning),
        ("threads_batch", serving.threads_batch, note),
    ):
        if isinstance(threads, int) and cores is not None and threads > cores:
            yield level("threads", f"serving.{key} = {threads} is more than the {cores} physical cores",
                        f"tunerd plan PROFILE --set serving.{key}=physical")  # fmt: skip


def check_values(resolved: Resolved, host: Host) -> Iterator[Message]:
    """Values that exclude each other or that this machine cannot give."""
    serving, speculation = resolved.profile.serving, resolved.profile.speculation
    drafts = has_depth(resolved) and speculation.kinds
    if drafts and (speculation.n_min or 0) > (speculation.n_max or inf):
        yield error("n-min", f"speculation.n_min = {speculation.n_min} is more than "
                    f"speculation.n_max = {speculation.n_max}: no draft would ever be used")  # fmt: skip
    if (serving.n_ubatch or 0) > (serving.n_batch or inf):
        yield error("ubatch", f"serving.n_ubatch = {serving.n_ubatch} is more than "
                    f"serving.n_batch = {serving.n_batch}")  # fmt: skip
    by_text = sorted(kind for kind in speculation.kinds if kind.startswith("ngram-"))
    if "mtp" in speculation.kinds and by_text:
        # Source: write-up "Multi-Token Prediction lands in llama.cpp"; ggml-org/llama.cpp#23154.
        yield warning("mixed-drafts", f"MTP together with {', '.join(by_text)} is experimental, and has crashed servers with CUDA "
                      "errors", "set speculation.type = mtp; `tunerd compare` shows whether both together are faster")  # fmt: skip
    yield from check_threads(resolved.profile, host.cpu.physical_cores)
    # Left to the engine it is 127.0.0.1 on every build; some take a list.
    hosts = [] if serving.host is None else [host.strip() for host in serving.host.split(",")]
    given = set(map(normal_spelling, resolved.profile.extra_args or ()))
    for flag in sorted(given & _NOT_FOR_TEXT):
        yield warning("not-for-text", f"with `{flag}` the server is for vectors or ranks, and all that tunerd checks, measures and "
                      "tunes is text", "sweep no such server: what is fast for text may be slow for those")  # fmt: skip
    is_open = not all(_LOOPBACK.fullmatch(host) or host.endswith(UNIX_SOCKET) for host in hosts)
    if is_open and serving.api_key_file is None:
        yield warning("open-port", f"serving.host = {serving.host}: anybody who reaches this port may use "
                      "the model", "set serving.api_key_file, or serving.host = 127.0.0.1")  # fmt: skip


def check_mtp(engine: Engine) -> Iterator[Message]:
    """Whether the build was seen not to draft with MTP."""
    mtp = engine.proof("mtp")
    if mtp.effect in {Effect.NO_EFFECT, Effect.FAILED}:
        yield error("mtp-unproved", f"{engine.name} accepts the flags for MTP, but {mtp.detail}",
                    "choose another build; `tunerd engines` lists what is here")  # fmt: skip


def check_proofs(resolved: Resolved, engine: Engine) -> Iterator[Message]:
    """What the plan relies on and this build was seen not to do."""
    speculation, serving = resolved.profile.speculation, resolved.profile.serving
    usual = engine.capabilities.default_slots if engine.capabilities is not None else None
    yield from check_slots(resolved.profile, serving.n_parallel or usual)
    if "mtp" not in speculation.kinds:
        return
    yield from check_mtp(engine)
    mtp = engine.proof("mtp")
    if mtp.effect is Effect.UNTRIED:
        yield note("mtp-untried", f"whether {engine.name} drafts with MTP has not been tried: "
                   f"{mtp.detail}", "`tunerd engines --prove`")  # fmt: skip
    pairs = (
        (speculation.cache_type_k, serving.cache_type_k),
        (speculation.cache_type_v, serving.cache_type_v),
    )
    differs = any(wanted not in {None, target or "f16"} for wanted, target in pairs)
    if differs and engine.capabilities and not laws_of(engine.capabilities).has_own_mtp_kv_type:
        yield warning("mtp-cache-type", f"{engine.name} accepts speculation.cache_type_k and _v with MTP, but "
                      "uses the types of the model's own cache instead",
                      "set serving.cache_type_k and _v, or use a newer build of mainline")  # fmt: skip
    p_min = engine.proof("p-min")
    if speculation.p_min and p_min.effect is Effect.NO_EFFECT:
        yield warning("p-min-ignored", f"{engine.name} accepts p-min but ignores it: {p_min.detail}",
                      "expect what p_min = 0 gives, or use a newer build")  # fmt: skip


def check_asked(new: Serving) -> Iterator[Message]:
    """Whether its server could be asked."""
    if (way := new.asked_otherwise) is not None:
        code = "unix-socket" if "socket" in way else "asked-otherwise"
        yield error(code, f"the server would answer {way}: tunerd cannot check whether it does, so it cannot deploy it",
                    "set serving.host = 127.0.0.1 without --ssl-cert-file and --api-prefix; a proxy (nginx, caddy, socat) can offer it so")  # fmt: skip


def check_live(
    new: Serving,
    live: LiveUnit,
    now: Serving | None = None,
    *,
    lost: Sequence[str] = (),
    systemctl: str = "systemctl",
) -> Iterator[Message]:
    """What changes for clients, and what of a hand-written unit would no longer hold.

    Args:
        new: Address and names that the plan gives.
        live: The unit that stands.
        now: How its server is reached and named now, where that says more than its text.
        lost: Lines of a hand-written unit that are not taken over.
        systemctl: How a person calls the unit's manager.
    """
    if live.text is None:
        return
    old = now or live.serving
    for what, before, after in (
        ("alias", old.alias, new.alias),
        ("host", old.host, new.host),
        ("port", old.port, new.port),
    ):
        if before is not None and after is not None and before != after:
            yield warning(f"{what}-changes", f"the {what} changes from {before} to {after}: clients "
                          "that use the old one break", f"--set serving.{what}={before}")  # fmt: skip
    if old.is_router:
        yield warning("router", f"{live.unit} is a router that starts a server for each model that clients ask for: its models "
                      "are not served any more", "`tunerd settings set service.unit ANOTHER.service` leaves it alone")  # fmt: skip
    if (old.api_key or old.api_key_file) and not (new.api_key or new.api_key_file):
        yield warning("key-gone", f"{live.unit} asks its clients for a key, and the new server will "
                      "answer everybody", "put the key into a file and set serving.api_key_file")  # fmt: skip
    if live.drop_in_exec:
        paths = ", ".join(f"`{path}`" for path in live.drop_in_exec)
        yield error("drop-in-exec", f"a drop-in sets ExecStart= and would replace the new command: "
                    f"{paths}", "move that line into the unit itself, where a rollback finds it")  # fmt: skip
    elif live.drop_ins:
        paths = ", ".join(f"`{path}`" for path in live.drop_ins)
        yield note("drop-ins", f"drop-ins stay in force: {paths}")
    if live.link_to is not None:
        yield warning("link", f"{live.unit} is a link to `{live.link_to}`: a regular file replaces it "
                   "and stays after a rollback; what the link points to is left alone",
                   "after a rollback, make the link again by hand if you want it back")  # fmt: skip
    if not live.is_ours:
        yield _adopted(live)
        if lost:
            yield warning("foreign-directives",
                          "the new unit will not have these lines of it: " + "; ".join(lost),
                          f"put what you want to keep into a drop-in: {systemctl} edit {live.unit}")  # fmt: skip


def _adopted(live: LiveUnit) -> Message:
    """What becomes of a unit that tunerd did not write."""
    text, hint = "it is kept as a `.pre-*` file", None
    if live.shadowed_by is not None:
        text = f"`{live.path}` stays as it is, and `{live.shadowed_by}` takes its place"
        hint = "`tunerd rollback` removes that file, and the packaged unit is in force again"
    return note("adopted", f"{live.unit} was not written by tunerd; {text}", hint)


def serving_after(
    command: CommandLine,
    capabilities: Capabilities | None,
    environment: Mapping[str, str] | None = None,
) -> Serving:
    """Address and names that the planned command gives; a port it does not name is the build's own."""
    serving = serving_of(command.words, environment or {})
    if serving.port is not None or capabilities is None:
        return serving
    return replace(serving, port=capabilities.default_port)


def explain(command: CommandLine, resolved: Resolved) -> tuple[tuple[str, str, str], ...]:
    """For each flag: the words, the key behind it, and who set it; what left no flag comes last."""
    rows = [
        (" ".join(argument.words), argument.key, str(argument.origin))
        for argument in command.arguments
    ]
    rows += [
        (f"({remark.text})", remark.key, str(resolved.origin(remark.key) or ""))
        for remark in command.notes
    ]
    rows += [
        ("(left to the engine)", key, str(origin))
        for key, origin in sorted(resolved.left_to_engine.items())
    ]
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class UserFacts:
    """The account that runs the server, and what it may read."""

    mode: Mode
    user: str | None
    is_missing: bool
    unreadable: Sequence[str]
    gone: Sequence[str]
    memlock_unlimited: bool | None
    lacks_manager: bool = False


def check_user(facts: UserFacts, *, wants_mlock: bool) -> Iterator[Message]:
    """Whether the account that will run the server can do so."""
    if facts.is_missing:
        yield error("no-account", f"there is no user `{facts.user}` to run the server",
                    "`tunerd settings set service.user ACCOUNT` names another; install.sh makes `llama-server`")  # fmt: skip
    for path in facts.unreadable:
        yield error("unreadable", f"user {facts.user} may not read `{path}`",
                    f"chmod or move it, or set service.user; try: sudo -u {facts.user} cat {path} "
                    "| head -c 1")  # fmt: skip
    for path in facts.gone:
        yield error(
            "no-file",
            f"the server would read `{path}`, which is not there",
            "put it there, or change what names it",
        )
    if facts.lacks_manager:
        yield lacks_manager()
    if wants_mlock and facts.mode is not Mode.SYSTEM and facts.memlock_unlimited is False:
        yield warning(
            "memlock",
            "the memory lock limit of this session is too low for mlock; the server would run unlocked",
            "as root, once: add a drop-in with LimitMEMLOCK=infinity to user@.service, then log in again",
        )


def written_by(argv: Sequence[str]) -> list[str]:
    """Paths of a command line that the server writes, and that need not be there."""
    return [
        path for flag, path in itertools.pairwise(argv) if flag in _WRITING and path.startswith("/")
    ]


def check_written(argv: Sequence[str], unit: UnitFile, name: str) -> Iterator[Message]:
    """What the unit keeps the server from writing; a server goes on without a log of its own, and says nothing."""
    if unit.value("Service", "ProtectSystem") != "strict":
        return

    def words(key: str) -> list[str]:
        return [word for one in unit.values("Service", key) for word in one.value.split()]

    folders = {place: [f"{place}/{word}" for word in words(key)] for key, place in _PLACES.items()}
    is_open = [*_PRIVATE, *itertools.chain(*folders.values())]
    is_open += [word.lstrip("-+") for word in words("ReadWritePaths")]
    for path in written_by(argv):
        if not any(PurePath(path).is_relative_to(folder) for folder in is_open):
            yield warning("not-written", f"the unit keeps the server from writing `{path}`",
                          f"use a path below {' or '.join(folders['/var/lib'])}, or a drop-in with "
                          f"ReadWritePaths=: systemctl edit {name}")  # fmt: skip


def check_spill(environment: Mapping[str, str], way: str) -> Iterator[Message]:
    """Whether the driver may move to RAM what the card does not hold; `way` takes that back."""
    if "GGML_CUDA_ENABLE_UNIFIED_MEMORY" in environment:
        yield warning("unified-memory", "GGML_CUDA_ENABLE_UNIFIED_MEMORY lets VRAM spill into RAM: "
                      "instead of an out-of-memory error the server becomes very slow", way)  # fmt: skip


def environment_conflicts(environment: Mapping[str, str]) -> Iterator[Message]:
    """Variables that change what was asked for."""
    yield from check_spill(environment, "remove it from [environment]")
    for name in environment:
        if is_secret_variable(name):
            yield error("secret", f"environment.{name} would be in the unit, where everybody can read it",
                        "put it into a file and set serving.api_key_file")  # fmt: skip
        elif name.startswith("LLAMA_ARG_"):
            yield error("hidden-option", f"environment.{name} is an option in disguise",
                        "set the profile key instead")  # fmt: skip


# Said by tunerd in its own words, shown flag by flag elsewhere, or looked at variable by variable.
_ELSEWHERE = frozenset(
    {
        ("Unit", "Description"),
        ("Unit", "Documentation"),
        ("Service", "ExecStart"),
        ("Service", "Environment"),
        ("Service", "EnvironmentFile"),
    }
)
# Values that mean what tunerd's own text says otherwise; of a list each word counts by itself.
_SAME_MEANING: Mapping[tuple[str, str], frozenset[str]] = {
    ("Unit", "After"): frozenset({"network.target", "network-online.target"}),
    ("Unit", "Wants"): frozenset({"network.target", "network-online.target"}),
    ("Service", "Type"): frozenset({"simple", "exec"}),
    ("Service", "StandardOutput"): frozenset({"journal"}),
    ("Service", "StandardError"): frozenset({"journal", "inherit"}),
    ("Install", "WantedBy"): frozenset({"multi-user.target", "default.target"}),
}
# Where the server finds its home and its downloads, which tunerd's own text says too.
_OWN_VARIABLES = frozenset({"HOME", "LLAMA_CACHE"})
_YES = frozenset({"yes", "true", "on", "1"})
_NO = frozenset({"no", "false", "off", "0"})
# A word as a shell and systemd read it; a quote that is never closed ends with its line.
_WORD = r"""(?:"(?:\\[\s\S]|[^"\\\n])*+"?|'[^'\n]*+'?|\\[\s\S]|[^\s"'\\])++"""
_IN_QUOTES = r"(?:\\[\s\S]|(?!(?P=q)).)*+"
_FLAGS = "|".join(flag.lstrip("-").replace("-", "[-_]") for flag in sorted(SECRET_FLAGS))
_HIDDEN_NAME = (
    r"(?<!\w)(?:\w{0,200}_)?(?:API_?KEY|TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET)(?:_\w{0,200})?"
)
_SECRETS = (
    re.compile(rf"""(?P<shown>(?P<q>["'])--?(?:{_FLAGS})=){_IN_QUOTES}"""),
    re.compile(rf"""(?P<shown>(?<![\w-])--?(?:{_FLAGS})["']?[=\s\\]++){_WORD}"""),
    re.compile(
        r"^(?P<shown>[-+ \t]*SetCredential\w*[ \t]*=(?:[^:\n\\]*:)?)(?:\\[\s\S]|[^\n\\])++",
        re.MULTILINE,
    ),
    re.compile(rf"""(?P<shown>(?P<q>["']){_HIDDEN_NAME}=){_IN_QUOTES}""", re.IGNORECASE),
    re.compile(rf"(?P<shown>{_HIDDEN_NAME}=){_WORD}", re.IGNORECASE),
    re.compile(rf"""(?P<shown>(?P<q>["']){_HIDDEN_NAME}(?P=q)\s*+:\s*+){_WORD}""", re.IGNORECASE),
)


def masked(text: str, hidden: str = "...") -> str:
    """A text without the secrets that command lines and units hold; where in doubt too much is hidden."""
    for secret in _SECRETS:
        text = secret.sub(lambda one: f"{one['shown']}{hidden}", text)
    return text


def lost_lines(live: LiveUnit, planned: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Lines of a hand-written unit that would no longer hold, as `Name=value`; secrets are masked.

    Drop-ins stay in force, so only the unit file itself counts. Nothing is lost of a unit of ours.

    Args:
        live: The unit that stands.
        planned: The text that takes its place; empty where it is not known.
        argv: The command line of that text.
    """
    if live.text is None or live.is_ours:
        return ()
    old, new = parse_unit(live.text), parse_unit(planned)
    found = [*_directives(old, new), *_variables(live, new, argv), *_files(live, new, argv)]
    if live.prefix:
        other = "which a drop-in says by CPUAffinity=, NUMAPolicy=, Nice= and the like"
        found.append(f"ExecStart={' '.join(live.prefix)} ..., {other}")
    return tuple(dict.fromkeys(found))


def _directives(old: UnitFile, new: UnitFile) -> Iterator[str]:
    kept = {(d.section, d.name, _normal(d.value)) for d in new.directives}
    for directive in old.directives:
        place = (directive.section, directive.name)
        if place in _ELSEWHERE or (*place, _normal(directive.value)) in kept:
            continue
        same = _SAME_MEANING.get(place)
        if same is None:
            yield masked(f"{directive.name}={directive.value}")
            continue
        rest = [word for word in directive.value.split() if word not in same]
        if rest:
            yield f"{directive.name}={' '.join(rest)}"


def _normal(value: str) -> str:
    """A value as systemd understands it: words for yes and no, seconds with or without their unit."""
    lowered = value.lower()
    if lowered in _YES | _NO:
        return "yes" if lowered in _YES else "no"
    return re.sub(r"^(\d+)\s*s(ec)?$", r"\1", value)


def _variables(live: LiveUnit, new: UnitFile, argv: Sequence[str]) -> Iterator[str]:
    for name, value in live.own_environment.items():
        is_overridden = bool(live.own_environment_files) and name in live.file_environment
        if not is_overridden and not _is_taken(name, value, new, argv):
            is_secret = holds_secret(name, value, secrets_in(live.arguments))
            yield f"Environment={name}={'...' if is_secret else value}"


def _files(live: LiveUnit, new: UnitFile, argv: Sequence[str]) -> Iterator[str]:
    """Environment files, with the names of variables that are not taken over."""
    variables = live.file_environment
    lost = [name for name, value in variables.items() if not _is_taken(name, value, new, argv)]
    if variables and not lost:
        return
    for path in live.own_environment_files:
        sets = f" (with {', '.join(lost)})" if lost else ""
        yield f"EnvironmentFile={path}{sets}"


def _is_taken(name: str, value: str, new: UnitFile, argv: Sequence[str]) -> bool:
    """Whether the new unit has the variable, or its command line the option that it stands for."""
    if name in _OWN_VARIABLES or environment_of(new, {"%": "%"}).get(name) == value:
        return True
    if not name.startswith(PREFIX):
        return False
    flag = flag_of(name.removeprefix(PREFIX))
    on, off = (value.lower() in words for words in (TRUE, FALSE))
    for word, after in itertools.pairwise([*argv, ""]):
        spelled = normal_spelling(word)
        positive = "--" + spelled.removeprefix("--").removeprefix("no-")
        is_same = flag in {spelled, positive} or (owner_of(flag) or flag) == owner_of(word)
        turned = spelled.startswith("--no-") != flag.startswith("--no-")
        if word.startswith("-") and is_same and (after == value or (off if turned else on)):
            return True
    return False
