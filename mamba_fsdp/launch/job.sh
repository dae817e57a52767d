#!/bin/bash
# How a training is asked to stop, and what becomes of its job. 1.train.sbatch sources it.
# shellcheck disable=SC2154 # what it and environment.sh set

LAST_SECONDS=45 # so close to the time limit, don't wait for a checkpoint any longer

decide() { # what becomes of the job, from the training's exit code and what the launchers of the nodes have left
    local code=$1 status=''
    stop_asking
    [ -z "$check" ] || end_check "$code"
    read -r status code _ 2>/dev/null < "$failures/outcome" || true
    if [ "$code" = 0 ] && [ -n "$dry" ]; then
        say "dry run: nothing was trained"
        rm -f "$restarts_file"
    elif [ "$code" = 0 ] && [ "$status" = finished ]; then
        say "finished: $run_folder"
        rm -rf "$restarts_file" "$failures"
    elif [ "$stop_asked" = INT ] || { [ -n "$stop_asked" ] && [ "$(job_state)" != RUNNING ]; }; then
        say "ended at $(newest_checkpoint) by Slurm or by hand; if Slurm does not resume it, sbatch the same command"
        show_first_error
        exit 143
    elif [ -n "$stop_asked" ]; then
        requeue
    elif [ "$code" = 0 ]; then
        say "stopped at $(newest_checkpoint) as the file STOP asked; sbatch the same command to resume"
    elif [ "$code" = 2 ]; then
        say "not queued again, since no restart can fix this"
        show_first_error
        exit 2
    elif [ "$status" = stopped ]; then # as much of it as the failure left
        say "ended at $(newest_checkpoint): the file STOP asked, and a rank failed meanwhile; sbatch the same command to resume"
        show_first_error
        exit 1
    elif [ "$restarts" -ge "${MAX_RESTARTS:-3}" ] && [ "$newest" = "$(newest_checkpoint)" ]; then
        say "error: gave up after $restarts restarts without a checkpoint newer than $newest" \
            "(MAX_RESTARTS=${MAX_RESTARTS:-3}); fix the cause, then sbatch the same command to resume"
        show_first_error
        exit 1
    else
        requeue
    fi
}

starts_again() { # whether ranks start again in place, after one failed: once for each new checkpoint, no mistake, no request to stop
    local status='' code='' lost_rank=''
    read -r status code lost_rank 2> /dev/null < "$failures/outcome" || return 1
    [ "$code" != 0 ] && [ "$code" != 2 ] && [ "$status" != stopped ] && [ -z "$stop_asked" ] || return 1
    [ "${MAX_RESTARTS:-}" != 0 ] && [ "$restarted_from" != "$(newest_checkpoint)" ] || return 1
    restarted_from=$(newest_checkpoint)
    say "restarts   the ranks after the loss of $lost_rank"
    rm -f "$failures"/*
}

requeue() { # Slurm ends this script
    trap '' USR1 TERM INT
    remove_container
    say "queued again, to resume from $(newest_checkpoint)"
    show_first_error
    for _ in {1..5}; do # a busy controller may answer later
        case $(job_state) in PENDING | COMPLETING | REQUEUE*) exit 0 ;; esac # it is already
        ! scontrol requeue "$job" || exit 0
        sleep 2
    done
    say "error: Slurm refused to queue the job again; sbatch the same command to resume"
    exit 1
}

show_first_error() { # last, where a person looks first. After the loss of a node others fail for its sake
    local lost
    lost=$(sinfo --noheader --nodes="$SLURM_JOB_NODELIST" --states=down --format=%n 2> /dev/null | paste -sd ,) || true
    if [ -n "$lost" ]; then
        say "error: Slurm has lost $lost"
    else
        show_outcome
    fi
}

show_outcome() { # the first error of a training that ended with the exit code $code
    if [ -f "$failures/outcome" ]; then
        tail -n +2 "$failures/outcome"
    elif [ "${code:-0}" = 137 ]; then # it leaves none
        say "error: a launcher was killed by SIGKILL, and all ranks with it; the kernel does so where memory runs out (dmesg)"
    fi
}

give_way() { # to another start, before there is a run folder: trouble that may be gone then
    say "error: $*"
    [ -n "$check" ] || count_restarts
    decide 1
}

count_restarts() { # of this job: starts in a row from the same checkpoint; sets restarts and newest
    local before=''
    restarts=0
    if [ "${attempt#*.}" != 0 ]; then
        read -r restarts before 2>/dev/null < "$restarts_file" || true
        [ -n "$run_folder" ] || newest=${before:-start} # where it lies is not known yet
    fi
    newest=$(newest_checkpoint)
    if [ "$before" = "$newest" ]; then restarts=$((restarts + 1)); else restarts=0; fi
    mkdir -p "$project/logs"
    say "$restarts $newest" > "$restarts_file"
}

newest_checkpoint() {
    local commits=("$run_folder"/checkpoints/step_*/COMMIT)
    if [ -n "$run_folder" ] && [ -f "${commits[-1]}" ]; then
        basename "$(dirname "${commits[-1]}")"
    else
        say "$newest"
    fi
}

