#!/usr/bin/env bash
# Run the tests: makes the environment it needs, runs all that this machine can run, and ends with how many passed, failed
# and were skipped, and why.
#
#   tests/run.sh                    everything
#   tests/run.sh --quick            what takes 90 seconds together on two quiet cores
#   tests/run.sh --slow             only the rest
#   tests/run.sh --stack torch2.2   the tests of the pinned stack, in an environment of its own (.venv-torch2.2)
#
# Further words go to pytest, as in tests/run.sh tests/model -k tied. Larger than by default, as environment variables:
# KILLS=60 KILL_STORMS=3 KERNEL_GATES=all STORM_ROUNDS=200 FROZEN_STORM=all FUZZ_ROUNDS=2000;
# HYPOTHESIS_PROFILE=random draws anew. With TEST_RECORDS=FOLDER the counts are left there, and .ci/run sums them up.
set -euo pipefail
cd "$(dirname "$0")/.."

stack=cpu venv=.venv
# Four tests at a time also on two cores, since many mostly wait; not among the quick ones, which compute.
workers=4 quick=0 speed='' order=--no-loadscope-reorder
while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=1 workers=2 speed=' and not slow' order=--loadscope-reorder ;;
    --slow) speed=' and slow' ;;
    --stack) stack=${2:?--stack needs a name}; shift ;;
    --stack=*) stack=${1#*=} ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
    *) break ;;
    esac
    shift
done
# budget: the seconds that all its tests may take on two quiet cores, while the other stack's run in .ci/run.
case $stack in
cpu) marks='not pinned' budget=800 ;;
torch2.2) venv=.venv-torch2.2 marks='(torch22 or pinned)' budget=900 ;;
*) echo "error: there are tests for the stacks cpu and torch2.2, not for '$stack'" >&2; exit 2 ;;
esac
[ $quick = 0 ] || budget=90

# The kernels in a second call, beside a Triton that interprets them, for the cpu stack only: it compiles them by the
# pinned stack's Triton too. Which of the words belong to which call:
words=() kernels=() paths='' empty=()
for word in "$@"; do
    case ${word#./} in
    tests/kernels*) paths+=' kernels'; kernels+=("$word") ;;
    tests | tests/) ;;
    tests/*) paths+=' tests'; words+=("$word") ;;
    *) words+=("$word"); kernels+=("$word") ;;
    esac
    case $word in -k* | -m*) empty=(--may-be-empty) ;; esac # these may be for the other call
done
if [ -z "$paths" ]; then
    paths=tests
    if [ $quick = 0 ]; then # of the kernels' tests none is quick
        paths='tests kernels' kernels=(tests/kernels "${kernels[@]}")
    fi
fi

VENV=$venv ./0.create_env.sh --stack "$stack" --dev
# Else each of a thousand processes compiles all of torch that it imports, which takes longer than the import:
unset PYTHONDONTWRITEBYTECODE
"$venv/bin/python" -m compileall -q mamba_fsdp
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # spinning threads of many processes on few cores slow each other down
export MAMBA_FSDP_TEST_STACK=$stack
records=${TEST_RECORDS:-$(mktemp -d)}
[ -n "${TEST_RECORDS:-}" ] || trap 'rm -rf "$records"' EXIT

parts=()
run_part() { # its name, the seconds it may take, words for pytest. Fails after an interrupt.
    local began=$SECONDS status=0 record=$records/$stack-$1
    parts+=("$stack/$1")
    # The tests of one file one after the other, and the files in the order of tests/conftest.py.
    "$venv/bin/python" -m pytest -n "$workers" --dist loadfile "$order" -r fE --junitxml="$record.xml" \
        -o junit_family=xunit1 -m "$marks$speed" "${@:3}" || status=$?
    echo "$status $((SECONDS - began)) $2" >"$record.end"
    [ $status != 2 ]
}

run_kernels() {
    local triton
    if triton=$("$venv/bin/python" -m benchmarks.kernels.install); then
        PYTHONPATH=$triton${PYTHONPATH:+:$PYTHONPATH} TRITON_INTERPRET=1 run_part kernels 120 "${kernels[@]}"
    else
        parts+=("$stack/kernels")
        echo "the Triton that interprets them can't be installed: see the error above" >"$records/$stack-kernels.skipped"
    fi
}

LEFT_OUT="--quick left out what is marked slow (trainings of several processes, Slurm, images, the pages' commands, the
kernels: tests/run.sh --slow) and the pinned stack (tests/run.sh --stack torch2.2)"
goes_on=1
case $paths in *tests*) run_part tests "$budget" "${words[@]}" || goes_on=0 ;; esac
if [ $goes_on = 0 ] || [ "$stack" != cpu ]; then paths=''; fi
case $paths in *kernels*) run_kernels || true ;; esac
if [ -z "${TEST_RECORDS:-}" ]; then
    status=0
    "$venv/bin/python" tests/support/summary.py "$records" "${empty[@]}" "${parts[@]}" || status=$?
    [ $quick = 0 ] || echo "$LEFT_OUT"
    exit $status
fi
