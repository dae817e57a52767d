#!/bin/bash
# Training on the nodes of a job, and on its spare ones (--spares=N) in place of lost ones. 1.train.sbatch sources it.
# shellcheck disable=SC2154 # what it and environment.sh set

WATCH_SECONDS=20

take_spares() { # all words but --spares=N are settings; sets spares and settings
    local word
    spares=0 settings=()
    for word in "$@"; do
        if [[ $word == --spares=* ]]; then spares=${word#*=}; else settings+=("$word"); fi
    done
    case $spares in '' | *[!0-9]*) fail "--spares=$spares: expected a number of nodes" ;; esac
    [ "$spares" = 0 ] || [ -n "${SLURM_JOB_ID:-}${check:-}" ] ||
        fail "--spares=$spares: there are spare nodes in a Slurm job only (sbatch); leave it out on one machine"
}

train_on_nodes() { # the settings; the exit code of the last launch
    local code watcher launches=0 wanted=$((${#nodes[@]} - spares))
    while :; do
        export LAST_NODE=${nodes[wanted - 1]} RELAUNCHES=$launches
        set -m # to end it with what it has started
        watch_first_node > /dev/null 2>&1 < /dev/null &
        watcher=$!
        set +m
        # The first node is named by its host name, never by its address: a replaced node keeps the name.
        await "${srun[@]}" --nodes="$wanted" --ntasks="$wanted" --nodelist="$(IFS=, && printf %s "${nodes[*]:0:wanted}")" \
            --kill-on-bad-exit=1 "${container[@]}" "$project/1.train.sbatch" --on-node "${launcher[@]}" \
            --nnodes="$wanted" --rdzv-backend=c10d --rdzv-id="$attempt.$launches" \
            --rdzv-endpoint="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))" \
            --rdzv-conf=join_timeout=900,read_timeout=900 training.py "$@" && code=0 || code=$?
        kill -- "-$watcher" 2> /dev/null || true
        [ "$code" != 0 ] && [ "$spares" -gt 0 ] && [ -z "$stop_asked" ] && leave_lost_out || return "$code"
        [ "${#nodes[@]}" -ge "$wanted" ] || return "$code"
        launches=$((launches + 1))
        say "resuming from $(newest_checkpoint) on ${nodes[*]:0:wanted}"
    done
}

leave_lost_out() { # sets nodes to those that answer; false where all do
    local living lost moment
    living=$(for node in "${nodes[@]}"; do answers "$node" & done && wait)
    lost=$(printf '%s\n' "${nodes[@]}" | grep -vxFf <(printf '%s\n' "$living")) || return 1
    mapfile -t nodes < <(printf '%s\n' "${nodes[@]}" | grep -xFf <(printf '%s\n' "$living"))
    say "lost       ${lost//$'\n'/, }"
    moment=$(find "$failures" -name '*.txt' -printf '%f\n' 2>/dev/null | cut -d- -f2 | sort | head -n 1)
    mkdir -p "$failures"
    printf '%s failed first.\nIt does not answer any longer.\n' "${lost//$'\n'/, }" \
        > "$failures/0-${moment:-$(date +%s.%3N)}-${lost%%$'\n'*}-exit1.txt"
}

watch_first_node() { # from another: if it is lost, this script is too, and --no-kill keeps its job for nothing
    [ "${#nodes[@]}" -gt 1 ] || return 0 # Slurm queues it again
    while sleep "$WATCH_SECONDS"; do # at first until the ranks have their nodes
        # shellcheck disable=SC2016 # for the node to say
        srun --overlap --mem=0 --nodes=1 --ntasks=1 --nodelist="${nodes[1 + RANDOM % (${#nodes[@]} - 1)]}" \
            --cpu-bind=none sh -c 'while sleep "$1"; do
                left=$(squeue --noheader --jobs="$2" --states=RUNNING --format=%N) && [ -n "$left" ] || continue
                left=$(scontrol show hostnames "$left") || continue
                echo "$left" | grep -qx "$SLURMD_NODENAME" || continue # a start that is over watches no other
                echo "$left" | grep -qx "$3" || scontrol requeue "$2"
            done' - "$WATCH_SECONDS" "$job" "${nodes[0]}" || true
    done
}

answers() { # says the node's name if it does
    timeout 20 srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --cpu-bind=none true < /dev/null 2> /dev/null && say "$1"
}
