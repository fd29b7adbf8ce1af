"""The command line of today becomes a profile that renders to it, or each flag is named that does not."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.builders import HELP_OF, capabilities_of
from tests.support.profiles import PROFILE_DATA, context, profile_of
from tunerd.engine.flags import CommandLine, RenderContext, arguments_sha256, render
from tunerd.engine.help import parse_help, read_capabilities
from tunerd.engine.importer import Imported, import_command_line, split_flags
from tunerd.profile.layers import Layer, LayerFile, Resolved, resolve
from tunerd.profile.schema import check_file

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
    section, _, name = key.partition(".")
    return found.data.get(section, {}).get(name)


def reasons(found: Imported) -> dict[str, str]:
    return {" ".join(entry.words): entry.reason for entry in found.unplaced}


# Round trips.


@settings(max_examples=150, deadline=None)
@given(PROFILE_DATA, st.sampled_from(DIALECTS))
@example({"serving.reasoning_budget_message": " "}, "ik-now")
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


# One flag at a time.


@pytest.mark.parametrize(
    ("dialect", "line", "key", "expected"),
    [
        ("main-0x", "-c 4096", "serving.ctx_size", 4096),
        ("main-0x", "--ctx_size 4096", "serving.ctx_size", 4096),
        ("main-0x", "-n -1", "serving.n_predict", -1),
        ("main-0x", "--temp .5", "serving.temp", 0.5),
        ("main-0x", "--temp 5e-1", "serving.temp", 0.5),
        ("main-0x", "--temp 1", "serving.temp", 1),
        ("main-0x", "-fa 1", "serving.flash_attn", "on"),
        ("main-0x", "-fa disabled", "serving.flash_attn", "off"),
        ("main-0x", "--no-warmup", "serving.warmup", False),
        ("main-0x", "--warmup --no-warmup", "serving.warmup", False),
        ("main-0x", "-nkvo", "memory.kv_offload", False),
        ("main-0x", "-a one -a two", "serving.alias", "two"),
        ("main-0x", "-lm mlock", "serving.load_mode", "mlock"),
        ("main-mid", "--no-mmap --mlock", "serving.load_mode", "mlock"),
        ("main-mid", "--mlock --no-mmap", "serving.load_mode", "mlock"),
        ("main-mid", "--mlock", "serving.load_mode", "mmap+mlock"),
        ("main-mid", "--no-mmap --mmap", "serving.load_mode", "mmap"),
        ("main-mid", "-dio", "serving.load_mode", "dio"),
        ("main-mid", "--no-mmap -dio", "serving.load_mode", "dio"),
        ("main-lm", "--no-mmap --mlock", "serving.load_mode", "mlock"),
        ("main-lm", "--mlock --no-mmap", "serving.load_mode", "none"),
        ("main-lm", "--mlock", "serving.load_mode", "mlock"),
        ("main-lm", "-lm mmap+mlock --no-mmap", "serving.load_mode", "none"),
        ("main-lm", "--mlock -ndio", "serving.load_mode", "none"),
        ("main-0x", "--chat-template-kwargs '{\"a\":false}'", "serving.chat_template_kwargs", {"a": False}),
        ("main-0x", "-ngl all", "memory.n_gpu_layers", "all"),
        ("main-0x", "-ot a=CPU,b=CPU -ot c=CPU", "memory.override_tensor", ["a=CPU", "b=CPU", "c=CPU"]),
        ("main-0x", "-fitt 512", "memory.fit_mib", 512),
        ("main-0x", "--fit off", "memory.fit", False),
        ("main-0x", "--fit off --device CUDA0", "memory.fit", False),
        ("ik-now", "--fit --fit-margin 1664", "memory.fit_mib", 1664),
        ("ik-now", "--fit", "memory.fit", True),
        ("ik-now", "--context-shift off", "serving.context_shift", False),
        ("main-0x", "--no-context-shift", "serving.context_shift", False),
        ("main-0x", "--spec-type draft-mtp", "speculation.type", "mtp"),
        ("main-0x", "--spec-type none", "speculation.type", "off"),
        ("main-0x", "--spec-type draft-mtp,ngram-mod", "speculation.type", "mtp,ngram-mod"),
        # Both were seen at work on the build of August 2026.
        ("main-0x", "--spec-type draft-mtp --spec-type ngram-mod", "speculation.type", "mtp,ngram-mod"),
        ("main-0x", "--spec-type draft-mtp --spec-type none", "speculation.type", "mtp"),
        ("main-0x", "-c 032768", "serving.ctx_size", 32768),
        ("main-0x", "-fitt +512", "memory.fit_mib", 512),
        ("ik-may", "-mtp", "speculation.type", "mtp"),
        ("ik-may", "-mtp -no-mtp", "speculation.type", "mtp"),
        ("ik-now", "--spec-type mtp:p_min=0.75,n_max=3", "speculation.p_min", 0.75),
        ("main-old", "-md /d.gguf --draft-max 5", "speculation.type", "draft"),
        ("main-old", "-md /d.gguf --draft-max 5", "speculation.n_max", 5),
        # Each was seen to draft, and no deeper than that, on a build of its dialect.
        ("main-mid", "-md /d.gguf --spec-draft-n-max 5", "speculation.type", "draft"),
        *((dialect, "--spec-type ngram-simple --draft-max 2", "speculation.n_max", 2)
          for dialect in ("main-old", "ik-may")),
        ("main-0x", "-md /d.gguf", "speculation.type", "off"),
        ("main-0x", "", "speculation.type", "off"),
        ("main-0x", "", "serving.port", "default"),
    ],
)  # fmt: skip
def test_a_flag_becomes_its_key(dialect: str, line: str, key: str, expected: object) -> None:
    assert value(imported(line, dialect), key) == expected


@pytest.mark.parametrize(
    ("dialect", "line", "lost", "why"),
    [
        ("main-0x", "--nope 5 -c 5", "--nope 5", "does not list"),
        ("main-0x", "--mlock", "--mlock", "no such"),
        ("main-0x", "-c", "-c", "missing"),
        ("main-0x", "-c many", "-c many", "a whole number"),
        ("main-0x", f"-c {'9' * 5000}", f"-c {'9' * 5000}", "allowed"),
        ("main-0x", "--temp nan", "--temp nan", "allowed"),
        ("main-0x", "-fitt 512,1024", "-fitt 512,1024", "one margin for all devices"),
        ("main-0x", "-t -1", "-t -1", "greater than or equal to 1"),
        ("main-0x", "--port 0", "--port 0", "greater than or equal to 1"),
        ("main-0x", "--fit off -fitt 512", "-fitt 512", "without --fit"),
        ("ik-now", "--fit-margin 1664", "--fit-margin 1664", "without --fit"),
        ("main-0x", "-ngl 9 -fitt 512", "-fitt 512", "by hand"),
        ("main-0x", "--spec-draft-n-max 5", "--spec-draft-n-max 5", "speculation.type = off"),
        ("main-0x", "--spec-type ngram-mod --spec-draft-n-max 5", "--spec-draft-n-max 5", "beside"),
        ("main-0x", "--spec-type draft-dflash", "--spec-type draft-dflash", "needs a draft model"),
        *((dialect, "--spec-type draft-mtp -md /mtp.gguf", "-md /mtp.gguf", "own file alone")
          for dialect in ("main-mid", "main-lm")),
        ("main-mid", "--mlock -dio", "--mlock --direct-io", "one load mode"),
        ("main-0x", "--api-key hunter2", "--api-key ...", "secret"),
        ("main-0x", "--api_key hunter2", "--api_key ...", "secret"),
        ("main-0x", "-hft hunter2", "-hft ...", "secret"),
        ("main-0x", "-a 'a\nb'", "-a a\nb", "allowed"),
        ("main-0x", "--lora 'a\nb'", "--lora a\nb", "control character"),
        ("main-0x", "stray words -c 5", "stray words", "does not list"),
    ],
)  # fmt: skip
def test_what_no_profile_can_say_is_named(dialect: str, line: str, lost: str, why: str) -> None:
    found = imported(line, dialect)
    named = {key.replace("-dio", "--direct-io"): reason for key, reason in reasons(found).items()}
    assert lost in named or why == "no such"
    if why != "no such":
        assert why in named[lost]
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(
    ("dialect", "line", "served"),
    [
        ("main-lm", "-m a/q.gguf --mmproj ./p.gguf -md d.gguf --spec-type draft-simple",
         ["/w/a/q.gguf", "/w/p.gguf", "/w/d.gguf"]),
        ("main-lm", "-m /q.gguf --lora l.gguf,/m.gguf --log-file s.log --chat-template-file t.jinja",
         ["/q.gguf", "/w/l.gguf,/m.gguf", "/w/s.log", "/w/t.jinja"]),
        ("ik-now", "-m q.gguf --lora-scaled l.gguf 0.5 --slot-save-path s --api-key-file k",
         ["/w/q.gguf", "/w/l.gguf", "0.5", "/w/s", "/w/k"]),
        ("main-lm", "-m q.gguf -hff f.gguf --alias a/b -ot a/b=CPU", ["/w/q.gguf", "a/b", "a/b=CPU"]),
    ],
)  # fmt: skip
def test_a_file_is_that_of_the_folder_where_the_server_started(
    dialect: str, line: str, served: Sequence[str]
) -> None:
    """Another file of the same name, below `models.dirs`, was served in its place without a word."""
    found = imported(line, dialect, folder="/w")
    assert found.unplaced == ()
    assert set(served) <= set(again(found, dialect).argv)


def test_a_variable_may_name_a_file_from_there_too() -> None:
    found = imported("", "main-lm", {"LLAMA_ARG_MODEL": "q.gguf"}, folder="/w")
    assert value(found, "model.path") == "/w/q.gguf"


@pytest.mark.parametrize(
    ("dialect", "line"), [("main-lm", "-ngl -1 -t -1 -np -1"), ("main-0x", "-ngl -1 -np -1")]
)
def test_a_number_that_means_the_default_is_no_loss(dialect: str, line: str) -> None:
    found = imported(f"{line} -c 512", dialect)
    assert found.unplaced == ()
    assert again(found, dialect).argv[-2:] == ("--ctx-size", "512")


def test_what_tunerd_would_set_is_left_to_the_engine_where_the_line_does_not() -> None:
    command = again(imported("-m /m.gguf -c 512", "main-0x"), "main-0x")
    assert command.argv[1:] == ("--model", "/m.gguf", "--ctx-size", "512")


# Environments.


@pytest.mark.parametrize(
    ("dialect", "variable", "key", "expected"),
    [
        ("main-0x", "CTX_SIZE=4096", "serving.ctx_size", 4096),
        ("main-0x", "ALIAS=x", "serving.alias", "x"),
        ("main-0x", "FLASH_ATTN=on", "serving.flash_attn", "on"),
        ("main-0x", "JINJA=1", "serving.jinja", True),
        ("main-0x", "JINJA=disabled", "serving.jinja", False),
        ("main-0x", "NO_JINJA=whatever", "serving.jinja", False),
        ("main-0x", "ENDPOINT_METRICS=true", "serving.metrics", True),
        ("main-0x", "ENDPOINT_SLOTS=0", "serving.slots", False),
        ("main-0x", "SPEC_TYPE=draft-mtp", "speculation.type", "mtp"),
        ("main-0x", "LOAD_MODE=mlock", "serving.load_mode", "mlock"),
        ("main-0x", "MODEL=/m.gguf", "model.path", "/m.gguf"),
        ("main-0x", "CACHE_TYPE_K=q8_0", "serving.cache_type_k", "q8_0"),
        ("main-0x", "FIT_TARGET=512", "memory.fit_mib", 512),
        ("main-0x", "NO_HOST=1", "serving.host", "default"),
        # ik's switches know `1` and `true` alone.
        ("ik-now", "FLASH_ATTN=1", "serving.flash_attn", "on"),
        ("ik-now", "FLASH_ATTN=on", "serving.flash_attn", "off"),
        ("ik-now", "ENDPOINT_SLOTS=no", "serving.slots", False),
        ("ik-now", "ENDPOINT_METRICS=true", "serving.metrics", True),
        ("ik-now", "MODEL_ALIAS=x", "serving.alias", "x"),
        ("ik-now", "MLOCK=1", "serving.load_mode", "mmap+mlock"),
        ("ik-now", "MLOCK=on", "serving.load_mode", None),
    ],
)
def test_a_variable_is_the_option_that_it_stands_for(
    dialect: str, variable: str, key: str, expected: object
) -> None:
    name, _, text = variable.partition("=")
    found = imported("", dialect, {f"LLAMA_ARG_{name}": text})
    assert value(found, key) == expected
    assert "environment" not in found.data
    assert found.unplaced == ()


@pytest.mark.parametrize(
    ("dialect", "wins", "overridden"),
    [("main-0x", 1024, ("LLAMA_ARG_CTX_SIZE",)), ("ik-now", 2048, ())],
)
def test_on_mainline_the_command_line_wins_over_the_environment_and_on_ik_the_other_way_round(
    dialect: str, wins: int, overridden: tuple[str, ...]
) -> None:
    found = imported("-c 1024", dialect, {"LLAMA_ARG_CTX_SIZE": "2048"})
    assert value(found, "serving.ctx_size") == wins
    assert found.overridden == overridden


@pytest.mark.parametrize(
    ("dialect", "line", "variables", "key", "expected"),
    [
        # As builds of May and August 2026 served them.
        ("main-mid", "--no-mmap", ["MLOCK=1"], "serving.load_mode", "mlock"),
        ("main-lm", "--no-mmap", ["MLOCK=1"], "serving.load_mode", "none"),
        ("main-lm", "", ["NO_MMAP=1", "MLOCK=1"], "serving.load_mode", "none"),
        ("main-lm", "-ot b=CPU", ["OVERRIDE_TENSOR=a=CPU"], "memory.override_tensor", ["a=CPU", "b=CPU"]),
        ("main-lm", "--spec-type draft-mtp", ["SPEC_TYPE=ngram-mod"], "speculation.type", "ngram-mod,mtp"),
    ],
)  # fmt: skip
def test_options_that_add_up_do_so_with_their_variables(
    dialect: str, line: str, variables: Sequence[str], key: str, expected: object
) -> None:
    split = (variable.partition("=") for variable in variables)
    found = imported(line, dialect, {f"LLAMA_ARG_{name}": text for name, _, text in split})
    assert value(found, key) == expected
    assert found.overridden == ()


def test_other_variables_are_options_where_the_help_says_so() -> None:
    found = imported("", "main-mid", {"LLAMA_LOG_VERBOSITY": "2", "LLAMA_CACHE": "/c", "_X": "1"})
    assert value(found, "serving.log_verbosity") == 2
    assert found.data["environment"] == {"LLAMA_CACHE": "/c"}
    assert "no such name" in reasons(found)["_X=1"]
    one_side = imported("", "main-0x", {"LLAMA_ARG_NO_HOST": "1"})
    assert one_side.data["extra_args"] == ["--no-host"]


@pytest.mark.parametrize("name", ["LLAMA_API_KEY", "HF_TOKEN", "LLAMA_ARG_API_KEY", "MY_SECRET"])
def test_a_secret_of_the_environment_goes_into_no_profile(name: str) -> None:
    found = imported("", "main-0x", {name: "hunter2", "CUDA_VISIBLE_DEVICES": "0"})
    assert "hunter2" not in str(found)
    assert found.data["environment"] == {"CUDA_VISIBLE_DEVICES": "0"}
    assert reasons(found)[f"{name}=..."].startswith("a secret")


@pytest.mark.parametrize("name", ["MY_KEY", "LLAMA_ARGS", "PASS"])
def test_a_variable_with_the_key_that_the_line_gives_goes_into_no_profile(name: str) -> None:
    """It went from a file of root's own into the unit, where everybody reads it."""
    variables = {name: "--api-key hunter2", "GGML_X": "1"}
    found = imported("-m /q.gguf --api-key hunter2", "main-lm", variables)
    assert "hunter2" not in str(found)
    assert found.data["environment"] == {"GGML_X": "1"}
    assert "serving.api_key_file" in reasons(found)[f"{name}=..."]


