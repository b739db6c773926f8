# What the scripts beside this one share. They start from a clean clone, in $work/clone, and clean environments; each step prints its
# name, and the first failure ends it.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export JAX_PLATFORMS=cpu PIP_DISABLE_PIP_VERSION_CHECK=1
# Two workers, and steps after one another, compile many programs alike: a sixth of the tests' time.
export JAX_COMPILATION_CACHE_DIR="$work/jax" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export PIP_NO_COMPILE=1 # most of what is installed is never imported: what is, is compiled then
# One module for each program instead of up to 32: nobody waits for one program alone, and all of them take a tenth less.
export XLA_FLAGS=--xla_cpu_parallel_codegen_split_count=1
unset PYTHONDONTWRITEBYTECODE # and kept for the steps that follow
export JAXNORM_WHEEL=pure # what is installed from these sources; .ci/wheel makes the other kind, too

step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }
# The first command line after the README's line that begins with these words.
readme_command() { awk -v words="$1" 'index($0, words) == 1 {f = 1} f && /^python3/ {print; exit}' README.md; }
# In the background: NAME is what the command is waited for by, and what it prints is shown then.
declare -A jobs
beside() { ("${@:2}") > "$work/$1.log" 2>&1 & jobs[$1]=$!; }
finished() {
  local status=0
  wait "${jobs[$1]}" || status=$?
  cat "$work/$1.log"
  return $status
}
# Into the environment in FOLDER: by uv, which takes half the time, if it can be had.
install() {
  "$1/bin/pip" install -q uv && "$1/bin/uv" pip install -q --python "$1/bin/python" "${@:2}" || "$1/bin/pip" install -q "${@:2}"
}
# Environment NAME of PYTHON, with the library and what its tests take.
environment() { "$2" -m venv "$work/$1" && install "$work/$1" "${@:3}" '.[test]'; }
# Runs tests in the environment in FOLDER.
tests() { "$1/bin/python" -m pytest -n 2 -p no:cacheprovider "${@:2}"; }
versions() { "$1/bin/pip" list 2> /dev/null | grep -iE '^(jax|jaxlib|flax) '; }

git clone -q "$here" "$work/clone"
cd "$work/clone"

# The first Python of these versions that runs here, or nothing. A name on the path may be a shim for
# a version that is not selected.
python_of() {
  local version candidate
  for version in "$@"; do
    for candidate in "python$version" "$HOME/.pyenv/versions/$version."*/bin/python; do
      if "$candidate" -c 'import venv' 2> /dev/null; then echo "$candidate" && return; fi
    done
  done
}
newest=$(python_of 3.13 3.12)
colab=$(python_of 3.13) # whose versions are those of colab.txt
