#!/usr/bin/env bash
# Makes .venv with everything that slime needs, from a complete lock; at once when nothing changed since the last time.
# PYTHON=/path/to/python3.12 picks the interpreter. Reads nothing from standard input.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null

stamp_of() { echo ".venv/.slime-$(cat "$1" pyproject.toml | sha256sum | cut -c1-64)"; }
for lock in ci/lock-cpu.txt ci/lock-cuda.txt; do
    if [ -f "$(stamp_of "$lock")" ] && [ -x .venv/bin/slime ]; then exit 0; fi
done

is_312() { [ -n "$1" ] && "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {  # a name on PATH may be a shim that does not run, so each candidate is tried
    local root candidate
    if [ -n "${PYTHON:-}" ]; then is_312 "$PYTHON" && "$PYTHON" -c 'import sys; print(sys.executable)'; return; fi
    for candidate in python3.12 python3 python; do
        if is_312 "$candidate"; then "$candidate" -c 'import sys; print(sys.executable)'; return; fi
    done
    for root in "${PYENV_ROOT:-}" "$HOME/.pyenv" "$(pyenv root 2>/dev/null || true)"; do
        [ -n "$root" ] || continue
        for candidate in $(ls -d "$root"/versions/3.12*/bin/python3.12 2>/dev/null | sort -rV); do
            if is_312 "$candidate"; then echo "$candidate"; return; fi
        done
    done
    return 1
}

say() { echo "setup: $*"; }
twice() {  # a registry that stumbles once is asked again; what was fetched is kept
    "$@" && return
    say "that failed; once more in 5 s" >&2
    sleep 5
    "$@"
}

lock=ci/lock-cpu.txt
if nvidia-smi >/dev/null 2>&1; then lock=ci/lock-cuda.txt; fi

python=.venv/bin/python
if ! is_312 "$python"; then
    base=$(find_python) || {
        echo "setup: no Python 3.12${PYTHON:+ at PYTHON=$PYTHON}: install one (apt install python3.12-venv, pyenv install 3.12 or uv python install 3.12), or name it: make PYTHON=/path/to/python3.12" >&2
        exit 1
    }
    say "making .venv with $("$base" --version) ($base)"
    rm -rf .venv
    "$base" -m venv .venv || {
        echo "setup: $base cannot make a virtual environment: install its venv module (apt install python3.12-venv)" >&2
        exit 1
    }
fi

# A cap that the machine or the user sets for other projects must not meet the lock.
export PIP_CONSTRAINT="" UV_CONSTRAINT="" UV_HTTP_TIMEOUT=300 UV_SYSTEM_CERTS=true PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --upgrade >/dev/null
if [ ! -x .venv/bin/uv ] && ! twice "$python" -m pip install --quiet uv; then
    say "no uv to be had: pip does it, more slowly"
fi
install() {
    if [ -x .venv/bin/uv ] && [ -t 2 ]; then
        .venv/bin/uv pip install --python "$python" --no-deps "$@"
    elif [ -x .venv/bin/uv ]; then  # what is downloaded, without the list of all packages at the end
        .venv/bin/uv pip install --python "$python" --no-deps "$@" 2>&1 | sed -u '/^ [+-] /d'
    else
        "$python" -m pip install --no-deps --progress-bar off "$@"
    fi
}

say "installing the $(grep -c '==' "$lock") packages of $lock (several GB the first time: minutes)"
twice install -r "$lock"
say "installing slime itself"
twice install -e .
# Engines start in many processes, and each would compile what it imports wherever Python is told not to write bytecode.
say "compiling what the engines import"
skip='/(tests?|testing/_internal|rllib|dashboard|multimodal_gen|nvidia)/|transformers/models/|ray/(data|serve|tune|train|llm)/'
"$python" -m compileall -qq -j 0 -x "$skip" .venv/lib/python3.12/site-packages >/dev/null 2>&1 || true
rm -f .venv/.slime-*
touch "$(stamp_of "$lock")"
say "done"