def test_a_key_that_is_a_common_word_makes_no_secret_of_what_holds_its_letters() -> None:
    variables = {"LD_LIBRARY_PATH": "/usr/local/lib", "CUDA_CACHE_PATH": "/var/local"}
    found = imported("-m /q.gguf --api-key local", "main-lm", variables)
    assert found.data["environment"] == variables


def test_nobody_is_told_to_make_a_token_for_downloads_the_key_of_clients() -> None:
    found = imported("--hf-token hunter2", "main-lm", {"HF_TOKEN": "x", "OPENAI_API_KEY": "y"})
    told = reasons(found)
    assert "downloads" in told["--hf-token ..."]
    assert "downloads" in told["HF_TOKEN=..."]
    assert "drop-in" in told["OPENAI_API_KEY=..."]
    assert "hunter2" not in str(found)


def test_flags_that_the_line_did_not_have_are_told() -> None:
    assert imported("-c 4096 --temp .5 -fa 1 -ot a=CPU --fit off", "main-0x").added == ()
    assert imported("-ngl 9", "main-0x").added == ("--fit off",)
    assert imported("-ngl 9 --fit on", "main-0x").added == ("--fit off",), "though fit was given"
    assert imported("", "main-0x", {"LLAMA_ARG_CTX_SIZE": "512"}).added == ()


