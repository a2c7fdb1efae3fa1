#!/usr/bin/env bash
# Installs the browser that tests of `hf-dcp view` click through, where it is missing and can be had: Debian's chromium
# and its driver, by apt-get, as root. Elsewhere it says so, and those tests are skipped.
set -uo pipefail

if { command -v chromium || command -v google-chrome; } >/dev/null && command -v chromedriver >/dev/null; then
  exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "browser: installing chromium"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core; } >/dev/null 2>&1 &&
    exit 0
  echo "browser: apt-get could not install it: tests of the page are skipped"
else
  echo "browser: no chromium and chromedriver here, and no way to install them: tests of the page are skipped"
fi
