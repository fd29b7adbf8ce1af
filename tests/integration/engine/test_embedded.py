"""The embedded server as a program: what it prints, how it starts, serves and ends."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import needs
from tests.support.designed import Truth, encode, read_truth
from tests.support.real_server import RealServer, ServerEndedError
from tunerd.engine.help import parse_version
from tunerd.tryout.designed import SHAPES, design, vocabulary, write
from tunerd.tryout.embedded import OPTIONS, Option, apply_setting, parse_command

pytestmark = pytest.mark.llama

PROGRAM = (sys.executable, "-m", "tunerd.tryout.embedded")
WORDS = vocabulary()

# A value for each option that has an argument, other than its default.
VALUES = {
    "--flash-attn": "off",
    "--cache-type-k": "q8_0",
    "--cache-type-v": "q4_0",
    "--load-mode": "mlock",
    "--gpu-layers": "all",
    "--fit": "off",
    "--fit-target": "2048",
    "--cache-type-k-draft": "q8_0",
    "--cache-type-v-draft": "q8_0",
    "--temp": "0.25",
    "--top-p": "0.5",
    "--min-p": "0.25",
    "--repeat-penalty": "1.5",
    "--presence-penalty": "0.5",
    "--spec-type": "draft-mtp",
    "--spec-draft-p-min": "0.75",
    "--host": "127.0.0.2",
    "--alias": "one,two",
    "--chat-template-kwargs": '{"a": [1]}',
    "--reasoning-format": "none",
    "--reasoning": "off",
}
NUMBER, TEXT = "7", "some text"


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    if find_spec("xllamacpp") is None:
        needs.missing("llama", "no embedded engine", "pip install 'tunerd[embedded]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write(design(SHAPES["tiny"]), folder / "tiny.gguf").path


@pytest.fixture(scope="module")
def truth(model: Path) -> Truth:
    return read_truth(model)


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={"PYTHONPATH": str(Path.cwd()), **environment} if environment else None,
    )


def _server(model: Path, folder: Path, *options: str, **keywords: Any) -> RealServer:
    return RealServer(
        PROGRAM, "-m", str(model), "-t", "1", "-c", "1024", "-np", "1", "--no-warmup", *options,
        folder=folder, **keywords,
    )  # fmt: skip


def test_the_version_has_mainlines_shape_and_goes_to_stderr() -> None:
    done = _run("--version")

    version = parse_version(done.stderr)
    assert (done.returncode, done.stdout) == (0, "")
    assert version is not None
    assert version.label is not None
    assert "built with " in done.stderr


def test_the_help_goes_to_stdout_and_does_not_load_the_engine() -> None:
    script = (
        "import sys; from tunerd.tryout.embedded import main; status = main(['--help']);"
        " sys.exit(status or 'xllamacpp' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("----- common params -----\n\n-h,    --help, --usage")


def test_a_refusal_is_one_line_on_stderr_before_any_file_is_looked_at() -> None:
    done = _run("-m", "/nowhere/model.gguf", "--nope")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: invalid argument: --nope\n"


def test_without_the_library_the_way_to_get_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('not here')\n")
    done = _run("-m", "model.gguf", PYTHONPATH=f"{tmp_path}:{Path.cwd()}")

    assert done.returncode == 1
    assert "pip install 'tunerd[embedded]'" in done.stderr


def test_without_a_model_it_does_not_become_a_router() -> None:
    done = _run("--port", "1")

    assert done.returncode == 1
    assert "no model to serve" in done.stderr


def test_a_missing_model_ends_in_mainlines_last_words() -> None:
    done = _run("-m", "/nowhere/model.gguf", "-t", "1", "--port", "0")

    assert done.returncode == 1
    assert "failed to open GGUF file '/nowhere/model.gguf'" in done.stderr
    assert "failed to load model, '/nowhere/model.gguf'" in done.stderr
    assert done.stderr.rstrip().endswith("exiting due to model loading error")
    assert "Traceback" not in done.stderr


def test_speculation_that_the_model_cannot_do_ends_the_start(folder: Path) -> None:
    bare = write(design(SHAPES["tiny-nomtp"]), folder / "bare.gguf").path

    with (
        pytest.raises(ServerEndedError, match="failed to create MTP context") as caught,
        _server(bare, folder, "--spec-type", "draft-mtp"),
    ):
        pass
    assert caught.value.status == 1


def test_a_taken_port_is_noticed_before_the_model_is_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _run("-m", "/nowhere/model.gguf", "--port", str(port))

    assert done.returncode == 1
    assert f"couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}" in done.stderr
    assert "GGUF" not in done.stderr


def test_it_says_that_it_loads_and_a_signal_then_ends_it(folder: Path) -> None:
    big = write(design(SHAPES["medium"]), folder / "medium.gguf").path
    server = _server(big, folder, "-lm", "none")
    answers: list[httpx.Response] = []
    give_up = time.monotonic() + 20
    while not answers and time.monotonic() < give_up:
        try:
            answers.append(server.client.get("/health", timeout=1))
        except httpx.HTTPError:
            time.sleep(0.005)

    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["message"] == "Loading model"
    assert server.stop() == -signal.SIGTERM


def _wait_until_signals_are_caught(server: RealServer) -> None:
    """The engine says that it is ready a moment before the program takes signals over."""
    status = Path(f"/proc/{server.process.pid}/status")
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        caught = next(line for line in status.read_text().splitlines() if "SigCgt" in line)
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.01)
    raise TimeoutError


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_cleanly_within_a_second(
    number: signal.Signals, model: Path, folder: Path
) -> None:
    with _server(model, folder) as server:
        server.client.close()
        _wait_until_signals_are_caught(server)
        began = time.monotonic()
        server.process.send_signal(number)
        status = server.process.wait(10)
        took_s = time.monotonic() - began

    assert (status, took_s < 1) == (0, True)
    assert "cleaning up before exit" in server.log


def test_a_second_signal_does_not_wait_for_a_client(model: Path, folder: Path) -> None:
    # Enough candidates with each token to fill the buffers of a connection soon.
    asked = {"prompt": "code", "n_predict": 1500, "n_probs": 100, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        _server(model, folder, "-c", "2048") as server,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head.encode() + body)
        client.recv(100)
        _wait_until_signals_are_caught(server)
        _wait_until_sending_stalls(server)
        server.process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.5)
        server.process.terminate()
        status = server.process.wait(5)

    assert status == -signal.SIGTERM


def _wait_until_sending_stalls(server: RealServer) -> None:
    """The client reads no more; when the answer is done, the rest waits in the server."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        if "stop processing" in server.log:
            return
        time.sleep(0.05)
    raise TimeoutError


