#!/usr/bin/env bash
# Compile causal-conv1d and mamba-ssm for the GPUs that are wanted, and no others, into wheels.
#
#   requirements/build_kernels.sh STACK WHEELS [ARCHIVES]
#
#   STACK       torch2.2 or current; the versions are those that kernels-STACK.txt names
#   WHEELS      the folder to write the wheels to
#   ARCHIVES    a folder with the two source archives (NAME-VERSION.tar.gz), for machines without network;
#               without it the versions' git tags are fetched
#
# CUDA_ARCHITECTURES holds the compute capabilities; if not set, "8.0 8.6 8.9 9.0" (A100; A10G; L4 and L40S; H100 and
# H200), and for the current stack "10.0 12.0" too (B200, B300 and their Grace kin; RTX PRO 6000). Code for 10.0 runs on
# B300 (10.3), for which nvcc 13 makes causal-conv1d wrong. MAX_JOBS limits the files compiled at a time,
# each for four of these at once, which takes up to 6 GB of memory. PYTHON names an interpreter with the stack's PyTorch,
# ninja and wheel. Needs nvcc, a C++ compiler and git; takes about an hour on two cores.
set -euo pipefail

stack=${1:-} wheels=${2:-} archives=${3:-}
list=$(dirname "$0")/kernels-$stack.txt
if [ -z "$wheels" ] || [ ! -f "$list" ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0" >&2
    exit 2
fi
python=${PYTHON:-python3}
architectures=(8.0 8.6 8.9 9.0)
[ "$stack" != current ] || architectures+=(10.0 12.0)
[ -z "${CUDA_ARCHITECTURES:-}" ] || read -ra architectures <<<"$CUDA_ARCHITECTURES"
at_a_time=$((${#architectures[@]} < 4 ? ${#architectures[@]} : 4)) # their setup.py gives nvcc four threads
export TORCH_CUDA_ARCH_LIST=${architectures[*]} MAX_JOBS=${MAX_JOBS:-$((($(nproc) + at_a_time - 1) / at_a_time))}
export CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE # else their setup.py downloads a wheel

fail() { # what is wrong, what to do
    echo "error: $1" >&2
    echo "       $2" >&2
    exit 1
}

fetch() { # name, repository, version -> sources in $build/$name
    if [ -n "$archives" ]; then
        local archive=$archives/${1//-/_}-$3.tar.gz
        [ -f "$archive" ] || fail "there is no $archive" "get it with pip download --no-deps --no-binary=:all: $1==$3"
        mkdir "$build/$1"
        tar -xzf "$archive" -C "$build/$1" --strip-components=1
    else
        git clone --quiet --depth 1 --branch "v$3" "https://github.com/$2" "$build/$1" 2>"$build/log" ||
            fail "$1 v$3 could not be fetched: $(tail -n 1 "$build/log")" "check the network, or give a folder with its archive"
    fi
}

# setup.py lists up to nine architectures of its own, and TORCH_CUDA_ARCH_LIST counts only where nothing is listed.
restrict_architectures() { # name
    local setup=$build/$1/setup.py anchor='^    # HACK: The compiler flag'
    grep -q "$anchor" "$setup" ||
        fail "$1's setup.py has no line like '$anchor'" "look where it has set cc_flag, and mend requirements/build_kernels.sh"
    sed -i "/$anchor/i\\    cc_flag = []" "$setup"
}

compile() { # name, version
    local architecture number
    "$python" -m pip --disable-pip-version-check wheel -v --no-index --no-build-isolation --no-deps \
        --wheel-dir "$wheels" "$build/$1" >"$build/log" 2>&1 || {
        { grep -iE '(error|killed)\b' "$build/log" || tail "$build/log"; } | head -n 10 >&2
        fail "$1 $2 could not be compiled: see the lines above" "killed means out of memory: MAX_JOBS=1 needs the least"
    }
    for architecture in "${architectures[@]}"; do # ptxas names each that it makes code for
        number=${architecture%+PTX} number=${number/./}
        grep -q "for 'sm_$number'" "$build/log" ||
            fail "$1 $2 was compiled without code for sm_$number" "look at its setup.py and at CUDA_ARCHITECTURES"
    done
}

PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v nvcc >/dev/null ||
    fail "there is no nvcc on PATH nor in ${CUDA_HOME:-/usr/local/cuda}" "install the CUDA toolkit, or name its folder: CUDA_HOME"
mkdir -p "$wheels"
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
# A line of the list: NAME @ https://github.com/OWNER/REPOSITORY/releases/download/vVERSION/...
sed -nE 's#^(\S+) @ https://github.com/([^/]+/[^/]+)/releases/download/v([^/]+)/.*#\1 \2 \3#p' "$list" | sort -u >"$build/list"
while read -r name repository version; do
    echo "compiling $name $version for compute capability $TORCH_CUDA_ARCH_LIST"
    fetch "$name" "$repository" "$version"
    restrict_architectures "$name"
    compile "$name" "$version"
done <"$build/list"
