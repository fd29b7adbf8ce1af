"""Which start scripts may be asked for their server's help."""

from __future__ import annotations

import pytest

from tunerd.engine.help import hands_words_on

HAND_ON = {
    "as it is": 'exec llama-server -m a.gguf "$@"',
    "without quotes, amid others": "exec llama-server $* -c 1024",
    "without its first": 'model=$1\nshift\nexec llama-server -m "$model" "${@}"',
    "in a line that goes on": 'exec llama-server \\\n  -m a.gguf \\\n  "$@"',
    "where there are any": 'test $# -gt 0 && exec llama-server "$@"\nexec llama-server -m a.gguf',
    "by a function": 'main() {\n  exec llama-server "$@"\n}\nmain "$@"',
    "by a function that reads them": 'parse() {\n  while [ $# -gt 0 ]; do\n    args+=("$1")\n    shift\n  done\n}\n'
    'parse "$@"\nexec llama-server "${args[@]}"',
    "beside a function that only reads": 'parse() { model=$1; }\nparse "$@"\nexec llama-server -m "$model" "$@"',
    "behind what is said": 'log() { echo "$1"; }\necho "starting $*"\nexec llama-server "$@"',
    "as one of several": 'case "$1" in\n--bench) exec llama-bench "$@";;\n*) exec llama-server "$@";;\nesac',
    "as what it is started with": 'set -- -m a.gguf "$@"\nexec llama-server "$@"',
    "as a list": 'args=(-m a.gguf "$@")\nexec llama-server "${args[@]}"',
    "one by one, without `in`": 'for arg; do args+=("$arg"); done\nexec llama-server "${args[@]}"',
    "one by one": 'for arg in "$@"\ndo\n  args="$args $arg"\ndone\nexec llama-server $args',
    "from the first": 'while [ $# -gt 0 ]; do\n  args+=("$1")\n  shift\ndone\nexec llama-server "${args[@]}"',
    "beside the words of a function": 'model() { echo a.gguf; }\nexec llama-server -m "$(model)" -a "`model`" "$@"',
    "zsh": 'exec llama-server "${argv[@]}"',
    "csh": "exec llama-server $argv:q",
    "fish": "function greet\n  echo $argv\nend\nexec llama-server $argv",
}
HAND_NOTHING_ON = {
    "no words": "exec llama-server -m a.gguf",
    "a comment": '# put "$@" here\nexec llama-server -m a.gguf # "$@"',
    "a comment that ends a line which goes on": 'exec llama-server -m a.gguf \\\n  # -c 1 \\\n  "$@"',
    "awk's": "exec llama-server -t $(nproc | awk '{print $1, $@}')",
    "a file of variables": ". /etc/default/llama\nsource /opt/intel/oneapi/setvars.sh\nexec llama-server",
    "a count": "[ $# -gt 0 ] && exit 1\nexec llama-server -m a.gguf",
    "two of them": 'exec llama-server "$1" "$2"',
    "a subcommand": 'case "$1" in\nstop) exit;;\n*) exec llama-server -m a.gguf;;\nesac',
    "options of its own": 'while getopts m: one; do :; done\nexec llama-server -m "$OPTARG"',
    "a loop of its own": 'for arg in "$@"; do case $arg in --gpu=*) gpu="${arg#*=}";; esac; done\nexec llama-server',
    "a function in one line": 'run() { "$@"; }\nrun llama-server -m a.gguf',
    "a function": 'retry()\n{\n  if ! "$@"; then\n    "$@"\n  fi\n}\nretry llama-server -m a.gguf',
    "a function that takes none": 'main() {\n  exec llama-server -m a.gguf\n}\n\nmain "$@"',
    "a function that takes none, in words": 'function main { llama-server -m a.gguf; }\nif true; then main "$@"; fi',
    "a function that reads some": 'parse() {\n  [ "$1" = -v ] && set -x\n}\nparse "$@"\nexec llama-server -m a.gguf',
    "a function that takes none, by another": 'serve() {\n  llama-server -m a.gguf\n}\n'
    'main() {\n  serve "$(basename "$(pwd)")" "$@"\n}\nmain "$@"',
    "a function with colons": 'log::info() {\n  logger "$*"\n}\nlog::info "$@"\nexec llama-server -m a.gguf',
    "functions without end": "f()\n" * 2000,
    "itself, by its path": 'test $UP || UP=1 exec flock -n lock "$(readlink -f "$0")" "$@"\nexec llama-server',
    "itself, as bash has it": 'test $UP || UP=1 exec flock -n lock "${BASH_SOURCE[0]}" "$@"\nexec llama-server',
    "itself": '[ "$LOCKED" ] || exec env LOCKED=1 flock -n "$0" "$0" "$@"\nexec llama-server -m a.gguf',
    "a function of fish": "function run; $argv; end\nrun llama-server -m a.gguf",
    "what is said": 'echo "starting with $*"; exec llama-server -m a.gguf',
    "what is compared": 'if [[ "$*" == *debug* ]]; then set -x; fi\nexec llama-server -m a.gguf',
    "others in their place": 'set -- -m a.gguf\n[ -e gpu ] && set -- "$@" -ngl 99\nexec llama-server "$@"',
    "the first, of fish": "exec llama-server -m $argv[1]",
}  # fmt: skip


@pytest.mark.parametrize("how", HAND_ON)
def test_a_script_that_hands_its_words_on_may_be_asked(how: str) -> None:
    assert hands_words_on(f"#!/bin/sh\n{HAND_ON[how]}\n".encode())


@pytest.mark.parametrize("what", HAND_NOTHING_ON)
def test_a_script_whose_words_do_not_all_reach_its_server_is_not_asked(what: str) -> None:
    assert not hands_words_on(f"#!/bin/sh\n{HAND_NOTHING_ON[what]}\n".encode())
