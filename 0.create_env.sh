#!/usr/bin/env bash
# Makes .venv, the Python environment for training without a container.
#
#   ./0.create_env.sh [--stack cpu|current|torch2.2] [--dev]
#
#   cpu       the newest torch without CUDA, for laptops         (about 1.3 GB)
#   current   the newest torch with CUDA, for NVIDIA GPUs        (about 8 GB)
#   torch2.2  the stack of the default image: torch 2.2.2, cu121 (about 7 GB)
#   --dev     installs the packages that the tests need, too
#
# The environment contains the command .venv/bin/mamba-fsdp and the package mamba_fsdp; both work from any folder.
# Without --stack, this script chooses current or torch2.2, whichever fits the NVIDIA driver, or cpu if there is no driver.
# If nothing has changed since the last call, the script exits at once. PYTHON=... selects the interpreter, and VENV=...
# another folder than .venv. INSTALL_KERNELS=1 adds the compiled CUDA kernels of mamba-ssm and causal-conv1d, for
# comparisons with the kernels of this project.
set -euo pipefail
cd "$(dirname "$0")"
unset PYTHONHOME PYTHONPATH # on clusters, module files can set these variables for another Python

VENV=${VENV:-.venv}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

fail() { # MESSAGE ADVICE: prints what is wrong and what to do, and exits
    echo "error: $1" >&2
    echo "       $2" >&2
    exit 1
}

has_driver() { [ -e /proc/driver/nvidia/version ] || nvidia-smi >/dev/null 2>&1; }

driver_cuda() { # prints the newest CUDA version that the driver supports, such as 12.4; nothing if nvidia-smi does not show it
    nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Z ]*Version: *\([0-9]*\.[0-9]*\).*/\1/p' | head -n 1 || true
}

cuda_of() { # STACK: prints the major version of the stack's CUDA. A driver that supports this major version can run the stack
    sed -n 's/^nvidia-cuda-runtime[^=]*==\([0-9]*\).*/\1/p' "requirements/$1.txt"
}

fits() { # STACK: succeeds if the driver and the GPUs can run the stack
    local capabilities needed
    needed=$(cuda_of "$1")
    if [ "$1" = torch2.2 ]; then # torch 2.2 has no code for Blackwell GPUs, and no CUDA packages for Arm
        capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true)
        [ "$(uname -m)" = x86_64 ] && ! grep -q '^1[0-9]\.' <<< "$capabilities" || return 1
    fi
    [ -z "$cuda" ] || [ "${cuda%%.*}" -ge "${needed:-0}" ]
}

fitting_stack() {
    if fits current; then echo current; elif fits torch2.2; then echo torch2.2; fi
}

choose_stack() { # sets $stack to one that fits this machine; if the user has chosen one, only warns if it does not fit
    local cuda fitting
    if [ "$stack" = cpu ] || ! has_driver; then
        stack=${stack:-cpu}
        return
    fi
    cuda=$(driver_cuda)
    fitting=$(fitting_stack)
    if [ -z "$stack" ]; then
        [ -n "$fitting" ] || fail "the NVIDIA driver runs CUDA $cuda, which is too old for this GPU's stacks" \
            "update the driver (docs/image.md says to which), or choose --stack cpu"
        stack=$fitting
    elif [ -e "requirements/$stack.txt" ] && ! fits "$stack"; then
        echo "warning: the $stack stack does not fit the GPUs and their driver, which runs CUDA $cuda;" \
            "$([ -n "$fitting" ] && echo "--stack $fitting does" || echo "update the driver")" >&2
    fi
}

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; }

parse_arguments() {
    stack='' dev=0
    while [ $# -gt 0 ]; do
        case $1 in
        --stack) stack=${2:-}; shift ;;
        --stack=*) stack=${1#*=} ;;
        --dev) dev=1 ;;
        -h | --help) usage; exit 0 ;;
        *) fail "unknown argument $1" "see ./0.create_env.sh --help" ;;
        esac
        shift
    done
    choose_stack
    case $stack in
    cpu) needed_gb=3 ;;
    current) needed_gb=12 ;;
    torch2.2) needed_gb=10 ;;
    *) fail "there is no stack '$stack'" "choose cpu, current or torch2.2" ;;
    esac
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 python3.13}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            python=$candidate
            return
        fi
    done
    local looked_for=${PYTHON:-python3 and python3.10 to 3.13}
    fail "no Python 3.10 or newer with its venv module was found (looked for $looked_for)" \
        "install one (on Debian: apt-get install python3-venv) or name it: PYTHON=/path/to/python3 ./0.create_env.sh"
}

check_space() {
    local free_kb
    free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
    [ "$free_kb" -ge $((needed_gb * 1000 * 1000)) ] ||
        fail "$((free_kb / 1000000)) GB free in $PWD, the $stack stack needs $needed_gb GB while it installs" \
            "free some space, or VENV=/other/disk/venv"
}

install() { # FILE [PIP_ARGUMENT ...]: installs a requirements file. Without --no-compile, pip compiles unused files too
    PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip install --progress-bar=off --disable-pip-version-check --no-input \
        --no-compile "${@:2}" -r "$1" 2>&1 | tee -a "$log" | show_progress
}

live() { # TEXT: on a terminal, prints a line that the next call replaces
    local width
    [ -t 1 ] && [ "${TERM:-dumb}" != dumb ] || return 0
    width=$(($(tput cols 2>/dev/null || echo 80) - 1))
    printf '\r%-*.*s\r' "$width" "$width" "$1"
}

installed() { compgen -G "$VENV/lib/python*/site-packages/*.dist-info" | wc -l || true; }

