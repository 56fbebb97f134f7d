#!/usr/bin/env bash
# PPO: GRPO's job with a critic.
#   sbatch slurm/train_ppo.sh experiment=quickstart trainer.steps=100     (arguments are hydra overrides; docs/cluster.md)
#   sbatch --dependency=singleton slurm/train_ppo.sh ...                   (a chain: each job goes on where the one before ended)
#SBATCH --job-name=megarl-ppo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
source "${MEGARL_HOME:-$SLURM_SUBMIT_DIR}/slurm/common.sh"
megarl_train algorithm=ppo store=postgres cluster.restarts=3 run.shutdown_grace_s=150 -- "$@"
