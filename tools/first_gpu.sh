#!/usr/bin/env bash
# What to run first on a machine with a GPU: about twenty minutes on one card, without a network.
#
#   tools/first_gpu.sh [STEP...]
#
# PYTHON (default .venv/bin/python, else python3) has megarl's packages; WHEELS, a folder, is where missing ones are
# installed from. OUT (default runs/first_gpu) gets every step's output. After a step that fails or takes
# too long the others go on; the exit code is the number of steps that failed. Without a GPU nothing is measured: what can
# run on a CPU runs at toy size, and the rest says what it would prove.
OUT=${OUT:-runs/first_gpu}
STEPS=${*:-build kernels learner attention update layers speed sync offload sanitizer jobs loop exact apart large \
  eight_bits eight_bit_experts eight_bit_cache}
export WITHOUT_VLLM=0
. "$(dirname "$0")/gpu_steps.sh"

build() {
  local architecture
  [ -n "${WHEELS:-}" ] && { "$PYTHON" -m pip install -q --no-index --no-deps "$WHEELS"/*.whl || return; }
  architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
  [ "$architecture" = 90 ] && architecture=90a
  # shellcheck disable=SC2086
  "$PYTHON" -m pip install -q --no-deps --no-build-isolation \
    ${architecture:+-C cmake.define.CMAKE_CUDA_ARCHITECTURES=$architecture-real} -e . &&
    "$PYTHON" -c 'from megarl.ops import native; print(native.library.CUDA_STATE)'
}

sanitizer() {
  local tool code=0
  for tool in memcheck racecheck initcheck synccheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-regex kns=megarl \
      "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu tests/unit/test_ops_gpu.py tests/unit/test_ops_gpu_policy.py \
      -k "special_rows or (misaligned and 0-2049) or (digest_equals and 2) or (test_policy and token-ppo_clip-k3)" \
      >"$OUT/$tool.log" 2>&1 &
  done
  for tool in memcheck racecheck initcheck synccheck; do
    wait -n || code=$?
  done
  tail -n 8 "$OUT"/{memcheck,racecheck,initcheck,synccheck}.log
  return $code
}

# The engine has the trainer's card, which is named twice: two processes that see it alone.
apart() {
  local card=${CUDA_VISIBLE_DEVICES:-0}
  CUDA_VISIBLE_DEVICES="${card%%,*},${card%%,*}" job apart model.dtype=bfloat16 rollout.placement=separate \
    sync.transport=nccl sync.cold_interval=3
}

# Random weights in the shape of Qwen2.5-1.5B: nearly every response runs to its last token. Then the prediction of the
# same job (`set`), and vLLM alone on its model.
large() {
  local shape="model_type=qwen2 vocab_size=151936 hidden_size=1536 intermediate_size=8960 num_hidden_layers=28
    num_attention_heads=12 num_key_value_heads=2 head_dim=128 max_position_embeddings=1024 tie_word_embeddings=true
    initializer_range=0.02" card
  # shellcheck disable=SC2086
  set -- $(printf 'model.from_scratch.%s ' $shape) model.dtype=bfloat16 rollout.placement=colocated \
    rollout.max_response_tokens=512 rollout.kv_cache_bytes=8589934592 rollout.max_num_seqs=128 \
    trainer.tasks_per_step=16 algorithm.group_size=8 trainer.updates_per_step=1 algorithm.kl.coef=0 \
    trainer.logits_bytes=1073741824 trainer.max_tokens_per_micro_batch=16384 trainer.keep_checkpoints=1
  STEPS_OF_JOB="trainer.steps=3 trainer.warm_start.steps=0" job large "$@" || return
  for card in h100 h200 b200 gb200 a100 l40s; do
    nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | grep -qiw "$card" && "$PYTHON" -m megarl plan \
      experiment=quickstart parallel=tp1 parallel.backend=nccl "run.dir=$OUT/runs/large" "$@" \
      --gpus-per-node 1 --gpu "$card" --lengths 512,512,512 --top 1
  done
  "$PYTHON" tools/bare_engine.py "$OUT/runs/large/model"
}

# job_in_eight_bits NAME SETTING OVERRIDES...
job_in_eight_bits() {
  local newest
  newest=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -V | tail -1)
  if [ "$2" = weight_dtype ] && [ -n "$newest" ] && [ "$(printf '%s\n' 8.9 "$newest" | sort -V | head -1)" != 8.9 ]; then
    echo "not run: vLLM multiplies in 8 bits from compute capability 8.9 on, this is $newest"
    return
  fi
  job "$1" model.dtype=bfloat16 rollout.placement=colocated "rollout.$2=fp8" algorithm.correction=truncate \
    sync.probe_tolerance=0.06 sync.sample_tolerance=0.1 "${@:3}"
}

# The quickstart's tokenizer with a mixture of experts, whose sizes are whole blocks of 8-bit numbers.
experts_in_eight_bits() {
  local model=$OUT/experts
  [ -d "$model" ] || "$PYTHON" - "$model" <<'PYTHON'
import json, os, shutil, sys
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from megarl.config.schema import FromScratchConfig
from megarl.learn.models.from_scratch import create

partial = Path(f"{sys.argv[1]}.partial")
shutil.rmtree(partial, ignore_errors=True)
prompt = "State the final answer to the following arithmetic problem: 1 + 2 ="
create(partial, FromScratchConfig(num_hidden_layers=2, max_position_embeddings=64), [prompt], seed=1)
dense = json.loads((partial / "config.json").read_text())
sizes = {name: value for name, value in dense.items() if name not in ("architectures", "model_type")}
moe = AutoConfig.for_model("qwen3_moe", **sizes, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=4)
AutoModelForCausalLM.from_config(moe).save_pretrained(partial)
os.rename(partial, sys.argv[1])
PYTHON
  [ -d "$model" ] && job_in_eight_bits eight_bit_experts weight_dtype "model.path=$model" model.from_scratch=null
}

export -f build sanitizer apart large job_in_eight_bits experts_in_eight_bits
tests_of_kernels=$(grep -rl "mark.gpu" tests/unit)
tests_of_learner=$(grep -rl "mark.gpu" tests/parallel)
# shellcheck disable=SC2086
{
  step build 240 "the extension compiles for this card" 0 build
  step kernels 150 "kernels give float64's numbers, the same bits in any company, equal digests on both devices" 1 \
    gpu_tests $tests_of_kernels
  step learner 150 "updates equal plain transformers on the CPU, TransformerEngine's layers the local ones" 1 \
    gpu_tests $tests_of_learner
  step attention 90 "packed attention in bfloat16 against float32" 0 "$PYTHON" benchmarks/gpu.py attention
  step update 150 "model FLOPs of an update against the card's" 0 \
    "$PYTHON" benchmarks/gpu.py update --profile "$OUT/profile.txt"
  step layers 150 "seconds and activations of Qwen2.5-7B's layers by recomputation, beside the estimate" 0 \
    "$PYTHON" benchmarks/gpu.py layers
  step speed 240 "kernels against the card's bandwidth and what one would use instead" 1 \
    "$PYTHON" benchmarks/kernels.py
  step sync 90 "rate of weights from one process to another, first and later, by host memory and CUDA IPC" 0 "$PYTHON" benchmarks/gpu.py sync
  step offload 60 "rate of a model's memory to registered host memory and back" 0 "$PYTHON" benchmarks/offload.py
  step sanitizer 150 "no bad access, race, read of what nobody wrote" 1 sanitizer
  step jobs 300 "SFT and DPO on the card; killed and resumed" 1 \
    "$PYTHON" benchmarks/gpu.py jobs --root "$OUT/jobs"
  step loop 300 "the whole loop with vLLM on this card, engines asleep between, every sync proven" 1 \
    job loop model.dtype=bfloat16 rollout.placement=colocated
  step exact 300 "the same in float32: engine and trainer differ by rounding" 1 \
    job exact model.dtype=float32 rollout.placement=colocated
  step apart 300 "weights by CUDA IPC, an engine with captured graphs against one that begins with the weights" 1 apart
  step large 600 "the loop at Qwen2.5-1.5B's shape beside its prediction and vLLM alone" 1 large
  step eight_bits 300 "weights of an engine in 8 bits, every sync proven" 1 \
    job_in_eight_bits eight_bits weight_dtype
  step eight_bit_experts 300 "the same of a mixture of experts, whose blocks vLLM's CUDA kernels take" 1 \
    experts_in_eight_bits
  step eight_bit_cache 300 "an engine's KV cache in 8 bits" 1 job_in_eight_bits eight_bit_cache kv_cache_dtype
}
echo "first_gpu: $failed steps failed; outputs in $OUT"
exit $failed
