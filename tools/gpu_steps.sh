# Steps of tools/first_gpu.sh and tools/two_gpus.sh, which source this: where they run, and one after the other.
# Without the GPUs that a step needs it says what it would prove.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
mkdir -p "$OUT"
export PYTHON OUT PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0
card=$(nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version --format=csv,noheader 2>/dev/null | head -1)
cards=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l)
echo "card: ${card:-none}, $cards in all; $("$PYTHON" -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)')"

# step NAME SECONDS "what it proves" GPUS COMMAND...
step() {
  local name=$1 limit=$2 proves=$3 gpus=$4 code start
  shift 4
  case " $STEPS " in *" $name "*) ;; *) return ;; esac
  echo "== $name: $proves"
  if [ "$cards" -lt "$gpus" ]; then
    echo "   not run: needs $([ "$gpus" = 1 ] && echo "a GPU" || echo "$gpus GPUs")"
    return
  fi
  start=$SECONDS
  timeout -k 5 "$limit" bash -c '"$@"' _ "$@" >"$OUT/$name.log" 2>&1
  code=$?
  tail -n "${LINES_OF_STEP:-40}" "$OUT/$name.log"
  if [ "$code" = 124 ]; then echo "   did not end within $limit s"; fi
  echo "== $name: exit code $code, $((SECONDS - start)) s"
  [ "$code" = 0 ] || failed=$((failed + 1))
}

gpu_tests() {
  local workers=
  "$PYTHON" -c 'import xdist' 2>/dev/null && workers="-n 4"
  # shellcheck disable=SC2086
  "$PYTHON" -m pytest -q -p no:cacheprovider $workers -m gpu "$@"
}

# job NAME OVERRIDES...: a short GRPO job, with what its syncs took and how far engine and trainer are apart. Without vLLM
# it ends with WITHOUT_VLLM.
job() {
  local name=$1
  shift
  "$PYTHON" -c 'import vllm' || { echo "not run: vLLM cannot be imported"; return "${WITHOUT_VLLM:-1}"; }
  # shellcheck disable=SC2086
  "$PYTHON" -m megarl train experiment=quickstart parallel=tp1 parallel.backend=nccl cluster.allow_idle=true \
    ${STEPS_OF_JOB:-trainer.steps=6 trainer.warm_start.steps=100} run.name="$name" "run.dir=$OUT/runs/$name" "$@" || return
  "$PYTHON" - "$OUT/runs/$name/metrics.jsonl" <<'PYTHON'
import json, sys

names = ("sync/seconds", "sync/transfer_seconds", "sync/digest_seconds", "sync/probe_diff_max", "sync/cold_seconds",
         "training/rollout_logp_diff_mean", "training/rollout_logp_diff_p99", "timing_s/rollout", "timing_s/update", "timing_s/step", "perf/throughput",
         "perf/total_num_tokens", "memory/engines/freed_bytes")
for line in open(sys.argv[1]):
    step = json.loads(line)
    if "sync/seconds" in step:
        print(step["step"], {name: float(f"{step[name]:.3g}") for name in names if name in step})
PYTHON
}
export -f gpu_tests job
