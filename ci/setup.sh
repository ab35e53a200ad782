#!/usr/bin/env bash
# Makes .venv with everything that slime needs, from a complete lock. Quick when nothing changed since the last time.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

lock=ci/lock-cpu.txt
if nvidia-smi >/dev/null 2>&1; then lock=ci/lock-cuda.txt; fi
stamp=".venv/.slime-$(cat "$lock" pyproject.toml | sha256sum | cut -c1-16)"
if [ -f "$stamp" ]; then exit 0; fi

python=$(find_python) || {
    echo "slime needs Python 3.12 and found none: install it (apt install python3.12, pyenv install 3.12, or uv python install 3.12) and run make again, or pass PYTHON=/path/to/python3.12" >&2
    exit 1
}
echo "setup: $("$python" --version) at $python, packages from $lock (several GB the first time)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
[ -x .venv/bin/uv ] || .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
install() { .venv/bin/uv pip install --python .venv/bin/python --no-deps "$@"; }
export UV_HTTP_TIMEOUT=300
echo "setup: installing $(grep -c '==' "$lock") packages"
# A registry that stumbles once is asked again; what was fetched is kept.
install -r "$lock" || { echo "setup: once more" >&2; sleep 5; install -r "$lock"; }
echo "setup: installing slime itself"
install --quiet -e .
rm -f .venv/.slime-*
touch "$stamp"
echo "setup: done"
