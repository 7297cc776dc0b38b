#!/usr/bin/env bash
# Runs the tests at one end of the version ranges of pyproject.toml, in a virtual environment of their own.
#
#   tests/template/versions.sh lowest                                   # the lowest version of each range
#   tests/template/versions.sh newest                                   # the newest version of each range
#   tests/template/versions.sh beyond                                   # the newest there is: can the ranges be widened?
#   PIN="torch==2.13.0 numpy<2.3" tests/template/versions.sh newest     # but for these
#   PYTHON=python3.14 VENV=/tmp/newest tests/template/versions.sh newest tests/template/test_resume.py
#
# Further arguments go to pytest. VENV is kept, and used again where it exists; without it the environment is deleted.
set -euo pipefail
cd "$(dirname "$0")/../.."
end=${1:-}
case $end in
    lowest | newest | beyond) shift ;;
    *) sed -nE '2,/^set /s/^# ?//p' "$0" >&2; exit 2 ;;
esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
venv=${VENV:-$scratch/venv}
[ -e "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"

"$venv/bin/python" - "$end" > "$scratch/versions.txt" <<'PYTHON'
import os, re, sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
ranges = sum(project["optional-dependencies"].values(), project["dependencies"])
pins = {re.match(r"[\w-]+", pin)[0].lower(): pin for pin in os.environ.get("PIN", "").split()}
for line in ranges:
    name, lowest, rest = re.fullmatch(r"([\w-]+)>=([\d.]+)(.*)", line).groups()
    exceptions = "".join(re.findall(r",!=[^,]+", rest))
    ends = {"lowest": f"{name}=={lowest}", "newest": line, "beyond": f"{name}>={lowest}{exceptions}"}
    print(pins.pop(name.lower(), ends[sys.argv[1]]))
print(*pins.values(), sep="\n")
print("pytorch-lightning!=2.6.2,!=2.6.3")  # comes with lightning; these were published with stolen credentials
PYTHON
"$venv/bin/pip" install --quiet --quiet --upgrade --requirement "$scratch/versions.txt"

"$venv/bin/python" - "$scratch/versions.txt" <<'PYTHON'
import platform, re, sys
from importlib.metadata import version

tested = dict(re.findall(r"^([\w-]+)==(\S+)", open("requirements.txt").read() + open("requirements-dev.txt").read(), re.MULTILINE))
print(f"Python {platform.python_version()}")
for name in re.findall(r"^[\w-]+", open(sys.argv[1]).read(), re.MULTILINE):
    found, expected = version(name), tested.get(name)
    print(f"{name}=={found}" + (f"  # tested: {expected}" if expected not in (None, found.split("+")[0]) else ""))
PYTHON
PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" -m pytest -n 3 --dist loadfile "$@"
