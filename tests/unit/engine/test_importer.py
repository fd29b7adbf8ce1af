"""The command line of today becomes a profile that renders to it, or each flag is named that does not."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.builders import HELP_OF, capabilities_of
from tests.support.profiles import PROFILE_DATA, context, profile_of
from tests.support.transcripts import inputs_of, transcript
from tunerd.engine.capabilities import parse_help, read_capabilities
from tunerd.engine.flags import CommandLine, RenderContext, arguments_sha256, owner_of, render
from tunerd.engine.importer import PREFIX, Imported, flag_of, import_command_line, split_flags
from tunerd.profile.layers import Layer, LayerFile, Resolved, resolve
from tunerd.profile.schema import check_file, flatten

DIALECTS = sorted(HELP_OF)


def imported(
    line: str | Sequence[str],
    dialect: str,
    environment: Mapping[str, str] | None = None,
    folder: str = "",
) -> Imported:
    words = shlex.split(line) if isinstance(line, str) else line
    return import_command_line(words, environment or {}, capabilities_of(dialect), folder)


def again(found: Imported, dialect: str) -> CommandLine:
    """What the imported profile renders to."""
    resolved = resolve("new", (LayerFile(Layer.SITE, "new", found.data),))
    assert isinstance(resolved, Resolved), [str(problem) for problem in resolved]
    model = resolved.profile.model.path or "NONE"
    machine = RenderContext("/usr/bin/llama-server", model, has_gpu=True, physical_cores=None)
    command = render(resolved, capabilities_of(dialect), machine)
    assert isinstance(command, CommandLine), [str(refusal) for refusal in command]
    return command


def flags(command: CommandLine, dialect: str) -> set[tuple[str, ...]]:
    return {flag.words for flag in split_flags(command.argv[1:], capabilities_of(dialect))}


def value(found: Imported, key: str) -> Any:
    return flatten(found.data).get(key)


def reasons(found: Imported) -> dict[str, str]:
    return {" ".join(entry.words): entry.reason for entry in found.unplaced}


# Round trips.


@settings(max_examples=150, deadline=None)
@given(PROFILE_DATA, st.sampled_from(DIALECTS))
@example({"serving.reasoning_budget_message": " "}, "ik-now")
@example({"serving.alias": "--port"}, "ik-may")
@example({"speculation.type": "mtp", "speculation.override_tensor": []}, "main-lm")
@example({"model.chat_template_file": '" "', "serving.alias": "null"}, "bee-01")
def test_a_random_profile_comes_back_from_its_command_line(
    data: dict[str, Any], dialect: str
) -> None:
    before = render(profile_of(data), capabilities_of(dialect), context(has_gpu=True))
    if not isinstance(before, CommandLine):
        return
    found = imported(before.argv[1:], dialect)
    assert check_file("new", found.data) == ()
    assert found.unplaced == ()
    assert flags(again(found, dialect), dialect) == flags(before, dialect)
    assert imported(again(found, dialect).argv[1:], dialect).data == found.data


ANY_WORD = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["1", "on", "off", "0.5", "-1", "1e-1", ".5", "9" * 5000, "mtp:n_max=2", "{", "a,b"]),
)  # fmt: skip


@st.composite
def any_line(draw: st.DrawFn) -> tuple[str, list[str]]:
    dialect = draw(st.sampled_from(DIALECTS))
    spellings = st.sampled_from(sorted(capabilities_of(dialect).help.live_spellings))
    words = draw(st.lists(st.one_of(spellings, spellings, ANY_WORD), max_size=12))
    return dialect, words


@settings(max_examples=200, deadline=None)
@given(any_line())
@example(("main-0x", ["-c", "9" * 5000]))
@example(("bee-04", ["--override-tensor", ""]))
@example(("ik-now", ["-cd", "4096"]))  # by its help, and not by its parser
@example(("main-0x", ["--override-tensor", "exps=CPU,,a=CPU"]))
def test_every_word_of_any_command_line_is_placed_or_named(case: tuple[str, list[str]]) -> None:
    dialect, words = case
    found = imported(words, dialect)
    assert check_file("new", found.data) == ()
    again(found, dialect)  # whatever was placed can be rendered
    for entry in found.unplaced:
        assert entry.reason


# What becomes of lines and variables.


VARIABLE = re.compile(r"[A-Z_]+=")


def came_of(dialect: str, line: str) -> list[str]:
    """What a line brings beside the profile of an empty one; variables come before flags."""
    line = "" if line == "nothing" else line
    words = shlex.split(line)
    given = list(itertools.takewhile(VARIABLE.match, words))
    environment = dict(one.split("=", 1) for one in given)
    found = imported(words[len(given) :], dialect, environment)
    empty = flatten(imported("", dialect).data) if line else {}
    assert "hunter2" not in str(found)
    shown = [
        f"{name} = {json.dumps(value)}"
        for name, value in flatten(found.data).items()
        if empty.get(name) != value
    ]
    shown += [f"not taken: {text}: {reason}" for text, reason in reasons(found).items()]
    shown += [f"overridden: {name}" for name in found.overridden]
    shown += [f"added: {flag}" for flag in found.added]
    told = [f"{dialect}: {line or 'nothing'}", *(f"    {one}" for one in shown)]
    return [one.replace("\n", r"\n") for one in told]


def test_what_becomes_of_a_line_is_told_as_in_the_golden_text() -> None:
    """Of one that is empty all is told, of others what they change in that.

    The lines are those of the text itself, as `DIALECT: LINE`. Speculation is what the build of its dialect was seen
    to do, chains what that of August 2026 did; a repository names its model since clients had no model of its file's
    name; depth in flags of their own is of units from before June 2026 whose engine was upgraded since; and a variable
    with the key of the line went from a file of root's own into the unit, where everybody reads it.
    """
    cases = [
        (heading, [told for line in lines for told in came_of(*line.split(": ", 1))])
        for heading, lines in inputs_of("imported/lines")
    ]
    assert sum(len(came) for _, came in cases) > 300
    transcript("imported/lines", cases)


@pytest.mark.parametrize(
    ("dialect", "line", "served"),
    [
        ("main-lm", "-m a/q.gguf --mmproj ./p.gguf -md d.gguf --spec-type draft-simple",
         "/w/a/q.gguf /w/p.gguf /w/d.gguf"),
        ("main-lm", "-m /q.gguf --lora l.gguf,/m.gguf --log-file s.log --chat-template-file t.jinja",
         "/q.gguf /w/l.gguf,/m.gguf /w/s.log /w/t.jinja"),
        ("ik-now", "-m q.gguf --lora-scaled l.gguf 0.5 --slot-save-path s --api-key-file k",
         "/w/q.gguf /w/l.gguf 0.5 /w/s /w/k"),
        ("main-lm", "-m q.gguf -hff f.gguf --alias a/b -ot a/b=CPU", "/w/q.gguf a/b a/b=CPU"),
    ],
)  # fmt: skip
def test_a_file_is_that_of_the_folder_where_the_server_started(
    dialect: str, line: str, served: str
) -> None:
    """Another file of the same name, below `models.dirs`, was served in its place without a word."""
    found = imported(line, dialect, folder="/w")
    assert found.unplaced == ()
    assert set(served.split()) <= set(again(found, dialect).argv)
    by_variable = imported("", "main-lm", {"LLAMA_ARG_MODEL": "q.gguf"}, folder="/w")
    assert value(by_variable, "model.path") == "/w/q.gguf"


def test_what_is_the_default_or_what_tunerd_would_set_is_left_to_the_engine() -> None:
    for dialect, line in (("main-lm", "-ngl -1 -t -1 -np -1"), ("main-0x", "-ngl -1 -np -1"), ("main-0x", "")):  # fmt: skip
        found = imported(f"{line} -m /m.gguf -c 512", dialect)
        assert found.unplaced == ()
        assert again(found, dialect).argv[1:] == ("--model", "/m.gguf", "--ctx-size", "512")


@pytest.mark.parametrize(
    ("dialect", "line"),
    [
        ("main-0x", "--spec-type draft-mtp,ngram-mod --spec-draft-n-max 3 --spec-draft-p-min 0.5"),
        ("main-0x", "--spec-type ngram-map-k,draft-mtp --spec-draft-n-max 2"),
        ("ik-now", "--spec-type ngram-mod:n_max=64,n_min=2 --spec-type mtp:n_max=1,p_min=0.0"),
        ("ik-now", "--spec-type mtp:heads=2,n_max=3"),
        *((dialect, "-rtr -thp -op 27,0 -no-ooae -rcache -ts 3,1 --override-tensor exps=CPU")
          for dialect in ("ik-may", "ik-now")),
    ],
)  # fmt: skip
def test_a_chain_of_speculation_and_what_ik_takes_without_listing_it_are_served_as_they_were(
    dialect: str, line: str
) -> None:
    found = imported(line, dialect)

    assert found.unplaced == ()
    assert set(shlex.split(line)) <= set(again(found, dialect).argv)


def test_a_kind_that_only_the_build_knows_keeps_its_word() -> None:
    text = capabilities_of("main-0x").help.text
    capabilities = read_capabilities(parse_help(text.replace("draft-mtp,", "draft-mtp,draft-new,")))
    line = ["--spec-type", "draft-new", "--spec-draft-n-max", "6"]

    found = import_command_line(line, {}, capabilities)

    assert (value(found, "speculation.type"), value(found, "speculation.n_max")) == ("draft-new", 6)
    assert found.unplaced == ()


def test_what_is_not_utf_8_is_left_out_and_said_so() -> None:
    """`profiles new` ended in a traceback: no profile can hold it."""
    odd = os.fsdecode(b"a\xffb")
    variable = imported("", "main-0x", {"GGML_NAME": odd})
    flag = imported(f"-m /a.gguf --lora /gr{odd}.gguf", "main-0x")

    assert not {"environment", "extra_args"} & {*variable.data, *flag.data}
    assert list(reasons(variable).values()) == ["a profile cannot have it in [environment]"]
    assert list(reasons(flag).values()) == ["it is not UTF-8, as all of a profile is"]


def test_a_draft_model_alone_drafts_on_builds_of_before_june_2026() -> None:
    """ggml-org/llama.cpp#23988: since then a line without a type serves without drafts."""
    text = capabilities_of("main-mid").help.text
    for ping, kind in (("", "draft"), ("\n--sse-ping-interval N   seconds\n", "off")):
        build = read_capabilities(parse_help(text + ping))
        found = import_command_line(["-md", "/d.gguf"], {}, build)
        assert value(found, "speculation.type") == kind


