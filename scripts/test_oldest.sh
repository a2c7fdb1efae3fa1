#!/usr/bin/env bash
# Tests the oldest supported transformers and accelerate: scripts/test_oldest.sh [PYTEST ARGUMENTS]
#
# They are installed into an environment of their own, which takes everything else (torch among it) from the one that
# scripts/setup.sh makes. Without arguments the tests run that touch these libraries.
#
# Settings, as environment variables:
#   HF_DCP_VENV          the environment of the newest versions    (default: .venv in the repository)
#   HF_DCP_OLDEST_VENV   where the other one is made               (default: .venv-oldest in the repository)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
newest=${HF_DCP_VENV:-.venv}
oldest=${HF_DCP_OLDEST_VENV:-.venv-oldest}
[ -x "$newest/bin/python" ] || scripts/setup.sh redis,kahypar,trl,test,docs

if [ ! -x "$oldest/bin/python" ]; then
  "$newest/bin/python" -m venv --without-pip "$oldest"
fi
# What this environment doesn't have is found in the other: a path file of Python names it.
site=$("$oldest/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$newest/bin/python" - >"$site/newest.pth" <<'PYTHON'
import sysconfig

print(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
PYTHON

read -r -a wanted <<<"$("$newest/bin/python" - <<'PYTHON'
import runpy

oldest = runpy.run_path("hf_dcp/integrations/versions.py")["OLDEST"]
print(*(f"{name}=={'.'.join(map(str, oldest[name]))}.0" for name in ("transformers", "accelerate")))
PYTHON
)"
echo "test_oldest: ${wanted[*]}"
"$newest/bin/python" -m pip --quiet --python "$oldest/bin/python" install --no-deps "${wanted[@]}"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TOKENIZERS_PARALLELISM=false
"$oldest/bin/python" -c 'import accelerate, transformers as t; print("test_oldest: found", t.__version__, accelerate.__version__)'
[ $# -gt 0 ] || set -- tests/integrations tests/data
exec "$oldest/bin/python" -m pytest "$@"
