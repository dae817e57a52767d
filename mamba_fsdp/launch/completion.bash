# Completion for bash: source PROJECT/mamba_fsdp/launch/completion.bash
# It offers the verbs, options and choices that the command lists with --help=all.

declare -A _mamba_fsdp_pages # {command and verb: its help page}

_mamba_fsdp() {
    local command=${COMP_WORDS[0]} word=${COMP_WORDS[COMP_CWORD]} name='' key page choices verb
    command=${command/#\~/$HOME}
    COMPREPLY=()
    if [[ $COMP_CWORD -ge 2 && ${COMP_WORDS[COMP_CWORD - 1]} == = ]]; then # bash splits --name=value into three words
        name=${COMP_WORDS[COMP_CWORD - 2]}
    elif [[ $word == = ]]; then
        name=${COMP_WORDS[COMP_CWORD - 1]} word=''
    fi
    key=$command
    [[ ${command##*/} != mamba-fsdp || $COMP_CWORD -lt 2 ]] || key+=" ${COMP_WORDS[1]}"
    if [[ -z ${_mamba_fsdp_pages[$key]+known} ]]; then
        read -ra verb <<< "${key#"$command"}"
        _mamba_fsdp_pages[$key]=$(COLUMNS=100 "$command" "${verb[@]}" --help=all 2> /dev/null)
    fi
    page=${_mamba_fsdp_pages[$key]}
    if [[ -n $name ]]; then
        choices=$(awk -v start="  $name=" '/^  --/ {here = index($0, start) == 1} here' <<< "$page" | tr -s '\n ' ' ' |
            grep -oE '\([a-z0-9_.-]+( ?[|,] ?[a-z0-9_.-]+)+\)' | tail -n 1 | tr -d '()' | tr '|,' '  ')
        mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$word")
    elif [[ $word == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(grep -oE '^  --\w+=' <<< "$page") --help" -- "$word")
        compopt -o nospace
    elif [[ $COMP_CWORD == 1 && ${command##*/} == mamba-fsdp ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(grep -oE '^  [a-z]+' <<< "$page")" -- "$word")
    fi
}

complete -o default -F _mamba_fsdp mamba-fsdp 1.train.sbatch
