#!/usr/bin/env bash
# Checks and measures on a GPU, in stages, into one folder:
#
#     benchmarks/gpu.sh [--output FOLDER] [--stages 1,2,3] [--model llada-8b] [--bundle FOLDER]
#
#  1  each kernel against its plain version on the CPU, at the sizes of the model     kernels.json
#  2  one FULL and one REUSE step over their floors: launched, and recorded           launched.json, recorded.json
#  3  answers of every cache method against those of a CPU                            answers.json
#  4  every cache method at batch 1, 8 and 64, with a threshold, and with FP8         bench-*.json
#  5  paged attention over its floor                                                  attention.json
#  6  `vllm bench serve` against `dllm serve`, 1 and 32 requests at a time            serve-*.json
#  7  kernels for heads of other sizes, and the tests                                 heads.json, tests.txt
#
# The first three are stopped after ten minutes in all. A command that fails or takes too long ends alone; the last lines
# say which, and the exit status is 1. `--model` names random weights of a shape.
#
# `--bundle` names a folder of scripts/gpu_bundle.py, installed for this run alone: beside what the machine's python3
# has, or, a complete one, into an environment of its own. Without it, dllm-engine is installed.
set -euo pipefail

folder=gpu-results stages=1,2,3,4,5,6,7 model=llada-8b bundle=
while (($#)); do
    case "$1" in
        --output) folder="$2" ;;
        --stages) stages="$2" ;;
        --model) model="$2" ;;
        --bundle) bundle="$(realpath "$2")" ;;
        *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
    shift 2
done
mkdir -p "$folder"
folder="$(realpath "$folder")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1

if [[ -n "$bundle" ]]; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    install=(python3 -m pip install --quiet --no-index --no-deps --no-compile)
    if compgen -G "$bundle/torch-*.whl" >/dev/null; then
        python3 -m venv "$site"
    else
        install+=(--upgrade --target "$site")
        export PYTHONPATH="$site"
    fi
    export PATH="$site/bin:$PATH"
    "${install[@]}" "$bundle"/*.whl
    # From a copy, in which nothing of an earlier build lies.
    mkdir "$site/source"
    cp -r pyproject.toml README.md LICENSE dllm_engine kernels model_executor scheduler "$site/source"
    "${install[@]}" --no-build-isolation "$site/source"
fi

status=0 summary=()
run() { # SECONDS COMMAND...: run the command for so long at most, and go on if it fails
    local limit="$1" begin="$SECONDS" code=0
    shift
    printf '\n$ %s\n' "$*"
    timeout --kill-after=10 "$limit" "$@" || code=$?
    ((code == 0)) || status=1
    case "$code" in
        0) summary+=("$((SECONDS - begin)) s  ok  $*") ;;
        124 | 137) summary+=("$((SECONDS - begin)) s  FAILED: not ready in time  $*") ;;
        *) summary+=("$((SECONDS - begin)) s  FAILED with exit status $code  $*") ;;
    esac
}

steps() { # NAME SECONDS OPTIONS...
    run "$2" python3 benchmarks/step_time.py --model "$model" --dtype bfloat16 --canvas 1024 --gen-length 64 --batch 1 \
        "${@:3}" --output "$folder/$1.json"
}

bench() { # NAME SECONDS OPTIONS...
    run "$2" dllm bench --model "$model" --dtype bfloat16 --batch 1,8,64 --prompt 512 --response 64 --block-length 32 \
        --repeats 2 "${@:3}" --output "$folder/bench-$1.json"
}

serve() { # random weights of the model's layers, with the vocabulary and tokenizer of the demo model
    local port=8321 begin="$SECONDS" server
    python3 - "$model" "$folder/model" <<'MAKE'
import json, shutil, sys
from dllm_engine.checkpoints import named_shape
from dllm_engine.demo import DEMO_MODEL_DIR
shutil.copytree(DEMO_MODEL_DIR, sys.argv[2], dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
own = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
ids = {name: own[name] for name in ("vocab_size", "embedding_size", "mask_token_id", "eos_token_id", "pad_token_id")}
with open(f"{sys.argv[2]}/config.json", "w") as file:
    json.dump(named_shape(sys.argv[1]) | ids, file)
MAKE
    dllm serve "$folder/model" --load-format dummy --cache-method dual --max-model-len 1024 --port "$port" >"$folder/server.log" 2>&1 &
    server=$!
    until curl --silent --fail "localhost:$port/health" >/dev/null; do
        if ((SECONDS - begin > 300)) || ! kill -0 "$server"; then
            status=1 summary+=("FAILED: dllm serve; see $folder/server.log")
            kill "$server" || true
            return
        fi
        sleep 1
    done
    for at_once in 1 32; do
        run 300 vllm bench serve --model "$folder/model" --port "$port" --dataset-name random --random-input-len 512 \
            --random-output-len 64 --num-prompts $((8 * at_once)) --max-concurrency "$at_once" --ignore-eos \
            --percentile-metrics ttft,e2el --save-result --result-dir "$folder" --result-filename "serve-$at_once.json"
    done
    kill "$server" && wait "$server" || true
}

stage() {
    case "$1" in
        1) run 170 dllm check "$model" --only kernels --output "$folder/kernels.json" ;;
        2)
            steps launched 150 --methods none dual --no-cuda-graphs
            steps recorded 120 --methods dual --cuda-graphs
            ;;
        3) run 130 dllm check --only answers --output "$folder/answers.json" ;;
        4)
            bench methods 1800 --methods none,prefix,dual,sparse,dkv,dllm_cache,maskkv,es_dllm,freecache,delayed,d2_cache
            bench dual-launched 300 --methods dual --no-cuda-graphs
            bench dual-threshold 300 --methods dual --unmasking-rules threshold=0.9
            bench dual-fp8 300 --methods dual --engine-arg quantization=fp8
            ;;
        5) run 120 python3 benchmarks/kernel_time.py --output "$folder/attention.json" ;;
        6) serve ;;
        7)
            run 600 dllm check "$model" --only heads --output "$folder/heads.json"
            run 3600 bash -c 'set -o pipefail; python3 -m pytest -q -n 8 --dist loadfile --continue-on-collection-errors 2>&1 | tee "$1"' pytest "$folder/tests.txt"
            ;;
        *) echo "there is no stage $1" >&2; exit 2 ;;
    esac
}

for number in ${stages//,/ }; do
    stage "$number"
done
printf '\n'
printf '%s\n' "${summary[@]}" | tee "$folder/summary.txt"
exit "$status"
