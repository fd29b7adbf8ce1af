"""The local API on real sockets: who comes in, what is refused, and what jobs do."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import tunerd
from tests.support.api_box import GROUP, MEMBER, STRANGER, ApiBox, serving
from tests.support.needs import needs_root
from tests.support.readings import a_reading, served
from tests.support.transcripts import answered
from tunerd.errors import HostError
from tunerd.jobs import JobFolder, folder_of
from tunerd.machine.peers import unix_socket
from tunerd.operations import JobRequest, Lane
from tunerd.web.app import Limits

REQUEST = JobRequest("apply", (), Lane.CHANGE, "alice", 1.0)


def test_what_is_not_there_or_cannot_be_is_refused_as_in_the_golden_text_and_starts_nothing(
    api: ApiBox,
) -> None:
    """A line is a request: its method, its address, and its body."""
    before = api.ask("/api/jobs").json

    def told(line: str) -> list[str]:
        method, url, *body = line.split(" ", 2)
        said = api.ask(url, method=method, body=body[0] if body else None)
        code = said.headers["x-tunerd-exit-code"]
        return [f"{said.status}, exit code {code}: {said.json['error']['message']}"]

    answered("errors/api", told)
    for url, body in (
        ("/api/history/" + "9" * 5000, None),
        ("/api/apply", "[" * 20000),
        ("/api/apply", b"\xed\xb3\xbf"),
    ):
        said = api.post(url, body) if body else api.ask(url)
        assert (said.status, said.json["ok"]) == (400 if body else 404, False)
    assert api.ask("/api/jobs").json == before


def test_a_page_of_what_is_not_there_is_not_found_and_says_what_there_is(api: ApiBox) -> None:
    for url in ("/workloads/none-such", "/deploy/none-such", "/sweeps/7"):
        said = api.ask(url)
        assert said.status == 404
        assert "there is no " in said.text.lower()


def test_a_body_that_is_too_large_is_refused_whatever_its_head_says(api: ApiBox) -> None:
    big = b" " * 70_000
    assert api.post("/api/apply", big).status == 413

    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(30)
        channel.connect(str(api.path))
        head = b"POST /api/apply HTTP/1.1\r\nHost: localhost\r\nX-Tunerd: 1\r\n"
        kind = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        channel.sendall(head + kind + b"11170\r\n" + big + b"\r\n0\r\n\r\n")
        assert channel.recv(4096).startswith(b"HTTP/1.1 413")


LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize(
    ("method", "url", "tcp", "headers", "status"),
    [
        ("POST", "/api/rollback", False, {"X-Tunerd": "0"}, 403),
        ("POST", "/api/rollback", True, {"Origin": "http://evil.example"}, 403),
        ("POST", "/api/rollback", True, {"Sec-Fetch-Site": "cross-site"}, 403),
        ("POST", "/api/rollback", False, {"Content-Type": "text/plain"}, 415),
        ("GET", "/api/status", True, {"Host": "evil.example"}, 421),
        ("GET", "/api/status", True, {"Host": "localhost:1"}, 200),
        ("GET", "/api/status", False, {"Host": "evil.example"}, 421),  # by a tunnel
        ("GET", "/api/doctor", True, LINK, 403),
        ("GET", "/jobs", True, LINK, 200),  # a link may lead to the page
        *(("GET", "/doctor", True, LINK | {"Sec-Fetch-Dest": kind}, 403)
          for kind in ("image", "iframe", "script", "empty")),
    ],
)  # fmt: skip
def test_a_foreign_page_reads_nothing_and_changes_nothing_by_whatever_name(
    api: ApiBox, method: str, url: str, tcp: bool, headers: dict[str, str], status: int
) -> None:
    body = None if method == "GET" else "{}"
    assert api.ask(url, method=method, body=body, tcp=tcp, headers=headers).status == status


@needs_root
def test_a_proxy_that_runs_as_root_speaks_for_nobody(api: ApiBox) -> None:
    for name in ("X-Forwarded-For", "Forwarded", "Via"):
        assert api.ask("/api/status", tcp=True, headers={name: "for=192.0.2.1"}).status == 403


def test_every_answer_forbids_frames_sniffing_and_foreign_scripts(api: ApiBox) -> None:
    for url in ("/api/status", "/api/nothing"):
        headers = api.ask(url, tcp=True).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


STATIC = ("page.css", "report.css", "page.js", "live.js", "report.js")


def test_a_browser_asks_whether_its_copy_of_a_file_of_the_page_still_holds(api: ApiBox) -> None:
    for name in STATIC:
        said = api.ask(f"/static/{name}")
        assert said.headers["cache-control"] == "no-cache"
        assert "nosniff" in said.headers["x-content-type-options"]
        held = {"If-None-Match": said.headers["etag"]}
        assert (said.status, api.ask(f"/static/{name}", headers=held).status) == (200, 304)


@pytest.mark.parametrize(
    "path", ["none.js", "", "../html.py", "..%2fhtml.py", "/etc/passwd", "a%00b", "x" * 5000, "%ff"]
)
def test_beside_the_files_of_the_page_is_nothing_and_nobody_keeps_what_says_so(
    api: ApiBox, path: str
) -> None:
    said = api.ask(f"/static/{path}")
    assert (said.status, said.headers["cache-control"]) == (404, "no-store")


def test_the_files_of_the_page_are_there_where_an_installer_put_links(tmp_path: Path) -> None:
    """As uv does with `--link-mode symlink`: each file is a link into its cache."""
    package = Path(tunerd.__file__).parent
    shutil.copytree(package, tmp_path / "tunerd", copy_function=os.symlink)
    script = f"""
