#!/usr/bin/env bash
# What `make test` runs: every test, in two parts. The layouts' jobs take every core for minutes and begin with a
# session: one process runs what reads them. All others go two files at a time: while one waits for engines to start,
# the other one computes. Both parts run whatever the first gives; what failed and the counts of both are the last
# lines, and the exit code is 1 unless both passed.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
trap 'exit 130' INT
layouts=(tests/training tests/weights/test_bridge.py)
failed=0

part() {  # NAME ARGUMENTS OF PYTEST...
    .venv/bin/python -m pytest "${@:2}" 2>&1 | tee "$logs/$1" || failed=1
}

part others tests "${layouts[@]/#/--ignore=}" -n 2 --dist loadfile --no-loadscope-reorder
part layouts "${layouts[@]}"
for name in others layouts; do
    grep -E '^(FAILED|ERROR)' "$logs/$name"
    echo "$name: $(tail -n 1 "$logs/$name")"
done
exit $failed
