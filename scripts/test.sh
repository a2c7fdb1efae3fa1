#!/usr/bin/env bash
# Sets up a virtual environment if needed and runs the tests: scripts/test.sh [PYTEST ARGUMENTS]
# (settings: see scripts/setup.sh; -m slow runs the long tests)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh redis,kahypar,trl,test,docs
scripts/browser.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # no test needs a hub
export TOKENIZERS_PARALLELISM=false
bin=${HF_DCP_VENV:-.venv}/bin
# Planner and executor are compiled here once; else every process of the first test would do it at once, for minutes.
"$bin/hf-dcp" plan --lengths 2048,700,300 --nodes 2 --devices-per-node 2 --json >/dev/null
"$bin/hf-dcp" bench attention --lengths 512,100 --repeats 1 --json >/dev/null
exec "$bin/python" -m pytest "$@"
