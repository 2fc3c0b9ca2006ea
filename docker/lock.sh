#!/usr/bin/env bash
# Write requirements.txt and requirements-build.txt: the newest release of everything that the image installs, with the
# hashes of its wheels for x86_64 and aarch64. Run it before a release, with the Python version of the image.
#
#   docker/lock.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3.11}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# lock FILE REQUIREMENT...: write FILE for these requirements and all that they need
lock() {
    local file=$1 machine glibc tags
    shift
    rm -rf "$folder/wheels"
    for machine in x86_64 aarch64; do
        tags=(--platform "manylinux2014_$machine")
        for glibc in 17 24 26 27 28 31 34 35 36; do tags+=(--platform "manylinux_2_${glibc}_$machine"); done
        "$python" -m pip download --quiet --only-binary :all: --python-version 3.11 --implementation cp "${tags[@]}" \
            --dest "$folder/wheels" "$@"
    done
    "$python" - "$folder/wheels" >"$file" <<'PY'
import hashlib
import pathlib
import sys

locked: dict[tuple[str, str], list[str]] = {}
for wheel in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    name, version = wheel.name.split("-")[:2]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    locked.setdefault((name.lower().replace("_", "-"), version), []).append(digest)
print("# Written by docker/lock.sh; wheels for x86_64 and aarch64.")
for (name, version), digests in sorted(locked.items()):
    print(" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in sorted(digests))]))
PY
}

mapfile -t needs < <("$python" -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
print(*project["build-system"]["requires"], "--", *project["project"]["dependencies"], sep="\n")')
for index in "${!needs[@]}"; do [ "${needs[index]}" != -- ] || split=$index; done
lock docker/requirements-build.txt "${needs[@]:0:split}"
lock docker/requirements.txt "${needs[@]:split+1}"