def test_the_hash_of_arguments_never_changes_for_evidence_names_it() -> None:
    hashes = {
        "-m a.gguf --draft 16 -c 4096 --port 1": "2c5710649b81",
        "--draft-n 16 --draft-n-min 2 -ngl 99": "36c97859f3cd",
        "-m a.gguf --draft-max 16 -fa on --temp 0.6 -ctk q8_0 -np 1 --spec-type draft-mtp": "cde38c2ae4a7",
    }
    found = {line: arguments_sha256(["x", *line.split()]) or "" for line in hashes}
    assert {line: one[:12] for line, one in found.items()} == hashes


def test_a_flag_that_a_help_does_not_show_and_that_has_no_value_has_no_place() -> None:
    for dialect, word in itertools.product(DIALECTS, ("-ot", "--fit-target", "--fit-margin")):
        assert [one.words for one in imported(word, dialect).unplaced] == [(word,)]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_variable_of_a_build_is_known_by_a_flag_of_its_own(dialect: str) -> None:
    """`LLAMA_ARG_ENDPOINT_METRICS` was `--endpoint-metrics`: plans called it lost where `--metrics` said it."""
    unknown = set()
    for option in capabilities_of(dialect).help.options:
        name = (option.env or "").removeprefix(PREFIX)
        if option.is_removed or name == option.env or not name:
            continue
        flag = flag_of(name)
        spelled = {word.replace("--no-", "--", 1) for word in option.spellings}
        keys = {owner_of(word) for word in option.spellings} - {None}
        if not ({flag, flag.replace("--no-", "--", 1)} & spelled or owner_of(flag) in keys):
            unknown.add((name, flag))
    assert not unknown
