#!/usr/bin/env bash
# Chromium for the tests of the live page: what is there, or Debian's package where this may install one. Without
# either the tests say that they were skipped; this never fails.
set -euo pipefail

for name in chromium-headless-shell chromium chromium-browser google-chrome chrome "${WINDLASS_CHROMIUM:-none}"; do
    if command -v "$name" >/dev/null; then
        echo "browser: $(command -v "$name")"
        exit 0
    fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    install=(apt-get install --quiet --quiet --yes --no-install-recommends chromium-headless-shell)
    if { timeout 120 apt-get update --quiet --quiet && timeout 300 "${install[@]}"; } >/dev/null 2>&1; then
        echo "browser: installed $(command -v chromium-headless-shell)"
        exit 0
    fi
fi
echo "browser: NO CHROMIUM, so the tests of the live page will be skipped"
