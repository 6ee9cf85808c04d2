# Sourced by scripts that run on a GPU machine without .venv: sets `python`, and PYTHONPATH where
# wheels/ has packages that are missing.
needs=(torch numpy safetensors tokenizers transformers tqdm filelock tyro docstring-parser typeguard
    typing-extensions)
python=python3
test -x .venv/bin/python && python=.venv/bin/python

absent() { # PACKAGE...: those that cannot be found
    "$python" - "$@" <<<'import importlib.util as u, sys
print(*(name for name in sys.argv[1:] if not u.find_spec(name.replace("-", "_"))))'
}
packages() { # FOLDER PACKAGE...: status 2 where some are missing still
    local folder=$1 lacks name
    shift
    lacks=$(absent "$@")
    if [[ $lacks && -d wheels ]]; then
        for name in $lacks; do # one by one, as pip installs all or none
            "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
                --find-links wheels --target "$folder" "$name" || true
        done
        export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
        lacks=$(absent "$@")
    fi
    [[ -z $lacks ]] && return
    echo "error: $python cannot import $lacks; where packages can be fetched," \
        "python3 -m pip download --no-deps -d wheels $lacks makes the folder wheels" >&2
    exit 2
}
require_gpu() {
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && return
    echo "error: there is no GPU here; --device cpu works" >&2
    exit 2
}
