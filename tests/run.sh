#!/usr/bin/env bash
# Run the tests: makes the environment it needs, runs all that this machine can run, and names what it skips and why.
#
#   tests/run.sh                    everything
#   tests/run.sh --quick            what takes about two minutes together, without the kernels
#   tests/run.sh --slow             only the rest
#   tests/run.sh --stack torch2.2   the tests of the pinned stack, in an environment of its own (.venv-torch2.2)
#
# Further words go to pytest, as in tests/run.sh tests/model -k tied. Larger than by default, as environment variables:
# KILLS=60 KILL_STORMS=3 SIMULATE=all KERNEL_GATES=all STORM_ROUNDS=200 FROZEN_STORM=all FUZZ_ROUNDS=2000;
# HYPOTHESIS_PROFILE=random draws anew.
set -euo pipefail
cd "$(dirname "$0")/.."

stack=cpu venv=.venv
# Four tests at a time also on two cores, since many mostly wait; not among the quick ones, which compute.
workers=4 selection=()
while [ $# -gt 0 ]; do
    case $1 in
    --quick) # names those that should be slow
        workers=2 selection=(-m "not slow" --loadscope-reorder --durations=10 --durations-min=3) ;;
    --slow) selection=(-m slow) ;;
    --stack) stack=${2:?--stack needs a name}; shift ;;
    --stack=*) stack=${1#*=} ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
    *) break ;;
    esac
    shift
done
case $stack in
cpu) ;;
torch2.2) venv=.venv-torch2.2 selection=(-m torch22) ;;
*) echo "error: there are tests for the stacks cpu and torch2.2, not for '$stack'" >&2; exit 2 ;;
esac

VENV=$venv ./0.create_env.sh --stack "$stack" --dev
# Else each of a thousand processes compiles all of torch that it imports, which takes longer than the import:
unset PYTHONDONTWRITEBYTECODE
"$venv/bin/python" -m compileall -q mamba_fsdp config
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # spinning threads of many processes on few cores slow each other down
export MAMBA_FSDP_TEST_STACK=$stack
# The tests of one file one after the other, and the files in the order of tests/conftest.py.
pytest=("$venv/bin/python" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder --durations=25)
pytest+=(--durations-min=1 "${selection[@]}")

# The kernels in a second call, beside a Triton that interprets them, once: it compiles them by the pinned stack's
# Triton too. Which of the words belong to which call:
words=() kernels=() paths=0
for word in "$@"; do
    case $word in
    tests/kernels*) paths=1 kernels+=("$word") ;;
    tests | tests/) ;;
    tests/*) paths=1 words+=("$word") ;;
    *) words+=("$word") kernels+=("$word") ;;
    esac
done
chosen() { case " $* " in *" tests/"*) return 0 ;; *) return 1 ;; esac; } # whether paths are among the words
status=5 # pytest's own for: no tests
if [ $paths = 0 ] || chosen "${words[@]}"; then
    status=0
    "${pytest[@]}" "${words[@]}" || status=$?
fi
[ $paths = 1 ] || kernels=(tests/kernels "${kernels[@]}")
if [ $status != 2 ] && [ "$stack" = cpu ] && chosen "${kernels[@]}"; then
    if triton=$("$venv/bin/python" -m benchmarks.kernels.install); then
        second=0
        PYTHONPATH=$triton${PYTHONPATH:+:$PYTHONPATH} TRITON_INTERPRET=1 "${pytest[@]}" "${kernels[@]}" || second=$?
        if [ $status = 0 ] || [ $status = 5 ]; then [ $status$second = 05 ] || status=$second; fi
    else
        echo "the tests of the kernels are skipped: see the error above" >&2
    fi
fi
exit $status
