#!/usr/bin/env bash
# What `make test` runs: every test, in two parts side by side. The layouts' jobs take minutes and begin with a session,
# so one process runs what reads them. All others go two files at a time: while one waits for engines to start, the
# other one and the jobs compute. What failed and the counts of both parts are the last lines, and the exit code is 1
# unless both passed.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
trap 'wait; exit 130' INT  # Ctrl-C reaches both parts
layouts=(tests/training tests/weights/test_bridge.py)
failed=0

env --default-signal=INT nice -n 5 .venv/bin/python -m pytest "${layouts[@]}" >"$logs/layouts" 2>&1 &
beside=$!
.venv/bin/python -m pytest tests "${layouts[@]/#/--ignore=}" -n 2 --dist loadfile --no-loadscope-reorder 2>&1 |
    tee "$logs/others" || failed=1
echo "the layouts' tests, which ran beside these:"
wait "$beside" || failed=1
cat "$logs/layouts"
for name in others layouts; do
    grep -E '^(FAILED|ERROR)' "$logs/$name"
    echo "$name: $(tail -n 1 "$logs/$name")"
done
exit $failed
