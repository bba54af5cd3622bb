#!/usr/bin/env bash
# Command 2: installs what the tests need and runs the linter, the type checker and the whole suite.
#   bash launch/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

make_venv test
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the suite starts many ranks on few cores
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .

# Two lanes side by side: tests that share the pools of ranks (tests/conftest.py), and beside them the type checker and
# the tests of one process. What the second says is shown after the first.
lane() { .venv/bin/python -m pytest --lane "$@"; }
said=$(mktemp)
set -m # the second is a process group of its own, which a failure or Ctrl-C takes along
{ .venv/bin/mypy && lane single "$@"; } >"$said" 2>&1 </dev/null &
second=$!
trap 'kill -- -"$second" 2>/dev/null || true; rm -f "$said"' EXIT

codes=()
lane ranks "$@" || codes[0]=$?
[[ ${codes[0]:=0} -ne 2 ]] || exit 2 # interrupted
wait "$second" || codes[1]=$?
cat "$said"
for code in "${codes[0]}" "${codes[1]:=0}"; do
    ((code == 0 || code == 5)) || exit "$code"
done
((codes[0] == 0 || codes[1] == 0)) || exit 5 # no test was selected; in one lane alone that is no failure
