#!/usr/bin/env bash
# Build causal-conv1d and mamba-ssm for Hopper GPUs (sm_90) from carried files, on a machine without network.
#
#   benchmarks/gpu_setup.sh SDISTS TARGET
#   PYTHONPATH=TARGET python -m benchmarks.gpu
#
# The machine has nvcc and PyTorch; PYTHON names its interpreter (default: python3). It takes about five minutes on 16
# cores. SDISTS holds the two sdists, and wheels of what else that Python lacks. To fill it on a machine with network
# and PyTorch (for --python-version give the other machine's):
#
#   export CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE
#   pip download -d SDISTS --no-deps --no-build-isolation --no-binary=:all: causal-conv1d==1.7.0 mamba-ssm==2.3.1
#   pip download -d SDISTS --only-binary=:all: --python-version=3.12 transformers einops ninja
set -euo pipefail

if [ $# -ne 2 ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0" >&2
    exit 2
fi
sdists=$1 target=$2
packages=(causal_conv1d-1.7.0 mamba_ssm-2.3.1)
for package in "${packages[@]}"; do
    if [ ! -f "$sdists/$package.tar.gz" ]; then
        echo "error: $sdists holds no $package.tar.gz; the head of this script says how to get it" >&2
        exit 2
    fi
done
mkdir -p "$target"
sdists=$(realpath "$sdists") target=$(realpath "$target") python=${PYTHON:-python3}
pip=("$python" -m pip --disable-pip-version-check)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

shopt -s nullglob
carried=("$sdists"/*.whl)
if [ ${#carried[@]} -gt 0 ]; then
    "${pip[@]}" install --quiet --no-index --no-deps --upgrade --target "$target" "${carried[@]}"
fi
export PYTHONPATH=$target${PYTHONPATH:+:$PYTHONPATH} PATH=$target/bin:$PATH
export CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE MAX_JOBS=$((($(nproc) + 1) / 2))

# Both list up to nine architectures to compile for, whatever TORCH_CUDA_ARCH_LIST says: cut them to one.
anchor='# HACK: The compiler flag'
builds=()
for package in "${packages[@]}"; do
    tar -xzf "$sdists/$package.tar.gz" -C "$build"
    setup=$build/$package/setup.py
    sed -i "/$anchor/i\\    cc_flag = [\"-gencode\", \"arch=compute_90,code=sm_90\"]" "$setup"
    if ! grep -q 'cc_flag = \["-gencode", "arch=compute_90' "$setup"; then
        echo "error: $package's setup.py has no line '$anchor' to set the architecture before" >&2
        exit 1
    fi
    "${pip[@]}" wheel --no-index --no-build-isolation --no-deps --wheel-dir "$build/wheels" "$build/$package" \
        >"$build/$package.log" 2>&1 &
    builds+=($!)
done
for i in "${!packages[@]}"; do
    if ! wait "${builds[i]}"; then
        tail -n 40 "$build/${packages[i]}.log" >&2
        echo "error: ${packages[i]} could not be built; the end of its log stands above" >&2
        kill "${builds[@]}" 2>/dev/null || true
        exit 1
    fi
done
"${pip[@]}" install --quiet --no-index --no-deps --upgrade --target "$target" "$build"/wheels/*.whl
echo "built ${packages[*]}; use them with PYTHONPATH=$target"
