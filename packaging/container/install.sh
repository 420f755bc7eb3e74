#!/bin/sh
# Installs the portions of Eagle Eye that lie in the working directory, with the given extras, into /opt/eagle-eye.
#
#     sh install.sh EXTRAS
#
# pip and the build tools have an environment of their own, which does not come along. Whatever is installed stands in
# requirements.lock, line by line, or the build fails.
set -eu
extras=$1
home=/opt/eagle-eye
tools=$(mktemp -d)

python3 -m venv "$tools/venv"
pip() {
    "$tools/venv/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"
}
pip install --constraint requirements.lock hatchling
pip wheel --no-deps --no-build-isolation --wheel-dir "$tools" .
python3 -m venv --without-pip "$home"
pip --python "$home/bin/python" install --only-binary :all: --constraint requirements.lock "$(ls "$tools"/*.whl)[$extras]"
pip --python "$home/bin/python" freeze --exclude eagle-eye > "$tools/installed"
# What follows a plus sign names the build of a version: torch==2.13.0+cpu is the lock's torch==2.13.0.
sed -i 's/+.*//' "$tools/installed"
if grep --invert-match --line-regexp --fixed-strings --file requirements.lock "$tools/installed"; then
    echo "these are not in requirements.lock" >&2
    exit 1
fi
rm -r "$tools"
