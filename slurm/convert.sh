#!/usr/bin/env bash
# A checkpoint from one format or grid to another (docs/checkpoints.md); a stream, one node is enough.
#   sbatch slurm/convert.sh hf-to-megatron --help        (arguments of `megarl convert`)
#SBATCH --job-name=megarl-convert
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
source "${MEGARL_HOME:-$SLURM_SUBMIT_DIR}/slurm/common.sh"
megarl_srun convert "$@"
