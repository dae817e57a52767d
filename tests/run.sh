#!/usr/bin/env bash
# Runs the tests. Makes the environment that they need, runs all tests that this machine can run, and prints how many have
# passed, failed and been skipped, with the reasons.
#
#   tests/run.sh                    all tests
#   tests/run.sh --quick            the tests that together take 90 seconds on two idle cores
#   tests/run.sh --slow             only the other tests
#   tests/run.sh --stack torch2.2   the tests of the pinned stack, in a separate environment (.venv-torch2.2)
#
# Further arguments are passed to pytest, for example tests/run.sh tests/model -k tied. These environment variables make
# some tests larger: KILLS=60 KILL_STORMS=3 KERNEL_GATES=all STORM_ROUNDS=200 FROZEN_STORM=all FUZZ_ROUNDS=2000.
# HYPOTHESIS_PROFILE=random tests other random examples. With TEST_RECORDS=FOLDER, the results are written to this folder
# instead of a summary, and .ci/run summarizes them.
set -euo pipefail
cd "$(dirname "$0")/.."

stack=cpu venv=.venv
# Four tests run at the same time even on two cores, because many tests mostly wait. The quick tests mostly compute, so
# only two of them run at the same time.
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
# budget: the time limit in seconds of all tests of a stack on two idle cores, while .ci/run also runs the other stack.
case $stack in
cpu) marks='not pinned' budget=800 ;;
torch2.2) venv=.venv-torch2.2 marks='(torch22 or pinned)' budget=900 ;;
*) echo "error: there are tests for the stacks cpu and torch2.2, not for '$stack'" >&2; exit 2 ;;
esac
[ $quick = 0 ] || budget=90

# The tests of the kernels run in a second call of pytest, with a Triton that interprets the kernels. Only the cpu stack
# has this second call, and its tests also compile the kernels with the Triton of the pinned stack. The loop decides to
# which of the two calls each argument is passed.
words=() kernels=() paths='' empty=()
for word in "$@"; do
    case ${word#./} in
    tests/kernels*) paths+=' kernels'; kernels+=("$word") ;;
    tests | tests/) ;;
    tests/*) paths+=' tests'; words+=("$word") ;;
    *) words+=("$word"); kernels+=("$word") ;;
    esac
    case $word in -k* | -m*) empty=(--may-be-empty) ;; esac # they can select no test in one of the two calls
done
if [ -z "$paths" ]; then
    paths=tests
    if [ $quick = 0 ]; then # no test of the kernels is quick
        paths='tests kernels' kernels=(tests/kernels "${kernels[@]}")
    fi
fi

VENV=$venv ./0.create_env.sh --stack "$stack" --dev
# Otherwise each of a thousand processes would compile the modules of torch that it imports, which takes longer than the
# import itself.
unset PYTHONDONTWRITEBYTECODE
"$venv/bin/python" -m compileall -q mamba_fsdp
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # threads that spin in many processes would slow each other down
export MAMBA_FSDP_TEST_STACK=$stack
records=${TEST_RECORDS:-$(mktemp -d)}
[ -n "${TEST_RECORDS:-}" ] || trap 'rm -rf "$records"' EXIT

parts=()
# Runs one call of pytest. Arguments: its name, its budget in seconds, arguments for pytest. Fails if it was interrupted.
run_part() {
    local began=$SECONDS status=0 record=$records/$stack-$1
    parts+=("$stack/$1")
    # All tests of a file run in one worker, and the files in the order of tests/conftest.py.
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
