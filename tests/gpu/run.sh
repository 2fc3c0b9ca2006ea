#!/usr/bin/env bash
# The tests of real hardware, also where nothing can be installed: with the packages of .venv if there is one, else with
# those of $PYTHON or python3 and those unpacked from wheels/*.whl, if there are any. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
if ! "$python" -I -c 'import exporter, pytest' 2>/dev/null; then
    base=${PYTHON:-python3}
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
    # Programs under test start in isolated mode, which sees only what is installed: so an environment of its own.
    "$base" -m venv --without-pip "$place/venv"
    python=$place/venv/bin/python
    mkdir "$place/wheels"
    for wheel in wheels/*.whl; do
        [ ! -e "$wheel" ] || "$base" -m zipfile -e "$wheel" "$place/wheels"
    done
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    {
        echo "$PWD"
        echo "$place/wheels"
        "$base" -c 'import site; print(*(f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()), sep="\n")'
    } >"$site/gpujob.pth"
fi
missing=$("$python" - <<'PY'
from importlib.util import find_spec

names = "ahocorasick_rs aiohttp hypothesis prometheus_client psutil pynvml pytest regex yaml".split()
print(*(name for name in names if find_spec(name) is None))
PY
)
if [ -n "$missing" ]; then
    echo "missing Python packages: $missing; \`make install-dev\`, or put wheels into wheels/" >&2
    exit 2
fi
"$python" -m pytest tests/gpu "$@"
