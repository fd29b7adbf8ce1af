"""Which start scripts may be asked for their server's help."""

from __future__ import annotations

from tunerd.engine.probe import hands_words_on

HAND_ON = {
    "as it is": 'exec llama-server -m a.gguf "$@"',
    "by a path": '/opt/llama.cpp/llama-server -m a.gguf "$@"\n\n# the end',
    "without quotes, amid others": "exec llama-server $* -c 1024",
    "in a line that goes on": 'exec llama-server \\\n  -m a.gguf \\\n  "$@"',
    "behind other things": 'cd /opt; exec llama-server "${@}"',
    "beside a function that only reads": 'parse() { model=$1; }\nparse "$@"\nexec llama-server -m "$model" "$@"',
    "behind what is said": 'log() { echo "$1"; }\necho "starting $*"\nexec llama-server "$@"',
    "with variables of its own": 'CUDA_VISIBLE_DEVICES=0 GGML_X=/tmp llama-server "$@"',
    "what it says kept in a file": 'exec llama-server "$@" >>/tmp/log 2>&1',
    "zsh": 'exec llama-server "${argv[@]}"',
    "csh": "exec llama-server $argv:q",
    "fish": "function greet\n  echo $argv\nend\nexec llama-server $argv",
}
HAND_NOTHING_ON = {
    "nothing": "",
    "no words": "exec llama-server -m a.gguf",
    "a comment": '# put "$@" here\nexec llama-server -m a.gguf # "$@"',
    "a comment that ends a line which goes on": 'exec llama-server -m a.gguf \\\n  # -c 1 \\\n  "$@"',
    "awk's": "exec llama-server -t $(nproc | awk '{print $1, $@}')",
    "quoted": "exec llama-server -a '$@'",
    "a count": "[ $# -gt 0 ] && exit 1\nexec llama-server -m a.gguf",
    "two of them": 'exec llama-server "$1" "$2"',
    "all but the first": 'model=$1\nshift\nexec llama-server -m "$model" "$@"',
    "all but the first, of bash": 'exec llama-server -m "$1" "${@:2}"',
    "some, in a case": 'case "$1" in\nstop) exit;;\n*) exec llama-server "$@";;\nesac',
    "some, under a condition": 'exec llama-server -m a.gguf\ntest $UP && exec llama-server "$@"',
    "to a function": 'main() {\n  exec llama-server -m a.gguf\n}\n\nmain "$@"',
    "to a function of fish": "function run; $argv; end\nrun llama-server -m a.gguf",
    "to itself": 'test $UP || UP=1 exec flock -n lock "$(readlink -f "$0")" "$@"\nexec llama-server',
    "what is said": 'exec llama-server -m a.gguf\necho "started with $*"',
    "what is said of it in one line": 'echo "starting with $*"; exec llama-server -m a.gguf',
    "to another program": 'exec nproc | awk "$@"',
    "others in their place": 'set -- -m a.gguf\nexec llama-server "$@"',
    "the first, of fish": "exec llama-server -m $argv[1]",
}  # fmt: skip


def test_a_script_may_be_asked_only_where_all_its_words_reach_its_server() -> None:
    scripts = HAND_ON | HAND_NOTHING_ON
    asked = {how for how in scripts if hands_words_on(f"#!/bin/sh\n{scripts[how]}\n".encode())}
    assert asked == set(HAND_ON)