def test_it_serves_the_routes_of_llama_server(model: Path, folder: Path, truth: Truth) -> None:
    expected = truth.text(encode("code")[0], 30)
    with _server(
        model, folder, "--metrics", "--alias", "designed", "--spec-type", "draft-mtp"
    ) as server:
        assert server.get("/health") == {"status": "ok"}
        assert server.get("/v1/health") == {"status": "ok"}
        answer = server.post("/completion", {"prompt": "code", "n_predict": 30, "temperature": 0})
        slots, props = server.get("/slots"), server.get("/props")
        models = server.get("/v1/models")
        metrics = server.client.get("/metrics").text
        tools = server.post("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "what time is it"}],
            "tools": [{"type": "function", "function": {
                "name": "now", "parameters": {"type": "object", "properties": {}}}}],
            "max_tokens": 8,
        })  # fmt: skip
        headers = server.client.get("/health").headers

    assert answer["content"] == expected
    assert answer["timings"]["draft_n"] > 0
    assert (slots[0]["speculative"], slots[0]["n_ctx"]) == (True, 1024)
    assert (props["model_alias"], props["total_slots"]) == ("designed", 1)
    assert models["data"][0]["id"] == "designed"
    assert "llamacpp:tokens_predicted_total 30" in metrics
    assert tools["object"] == "chat.completion"
    assert headers["server"] == "llama.cpp"


MANY_OPTIONS = """
-np 2 --no-kv-unified -c 1500 -n 21 --temp 0.25 --top-k 7 --top-p 0.5 --min-p 0.25
--repeat-penalty 1.5 --presence-penalty 0.5 --seed 5 --props --no-slots --no-cache-prompt
--reasoning-format none -lv 5 -b 256 -ub 128 -fa on -ctk q8_0 -ctv q8_0 -lm none -ctxcp 5 -cms 64
-cram 10 --threads-http 3 -tb 2 -fitt 2048 --spec-type draft-mtp --spec-draft-n-max 4
--spec-draft-n-min 2 --spec-draft-p-min 0.5 --no-spec-draft-backend-sampling -ctkd q4_0 -ctvd q4_0
"""


def test_settings_show_in_what_the_server_says_of_itself(model: Path, folder: Path) -> None:
    keys = folder / "keys"
    keys.write_text("# ours\nsecret\n")
    saved = folder / "saved"
    saved.mkdir(exist_ok=True)
    with _server(
        model, folder,
        *shlex.split(MANY_OPTIONS),
        *("--api-key-file", str(keys), "--slot-save-path", str(saved)),
        headers={"Authorization": "Bearer secret"},
    ) as server:  # fmt: skip
        props = server.get("/props")
        answers = [server.post("/completion", {"prompt": "x code"}) for _ in range(2)]
        refused = server.client.get("/props", headers={"Authorization": "Bearer wrong"})
        slots = server.client.get("/slots")
        kept = server.post("/slots/0?action=save", {"filename": "slot"})

    params = props["default_generation_settings"]["params"]
    sampling = {
        key: pytest.approx(value)
        for key, value in {
            "temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "seed": 5,
            "repeat_penalty": 1.5, "presence_penalty": 0.5,
        }.items()
    }  # fmt: skip
    assert {key: params[key] for key in sampling} == sampling
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 768  # half of it, in steps of 256
    assert props["endpoint_props"]
    assert params["reasoning_format"] == "none"
    assert (refused.status_code, slots.status_code) == (401, 501)
    assert answers[1]["timings"]["cache_n"] == 0
    assert answers[1]["tokens_predicted"] == 21
    assert (saved / "slot").exists()
    assert kept["filename"] == "slot"
    for line in (
        "n_batch               = 256",
        "n_ubatch              = 128",
        "flash_attn            = enabled",
        "K (q8_0)",
        "V (q8_0)",
        "K (q4_0)",
        "load_mode = none",
        "context checkpoints enabled, max = 5, min spacing = 64",
        "prompt cache is enabled, size limit: 10 MiB",
        "using 3 threads for HTTP server",
        "n_threads = 1 (n_threads_batch = 2)",
        ">= 2048 MiB of system memory",
        "n_max=4, n_min=2, p_min=0.50, n_embd=1056, backend_sampling=0",
    ):
        assert line in server.log, line


