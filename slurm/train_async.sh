#!/usr/bin/env bash
# A run as separate jobs: its store, EXPLORE jobs with engines and an explorer each, and the trainer (docs/modes.md).
#   EXPLORE=2 slurm/train_async.sh experiment=quickstart run.name=split trainer.steps=100
# run by hand submits all of them; arguments are hydra overrides, run.name or run.dir among them. Each job is queued
# again by itself, in any order. When the trainer has finished, all of them end.
# SBATCH_ARGS has more options of sbatch for all jobs, TRAIN_ARGS, EXPLORE_ARGS and STORE_ARGS for those of one kind.
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
if [ -z "${SLURM_JOB_ID:-}" ]; then
  set -euo pipefail
  case " $* " in
    *" run.name="* | *" run.dir="*) ;;
    *) echo "give run.name or run.dir: the jobs of a run meet in its directory" >&2; exit 2 ;;
  esac
  read -r -a all <<<"${SBATCH_ARGS:-}"
  # The database needs little: a part of a node, unless STORE_ARGS has it otherwise.
  STORE_ARGS="--oversubscribe --cpus-per-task=2 --mem=4G ${STORE_ARGS:-}"
  # submit KIND NAME ARGUMENT...: one job; KIND_ARGS are its own options.
  submit() {
    local kind=$1 name=$2 own=${1^^}_ARGS options
    read -r -a options <<<"${!own:-}"
    shift 2
    MEGARL_PART=$kind sbatch --job-name="$name" "${all[@]}" "${options[@]}" "$0" "$@"
  }
  submit store megarl-store "$@"
  for ((number = 0; number < ${EXPLORE:-1}; number++)); do
    submit explore "megarl-explore-$number" --number "$number" "$@"
  done
  submit train megarl-train "$@"
  exit
fi
given=${MEGARL_JOB_KEY:-}
# shellcheck source=slurm/common.sh
source "${MEGARL_HOME:-$SLURM_SUBMIT_DIR}/slurm/common.sh"
# The jobs of a run share the key in its directory, unless one is given to all.
[ -n "$given" ] || unset MEGARL_JOB_KEY
# The others reach this job at the address of its first node.
defaults=(store=postgres "run.host=$MEGARL_HEAD")
case $MEGARL_PART in
  store) megarl_command store "${defaults[@]}" -- "$@" ;;
  explore) megarl_command explore "${defaults[@]}" cluster.restarts=3 run.shutdown_grace_s=150 -- "$@" ;;
  train) megarl_command train "${defaults[@]}" run.mode=train cluster.restarts=3 run.shutdown_grace_s=150 -- "$@" ;;
  *) echo "MEGARL_PART=$MEGARL_PART: store, explore or train; run this script by hand to submit all" >&2; exit 2 ;;
esac
