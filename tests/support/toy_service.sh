#!/bin/sh
# A service for tests of service managers. By default it stays until SIGTERM and then ends with 0.
#   --print TEXT       print a line at once
#   --end-after S      end by itself after S seconds
#   --status N         with this status
#   --ignore-term      pay no heed to SIGTERM
#   --slow-term S      take S seconds to obey SIGTERM
#   --term-status N    end with this status on SIGTERM
text='' after='' status=0 ignore='' slow=0 term=0
while [ $# -gt 0 ]; do
    case $1 in
        --print) text=$2; shift ;;
        --end-after) after=$2; shift ;;
        --status) status=$2; shift ;;
        --ignore-term) ignore=yes ;;
        --slow-term) slow=$2; shift ;;
        --term-status) term=$2; shift ;;
        *) echo "unknown option: $1" >&2; exit 64 ;;
    esac
    shift
done
if [ -n "$ignore" ]; then
    trap '' TERM
else
    trap 'trap "" TERM; sleep "$slow"; exit "$term"' TERM
fi
[ -z "$text" ] || echo "$text"
if [ -n "$after" ]; then
    sleep "$after" &
    wait $!
    exit "$status"
fi
while :; do
    sleep 1 & # not longer: some shells miss a signal that comes right before they wait
    wait $!
done
