#!/usr/bin/env bash
# For each given version of Python, for example 3.13, prints the path of a working interpreter if this
# machine has one. Without arguments, looks for every supported version, the preferred one first.
# Searches the PATH and the versions of pyenv, as the shims of pyenv may not run.
set -euo pipefail

works() {
  "$1" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" >/dev/null 2>&1
}

pyenv_versions=${PYENV_ROOT:-$( (pyenv root || echo ~/.pyenv) 2>/dev/null)}/versions
[ $# -gt 0 ] || set -- 3.11 3.12 3.13 3.10
for version in "$@"; do
  for python in "python$version" python3 "$pyenv_versions/$version".*/bin/python; do
    if works "$python" "$version"; then
      command -v "$python"
      break
    fi
  done
done
