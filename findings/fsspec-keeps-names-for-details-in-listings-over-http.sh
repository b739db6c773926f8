#!/usr/bin/env bash
# One would guess: with use_listings_cache=True, an option of every file system of fsspec, calls give what they give without it, sooner.
# What happens: over HTTP ls(url, detail=False) keeps the names, and ls(url, detail=True) then returns these names instead of dicts.
#   walk and find of the same folder raise a TypeError. In the other order ls(url, detail=False) returns dicts.
# Why it matters: whoever lists a folder on a server before reading it gets an error far from its cause, and one that depends on what was
#   asked before, since fsspec gives all callers in a process the same file system.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q fsspec==2026.9.0 aiohttp==3.14.5
mkdir "$folder/data"
touch "$folder/data/0.parquet" "$folder/data/1.parquet"
cd "$folder/data"
"$folder/env/bin/python" - <<'PROGRAM'
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import fsspec

SimpleHTTPRequestHandler.log_message = lambda *_: None
server = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/"


def kind(function, *args, **options):
    """Return what a function returns: the type of the first item, or of the error."""
    try:
        return type(next(iter(function(*args, **options)))).__name__
    except TypeError as error:
        return f"{type(error).__name__}: {error}"


print("fsspec", fsspec.__version__)
found = {}
for cached in (False, True):
    for first in (False, True):
        system = fsspec.filesystem("http", use_listings_cache=cached, skip_instance_cache=True)
        system.ls(url, detail=first)
        found[cached, first] = [
            kind(system.ls, url, detail=False),
            kind(system.ls, url, detail=True),
            kind(system.find, url),
        ]
        print(f"use_listings_cache={cached!s:5}, after ls(detail={first!s:5}):", found[cached, first])
right = ["str", "dict", "str"]
wrong = found[True, False][1] == "str" and "TypeError" in found[True, False][2]
sys.exit(0 if found[False, False] == found[False, True] == right and wrong else 1)
PROGRAM
