#!/usr/bin/env bash
# Builds a wheel, installs it for the given versions of Python, for example 3.13, and tries it there.
# Without arguments, takes every supported version. Skips the version of $PYTHON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

tested=$(version_of "$PYTHON")
wheel=""
found=$(tools/find_pythons.sh)
[ $# -gt 0 ] || set -- 3.10 3.11 3.12 3.13
for version in "$@"; do
  [ "$version" != "$tested" ] || continue
  python=""
  for each in $found; do
    [ "$(version_of "$each")" != "$version" ] || python=$each
  done
  if [ -z "$python" ]; then
    echo "Python $version: skipped, this machine lacks it."
    continue
  fi
  environment=.venv-$version
  if [ -z "$wheel" ]; then
    rm -rf build  # A wheel takes old files from there.
    "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
    wheel=$(echo build/wheel/tfdpx-*.whl)
  fi
  "$python" -m venv --clear "$environment"
  # The pip that Python 3.10 brings searched for half an hour without an answer.
  "$environment/bin/python" -m pip install --quiet --upgrade pip
  "$environment/bin/python" -m pip install --quiet "$wheel"
  "$environment/bin/python" tools/smoke_test.py
  rm -rf "$environment"
done
