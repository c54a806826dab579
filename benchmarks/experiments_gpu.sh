#!/usr/bin/env bash
# Run several experiments at the same time on one GPU, which their small models would not fill one after another.
#
#     bash benchmarks/experiments_gpu.sh OUT SECONDS "norms seeds=1,2" "language-models arms=lstm --jobs 3" ...
#
# Each further argument is a call of `monoblock compare`, which is stopped after SECONDS; its results are lines of JSON
# in OUT/EXPERIMENT/results.jsonl, and lines that are there already are not measured again. CUDA MPS lets processes
# share the GPU; without it, or without a GPU, the calls run all the same. At most SLOTS calls (a variable, 12) run at
# once. Do not measure time this way: experiments that do (sparse, speculative, attention-memory, kv-cache, recurrence,
# and the arms of language-models with equal time) must be alone on the machine.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,11p' "$0"; exit 2; }
out=$1 seconds=$2
shift 2
mkdir -p "$out"
if command -v nvidia-cuda-mps-control > /dev/null; then
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi
export OMP_NUM_THREADS=1
number=0
for call in "$@"; do
  read -ra words <<< "$call"
  number=$((number + 1))
  while [ "$(jobs -rp | wc -l)" -ge "${SLOTS:-12}" ]; do wait -n || true; done
  timeout "$seconds" "${PYTHON:-python}" -m monoblock compare "${words[@]}" --out "$out/${words[0]}" \
    > "$out/${words[0]}-$number.log" 2>&1 || echo "stopped or failed: $call (see $out/${words[0]}-$number.log)" &
done
wait
wc -l "$out"/*/results.jsonl
