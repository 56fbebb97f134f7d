#!/usr/bin/env bash
# What to run on a machine with two GPUs and vLLM, after tools/first_gpu.sh: about half an hour, without a network.
#
#   tools/two_gpus.sh [STEP...]
#
# Each step is a job or tests whose own proofs decide: digests, addresses and log-probs after every sync, the step's own
# samples, and an engine that begins with the weights. PYTHON, OUT (default runs/two_gpus) and exit code are those of
# tools/first_gpu.sh. Without two GPUs each step says what it would prove.
OUT=${OUT:-runs/two_gpus}
STEPS=${*:-tests loop graphs eager sockets nccl ipc sleep destroy keep}
. "$(dirname "$0")/gpu_steps.sh"

# Steps that differ in transport alone print the same numbers where bits agree: the seed is one.
together="model.dtype=bfloat16 rollout.placement=colocated"
apart="model.dtype=bfloat16 rollout.placement=separate"
{
  step tests 600 "updates on two ranks equal plain transformers; slices over NCCL and CUDA IPC arrive whole" 2 \
    gpu_tests tests/parallel tests/unit
  step loop 300 "rollout and update on a GPU each; every sync proven" 2 job loop $apart
  step graphs 400 "captured graphs read the new weights: an engine that begins with them decodes alike" 2 \
    job graphs $apart sync.cold_interval=2
  step eager 300 "the same without captured graphs, whose log-probs are to be as near" 2 \
    job eager $apart rollout.enforce_eager=true
  step sockets 300 "weights through host memory over sockets" 2 job sockets $apart sync.shared_memory=false
  step nccl 300 "weights over NCCL" 2 job nccl $apart sync.transport=nccl sync.shared_memory=false
  step ipc 300 "weights through the GPU's memory by CUDA IPC" 2 job ipc $apart sync.transport=nccl
  step sleep 400 "engines that sleep on the trainer's GPUs wake with new weights; TP2 on both sides" 2 \
    job sleep $together rollout.tp=2 parallel.tp=2 rollout.offload=sleep
  step destroy 500 "the same with engines that end and are started" 2 \
    job destroy $together rollout.tp=2 parallel.tp=2 rollout.offload=destroy
  step keep 300 "requests under way go on with new weights" 2 \
    job keep $apart sync.pause=keep sync.max_staleness=1 sync.order=completion
}
echo "two_gpus: $failed steps failed; outputs in $OUT"
exit $failed