from tests.support.api_box import serving
with serving() as api:
    print([api.ask("/static/" + name).status for name in {STATIC!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{package.parent}"},
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert json.loads(done.stdout) == [200] * len(STATIC)


# Who


@needs_root
def test_a_member_of_the_group_comes_in_and_a_stranger_does_not() -> None:
    with serving(group=GROUP) as api:
        status = api.path.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, GROUP)

        assert api.ask_as(MEMBER, GROUP)[0] == 200
        began, text = api.ask_as(MEMBER, GROUP, url="/api/rollback", method="POST")
        assert began == 202, text
        assert api.ask_as(STRANGER)[:2] == (None, "PermissionError"), "the kernel refuses"

        api.path.chmod(0o666)  # even where the file would let them in
        refused, why = api.ask_as(STRANGER)
        assert refused == 403
        assert "only root and members of group tunerd" in why
        assert api.ask_as(STRANGER, url="/api/rollback", method="POST")[0] == 403
        assert api.ask_as(MEMBER, GROUP)[0] == 200


@needs_root
def test_on_the_port_a_stranger_and_root_are_told_by_the_owner_of_the_socket() -> None:
    account = pwd.getpwnam("nobody")
    with serving(group=account.pw_gid) as api:
        assert api.ask_as(account.pw_uid, tcp=True)[0] == 200
        assert api.ask_as(STRANGER, tcp=True)[0] == 403
        assert api.ask_as(0, tcp=True)[0] == 403, "it may be a forwarder or a container of root's"


@needs_root
def test_strangers_on_the_port_shut_nobody_out() -> None:
    hold = """
import socket, sys, time
host, port, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held = [socket.create_connection((host, port)) for _ in range(n)]
print("held", flush=True)
sys.stdin.read()
"""
    account = pwd.getpwnam("nobody")
    limits = Limits(connections=8, of_one=8, strangers=4)
    with serving(group=account.pw_gid, limits=limits) as api:
        python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
        words = [python, "-S", "-E", "-c", hold, "127.0.0.1", str(api.port), "16"]
        floods = [
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
                             user=uid, group=uid, extra_groups=[])
            for uid in (STRANGER, STRANGER + 1)
        ]  # fmt: skip
        try:
            assert [one.stdout.readline() for one in floods if one.stdout] == [b"held\n"] * 2
            assert api.ask("/api/status").status == 200, "root, on the socket"
            assert api.ask_as(MEMBER, account.pw_gid)[0] == 200
            assert api.ask_as(account.pw_uid, tcp=True)[0] == 200, "a member, on the port"
        finally:
            for one in floods:
                one.communicate()


def test_what_the_daemon_saw_is_what_top_shows(api: ApiBox) -> None:
    api.telemetry.add(a_reading(1_790_000_000.0, served=served(600, 50.0)))
    api.telemetry.add(a_reading(1_790_000_010.0))
    shown = api.ask("/api/top").json
    api.telemetry.add(a_reading(1_790_003_000.0))
    later = api.ask("/api/top").json
    assert shown["at_s"] == 1_790_000_010.0
    assert (shown["speeds"]["since"], shown["speeds"]["decode_tok_s"]) == ("between two looks", 50)
    assert later["speeds"] is None, "that was long ago"


# Jobs


def test_a_job_goes_on_without_its_client_and_tells_everybody_how_it_ended(api: ApiBox) -> None:
    said = api.post("/api/rollback", {})
    assert said.status == 202
    number = said.json["job"]["job"]
    assert said.headers["location"] == f"/api/jobs/{number}"

    for _ in range(2):
        events = api.events(number)
        assert events[0]["event"] == "begun"
        assert (events[-1]["event"], events[-1]["exit_code"]) == ("end", 1)
    job = api.ask(f"/api/jobs/{number}").json["job"]
    assert job["state"] == "failed"
    assert job["result"]["error"]["code"] == "deploy"
    assert job["asked_by"] == "root" if os.geteuid() == 0 else job["asked_by"]


def test_one_change_at_a_time_and_whoever_comes_second_is_told_of_the_first(api: ApiBox) -> None:
    folder = folder_of(api.box.context)
    request = JobRequest("apply", (), Lane.CHANGE, "alice", api.box.context.clock.now_s())
    number = folder.create(request)
    with folder.writing(number):
        second = api.post("/api/rollback", {})
        looked = api.ask("/api/plan/cpu-embedded").status
    after = api.post("/api/rollback", {})

    assert second.status == 409
    assert second.json["error"]["code"] == "busy"
    assert second.json["error"]["cause"] == f"job {number}, apply, asked for by alice"
    assert looked != 409, "looking is no change"
    assert after.status == 202, "its process is gone, and with it the job"
    api.events(after.json["job"]["job"])


def test_jobs_that_are_begun_at_once_have_numbers_of_their_own(tmp_path: Path) -> None:
    numbers: list[int] = []

    def create() -> None:
        numbers.extend(JobFolder(tmp_path / "jobs").create(REQUEST) for _ in range(40))

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 161))