show_progress() { # shows pip's progress as one live line on a terminal; elsewhere only the number of packages
    local line commas code before=0 packages=0 count=0
    while :; do
        code=0
        IFS= read -r -t 1 line || code=$?
        if [ "$code" -gt 128 ]; then # a second without output: pip is silent while it installs
            [ "$packages" = 0 ] || live "  $(($(installed) - before)) of $packages"
            continue
        fi
        [ "$code" = 0 ] || break
        case $line in
        Collecting\ * | Processing\ *) count=$((count + 1)) ;;
        *Downloading\ *) ;; # the line contains the name of a file and its size
        Installing\ *)
            commas=${line//[^,]/}
            packages=$((${#commas} + 1))
            before=$(installed)
            live ''
            echo "  installing $packages packages"
            continue
            ;;
        *) continue ;;
        esac
        line=${line%% (from *}
        line=${line#*ing }
        live "  $count: ${line##*/}" # the name of the package or of its file
    done
    live ''
}

explain_failure() { # FILE: prints why pip could not install this requirements file, and exits
    local reason offline='temporary failure|name or service|failed to establish|timed out|from versions: none'
    offline+='|connection (refused|reset|broken|error)'
    reason=$(grep -iE '^ *(error|fatal)|no space left|temporary failure|name or service|connection' "$log" |
        tail -n 1 | cut -c1-300 || true)
    if grep -qiE 'no space left' "$log"; then
        fail "the disk filled up while installing $1" "free some space and run this again (log: $log)"
    fi
    if grep -qiE "$offline" "$log"; then
        fail "no network: pip could not reach its package index, or the index lacks a package that is needed" \
            "check the connection or pip's proxy and index settings, then run this again (log: $log)"
    fi
    fail "pip could not install $1: ${reason:-see the log}" \
        "see $log; another Python may help: PYTHON=python3.11 ./0.create_env.sh"
}

install_stack() {
    # Try the configured index and local wheels first. Use torch's own index only for its CPU build, and only if the
    # configured index lacks it.
    install "requirements/$stack.txt" && return
    if [ "$stack" = cpu ] && grep -q 'No matching distribution found for torch' "$log"; then
        echo "  torch's CPU build: from $TORCH_CPU_INDEX"
        install "requirements/$stack.txt" --extra-index-url "$TORCH_CPU_INDEX" && return
    fi
    explain_failure "requirements/$stack.txt"
}

# Installs mamba-ssm's and causal-conv1d's CUDA kernels, as their projects publish them.
install_kernels() {
    local list=requirements/kernels-$stack.txt
    [ -e "$list" ] || fail "INSTALL_KERNELS=1: there are no compiled kernels for the $stack stack" \
        "choose --stack current or torch2.2, or leave it out"
    if nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | grep -q B300; then # nvcc 13 generates wrong code for this GPU
        echo "  without mamba-ssm and causal-conv1d: their compiled wheels give wrong results on B300; the image builds its own"
        return 0
    fi
    install "$list" --no-deps || explain_failure "$list"
}

# Lets many ranks share Triton's cache; see patches/rank0_cache.py. The cpu stack has no Triton.
patch_triton() {
    [ "$stack" = cpu ] || "$VENV/bin/python" patches/apply.py >>"$log" ||
        fail "Triton could not be patched" "see the lines above and $log"
}

# Makes `import mamba_fsdp` and the command mamba-fsdp work from any folder, with the files of this checkout.
install_project() {
    local wanted
    wanted=$(pwd -P && sha256sum < pyproject.toml) # the project folder can have been moved
    [ ! -L "$VENV" ] && [ -w "$VENV/bin" ] || return 0 # the environment belongs to another checkout
    [ "$(cat "$VENV/.complete-project" 2>/dev/null)" != "$wanted" ] || return 0
    log=$VENV/install-project.log
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --no-build-isolation \
        --editable . >"$log" 2>&1 || fail "pip could not install this project into $VENV" "see $log"
    echo "$wanted" > "$VENV/.complete-project"
}

stamp() { # prints two lines: the stack, and a hash of its requirements
    echo "$stack"
    sha256sum < "requirements/$stack.txt" | cut -d' ' -f1
}

parse_arguments "$@"
dev_stamp=$(sha256sum < requirements/dev.txt)
if [ "$(cat "$VENV/.complete" 2>/dev/null)" = "$(stamp)" ]; then
    echo "$VENV is complete: stack $stack"
else
    echo "making $VENV for the $stack stack (some minutes the first time)"
    find_python
    check_space
    live "  an environment of $("$python" --version)"
    rm -rf "$VENV" # its stamp does not match: it is incomplete, out of date, or has another stack
    "$python" -m venv "$VENV" || fail "$python could not make $VENV" "look at the lines above; is the folder writable?"
    log=$VENV/install.log
    install_stack
    patch_triton
    stamp > "$VENV/.complete.part"
    mv "$VENV/.complete.part" "$VENV/.complete"
    echo "$VENV is complete: stack $stack"
fi
install_project
if [ "${INSTALL_KERNELS:-0}" = 1 ] && [ ! -e "$VENV/.complete-kernels" ]; then
    echo "adding mamba-ssm's and causal-conv1d's kernels"
    log=$VENV/install-kernels.log
    install_kernels
    touch "$VENV/.complete-kernels"
fi
if [ $dev = 1 ] && [ "$(cat "$VENV/.complete-dev" 2>/dev/null)" != "$dev_stamp" ]; then
    echo "adding what the tests need"
    log=$VENV/install-dev.log
    install requirements/dev.txt || explain_failure requirements/dev.txt
    echo "$dev_stamp" > "$VENV/.complete-dev"
fi
