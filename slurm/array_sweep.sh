#!/bin/bash
#SBATCH --job-name=megarl-sweep
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%A_%a.out
# A sweep as a job array: one combination of `megarl train -m` for each task.
#
#   slurm/array_sweep.sh experiment=quickstart run.name=lr trainer.optimizer.lr=1e-5,5e-5 algorithm=grpo,rloo
#
# counts the combinations (all of their settings are validated by that) and submits this file as an array. Repeat it to resume: tasks of
# finished runs end at once. Under `sbatch` without --array it runs them all in one job, one after another.
#
#   MEGARL        the command (default: megarl)
#   SETUP         a file to source first: modules, a virtual environment
#   SBATCH_ARGS   more options of sbatch, e.g. "--partition=gpu --gpus-per-node=8 --time=4:00:00"
#   PARALLEL      tasks that run at a time (default: as many as Slurm lets)
set -euo pipefail

if [[ -n "${SETUP:-}" ]]; then
  # shellcheck disable=SC1090
  source "$SETUP"
fi
megarl="${MEGARL:-megarl}"

if [[ -z "${SLURM_JOB_ID:-}" ]]; then
  count="$("$megarl" train -m --count "$@")"
  read -r -a options <<<"${SBATCH_ARGS:-}"
  exec sbatch --array="0-$((count - 1))${PARALLEL:+%$PARALLEL}" ${options[@]+"${options[@]}"} "$0" "$@"
fi

# exec: Slurm's TERM before the time limit (--signal=B) then reaches megarl, which saves a checkpoint.
if [[ -n "${SLURM_ARRAY_TASK_ID:-}" ]]; then
  exec "$megarl" train -m --index "$SLURM_ARRAY_TASK_ID" "$@"
fi
exec "$megarl" train -m "$@"
