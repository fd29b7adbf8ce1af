"""What tunerd relies on from a llama-server: over HTTP, on its command line, and as a process.

The stand-in and real engines pass it alike. Where families differ, `EngineUnderTest` says so.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ports import free_port
from tests.support.server_process import Server, ended, serving, start
from tests.support.waiting import until

VERSION = re.compile(
    r"^version: (\d+\.\d+\.\d+\S* \(build \d+, commit \S+\)|\d+ \(\S+\))$", re.MULTILINE
)
N_CTX = 4096
COMMON_TIMINGS = {"prompt_n", "prompt_ms", "predicted_n", "predicted_ms"}


@dataclass(frozen=True)
class EngineUnderTest:
    """A program with a model, and how its family differs.

    Attributes:
        argv: The program, as it would stand in `ExecStart=`.
        model: A model file with one MTP block.
        is_ik: Routes, slots and log of ik_llama.cpp instead of llama.cpp.
        mtp: The flags that switch MTP on with at most three drafted tokens and no gate.
        extra: Flags that this build needs on this machine, as one thread.
        has_spec_metrics: `/metrics` counts drafted tokens.
        forced_status: How the process ends at the second SIGTERM while a client is served.
        bad_json_status: What a body that is no JSON is answered with.
        metrics_wake: Whether `/metrics` wakes it, and keeps it awake; None where it does not sleep.
    """

    argv: tuple[str, ...]
    model: Path
    is_ik: bool = False
    mtp: tuple[str, ...] = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
    extra: tuple[str, ...] = ("-t", "1", "-tb", "1")
    has_spec_metrics: bool = True
    forced_status: int = 1
    bad_json_status: int = 500
    metrics_wake: bool | None = True

    def command(self, *more: str) -> list[str]:
        return [
            *self.argv,
            *("-m", str(self.model), "-a", "the-alias", "-c", str(N_CTX), "-np", "1"),
            *self.extra,
            *more,
        ]


def prompt(n_tokens: int, *, first: int = 300) -> list[int]:
    """A prompt of exactly so many tokens; another `first` makes another prompt."""
    return [300 + (first + index) % 200 for index in range(n_tokens)]


def request(n_predict: int, tokens: list[int], **more: Any) -> dict[str, Any]:
    usual = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
    return {"prompt": tokens, "n_predict": n_predict, **usual, **more}


def chat(max_tokens: int, **more: Any) -> dict[str, Any]:
    usual = {
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "ignore_eos": True,
    }
    return {**usual, "max_tokens": max_tokens, **more}


def events(response: httpx.Response) -> Iterator[str]:
    """What stands after `data: ` of each event; comments are skipped."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def counters(text: str) -> dict[str, float]:
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    return {name.removeprefix("llamacpp:"): float(value) for name, value in rows}


