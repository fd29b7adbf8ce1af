"""Logs of units that never run again, of which the newest stay; and the place of the supervisor's socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunerd.errors import HostError
from tunerd.paths import paths_for
from tunerd.tryout.local import SOCKET_NAME, make_place_for_socket, prune_logs
from tunerd.units.manager import candidate_unit, is_candidate
from tunerd.words import Mode


def test_the_newest_logs_of_candidates_stay_and_those_of_others_all_do(tmp_path: Path) -> None:
    paths = paths_for(Mode.LOCAL, {"TUNERD_STATE_DIR": str(tmp_path), "HOME": str(tmp_path)})
    prune_logs(paths, is_candidate, keep=2)  # a folder that is not there is no error
    paths.log_dir.mkdir(parents=True)
    for number in range(6):
        path = paths.log_dir / f"{candidate_unit('0123456789ab', number)}.log"
        path.write_text("lines")
        os.utime(path, (number, number))
    (paths.log_dir / "llama-server.service.log").write_text("lines")
    os.utime(paths.log_dir / "llama-server.service.log", (0, 0))

    prune_logs(paths, is_candidate, keep=2)

    left = sorted(path.name for path in paths.log_dir.iterdir())
    newest = [f"{candidate_unit('0123456789ab', number)}.log" for number in (4, 5)]
    assert left == ["llama-server.service.log", *newest]


@pytest.mark.parametrize("leads_to", [SOCKET_NAME, "nowhere", "/dev/null"])
def test_a_link_in_the_place_of_the_socket_is_named(tmp_path: Path, leads_to: str) -> None:
    """One that leads in a circle ended as a defect of tunerd."""
    (tmp_path / SOCKET_NAME).symlink_to(leads_to)
    tmp_path.chmod(0o700)
    with pytest.raises(HostError) as caught:
        make_place_for_socket(tmp_path)
    assert f"`{tmp_path / SOCKET_NAME}` is not a socket" in (caught.value.cause or "")
