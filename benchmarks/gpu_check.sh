#!/usr/bin/env bash
# Everything that only a CUDA device can show, in five minutes: the tests of the kernels, of memory
# beyond 32 bits and of graphs, the engine on the device, and the GPU benchmarks.
#
#     benchmarks/gpu_check.sh [--rehearse]
#
# Runs from a checkout, without a network: nothing is installed. PYTHON names the interpreter.
# --rehearse goes through all of it on a CPU, with interpreted kernels.
#
# Exit status: 0 all passed, 1 something failed or ran out of time, 2 wrong usage, 3 no CUDA device,
# 4 packages are missing (what could be run without them was run, and passed).
set -u

LIMIT_S=300
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
results=benchmarks/results
rehearse=()
case "${1-}" in
"") ;;
--rehearse)
    rehearse=(--rehearse)
    export AGENTKV_TEST_DEVICE=cpu TRITON_INTERPRET=1
    LIMIT_S=3600
    results=$(mktemp -d)
    echo "A rehearsal on the CPU: nothing below says anything about a GPU."
    ;;
*)
    echo "usage: benchmarks/gpu_check.sh [--rehearse]" >&2
    exit 2
    ;;
esac

# Prints those of the named packages that cannot be imported.
missing() {
    "$python" - "$@" <<'PY'
import importlib.util
import sys

print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
PY
}

kernels_lack=$(missing torch triton numpy pytest) || exit 4
if [ -n "$kernels_lack" ]; then
    echo "Missing Python packages, without which nothing can be checked: $kernels_lack" >&2
    exit 4
fi
engine_lack=$(missing transformers tokenizers msgspec anyio gguf jinja2 safetensors huggingface_hub)
if [ -n "$engine_lack" ]; then
    echo "Missing Python packages, without which the engine cannot be checked: $engine_lack" >&2
fi
if [ ${#rehearse[@]} -eq 0 ]; then
    "$python" - <<'PY' || exit 3
import sys

import torch
import triton

if not torch.cuda.is_available():
    sys.exit("No CUDA device: torch sees none, so there is nothing to check here.")
name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
print(f"{name}, {memory >> 30} GiB, CUDA {torch.version.cuda}, torch {torch.__version__}, "
      f"triton {triton.__version__}, Python {sys.version.split()[0]}")
PY
fi

names=()
outcomes=()
seconds=()
notes=()
status=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

note() { # NAME OUTCOME SECONDS NOTE
    names+=("$1") outcomes+=("$2") seconds+=("$3") notes+=("$4")
}

# Runs a command for at most so many of the seconds that are left.
stage() { # NAME SECONDS COMMAND...
    local name=$1 most=$2 left=$((LIMIT_S - SECONDS)) start=$SECONDS code
    shift 2
    [ ${#rehearse[@]} -gt 0 ] && most=$left
    [ "$most" -gt "$left" ] && most=$left
    if [ "$most" -lt 5 ]; then
        note "$name" "no time" 0 "the $LIMIT_S s were used up"
        status=1
        return
    fi
    echo
    echo "== $name"
    timeout --kill-after=10 "$most" "$@" 2>&1 | tee "$log"
    code=${PIPESTATUS[0]}
    local last
    last=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1)
    case $code in
    0) note "$name" passed $((SECONDS - start)) "$last" ;;
    124 | 137) note "$name" "no time" $((SECONDS - start)) "stopped after $most s" && status=1 ;;
    *) note "$name" FAILED $((SECONDS - start)) "$last" && status=1 ;;
    esac
}

# The project's own settings name plugins that need not be here. Kernels compile side by side.
parallel=()
if [ -z "$(missing xdist)" ] && [ ${#rehearse[@]} -eq 0 ]; then
    parallel=(-n 6)
fi
tests() { # NAME SECONDS FILES...
    local name=$1 most=$2
    shift 2
    stage "$name" "$most" "$python" -m pytest -q -ra -c /dev/null --rootdir "$root" \
        --confcutdir tests/gpu --import-mode=importlib -p no:cacheprovider "$@"
}

tests "kernels" 150 tests/gpu/test_attention.py ${parallel[@]+"${parallel[@]}"}
tests "memory beyond 32 bits" 60 tests/gpu/test_cache.py
tests "graphs" 60 tests/gpu/test_graphs.py
if [ -z "$engine_lack" ]; then
    tests "engine" 100 tests/gpu/test_engine.py ${parallel[@]+"${parallel[@]}"}
fi
if [ -z "$(missing transformers)" ]; then
    stage "attention benchmark" 100 "$python" benchmarks/attention_gpu.py --seconds 60 \
        --out "$results/attention-gpu.json" ${rehearse[@]+"${rehearse[@]}"}
fi
if [ -z "$engine_lack" ]; then
    stage "decode benchmark" 60 "$python" benchmarks/decode_gpu.py \
        --out "$results/decode-gpu.json" ${rehearse[@]+"${rehearse[@]}"}
else
    note "engine, decode benchmark" "not run" 0 "missing: $engine_lack"
    [ "$status" -eq 0 ] && status=4
fi

echo
printf '%-26s %-8s %5s  %s\n' "stage" "outcome" "s" ""
for i in "${!names[@]}"; do
    printf '%-26s %-8s %5s  %s\n' "${names[i]}" "${outcomes[i]}" "${seconds[i]}" "${notes[i]:0:90}"
done
echo "results in $results"
exit "$status"