@pytest.mark.parametrize(
    ("dialect", "line"),
    [
        ("main-0x", "--spec-type draft-mtp,ngram-mod --spec-draft-n-max 3 --spec-draft-p-min 0.5"),
        ("main-0x", "--spec-type ngram-map-k,draft-mtp --spec-draft-n-max 2"),
        ("ik-now", "--spec-type ngram-mod:n_max=64,n_min=2 --spec-type mtp:n_max=1,p_min=0.0"),
        ("ik-now", "--spec-type mtp:heads=2,n_max=3"),
    ],
)
def test_a_chain_of_speculation_is_served_as_it_was(dialect: str, line: str) -> None:
    found = imported(line, dialect)

    assert found.unplaced == ()
    assert set(shlex.split(line)) <= set(again(found, dialect).argv)


@pytest.mark.parametrize("dialect", ["ik-may", "ik-now"])
def test_what_ik_takes_without_listing_it_is_served_as_it_was(dialect: str) -> None:
    line = "-ngl 99 -rtr -thp -op 27,0 -no-ooae -rcache -ts 3,1"
    found = imported(f"{line} -ot exps=CPU", dialect)

    assert found.unplaced == ()
    assert value(found, "memory.override_tensor") == ["exps=CPU"]
    assert set(line.split()[2:]) <= set(again(found, dialect).argv)


