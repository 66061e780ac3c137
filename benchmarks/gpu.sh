#!/usr/bin/env bash
# Checks and measures everything there is to check and measure on a GPU, into one folder:
#
#     benchmarks/gpu.sh [FOLDER [MODEL]]        (default: gpu-results, random weights of LLaDA-8B's shape)
#
# The tests, of which those of kernels and engines run on the GPU; attention over pages against its floor; then cache
# methods at batch 1, 8 and 64 over the plain model and over their floors, launched step by step and as CUDA graphs with
# eight steps a dispatch; ratios of the two last. Goes on where a test fails, and then exits with 1.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:-gpu-results}"
model="${2:-llada-8b}"
mkdir -p "$folder"

bench() {
    dllm bench --model "$model" --dtype bfloat16 --batch 1,8,64 --prompt 512 --response 64 --block-length 32 "$@"
}

status=0
python -m pytest -q | tee "$folder/tests.txt" || status=1
python benchmarks/kernel_time.py --device cuda --dtype bfloat16 --output "$folder/kernel_time.json"
bench --methods none,dual,sparse --output "$folder/launched.json" --plots "$folder"
bench --methods dual,sparse --no-baseline --engine-arg cuda_graphs=true --engine-arg steps_per_dispatch=8 \
    --output "$folder/graphs.json"
dllm bench --compare "$folder/launched.json" "$folder/graphs.json" | tee "$folder/comparison.txt"
exit "$status"
