#!/usr/bin/env bash
# On a fresh machine: makes a virtual environment, installs the package, trains a small Llama with DCP on four CPU
# processes. Under ten minutes on two cores. More arguments go to recipes/sft.py: recipes/quickstart.sh --mask lambda:64,512
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
exec "${HF_DCP_VENV:-.venv}/bin/accelerate" launch --config_file recipes/cpu_4.yaml recipes/sft.py "$@"
