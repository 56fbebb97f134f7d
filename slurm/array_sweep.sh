#!/usr/bin/env bash
# A sweep as a job array: each task runs one combination of `megarl train -m` (docs/sweeps.md).
#   slurm/array_sweep.sh experiment=quickstart run.name=lr trainer.optimizer.lr=1e-5,5e-5 algorithm=grpo,rloo
# run by hand counts the combinations, which validates the settings of all, and submits this file as an array.
# SBATCH_ARGS has more options of sbatch ("--nodes=2 --gpus-per-node=8"), PARALLEL how many tasks run at a time.
# Repeat it to resume: tasks of finished runs end at once. On several nodes the default is store=postgres.
# Under sbatch without --array one job runs all of them, one after another, on one node.
#SBATCH --job-name=megarl-sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.log
if [ -z "${SLURM_JOB_ID:-}" ]; then
  set -euo pipefail
  count=$(megarl train -m --count "$@")
  read -r -a options <<<"${SBATCH_ARGS:-}"
  exec sbatch --array="0-$((count - 1))${PARALLEL:+%$PARALLEL}" "${options[@]}" "$0" "$@"
fi
# shellcheck source=slurm/common.sh
source "${MEGARL_HOME:-$SLURM_SUBMIT_DIR}/slurm/common.sh"
defaults=()
[ "${SLURM_JOB_NUM_NODES:-1}" = 1 ] || defaults=(store=postgres)
megarl_train "${defaults[@]}" -- -m ${SLURM_ARRAY_TASK_ID:+--index "$SLURM_ARRAY_TASK_ID"} "$@"