THINKING_TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}<|im_end|>
{% endfor %}{{ note }}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""


@pytest.mark.parametrize(
    ("options", "thought", "answer"),
    [
        ((), 20, 0),
        (("--reasoning-budget", "5"), 4, 8),
        (("--reasoning", "off"), 0, 20),
        (("--reasoning-format", "none"), 0, 21),
    ],
)
def test_thinking_is_limited_and_shown_as_asked(
    options: tuple[str, ...], thought: int, answer: int, model: Path, folder: Path
) -> None:
    template = folder / "template.jinja"
    template.write_text(THINKING_TEMPLATE)
    with _server(model, folder, "--chat-template-file", str(template), *options) as server:
        reply = server.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "code"}], "max_tokens": 20, "temperature": 0},
        )

    message = reply["choices"][0]["message"]
    assert len(message.get("reasoning_content", "").split()) == thought
    assert len(message["content"].split()) == answer


def test_the_template_gets_its_arguments(model: Path, folder: Path) -> None:
    with _server(
        model, folder, "--chat-template", THINKING_TEMPLATE,
        "--chat-template-kwargs", '{"note": "N.B."}', "--reasoning", "off",
    ) as server:  # fmt: skip
        prompt = server.post("/apply-template", {"messages": [{"role": "user", "content": "a"}]})

    assert "N.B.<|im_start|>assistant\n<think>\n\n</think>" in prompt["prompt"]


def test_what_was_not_given_is_as_in_llama_server(model: Path, folder: Path) -> None:
    """Four slots over one KV buffer, batch threads like threads, context of the model."""
    environment = {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_API_KEY": "secret", "LLAMA_ARG_TOP_K": "3"}
    with RealServer(
        PROGRAM, "-m", str(model), "-t", "1", "-lv", "4", folder=folder, environment=environment
    ) as server:
        props = server.get("/props")

    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == SHAPES["tiny"].context_length
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert "kv_unified = 'true'" in server.log
    assert "n_threads = 1 (n_threads_batch = 1)" in server.log
    assert "warming up the model" in server.log


def test_threads_that_are_not_given_are_all_that_the_process_may_use(
    model: Path, folder: Path
) -> None:
    with RealServer(
        ("taskset", "-c", "0", *PROGRAM), "-m", str(model), "-c", "256", "-lv", "4", folder=folder
    ) as server:
        pass

    assert "n_threads = 1 (n_threads_batch = 1)" in server.log


def test_it_listens_on_every_address_it_was_given(model: Path, folder: Path) -> None:
    with _server(model, folder, "--host", "127.0.0.1,127.0.0.2") as server:
        reply = httpx.get(f"http://127.0.0.2:{server.port}/health", timeout=5)

    assert reply.status_code == 200


@pytest.mark.parametrize("option", OPTIONS[2:], ids=lambda option: option.spellings[-1])
def test_every_option_changes_a_field_of_the_engines_parameters(
    option: Option, tmp_path: Path
) -> None:
    import xllamacpp  # noqa: PLC0415 (only where it is installed)

    (tmp_path / "file").write_text("read from a file")
    places = {"FNAME": "file", "JINJA_TEMPLATE_FILE": "file", "PATH": "."}
    flag = next((flag for flag in option.spellings if flag in VALUES), option.spellings[0])
    value = VALUES.get(flag, NUMBER if option.argument in {"N", "SEED", "<0...100>"} else TEXT)
    if option.argument in places:
        value = str(tmp_path / places[option.argument])
    given = [[flag] if option.argument is None else [flag, value]]
    given += [[negation] for negation in option.negations[:1]]
    changed = False
    for arguments in given:
        params = xllamacpp.CommonParams()
        for field, wanted in parse_command(arguments).settings:
            before = _field(params, field)
            apply_setting(params, field, wanted, xllamacpp)
            changed = changed or _field(params, field) != before

    assert changed, option.spellings


def _field(params: Any, field: str) -> Any:
    for name in field.removeprefix("+").split("."):
        params = getattr(params, name)
    return params