try_tokenizer() { # in a check, on the first node, as get_dataset.py uses it; a FOLDER that all nodes see. Its exit code
    local log=$1/log code=0 name
    mkdir "$1/text"
    for name in train validation; do # two long documents, which two threads encode at the same time
        cat mamba_fsdp/*/*.py > "$1/text/$name.txt"
    done
    await on_first_node "$python" "$project/get_dataset.py" "$1/text" "$1/tokens" --splits=official \
        --tokenizer=train:512 > "$log" 2>&1 || code=$?
    [ "$code" != 0 ] || return 0
    cat "$log"
    say "error: the tokenizer fails on ${nodes[0]}: $(grep -v '^srun: ' "$log" | tail -n 1)"
    return "$code"
}

end_check() { # exit code
    rmdir --ignore-fail-on-non-empty "$run_folder" 2>/dev/null || true
    rmdir --parents data/builtin 2>/dev/null || true # made to be mounted, empty
    [ "$1" != 0 ] || say "fit to train"
    exit "$1"
}

await() { # run a command while traps are served at once; its exit code
    local code before
    set -m # a process group of its own: signals reach only this script, which stops the run in good order
    "$@" < /dev/null &
    child=$!
    set +m
    while :; do
        before=$signals
        wait "$child" 2> /dev/null && code=0 || code=$? # bash would tell by which signal it ended
        [ "$before" != "$signals" ] || return "$code" # else a signal ended the wait, not the command
    done
}

start_asking() { # the signal that makes us ask
    signals=$((signals + 1))
    [ -z "$stop_asked" ] || return 0
    stop_asked=$1
    [ -n "$run_folder" ] && [ -z "$over" ] || return 0 # nothing runs
    keep_asking &
    asker=$!
}

keep_asking() { # again and again: storage may fail for a moment
    local limit=''
    while kill -0 $$ 2>/dev/null; do # whatever has become of this script
        # By a rename, so that no rank reads it before it says why. There may be no run folder yet.
        { say "SIG$stop_asked" > "$run_folder/.STOP" && mv -f "$run_folder/.STOP" "$run_folder/STOP"; } 2> /dev/null || true
        if [ "$stop_asked" = USR1 ] && [ -z "$limit" ]; then # TERM comes before an end that Slurm itself sees to
            limit=$(time_limit)
        fi
        if [ -n "$limit" ] && [ $((limit - $(date +%s))) -lt "$LAST_SECONDS" ]; then
            say "$LAST_SECONDS s before the time limit: the training has not ended, and the job does not wait for it"
            requeue
        fi
        sleep 2 > /dev/null 2>&1
    done
}

time_limit() { # of the job, in seconds since the epoch; nothing where a busy controller does not answer
    local end
    end=$(scontrol show job "${job:-}" 2> /dev/null | sed -n "s/.* EndTime=\([^ ]*\).*/\1/p") || true
    date +%s -d "${end:-never}" 2> /dev/null || true
}

stop_asking() { # the step is over, or this script
    over=1
    rm -f "$settings_file"
    [ -n "$asker" ] || return 0
    kill "$asker" 2>/dev/null || true
    wait "$asker" 2>/dev/null || true # it makes no STOP any more
    rm -f "$run_folder/STOP" "$run_folder/.STOP"
    asker=''
}

clean_up() {
    stop_asking
    remove_container
}
