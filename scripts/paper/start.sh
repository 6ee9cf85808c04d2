# Common to scripts/quickstart.sh and the scripts here; sourced, with their arguments, after $root
# is set.
# Leaves $data, the folder that --data names, or nothing.

data=
for ((word = 1; word <= $#; word++)); do
    case "${!word}" in
        --data=*) data=${!word#--data=} ;;
        --data) next=$((word + 1)); data=${!next:-} ;;
    esac
done

# Missing files of the folder are reported at once, before anything is installed.
require() {
    local file missing=
    for file in "$@"; do
        [[ -s "$data/$file" ]] || missing+="${missing:+, }$data/$file"
    done
    [[ -z "$missing" ]] && return
    echo "error: --data $data lacks $missing; a folder with ${*} would work" >&2
    exit 2
}

# Files that a run from articles to table 3 reads, where --data is given at all.
require_all() {
    [[ -z "$data" ]] && return
    require race/RACE_train.tar.xz race/RACE_dev.tar.xz wikitext103/wiki.valid.tokens \
        lambada/lambada_test_first500.jsonl
}

# The program, in the project's own environment.  -P: the folder that the command is given in may
# have a "tools" of its own.  --help installs nothing: without .venv it is the head of the script.
start() {
    if [[ " $* " != *" --help "* && " $* " != *" -h "* ]]; then
        bash "$root/scripts/setup.sh"
    elif [[ ! -x "$root/.venv/bin/python" ]]; then
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
        exit
    fi
    PYTHONPATH="$root" exec "$root/.venv/bin/python" -P -m "$@"
}