def test_a_kind_that_only_the_build_knows_keeps_its_word() -> None:
    text = capabilities_of("main-0x").help.text.replace(
        "draft-mtp,", "draft-mtp,draft-mtp-adaptive,"
    )
    capabilities = read_capabilities(parse_help(text))
    line = ["--spec-type", "draft-mtp-adaptive", "--spec-draft-n-max", "6"]

    found = import_command_line(line, {}, capabilities)

    assert value(found, "speculation.type") == "draft-mtp-adaptive"
    assert value(found, "speculation.n_max") == 6
    assert found.unplaced == ()


def test_the_ready_made_speculation_of_a_build_is_left_to_it() -> None:
    found = imported("--spec-default", "main-0x")
    assert value(found, "speculation.type") == "default"
    assert found.data["extra_args"] == ["--spec-default"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-m a.gguf --draft 16 -c 4096 --port 1", "2c5710649b81"),
        ("--draft-n 16 --draft-n-min 2 -ngl 99", "36c97859f3cd"),
        ("-m a.gguf --draft-max 16 -fa on --temp 0.6 -ctk q8_0 -np 1 --spec-type draft-mtp", "cde38c2ae4a7"),
    ],
)  # fmt: skip
def test_the_hash_of_arguments_never_changes_for_evidence_names_it(
    line: str, expected: str
) -> None:
    found = arguments_sha256(["llama-server", *shlex.split(line)])
    assert found is not None
    assert found.startswith(expected)
