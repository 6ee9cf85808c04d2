# Sourced by what runs on a GPU machine without .venv: sets `python`, and PYTHONPATH where packages
# are missing that wheels/ has. `packages FOLDER PACKAGE...` ends with status 2 where some still are.
python=python3
test -x .venv/bin/python && python=.venv/bin/python

absent() { # PACKAGE...: those that cannot be found
    "$python" - "$@" <<<'import importlib.util as u, sys
print(*(name for name in sys.argv[1:] if not u.find_spec(name.replace("-", "_"))))'
}
packages() { # FOLDER PACKAGE...
    local folder=$1 lacks
    shift
    lacks=$(absent "$@")
    if [[ $lacks && -d wheels ]]; then
        # shellcheck disable=SC2086 # names
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
            --find-links wheels --target "$folder" $lacks || true
        export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
        lacks=$(absent "$@")
    fi
    [[ -z $lacks ]] && return
    echo "error: $python cannot import $lacks; where packages can be fetched," \
        "python3 -m pip download --no-deps -d wheels $lacks makes the folder wheels" >&2
    exit 2
}
