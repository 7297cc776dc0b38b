#!/bin/bash
# Makes the pictures of README.md and docs/ from a fresh run with the default options; about half a minute.
#   docs/pictures.sh [FOLDER]    # default: docs
# Needs python with requirements.txt and matplotlib, and chromium: apt install chromium fonts-dejavu
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:-$repo/docs}"
pictures=$(cd "${1:-$repo/docs}" && pwd)
folder=$(mktemp -d) server=
trap '[[ -z $server ]] || kill "$server"; rm -rf "$folder"' EXIT
cd "$folder"
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
python -c "import matplotlib"

python "$repo/train.py"
python "$repo/tools/runs.py" . --plot "$pictures/curves.png"

port=$(python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
address=http://127.0.0.1:$port
python -m tensorboard.main --logdir . --host 127.0.0.1 --port "$port" 2>tensorboard.log &
server=$!
python - "$address/data/plugin/timeseries/tags" <<'END'
import sys, time, urllib.request

for attempt in range(120):  # until the server has read the run
    time.sleep(0.5)
    try:
        if b"val/accuracy" in urllib.request.urlopen(sys.argv[1]).read():
            sys.exit()
    except OSError:
        pass
sys.exit("TensorBoard has not read the run within a minute")
END
# The budget is of the page's own time, which stands while something is being loaded. With WebGL, which draws beside the
# page, the curves might be missing. Root has no sandbox.
[[ $UID == 0 ]] && root=--no-sandbox || root=
"$browser" --headless $root --hide-scrollbars --disable-3d-apis --user-data-dir="$folder/browser" \
    --window-size=1500,1130 --virtual-time-budget=30000 --screenshot="$folder/tensorboard.png" \
    "$address/?smoothing=0#timeseries" 2>browser.log

python - "$folder/tensorboard.png" "$pictures/tensorboard.png" <<'END'
import sys

from PIL import Image

Image.open(sys.argv[1]).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(sys.argv[2], optimize=True)
END
ls -l "$pictures"/*.png
