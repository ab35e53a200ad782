#!/usr/bin/env bash
# The quickstart in runs/quickstart. A finished earlier run is moved aside; an unfinished one is resumed.
set -euo pipefail
cd "$(dirname "$0")/.."
run=runs/quickstart
if [ -f "$run/summary.json" ]; then mv "$run" "$run-$(date +%Y%m%d-%H%M%S)"; fi
exec .venv/bin/slime train --profile quickstart --run-dir "$run"