class LlamaServerContract:
    """Subclass it with a class-scoped fixture `engine`."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("servers")

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, engine: EngineUnderTest, folder: Path) -> Iterator[Server]:
        """One slot, metrics, MTP."""
        with serving(engine.command("--metrics", *engine.mtp), folder / "server.log") as running:
            yield running

    @pytest.fixture(autouse=True)
    def under_test(self, engine: EngineUnderTest) -> None:
        self.tested = engine

    @pytest.fixture
    def client(self, server: Server) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=server.url, timeout=60.0) as client:
            yield client

    @contextmanager
    def another(self, folder: Path, *flags: str) -> Iterator[tuple[Server, httpx.Client]]:
        """A server of the test's own, and a client of it."""
        with (
            serving(self.tested.command(*flags), folder / "log") as server,
            httpx.Client(base_url=server.url, timeout=60.0) as client,
        ):
            yield server, client

    def run(self, log: Path, *words: str) -> tuple[int, str]:
        """Start the program with other flags: its exit status and what it wrote."""
        with start([*self.tested.argv, *words], log) as running:
            return running.wait_ended(), running.log_text()

    def refused(self, log: Path, port: int) -> None:
        """It ends with 1 on a port that is taken, and says why."""
        assert ended(self.tested.command(), log, "couldn't bind", port=port)[0] == 1

    # Who it is.

    def test_it_says_who_it_is_and_what_it_serves(self, client: httpx.Client) -> None:
        health, is_ik = client.get("/health"), self.tested.is_ik
        (model,) = client.get("/v1/models").json()["data"]
        props = client.get("/props").json()
        (slot,) = client.get("/slots").json()

        assert (health.status_code, health.json()["status"]) == (200, "ok")

        assert health.headers["server"] == ("ik_llama.cpp" if is_ik else "llama.cpp")
        assert model["id"] == props["model_alias"] == "the-alias"
        assert props["total_slots"] == 1
        assert props["default_generation_settings"]["n_ctx"] == slot["n_ctx"] == N_CTX
        assert props["model_path"] == str(self.tested.model)
        assert slot["id"] == 0
        assert not slot["state" if is_ik else "is_processing"]
        assert slot.get("speculative") is (None if is_ik else True)

    # Completions.

    def test_a_completion_is_as_long_as_asked_and_counts_its_drafts(
        self, client: httpx.Client
    ) -> None:
        answer = client.post("/completion", json=request(64, prompt(20)))

        body = answer.json()
        timings = body["timings"]
        assert answer.status_code == 200
        assert body["stop"] is True
        assert body["content"]
        assert timings.keys() >= COMMON_TIMINGS
        assert (timings["prompt_n"], timings["predicted_n"]) == (20, 64)
        assert (body["tokens_evaluated"], body["tokens_predicted"]) == (20, 64)
        assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
        n_steps = timings["predicted_n"] - 1 - timings["draft_n_accepted"]
        assert 0 < n_steps <= 63
        assert timings["draft_n"] <= 3 * n_steps + 3
        if self.tested.is_ik:
            depths = timings["draft_by_depth"]
            assert sum(depth["draft_n"] for depth in depths) == timings["draft_n"]
            assert [depth["depth"] for depth in depths] == [1, 2, 3]

    def test_a_known_prompt_costs_little_with_the_cache_and_all_of_it_without(
        self, client: httpx.Client
    ) -> None:
        for _ in range(2):
            timings = client.post("/completion", json=request(4, prompt(40))).json()["timings"]

        assert timings["prompt_n"] == 40
        assert timings.get("cache_n", 0) == 0
        assert ("cache_n" in timings) is not self.tested.is_ik

        body = request(4, prompt(600, first=310), cache_prompt=True)
        for _ in range(2):
            timings = client.post("/completion", json=body).json()["timings"]

        assert timings["prompt_n"] <= 16
        if not self.tested.is_ik:
            assert timings["cache_n"] + timings["prompt_n"] == 600

    def test_a_text_is_tokenized_as_it_is_counted(self, client: httpx.Client) -> None:
        text = " stay read song eat"
        tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]

        body = request(4, prompt(1)) | {"prompt": text}
        n_prompt = client.post("/completion", json=body).json()["timings"]["prompt_n"]

        assert tokens
        assert all(isinstance(token, int) for token in tokens)
        assert n_prompt in {len(tokens), len(tokens) + 1}, "one more where a BOS is added"

    def test_what_the_template_gives_is_what_a_conversation_sends(
        self, client: httpx.Client
    ) -> None:
        body = {"messages": [{"role": "user", "content": " stay read song eat"}], "max_tokens": 4}
        chat = client.post("/v1/chat/completions", json=body | {"cache_prompt": False}).json()
        text = client.post("/apply-template", json=body).json()["prompt"]

        assert text.count("stay read song eat") == 1
        alike = request(4, prompt(1), cache_prompt=False) | {"prompt": text}
        for path, length in (("/completion", "n_predict"), ("/v1/completions", "max_tokens")):
            found = client.post(path, json=alike | {length: 4}).json()["timings"]
            assert found["prompt_n"] == chat["timings"]["prompt_n"]

    # Streams.

    def test_a_stream_ends_with_timings_and_no_done(self, client: httpx.Client) -> None:
        whole = client.post("/completion", json=request(16, prompt(20))).json()["content"]
        body = request(16, prompt(20), stream=True)
        with client.stream("POST", "/completion", json=body) as answer:
            received = [json.loads(event) for event in events(answer)]

        assert answer.headers["content-type"].startswith("text/event-stream")
        assert [event["stop"] for event in received] == [False] * (len(received) - 1) + [True]
        assert "".join(event["content"] for event in received) == whole
        assert received[-1]["timings"]["predicted_n"] == 16

    def test_the_timings_of_every_piece_of_a_text_lead_up_to_those_of_the_whole(
        self, client: httpx.Client
    ) -> None:
        body = {"prompt": prompt(20), "max_tokens": 24, "ignore_eos": True, "stream": True}
        told = {"timings_per_token": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=body | told) as answer:
            *received, end = list(events(answer))

        assert end == "[DONE]"
        pieces = [json.loads(event) for event in received]

        seen = [piece["timings"] for piece in pieces]
        for name in ("predicted_n", "predicted_ms"):
            values = [timings[name] for timings in seen]
            assert values == sorted(values)
        assert seen[-1]["predicted_n"] == pieces[-1]["usage"]["completion_tokens"] == 24

    def test_a_chat_answers_with_usage_and_timings(self, client: httpx.Client) -> None:
        body = client.post("/v1/chat/completions", json=chat(12)).json()

        (choice,) = body["choices"]
        assert choice["message"]["role"] == "assistant"
        assert choice["message"]["content"]
        assert choice["finish_reason"] == ("stop" if self.tested.is_ik else "length")
        assert body["usage"]["completion_tokens"] == body["timings"]["predicted_n"] == 12
        n_cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert body["usage"]["prompt_tokens"] == n_cached + body["timings"]["prompt_n"]

    @pytest.mark.parametrize("with_usage", [False, True])
    def test_a_chat_stream_has_timings_in_its_last_data(
        self, client: httpx.Client, with_usage: bool
    ) -> None:
        options = {"stream_options": {"include_usage": True}} if with_usage else {}
        body = chat(12, stream=True, **options)
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            *data, done = list(events(answer))

        chunks = [json.loads(event) for event in data]
        assert done == "[DONE]"
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["timings"]["predicted_n"] == 12
        assert ("usage" in chunks[-1]) is with_usage
        assert (chunks[-1]["choices"] == []) is with_usage
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert reasons[-1] in {"length", "stop"}
        assert set(reasons[:-1]) == {None}

    # One slot.

    def test_a_stream_keeps_the_slot_busy_until_its_client_goes_away(
        self, client: httpx.Client
    ) -> None:
        body = request(3000, prompt(20), stream=True)
        with client.stream("POST", "/completion", json=body) as answer:
            received = events(answer)  # dropping it would close the connection
            next(received)

            assert self._is_busy(client)
            assert client.get("/health").status_code == 200
        until(lambda: not self._is_busy(client), "the slot is free")

        assert client.post("/completion", json=request(4, prompt(20))).status_code == 200

    # Counters.

    def test_metrics_grow_by_what_the_timings_say(self, client: httpx.Client) -> None:
        before = counters(client.get("/metrics").text)

        timings = client.post("/completion", json=request(32, prompt(20))).json()["timings"]

        after = counters(client.get("/metrics").text)
        grown = {name: after[name] - before.get(name, 0.0) for name in after}
        assert grown["prompt_tokens_total"] == timings["prompt_n"]
        assert grown["tokens_predicted_total"] == timings["predicted_n"]
        assert after["requests_processing"] == 0
        assert after["requests_deferred"] == 0
        if self.tested.has_spec_metrics:
            assert grown["spec_decode_num_draft_tokens_total"] == timings["draft_n"]
            accepted = grown["spec_decode_num_accepted_tokens_total"]
            assert accepted == timings["draft_n_accepted"]

    def test_a_server_that_sleeps_is_woken_by_some_questions_and_not_by_others(
        self, tmp_path: Path
    ) -> None:
        if self.tested.metrics_wake is None:
            pytest.skip("it has no such flag")
        with self.another(tmp_path, "--metrics", "--sleep-idle-seconds", "2") as (_, client):

            def is_asleep() -> bool:
                return bool(client.get("/props").json()["is_sleeping"])

            for path in ("/health", "/v1/models", "/metrics", "/slots"):
                until(is_asleep, "it falls asleep")
                assert client.get(path).status_code == 200
                wakes = path == "/slots" or (path == "/metrics" and self.tested.metrics_wake)
                assert is_asleep() is not wakes, path
            assert client.post("/completion", json=request(4, prompt(20))).status_code == 200

    # Errors.

    def test_errors_come_in_an_envelope(self, client: httpx.Client) -> None:
        for path, content, status in (
            ("/completion", "not json", self.tested.bad_json_status),
            ("/completion", '{"n_predict":3}', 400),
            ("/no-such-route", "{}", 404),
        ):
            answer = client.post(path, content=content)

            error = answer.json()["error"]
            assert answer.status_code == error["code"] == status
            assert error["message"]
            assert error["type"]

    def test_a_prompt_that_is_too_long_is_refused_and_so_is_one_without_the_key(
        self, tmp_path: Path
    ) -> None:
        with self.another(tmp_path, "-c", "512", "--api-key", "secret") as (_, client):
            refused = client.post("/completion", json=request(4, prompt(20)))
            client.headers["Authorization"] = "Bearer secret"
            answer = client.post("/completion", json=request(4, prompt(600)))
            after = client.post("/completion", json=request(4, prompt(20)))

        error = answer.json()["error"]
        assert "exceeds the available context size" in error["message"]
        found = (answer.status_code, error["type"])
        usual = (400, "exceed_context_size_error")
        assert found == ((500, "server_error") if self.tested.is_ik else usual)
        assert (refused.status_code, after.status_code) == (401, 200)

    # The command line.

    def test_what_it_says_without_a_model(self, tmp_path: Path) -> None:
        is_ik, log = self.tested.is_ik, tmp_path / "log"
        help_status, help_text = self.run(log, "--help")
        version_status, version_text = self.run(log, "--version")
        unknown = self.run(log, "-m", "/nonexistent.gguf", "--no-such-flag")
        argv = [*self.tested.argv, "-m", "/nonexistent.gguf", *self.tested.extra]
        missing, missing_text = ended(argv, log, "failed to load model")

        assert help_status == (1 if is_ik else 0)
        assert "--ctx-size" in help_text
        assert version_status == 0
        assert VERSION.search(version_text)
        assert unknown[0] == missing == 1
        word = "unknown" if is_ik else "invalid"
        assert f"error: {word} argument: --no-such-flag" in unknown[1]
        assert "/nonexistent.gguf" in missing_text

    def test_a_port_that_another_program_holds_ends_it_and_a_second_server_ends_or_shares_it(
        self, server: Server, tmp_path: Path
    ) -> None:
        """ik sets SO_REUSEPORT: the kernel gives each connection to one of the two."""
        log = tmp_path / "log"
        with socket.create_server(("127.0.0.1", 0)) as other:
            self.refused(log, other.getsockname()[1])
        if self.tested.is_ik:
            with start(self.tested.command(), log, port=server.port) as second:
                second.wait_ready()
                time.sleep(0.3)
                assert second.process.poll() is None
        else:
            self.refused(log, server.port)

        assert httpx.get(f"{server.url}/health").status_code == 200

    # The process.

    def test_a_plain_server_drafts_and_counts_nothing_and_one_sigterm_ends_it(
        self, tmp_path: Path
    ) -> None:
        with self.another(tmp_path) as (server, client):
            answer = client.post("/completion", json=request(16, prompt(20)))
            (slot,) = client.get("/slots").json()
            metrics = client.get("/metrics")
            client.close()
            server.terminate()

            assert server.wait_ended() == 0
        assert "draft_n" not in answer.json()["timings"]
        assert not slot.get("speculative")
        assert metrics.status_code in {404, 501}
        text = server.log_text()
        assert ("HTTP server listening" if self.tested.is_ik else "listening on http://") in text
        assert "model loaded" in text

    def test_sigterm_ends_it_once_the_clients_have_gone(self, tmp_path: Path) -> None:
        body = request(4000, prompt(20), stream=True)
        with self.another(tmp_path) as (server, client):
            with client.stream("POST", "/completion", json=body) as answer:
                received = events(answer)
                next(received)
                server.terminate()

            assert server.wait_ended() == 0

    def test_sigterm_waits_for_a_patient_client_and_a_second_one_does_not(
        self, tmp_path: Path
    ) -> None:
        def ask(url: str) -> None:
            with suppress(httpx.HTTPError):
                httpx.post(f"{url}/completion", json=request(4000, prompt(20)), timeout=60.0)

        with serving(self.tested.command(), tmp_path / "log") as server:
            client = threading.Thread(target=ask, args=(server.url,))
            client.start()
            until(lambda: self._works(server), "the request is begun")
            server.terminate()
            time.sleep(0.3)

            assert server.process.poll() is None

            def ends() -> bool:
                """Two that a busy machine delivers as one are one; dozens at once may hold ik up for good."""
                server.terminate()
                with suppress(subprocess.TimeoutExpired):
                    server.process.wait(5.0)
                return server.process.poll() is not None

            until(ends, "the second one is heard")
            assert server.wait_ended() == self.tested.forced_status
        client.join(60.0)

    def test_its_port_is_free_when_it_has_ended(self, tmp_path: Path) -> None:
        port = free_port()
        for number in range(2):
            with start(self.tested.command(), tmp_path / f"log{number}", port=port) as server:
                server.wait_ready()
                httpx.post(f"{server.url}/completion", json=request(4, prompt(20)), timeout=60)
                server.process.send_signal(signal.SIGKILL)

                assert server.wait_ended() == -signal.SIGKILL

    def test_the_log_tells_what_a_request_took(self, server: Server, client: httpx.Client) -> None:
        timings = client.post("/completion", json=request(24, prompt(20))).json()["timings"]

        counts = (str(timings["draft_n_accepted"]), str(timings["draft_n"]))

        def is_logged() -> bool:
            text = server.log_text()
            spent_ms = re.findall(r" eval time =\s+([\d.]+) ms /\s+24 tokens", text)
            drafts = re.findall(r"\(\s*(\d+) accepted /\s+(\d+) generated\)", text)
            is_same = spent_ms and abs(float(spent_ms[-1]) - timings["predicted_ms"]) < 0.01
            return bool(is_same and drafts and drafts[-1] == counts)

        until(is_logged, "the log says what the answer does")

    def _is_busy(self, client: httpx.Client) -> bool:
        (slot,) = client.get("/slots").json()
        return bool(slot.get("is_processing", slot.get("state")))

    def _works(self, server: Server) -> bool:
        with httpx.Client(base_url=server.url, timeout=10.0) as client:
            return self._is_busy(client)
