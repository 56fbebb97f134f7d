#!/usr/bin/env bash
# GRPO with the trainer and the engines on nodes of their own: a heterogeneous job of two components.
#   sbatch slurm/train_hetjob.sh experiment=quickstart rollout.replicas=2     (arguments are hydra overrides; docs/cluster.md)
#SBATCH --job-name=megarl-hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=TERM@180
source "${MEGARL_HOME:-$SLURM_SUBMIT_DIR}/slurm/common.sh"
megarl_train store=postgres cluster.restarts=3 run.shutdown_grace_s=150 -- "$@"
