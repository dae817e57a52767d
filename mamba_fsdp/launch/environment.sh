#!/bin/bash
# What 1.train.sbatch and 2.tokenize.sbatch share: the environment that Python runs in, .venv or an image, here and on
# the nodes of a job. They source it in the project folder, whose path is $project; $nodes are the job's, $job is NUMBER
# or ARRAY_TASK, $attempt is NUMBER.RESTART.
# shellcheck disable=SC2154 # these four

# Pyxis and Enroot pass mounts on through a list, a shell and an fstab, each version with other escapes or none.
HARD_TO_MOUNT=$' \t\n,:#$`"\'\\'
LONGEST_LIST=100000                    # of mounts; Linux takes no word of 131,072 bytes
CONTAINER_PREFIX=mamba-train-
EFA_FOLDER=/sys/class/infiniband       # where Linux lists EFA devices
HYPERPOD_FOLDER=/opt/sagemaker_cluster # there on SageMaker HyperPod only

say() { printf '%s\n' "$*" 2> /dev/null || true; } # also when nobody reads it any longer

fail() { # a user's mistake: what is wrong and what to do. No restart fixes it
    say "error: $*" >&2
    exit 2
}

choose_venv() {
    python=$project/.venv/bin/python
    [ -x "$python" ] || fail "there is no environment in $project/.venv; make it: ./0.create_env.sh"
    [ -f .venv/.complete ] || fail "the environment $project/.venv is incomplete; make it again: ./0.create_env.sh"
}

check_variables() { # GPUS_PER_NODE is another name for PROCESSES_PER_NODE
    local name
    for name in PROCESSES_PER_NODE GPUS_PER_NODE; do
        case ${!name:-1} in 0 | *[!0-9]*) fail "$name=${!name}: expected 1 or more" ;; esac
    done
    case ${MAX_RESTARTS:-3} in *[!0-9]*) fail "MAX_RESTARTS=$MAX_RESTARTS: expected a number" ;; esac
    case ${PROFILE:-} in '' | torch | nsys) ;; *) fail "PROFILE=$PROFILE: choose torch or nsys" ;; esac
    [ -n "${GPUS_PER_NODE:-}" ] || return 0
    export PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-$GPUS_PER_NODE}
    [ "$PROCESSES_PER_NODE" = "$GPUS_PER_NODE" ] ||
        fail "GPUS_PER_NODE=$GPUS_PER_NODE and PROCESSES_PER_NODE=$PROCESSES_PER_NODE mean the same; give one of them"
}

