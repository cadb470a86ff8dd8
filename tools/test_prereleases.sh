#!/usr/bin/env bash
# Tries tfdpx and runs its fast tests with keras-nightly and the newest TensorFlow, release candidates
# included, on the newest Python that has wheels of it. The tests that fail are listed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv-pre
for python in $(tools/find_pythons.sh 3.15 3.14 3.13 3.12 3.11 3.10); do
  if "$python" -m pip index versions --pre tensorflow >/dev/null 2>&1; then
    break
  fi
done
"$python" -m venv --clear "$environment"
pip() { PYTHONWARNINGS=ignore "$environment/bin/python" -m pip --quiet "$@"; }
pip install --upgrade pip
pip install -e '.[test]'
# These may contradict the versions in setup.py, of which pip warns.
pip install --upgrade 'tensorflow>=2.0rc0'
# Keras and its nightly builds are one folder.
pip uninstall --yes keras keras-nightly
pip install --no-deps --pre keras-nightly
status=0
"$environment/bin/python" tools/smoke_test.py || status=$?
"$environment/bin/python" -m pytest || status=$?
rm -rf "$environment"
exit "$status"
