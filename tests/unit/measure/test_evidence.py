"""What a fingerprint is equal to, what it is not, and how it says so."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from tunerd.engine.fingerprint import Fingerprint, changes, holds
from tunerd.engine.flags import (
    argument_changes,
    arguments_sha256,
    compared_arguments,
    compared_environment,
    without_secrets,
)

FULL = Fingerprint(
    engine_sha256="1a2b3c4d5e6f7788",
    driver_version="560.35.03",
    gpu_names=("NVIDIA GeForce RTX 3090 Ti",),
    gpu_memory_mib=(24564,),
    power_limits_w=(450.0,),
    cpu_model="AMD Ryzen 7 9700X",
    model_sha256="aa" * 32,
    template_sha256="bb" * 32,
    arguments_sha256="cc" * 32,
    workload_sha256="dd" * 32,
    unit_limits=("CPUQuota=400%",),
    tunerd_version="0.1.0",
)
ARGV = ("/opt/llama-server", "--model", "/m/a.gguf", "--alias", "a", "--host", "::",
        "--port", "8080", "--ctx-size", "8192", "--temp", "-1", "--api-key-file", "/k")  # fmt: skip


def test_the_hash_of_a_fingerprint_does_not_change_between_versions() -> None:
    """Stored evidence is found by it."""
    assert replace(FULL, gpu_memory_mib=None, unit_limits=()).sha256 == (
        "a25f8596901635e3396328f8be42f28d05c1d6a05dc1e6f116be0d60f08fdcf9"
    )


def test_every_part_that_changes_is_named() -> None:
    for field in dataclasses.fields(Fingerprint):
        if field.name == "gpu_memory_mib":
            continue  # evidence of before it was kept counts by the card's name
        changed = replace(FULL, **{field.name: None})
        (lost,), (found,) = changes(FULL, changed), changes(changed, FULL)
        assert not lost.is_known
        assert "then, unknown now" in lost.text
        assert "unknown then," in found.text
        assert lost.text.count("unknown") == found.text.count("unknown") == 1


def test_a_change_is_said_in_words_with_both_values() -> None:
    now = replace(FULL, driver_version="570.10", power_limits_w=(350.0,), gpu_names=(),
                  engine_sha256="ffeeddccbbaa99887766")  # fmt: skip
    assert tuple(change.text for change in changes(FULL, now)) == (
        "engine changed: 1a2b3c4d5e6f -> ffeeddccbbaa",
        "driver changed: 560.35.03 -> 570.10",
        "GPU changed: NVIDIA GeForce RTX 3090 Ti -> none",
        "power limit changed: 450 W -> 350 W",
    )


def test_evidence_holds_until_a_part_that_matters_is_another() -> None:
    cases: list[tuple[dict[str, Any], bool | None]] = [
        ({"tunerd_version": "0.2.0"}, True),
        ({"driver_version": None}, None),
        ({"driver_version": None, "power_limits_w": (300.0,)}, False),
        ({"power_limits_w": (450.04,)}, True),  # one that moves in the second decimal is the same
        ({"power_limits_w": (450.1,)}, False),
        ({"gpu_memory_mib": (12288,)}, False),
        ({"gpu_memory_mib": None}, True),
        ({"unit_limits": ()}, False),
    ]
    for changed, still in cases:
        now = replace(FULL, **changed)
        assert holds(FULL, now) is still, changed
        assert all(one.is_remark for one in changes(FULL, now)) is (still is True), changed
    before = replace(FULL, unit_limits=None)
    assert holds(before, replace(FULL, unit_limits=())) is True, "of before limits were kept"
    assert holds(before, FULL) is None


def test_a_part_that_was_known_neither_then_nor_now_is_not_taken_for_the_same() -> None:
    for field in ("engine_sha256", "model_sha256"):
        unknown = replace(FULL, **{field: None})
        assert holds(unknown, unknown) is None
        assert "unknown then, unknown now" in changes(unknown, unknown)[0].text


def test_memory_depends_on_neither_power_limit_nor_workload() -> None:
    same = replace(FULL, power_limits_w=None, workload_sha256=None, tunerd_version="9")
    assert same.memory_key == FULL.memory_key
    for field in ("engine_sha256", "driver_version", "gpu_names", "model_sha256",
                  "arguments_sha256"):  # fmt: skip
        assert replace(FULL, **{field: None}).memory_key is None
    for other in ({"arguments_sha256": "other"}, {"gpu_memory_mib": (12288,)}):
        assert replace(FULL, **other).memory_key != FULL.memory_key
    untold = replace(FULL, gpu_memory_mib=(None,))
    assert untold.memory_key == replace(FULL, gpu_memory_mib=None).memory_key


def test_how_a_server_is_reached_does_not_change_its_arguments() -> None:
    elsewhere = ("/usr/bin/llama-server", "-m", "/other/b.gguf", "-a", "b", "--host", "127.0.0.1",
                 "--port", "9999", "-c", "8192", "--temp", "-1", "--api-key", "secret")  # fmt: skip
    assert arguments_sha256(ARGV) == arguments_sha256(elsewhere)
    assert "secret" not in str(compared_arguments(elsewhere))


def test_any_other_argument_changes_the_hash_and_so_do_variables_but_the_secret_ones() -> None:
    plain = arguments_sha256(ARGV)
    for more in ("--ctx-size 4096", "--no-mmap", "--temp 1", "--spec-type mtp"):
        assert arguments_sha256((*ARGV, *more.split())) != plain
    assert arguments_sha256(ARGV, {"LLAMA_API_KEY": "x", "LLAMA_ARG_PORT": "1"}) == plain
    assert arguments_sha256(ARGV, {"GGML_CUDA_DISABLE_GRAPHS": "1"}) != plain


def test_the_order_of_flags_does_not_matter_but_that_of_one_flags_values_does() -> None:
    one, same, other = (
        arguments_sha256(words.split())
        for words in ("p --a 1 --b 2 --ot x --ot y", "p --b 2 --ot x --a 1 --ot y", "p --a 1 --b 2 --ot y --ot x")
    )  # fmt: skip
    assert one == same != other


def test_secrets_are_neither_compared_nor_kept() -> None:
    argv = ("p", "--api-key", "k1", "-c", "8", "--hf-token", "t1", "--api_key", "k2")
    assert without_secrets(argv) == ("p", "--api-key", "[secret]", "-c", "8", "--hf-token",
                                     "[secret]", "--api_key", "[secret]")  # fmt: skip
    assert arguments_sha256(without_secrets(argv)) == arguments_sha256(argv)
    assert without_secrets(()) == (), "as of a unit that was made by hand"
    environment = {"MY_TOKEN": "hush", "GGML_X": "1", "LLAMA_API_KEY": "k"}
    kept = compared_environment(environment)
    assert set(kept) == {"MY_TOKEN", "GGML_X"}
    assert kept["GGML_X"] == "1"
    assert "hush" not in kept["MY_TOKEN"]
    assert arguments_sha256(argv, kept) == arguments_sha256(argv, environment)
    assert arguments_sha256(argv, {**environment, "MY_TOKEN": "x"}) != arguments_sha256(argv, kept)


def test_what_differs_between_two_command_lines_is_said_in_words() -> None:
    now = ("x", "--ctx-size", "16384", "--temp", "-1", "--no-mmap")
    assert argument_changes(ARGV, now) == ("--ctx-size 8192 -> 16384", "--no-mmap added")
    assert argument_changes(now, ARGV) == ("--ctx-size 16384 -> 8192", "--no-mmap removed")
    assert argument_changes(ARGV, ARGV) == ()
    moved = ["8081" if word == "8080" else word for word in ARGV]
    assert argument_changes(ARGV, moved) == ()
    assert argument_changes(ARGV, moved, with_uncounted=True) == ("--port 8080 -> 8081",)