add_mounts() { # that MOUNTS=FOLDER,..., DATA_PATH=FOLDER and FSX_MOUNT=FOLDER:FOLDER,... name; sets wanted
    local mount mounts
    wanted=()
    IFS=$',\n' read -rd '' -a mounts <<< "${MOUNTS:-},${DATA_PATH:-},${FSX_MOUNT:-}" || true
    for mount in "${mounts[@]}"; do
        [[ $mount == /* || -z $mount ]] || fail "MOUNTS, DATA_PATH or FSX_MOUNT: $mount: expected the whole path of a folder"
        [[ $mount != *:* || $mount == "${mount%%:*}:${mount%%:*}" ]] ||
            fail "MOUNTS or FSX_MOUNT: $mount: in the container each folder has its own name; write ${mount%%:*}:${mount%%:*}"
        [ -z "$mount" ] || wanted+=("${mount%%:*}")
    done
}

choose_environment() { # sets python and image
    image=${IMAGE:-mamba-train.sqsh}
    [[ $image == /* ]] || image=$project/$image # Pyxis asks a registry for a bare name
    if [ -f "$image" ]; then
        check_image
        export IMAGE=$image # for what a step says of itself
        python=python3
    elif [ -n "${IMAGE:-}" ]; then
        fail "IMAGE=$IMAGE: there is no such file ($image); build it (docs/image.md), or unset IMAGE to use .venv"
    elif [ -e .venv ]; then
        image=''
        choose_venv
    else
        fail "there is neither an image ($image) nor an environment ($project/.venv);" \
            "build an image (docs/image.md) or make the environment: ./0.create_env.sh"
    fi
    add_mounts
}

check_image() {
    [ -r "$image" ] || fail "the image $image can't be read by $(id -un): chmod a+r it"
    cmp -s -n 4 "$image" <(printf hsqs) ||
        fail "$image is no squashfs image; make it with enroot import (docs/image.md), or copy it again"
    [ "$(stat -Lc %s "$image")" -ge "$(od -An -t u8 -j 40 -N 8 "$image")" ] 2> /dev/null || # as its superblock says
        fail "the image $image was cut short; copy it again"
    [ -z "${SLURM_JOB_ID:-}${check:-}" ] || [[ $(srun --help) == *--container-image* ]] ||
        fail "this Slurm runs no images, since its plugin Pyxis is not switched on: docs/image.md says how;" \
            "without an image: rename $image, then ./0.create_env.sh"
}

read_settings() { # what they come to, or --help, before an image is unpacked; exit code 1 where no Python of this host can
    local reader=$project/.venv/bin/python
    [ -x "$reader" ] || reader=python3
    "$reader" -c 'import sys, yaml; sys.exit(sys.version_info < (3, 10))' 2> /dev/null || return 1
    "$reader" -m mamba_fsdp.launch.plan "$@"
}

check_gpus() { # as Slurm assigned them: a step can ask for one number only
    local assigned
    assigned=$(scontrol --details show job "$job" |
        sed -n 's/^ *Nodes=\([^ ]*\) .*GRES=\(gpu:[^(]*\).*/\1 \2/p')
    [ "$(cut -d' ' -f2 <<< "$assigned" | sort -u | wc -l)" = 1 ] ||
        fail "the nodes have different GPUs (${assigned//$'\n'/, });" \
            "choose one kind: --partition, --constraint, --exclude"
}

choose_srun() { # for a command on all nodes; sets srun
    # --cpu-bind=none: Slurm would pin the node's only task, and all ranks in it, to one core.
    srun=(srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --export=ALL --cpu-bind=none --label)
    # A step sees no GPU unless it asks, even where --exclusive gave the job all of them.
    [ -z "${SLURM_GPUS_ON_NODE:-}" ] || srun+=(--gpus-per-node="$SLURM_GPUS_ON_NODE")
    [ ! -d "$HYPERPOD_FOLDER" ] || srun+=(--auto-resume=1) # HyperPod replaces a broken node and starts this step again
}

is_of_image() { # a folder over which nothing is mounted, for that would hide what the image has there
    case ${1%/}/ in
    / | /bin/* | /boot/* | /dev/ | /etc/* | /lib/* | /lib32/* | /lib64/* | /libx32/* | /opt/ | /opt/amazon/* | /proc/* | /root/ | \
        /run/ | /sbin/* | /sys/* | /usr/* | /var/) ;;
    *) return 1 ;;
    esac
}

can_mount() { # a path, by the folder that it is or lies in; sets folder
    folder=$1
    [ -d "$folder" ] || folder=${folder%/*}
    [ -e "$1" ] && ! is_of_image "$folder"
}

find_links() { # in and below the paths; adds to folders where they lead, the links that are found there too, and so on
    local path link target folder paths targets=("$@") astray=()
    local -A seen=()
    [ -n "$image" ] || return 0
    while [ ${#targets[@]} != 0 ]; do
        paths=()
        while IFS= read -rd '' path; do # under the name that the link has for it, and under its own
            [ -z "${seen[$path]:-}" ] || continue
            seen[$path]=1
            if can_mount "$path"; then folders+=("$folder"); elif [ ! -L "$path" ]; then continue; fi
            paths+=("$path")
        done < <(for naming in --no-symlinks --physical; do
            printf '%s\0' "${targets[@]}" | xargs -0 realpath --zero --quiet --canonicalize-missing "$naming"
        done)
        [ ${#paths[@]} != 0 ] || break
        targets=()
        while IFS= read -rd '' link && IFS= read -rd '' target; do
            [[ $target == /* ]] || target=${link%/*}/$target
            if can_mount "$target"; then targets+=("$target"); else astray+=("$link -> $target"); fi
        done < <(printf '%s\0' "${paths[@]}" | xargs -0 sh -c 'find "$@" -type l -printf "%p\0%l\0"' -)
    done
    [ ${#astray[@]} = 0 ] || say "warning: the container can't follow ${astray[0]}: this leads nowhere or into the image's" \
        "own folders (such links: ${#astray[@]})"
}

use_container() { # the paths it needs beside the project and MOUNTS; sets container
    local path mount above list mounts=()
    local -A covered=()
    container=()
    [ -n "$image" ] || return 0
    for path in "$project" "${wanted[@]}" "$@"; do
        [[ $path != "$project"/* ]] || continue
        [ -e "$path" ] || fail "there is no $path on $(hostname), which a setting or MOUNTS names"
        mount=$path
        while [[ $mount == *["$HARD_TO_MOUNT"]* ]]; do mount=${mount%/*}; done
        [ -f "$mount" ] || ! is_of_image "$mount" ||
            fail "$path: the container would need ${mount:-/}, which is the image's own" \
                "(no mount has a space or one of ,:#\$\`\"'\\ in its name); move or rename it"
        above=$mount # a mount has what lies in it, other file systems too, but not where links lead
        until [ -z "$above" ] || [ -n "${covered[$above]:-}" ] || [ -L "$above" ]; do above=${above%/*}; done
        [ -n "${covered[${above:-/}]:-}" ] || mounts+=("$mount:$mount")
        covered[${mount%/}]=1
    done
    list=$(IFS=, && printf %s "${mounts[*]}")
    [ ${#list} -lt "$LONGEST_LIST" ] ||
        fail "symbolic links lead to ${#mounts[@]} folders, such as $mount: a container can't mount so many;" \
            "name one that they lie in: MOUNTS=FOLDER"
    # A container with a name is unpacked once and stays for the job's other steps. The name is of one start of the job:
    # what a start that was killed has left may be half unpacked. no_exec: each step has its own mounts.
    # The home folder stays out: its .triton, .cache and .local belong to other versions and are shared by all nodes.
    container=(--container-image="$image" --container-name="$CONTAINER_PREFIX$attempt:no_exec"
        --container-mounts="$list" --container-workdir="$project"
        --no-container-mount-home)
    # The image asks for NVIDIA's driver, and Enroot fails where that has no tools.
    if [ -z "${SLURM_GPUS_ON_NODE:-}" ] && [ ! -e /proc/driver/nvidia ]; then
        export NVIDIA_VISIBLE_DEVICES=void
        container+=(--container-env=NVIDIA_VISIBLE_DEVICES)
    fi
}

on_first_node() { # where this script runs itself, but for a check without an image: that runs where it was called
    local step=()
    [ -z "$image${check:-}" ] || step=(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --export=ALL --cpu-bind=none
        "${container[@]}" "$project/1.train.sbatch" --on-node)
    "${step[@]}" "$@"
}

make_corpus() { # in the folder of the built-in data, "" for other data, where it is missing; words: it, what runs a command
    [ -n "$1" ] && [ -z "$dry$check" ] || return 0
    if compgen -G "$1/.progress*" > /dev/null || { [ ! -f "$1/train/index.json" ] && [ ! -f "$1/index.json" ]; }; then
        say "making data/builtin from the source of a Python library, for a first try"
        "${@:2}" "$python" "$project/get_dataset.py" builtin "${1#"$PWD"/}"
    fi
}

has_no_nvlink() { # true of a node with GPUs none of which has a link
    local links
    links=$(timeout 20 nvidia-smi nvlink --status 2>/dev/null) && [[ $links == *GPU* && $links != *GB/s* ]]
}

set_network() { # what NCCL and libfabric need on this kind of node
    local device
    EFA_COUNT=0
    for device in "$EFA_FOLDER"/*; do
        [ "$(basename "$(readlink -f "$device/device/driver")")" != efa ] || EFA_COUNT=$((EFA_COUNT + 1))
    done
    export EFA_COUNT
    # Node to node over the real interface, whatever its name; a positive prefix such as ens fits one kind of node only.
    [ -z "${SLURM_JOB_ID:-}" ] || export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^docker,lo,veth}
    if [ "$EFA_COUNT" -gt 0 ]; then # p4d, p4de: 4 devices; p5, p5e: 32; p5en: 16
        # An error rather than a slow provider.
        export FI_PROVIDER=${FI_PROVIDER:-efa}
        # With huge pages, a process that forks (data workers do) runs out of memory.
        export FI_EFA_USE_HUGE_PAGE=${FI_EFA_USE_HUGE_PAGE:-0}
        # FSDP's copies on the GPU need not wait for each other.
        export FI_EFA_SET_CUDA_SYNC_MEMOPS=${FI_EFA_SET_CUDA_SYNC_MEMOPS:-0}
    elif has_no_nvlink; then # g5, g6
        # Such GPUs talk through shared memory, and their copy engines are faster at it.
        export NCCL_SHM_USE_CUDA_MEMCPY=${NCCL_SHM_USE_CUDA_MEMCPY:-1}
    fi
}

job_state() { # a busy controller does not answer: asked again until it does
    until squeue --noheader --jobs="$job" --format=%T 2>/dev/null | grep .; do sleep 2; done
}

start_containers() { # on all nodes at once, each unpacks the image the only time in this start of the job
    local started missing
    [ -n "$image" ] || return 0
    remove_containers "$attempt" &
    started=$(mktemp)
    await say_nodes_that_start "$started" || true
    missing=$(printf '%s\n' "${nodes[@]}" | grep -vxFf <(sed -n 's/^ *[0-9]*: started: //p' "$started") || true)
    rm -f "$started"
    [ -z "$missing" ] || [ -n "$stop_asked" ] ||
        give_way "the container did not start on ${missing//$'\n'/, }; see above. A node that goes on so: --exclude"
}

say_nodes_that_start() { # into a file: traps have the log
    # shellcheck disable=SC2016 # for the node to say
    timeout "$PREFLIGHT_SECONDS" "${srun[@]}" "${container[@]}" sh -c 'echo "started: $SLURMD_NODENAME"' > "$1"
}

remove_container() { # at the end, where Pyxis leaves it. A later start removes what is left here, or lies on a lost node
    [ -n "${image:-}" ] && enroot list 2> /dev/null | grep -qx "pyxis_$CONTAINER_PREFIX${attempt:-}" || return 0
    remove_containers none
    image=''
}

remove_containers() { # from the job's nodes, all that no job uses which is on nodes, but those of a START of this job
    # Pyxis does so itself, unless its container_scope is global, as it is by default.
    local jobs seconds=10 # after TERM Slurm does not wait for long
    case ${stop_asked:-} in
    '') seconds=3600 ;; # a node that makes no progress ends earlier by itself
    USR1) seconds=$(($(time_limit) - $(date +%s) - LAST_SECONDS)) ;; # then the job must be queued again
    esac
    [ "$seconds" -gt 10 ] || seconds=10
    jobs=$(squeue --noheader --user="$(id -u)" --states=RUNNING,SUSPENDED,STOPPED,COMPLETING --format=%A) || return 0
    mapfile -t jobs < <(grep -vx "$SLURM_JOB_ID" <<< "$jobs")
    timeout "$seconds" srun --overlap --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
        bash "$project/mamba_fsdp/launch/environment.sh" remove "$1" "${jobs[@]}" < /dev/null 2> /dev/null || true
}

remove_here() { # but those of the jobs and starts that are named
    local name names start
    command -v enroot > /dev/null || return 0
    mapfile -t names < <(enroot list)
    set -m # each removal is a process group
    for name in "${names[@]}"; do
        start=${name#pyxis_"$CONTAINER_PREFIX"}
        if [ "$start" != "$name" ] && [[ " $* " != *" $start "* && " $* " != *" ${start%.*} "* ]]; then
            enroot remove -f "$name" < /dev/null &
            await_progress $! "${REMOVAL_SECONDS:-60}" || kill -KILL -- "-$!"
        fi
    done
}

await_progress() { # of a process group. Fails if it does nothing for SECONDS, as on storage that no longer answers
    local before='' now second
    while now=$(cat /proc/[0-9]*/stat 2> /dev/null | awk -v group="$1" '$5 == group') && [ "$now" != "$before" ]; do
        before=$now # among it the processor's time that each process has used
        for ((second = 0; second < $2; second++)); do
            kill -0 "$1" 2> /dev/null || return 0
            sleep 1
        done
    done
    ! kill -0 "$1" 2> /dev/null
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    shift
    remove_here "$@"
fi
