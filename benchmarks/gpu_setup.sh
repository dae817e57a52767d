#!/usr/bin/env bash
# Build causal-conv1d and mamba-ssm for Hopper GPUs (sm_90) from carried files, on a machine without network.
#
#   benchmarks/gpu_setup.sh SDISTS TARGET
#   PYTHONPATH=TARGET python -m benchmarks.gpu --call 1
#
# Without them the same command measures all but the forms that need these libraries.
#
# The machine has nvcc and PyTorch; PYTHON names its interpreter (default: python3). It takes a quarter of an hour on two
# cores, and no GPU: TARGET, from a machine with the same Python, PyTorch and CUDA, can be carried to one that is lent.
# SDISTS holds the two sdists, and wheels of what else that Python lacks; without fire no run starts, without xdist tests
# compile one by one.
# To fill it on a machine with network and PyTorch (for --python-version give the other machine's):
#
#   export CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE
#   pip download -d SDISTS --no-deps --no-build-isolation --no-binary=:all: causal-conv1d==1.7.0 mamba-ssm==2.3.1
#   pip download -d SDISTS --no-deps --only-binary=:all: --python-version=3.12 fire termcolor xxhash pyyaml einops \
#       ninja wheel==0.45.1 setuptools packaging pytest pytest-xdist execnet pluggy iniconfig pygments
set -euo pipefail

if [ $# -ne 2 ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0" >&2
    exit 2
fi
mkdir -p "$2"
sdists=$(realpath "$1") target=$(realpath "$2") python=${PYTHON:-python3}
pip=("$python" -m pip --disable-pip-version-check)
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

shopt -s nullglob
carried=("$sdists"/*.whl)
if [ ${#carried[@]} -gt 0 ]; then
    "${pip[@]}" install --quiet --no-index --no-deps --upgrade --target "$target" "${carried[@]}"
fi
export PYTHONPATH=$target${PYTHONPATH:+:$PYTHONPATH} PATH=$target/bin:$PATH
CUDA_ARCHITECTURES=9.0 PYTHON=$python "$(dirname "$0")/../requirements/build_kernels.sh" current "$wheels" "$sdists"
"${pip[@]}" install --quiet --no-index --no-deps --upgrade --target "$target" "$wheels"/*.whl
echo "use them with PYTHONPATH=$target"
