#!/usr/bin/env bash
# Install megarl for GPUs, with vLLM and TransformerEngine, into an active virtual environment (docs/install_gpu.md).
#
#   tools/install_gpu.sh
#
# Needs nvcc 13.0, a C++20 compiler and Python 3.11, 3.12 or 3.13 with its headers. MAX_JOBS (default 4): compiler
# processes beside each other, 1.3 GB of memory each.
set -euo pipefail
cd "$(dirname "$0")/.."
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} MAX_JOBS=${MAX_JOBS:-4}
export PATH=$CUDA_HOME/bin:$PATH

# Wheels, in one resolution; megarl's own kernels are compiled by nvcc.
python -m pip install -e '.[gpu,te,dev]' setuptools wheel ninja cmake scikit-build-core pybind11

# The half of TransformerEngine that has no wheel, compiled against the torch of the line above. Its headers of maths
# libraries are those of torch's wheels. Its metadata names packages of CUDA 12, hence --no-deps.
S=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
export CPLUS_INCLUDE_PATH=$S/nvidia/cudnn/include:$S/nvidia/nccl/include:$S/nvidia/cu13/include
python -m pip install --no-deps --no-build-isolation "transformer-engine-torch==2.11.0"

python -c "import transformer_engine.pytorch"
