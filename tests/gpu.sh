#!/usr/bin/env bash
# Everything that needs a GPU, in one command: `bash tests/gpu.sh [RESULTS.json]`.
# Stopped after 8 minutes (no card has run it yet); no network. Installs nothing: PYTHON names the
# interpreter that has torch, triton and the packages of requirements.txt.
set -uo pipefail
cd "$(dirname "$0")/.."
unset TRITON_INTERPRET
exec timeout 470 "${PYTHON:-python}" tests/gpu.py --out "${1:-gpu.json}"
