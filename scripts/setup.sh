#!/usr/bin/env bash
# Usage: scripts/setup.sh [--test] [--with-apex DIR]
# Makes .venv in the root of the repository with what the project needs (--test: and its tests).
# Does nothing where that is done already.
# --with-apex: also builds NVIDIA's apex, with its CUDA extensions, from the checkout DIR of
# https://github.com/NVIDIA/apex. It needs nvcc of the CUDA version that torch was built with.
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "error: $*" >&2; exit 2; }

requirements=requirements.txt
stamps=(.venv/setup.stamp)
with_apex=no apex=
while [ $# -gt 0 ]; do
    case "$1" in
        --test)
            requirements=requirements-test.txt
            stamps=(.venv/setup.stamp .venv/setup-test.stamp) ;;
        --with-apex)
            with_apex=yes
            if [[ $# -gt 1 && $2 != --* ]]; then
                apex=$(cd "$called_from" && realpath -m "$2")
                shift
            fi ;;
        *) fail "unknown option $1; scripts/setup.sh [--test] [--with-apex DIR] would work" ;;
    esac
    shift
done

# The sources of the environment. A stamp with the same content says that it is complete; the
# folder is part of it because an environment that has been moved does not work.
made_from() { pwd && cat requirements.txt requirements-test.txt; }
is_complete() { made_from | cmp --silent - "${stamps[-1]}"; }

find_python() {
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    for candidate in "${PYTHON:-${candidates[@]}}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name one: PYTHON=/path/to/python3 $0"
}

make_environment() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make environments; on Debian and Ubuntu: apt install python3-venv"
    "$python" -m venv --clear .venv
}

install() {
    .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        make_environment
    rm -f "${stamps[@]}"
    echo "installing $requirements into .venv (once; this takes minutes)"
    # --no-compile: 20,000 files would take a minute; Python compiles those that it imports.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
        --requirement "$requirements"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
    made_from | tee "${stamps[@]}" >/dev/null
}

# Ends with one line that names what building apex lacks, if anything.
check_apex() {
    local missing=() cuda="${CUDA_HOME:-/usr/local/cuda}"
    if [[ -z $apex ]]; then
        missing+=("the folder of a checkout (git clone https://github.com/NVIDIA/apex)")
    elif [[ ! -f $apex/setup.py || ! -d $apex/apex ]]; then
        missing+=("a checkout of https://github.com/NVIDIA/apex in $apex")
    fi
    [[ -x $cuda/bin/nvcc ]] || command -v nvcc >/dev/null ||
        missing+=("nvcc of the CUDA toolkit (on PATH or in CUDA_HOME)")
    if [[ -e .venv/bin/python ]] &&
        ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null
    then
        missing+=("a torch built for CUDA in .venv")
    fi
    [[ ${#missing[@]} -eq 0 ]] && return
    local line
    line=$(printf '%s; ' "${missing[@]}")
    fail "--with-apex DIR lacks ${line%; }"
}

build_apex() {
    local pip=(.venv/bin/python -m pip install --disable-pip-version-check)
    "${pip[@]}" --quiet setuptools wheel packaging ninja
    # Older versions of apex read the build options, newer ones the environment.
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "${pip[@]}" --verbose --no-build-isolation --no-deps \
        --no-cache-dir --config-settings "--build-option=--cpp_ext" \
        --config-settings "--build-option=--cuda_ext" "$apex"
    .venv/bin/python -c 'import torch, amp_C, fused_layer_norm_cuda' ||
        fail "apex was built from $apex, but its CUDA extensions cannot be imported"
}

if [[ $with_apex = yes ]]; then check_apex; fi # before minutes of installing
is_complete 2>/dev/null || install
if [[ $with_apex = yes ]]; then
    check_apex # now torch, too
    build_apex
fi
