#!/usr/bin/env bash
# The benchmarks of benchmarks/ on a node of this cluster; results go to stdout.
#   sbatch slurm/bench.sh kernels.py        (a script of benchmarks/ and its arguments)
#SBATCH --job-name=megarl-bench
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.log
source "${MEGARL_HOME:-$SLURM_SUBMIT_DIR}/slurm/common.sh"
srun "${srun_options[@]}" "${launch[@]}" python "benchmarks/${1:-loop.py}" "${@:2}"