def test_a_socket_that_a_dead_process_left_is_taken_and_anything_else_is_left(api: ApiBox) -> None:
    with pytest.raises(HostError, match="another tunerd listens"):
        unix_socket(api.path, group=None)
    assert api.ask("/api/status").status == 200

    left = api.path.with_name("left.sock")
    unix_socket(left, group=None).close()
    unix_socket(left, group=None).close()

    file = api.path.with_name("file.sock")
    file.write_text("mine")
    with pytest.raises(HostError, match="is not a socket"):
        unix_socket(file, group=None)
    assert file.read_text() == "mine"


def test_texts_that_are_not_utf_8_are_shown_and_break_nothing(api: ApiBox) -> None:
    """As in a unit that somebody wrote by hand long ago."""
    unit = api.box.unit
    unit.parent.mkdir(parents=True)
    text = b"[Unit]\nDescription=%s\n[Service]\nExecStart=/bin/true -m /bin/true --port 1\n"
    unit.write_bytes(text % b"mod\xe8le")
    unit.with_name(f"{unit.name}.pre-20260101T000000Z-hand").write_bytes(text % b"old")

    said, shown = api.ask("/api/rollback/preview"), api.ask("/rollback")
    shutil.rmtree(unit.parent)

    assert (said.status, shown.status) == (200, 200)
    assert "Description=mod\udce8le" in said.json["diff"]
    assert "Description=mod\\udce8le" in shown.text


def test_what_takes_several_profiles_finds_each_of_them(api: ApiBox) -> None:
    name = "cpu-embedded-baseline"
    for words in (["emit", "shell", "--", name], ["fits", "--", name, name]):
        said = api.post("/api/run", {"argv": words})
        assert said.status == 202, said
    said = api.post("/api/fits", {"profile": [name, "none-such"]})
    assert (said.status, said.json["error"]["code"]) == (404, "unknown_name")
