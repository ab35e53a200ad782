#!/usr/bin/env bash
# Writes ci/lock-cuda.txt and ci/lock-cpu.txt anew from pyproject.toml. Run by hand when a pin changes; needs uv on PATH.
#
# What pyproject.toml asks for is resolved, megatron-bridge is added at its pin (slime_cli/installed.py says why it stands
# apart), and locks are installed with --no-deps. The CPU lock is the CUDA lock without kernels that need a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 - "$work/wanted.in" <<'PYTHON'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
with open(sys.argv[1], "w") as out:
    print(*project["dependencies"], *project["optional-dependencies"]["test"], sep="\n", file=out)
PYTHON
bridge=$(PYTHONPATH=. python3 -c 'from slime_cli.installed import TESTED; print("megatron-bridge==" + TESTED["megatron-bridge"])')
uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-header --no-annotate --no-emit-index-url \
    --no-emit-find-links "$work/wanted.in" -o "$work/resolved.txt"
{ grep -E '^[A-Za-z0-9]' "$work/resolved.txt"; echo "$bridge"; } | LC_ALL=C sort > ci/lock-cuda.txt

# Kernels, their compilers and what only they need. Imported by nothing that runs on a CPU.
gpu_only='anthropic|cuda-core|cuda-python|cuda-tile|flash-attn-4|flashinfer-python|helion|humming-kernels|mistral-common
modelscope|modelscope-hub|nvidia-cuda-cccl|nvidia-cuda-crt|nvidia-cuda-nvcc|nvidia-cuda-nvdisasm|nvidia-cudnn-frontend
nvidia-cutlass-dsl|nvidia-cutlass-dsl-libs-(base|core|cu12|cu13)|nvidia-mathdx|nvidia-nvvm|quack-kernels|sgl-deep-gemm
sglang-kernel|tilelang|tokenspeed-mla|tokenspeed-triton|z3-solver'
grep -vE "^(${gpu_only//$'\n'/|})==" ci/lock-cuda.txt > ci/lock-cpu.txt
wc -l ci/lock-*.txt
