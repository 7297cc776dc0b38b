#!/usr/bin/env bash
# Runs the tests against the newest versions on the package index, in a virtual environment of their own.
#
#   tests/template/newest.sh                                            # the newest of everything
#   PIN="torch==2.13.0 numpy<3" tests/template/newest.sh                # but for these
#   PYTHON=python3.14 VENV=/tmp/newest tests/template/newest.sh tests/template/test_resume.py
#
# Arguments go to pytest. VENV is kept, and used again where it exists; without it the environment is deleted.
set -euo pipefail
cd "$(dirname "$0")/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
venv=${VENV:-$scratch/venv}
[ -e "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"

# requirements.txt without its versions. Never lightning 2.6.2 or 2.6.3: they were published with stolen credentials.
sed -nE 's/^([A-Za-z0-9_-]+)==.*/\1/p' requirements.txt > "$scratch/newest.txt"
printf '%s\n' 'lightning!=2.6.2,!=2.6.3' 'pytorch-lightning!=2.6.2,!=2.6.3' >> "$scratch/newest.txt"
for pin in ${PIN:-}; do echo "$pin" >> "$scratch/newest.txt"; done
"$venv/bin/pip" install --quiet --quiet --upgrade --requirement "$scratch/newest.txt"

"$venv/bin/python" - <<'PYTHON'
import platform, re
from importlib.metadata import version

print(f"Python {platform.python_version()}")
for name, tested in re.findall(r"^([\w-]+)==(\S+)", open("requirements.txt").read(), re.MULTILINE):
    newest = version(name)
    print(f"{name}=={newest}" + ("" if newest.split("+")[0] == tested else f"  # requirements.txt has {tested}"))
PYTHON
PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" -m pytest "$@"
