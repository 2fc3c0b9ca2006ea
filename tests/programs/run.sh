#!/usr/bin/env bash
# Frameworks as users have them, in a virtual environment that no other test uses. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/../.."
place=$PWD/.venv-programs
if ! "$place/bin/python" -c 'import torch, accelerate, transformers, lightning, mpi4py, orbax.checkpoint, zarr, joblib, keras, tensorflow, lightgbm, xgboost' 2>/dev/null; then
    .venv/bin/python -m venv "$place"
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check "${TORCH:-torch}" -r tests/programs/requirements.txt
fi
GPUJOB_PROGRAMS=$place .venv/bin/python -m pytest tests/programs "$@"
