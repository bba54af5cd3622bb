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
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
