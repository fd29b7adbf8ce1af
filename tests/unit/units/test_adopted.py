"""What a unit by hand loses when tunerd's own takes its place: all of it is named, secrets are not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tunerd.production.checks import lost_lines
from tunerd.units.live import LiveUnit, read_live

PLANNED = """# Written by tunerd: profile x, engine y
[Unit]
Description=llama-server, profile x
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=300
[Service]
Type=exec
Environment=HOME=%S/llama-server
Environment="CUDA_VISIBLE_DEVICES=0"
ExecStart=/bin/x --ctx-size 4096
User=llama
Restart=on-failure
RestartSec=2
NoNewPrivileges=yes
[Install]
WantedBy=multi-user.target
"""
ARGV = ("/bin/x", "--ctx-size", "4096", "--parallel", "1", "--no-mmap")


def by_hand(
    service: str, *drop_ins: str, files: Mapping[str, str] | None = None, unit: str = ""
) -> LiveUnit:
    text = f"[Unit]\n{unit}\n[Service]\nExecStart=/bin/x\n{service}\n[Install]\nWantedBy=default.target"
    return read_live(
        unit="u.service",
        path=Path("/u"),
        text=text,
        drop_ins=[(Path(f"/d/{n}"), content) for n, content in enumerate(drop_ins)],
        file_environment=files or {},
        specifiers={"h": "/home/me"},
    )


@pytest.mark.parametrize(
    ("service", "lost"),
    [
        ("Restart=always", ("Restart=always",)),
        ("Restart=on-failure", ()),
        ("RestartSec=2s", ()),
        ("RestartSec=10", ("RestartSec=10",)),
        ("NoNewPrivileges=true", ()),
        ("NoNewPrivileges=no", ("NoNewPrivileges=no",)),
        ("Type=simple", ()),
        ("Type=notify", ("Type=notify",)),
        ("User=llama", ()),
        ("User=alice", ("User=alice",)),
        ("Nice=-5\nLimitMEMLOCK=infinity", ("Nice=-5", "LimitMEMLOCK=infinity")),
        ("Environment=CUDA_VISIBLE_DEVICES=0", ()),
        ("Environment=CUDA_VISIBLE_DEVICES=1 A=%h", (
            "Environment=CUDA_VISIBLE_DEVICES=1", "Environment=A=/home/me")),
        ("Environment=HOME=/srv", ()),
        ("Environment=LLAMA_ARG_CTX_SIZE=4096 LLAMA_ARG_N_PARALLEL=1 LLAMA_ARG_NO_MMAP=1", ()),
        ("Environment=LLAMA_ARG_CTX_SIZE=8192", ("Environment=LLAMA_ARG_CTX_SIZE=8192",)),
    ],
)  # fmt: skip
def test_a_line_whose_value_is_not_taken_over_is_named(service: str, lost: tuple[str, ...]) -> None:
    assert lost_lines(by_hand(service), PLANNED, ARGV) == lost


def test_only_what_is_waited_for_beside_the_network_is_named() -> None:
    unit = "Description=mine\nAfter=network.target nvidia-persistenced.service\nRequires=x.mount"
    found = lost_lines(by_hand("", unit=unit), PLANNED, ARGV)
    assert found == ("After=nvidia-persistenced.service", "Requires=x.mount")


def test_an_environment_file_is_named_with_what_it_would_have_set() -> None:
    files = {"LLAMA_ARG_CTX_SIZE": "4096", "LLAMA_ARG_CACHE_TYPE_V": "q8_0"}
    old = by_hand("EnvironmentFile=-/etc/default/llama", files=files)
    found = lost_lines(old, PLANNED, ARGV)
    assert found == ("EnvironmentFile=/etc/default/llama (with LLAMA_ARG_CACHE_TYPE_V)",)
    taken = by_hand("EnvironmentFile=/e", files={"LLAMA_ARG_CTX_SIZE": "4096"})
    assert lost_lines(taken, PLANNED, ARGV) == ()
    assert lost_lines(by_hand("EnvironmentFile=-/e"), PLANNED, ARGV) == ("EnvironmentFile=/e",)


def test_no_secret_is_shown() -> None:
    service = """
Environment=LLAMA_API_KEY=hunter2 HF_TOKEN=hunter2
EnvironmentFile=/etc/keys
ExecStartPre=/bin/warm --api-key hunter2 --hf-token=hunter2
ExecStartPost=/bin/sh -c 'LLAMA_API_KEY=hunter2 curl x'
SetCredential=key:hunter2
"""
    found = lost_lines(by_hand(service, files={"HF_TOKEN": "hunter2"}), PLANNED, ARGV)
    assert "hunter2" not in str(found)
    assert {line.partition("=")[0] for line in found} == {
        "Environment", "EnvironmentFile", "ExecStartPre", "ExecStartPost", "SetCredential",
    }  # fmt: skip


def test_drop_ins_stay_and_a_unit_of_ours_loses_nothing() -> None:
    drop_in = "[Service]\nNice=1\nEnvironment=B=1\n"
    assert lost_lines(by_hand("", drop_in), PLANNED, ARGV) == ()
    ours = read_live(unit="u.service", path=None, text=PLANNED + "Nice=1\n", drop_ins=(),
                     file_environment={}, specifiers={})  # fmt: skip
    assert lost_lines(ours, "", ()) == ()
