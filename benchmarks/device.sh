#!/usr/bin/env bash
# Everything that needs one GPU, in under nine minutes, without network.
#
#   bash benchmarks/device.sh            writes to $OUT, or to benchmarks/out/device
#
# Needs torch 2.11 or newer with CUDA (triton comes with it); what else is missing is skipped with a
# line. Each part has a limit of its own, so a slow one costs only itself.
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-benchmarks/out/device}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
began=$SECONDS

say() { printf '\n=== %s (%d s)\n' "$*" $((SECONDS - began)); }
has() { "$PYTHON" -c "import $1" 2>/dev/null; }

# part SECONDS NAME COMMAND...: the command within its limit, its output beside the figures.
part() {
    local limit=$1 name=$2
    shift 2
    say "$name"
    timeout "$limit" "$@" 2>&1 | tee "$OUT/$name.log" | tail -n 40
    local status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || echo "$name: exit $status (124: over $limit s), see $OUT/$name.log"
}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "skipped: $PYTHON has no torch that sees a GPU"
    exit 0
fi
"$PYTHON" - <<'EOF' | tee "$OUT/machine.txt"
import platform, torch
print(f"{torch.cuda.get_device_name(0)}, Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
EOF

if has pytest; then
    part 70 gpu_tests "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider --timeout 60 tests
else
    echo "skipped: GPU tests need pytest"
fi

part 40 attention "$PYTHON" benchmarks/kernels.py attention --out "$OUT"
part 40 head "$PYTHON" benchmarks/kernels.py head --out "$OUT"

has matplotlib || echo "no pictures: they need matplotlib"
for shape in 0.6b 1.7b; do
    part 30 "model_$shape" "$PYTHON" benchmarks/shapes.py "$shape" "$OUT/$shape"
    [ -f "$OUT/$shape/recipe.yaml" ] || continue
    part 120 "ladder_$shape" "$PYTHON" benchmarks/memory.py "$OUT/$shape/recipe.yaml" \
        --walks ladder --repeats 1 --steps 3 --warm-up 2 --deadline 105 --snapshots --out "$OUT/ladder_$shape"
    if [ "$shape" = 0.6b ]; then
        part 50 slope_0.6b "$PYTHON" benchmarks/memory.py "$OUT/$shape/recipe.yaml" \
            --slope 4096,8192 --repeats 1 --steps 1 --warm-up 1 --out "$OUT/slope_$shape"
    fi
    rm -rf "${OUT:?}/$shape"
done
say "done: $(find "$OUT" -type f | wc -l) files in $OUT"
