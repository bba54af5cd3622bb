# Sourced by the other scripts, from the checkout: find_python, make_venv.
# shellcheck shell=bash

# Prints the first interpreter new enough for this project; $PYTHON is asked first.
find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer is needed: sudo apt-get install -y python3 python3-venv (or set PYTHON to one)" >&2
    return 1
}

# Makes ./.venv and installs the project in it, editable, with the extra named by $1 (may be empty).
# Does nothing if that was done for this very pyproject.toml.
make_venv() {
    local extra=${1:-} python key
    key=$(sha256sum pyproject.toml | cut -d' ' -f1)
    # The glob: an installation with any extra has the project too. No pipe: `grep -q` leaves at the first match, and
    # under pipefail the writer's SIGPIPE would read as "not installed".
    if [[ -x .venv/bin/python ]] && grep -qsxF "$key" .venv/installed-"$extra"*; then
        return
    fi
    if ! .venv/bin/python -c '' 2>/dev/null; then
        python=$(find_python)
        if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "python3-venv is missing: sudo apt-get install -y python3-venv" >&2
            return 1
        fi
        echo "Making .venv with $("$python" --version)" >&2
        "$python" -m venv --clear .venv
    fi
    echo "Installing the project into .venv (torch is large: a few minutes the first time)" >&2
    .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -e ".${extra:+[$extra]}"
    # 13,000 files, which pip compiles on one core; some are templates that do not compile.
    .venv/bin/python -m compileall -qq -j 0 -x '/tests?/|transformers/models/' .venv/lib || true
    echo "$key" >".venv/installed-$extra"
}
