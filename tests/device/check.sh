#!/usr/bin/env bash
# Checks snaprt on this machine's GPU or TPU, in less than 8 minutes:
#
#   tests/device/check.sh                        # installs into a fresh environment
#   JAX='jax[tpu]' tests/device/check.sh         # the same on a TPU; the default is jax[cuda13]
#   PYTHON=~/venv/bin/python tests/device/check.sh   # uses this environment, installs nothing
#   JAX=jax tests/device/check.sh --platform cpu --megabytes 16 64    # to try the check itself
#
# Arguments are those of check.py. Writes device-check/check.json and device-check/check.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [[ -z ${PYTHON:-} ]]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  python3 -m venv "$work"
  "$work/bin/python" -m pip install --quiet --disable-pip-version-check \
    "$here/../..[demo]" "${JAX:-jax[cuda13]}"
  PYTHON=$work/bin/python
fi
"$PYTHON" "$here/check.py" "$@"
