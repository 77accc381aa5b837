#!/bin/sh
# Makes the environment .venv/NAME from requirements/LOCK.txt; a second call costs nothing.
#
#     PYTHON=python3.12 sh requirements/install.sh [--onto] NAME LOCK 'what it is and how large'
#
# Its stamp .venv/NAME/.stamp-LOCK is a copy of the lock file and is written last: another lock, a changed one or an
# interrupted install makes the environment anew. With --onto the packages are added to what NAME holds already.
# PYTHON, where given, is the interpreter to use; an environment made by another version is made anew.
set -eu
unset PYTHONPATH # pip would take what is there for installed
cd -- "$(dirname -- "$0")/.."

onto=
if [ "$1" = --onto ]; then onto=yes; shift; fi
folder=.venv/$1 lock=requirements/$2.txt stamp=.venv/$1/.stamp-$2 what=$3
python=${PYTHON:-python3}

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

if [ ! -f "$lock" ]; then
    fail "there is no $lock; the locks here are: $(cd requirements && echo *.txt)"
fi
if [ -x "$folder/bin/python" ] && cmp -s "$lock" "$stamp"; then
    if [ -z "${PYTHON:-}" ] || [ "$(version "$python")" = "$(version "$folder/bin/python")" ]; then exit 0; fi
fi

if ! command -v "$python" >/dev/null 2>&1; then
    fail "There is no '$python' here; Duel needs Python 3.11 or later." \
        "Install it, or name one that you have: make PYTHON=/path/to/python3.12 ..."
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    fail "'$python' is $("$python" -V 2>&1); Duel needs Python 3.11 or later." \
        "Install it, or name one that you have: make PYTHON=/path/to/python3.12 ..."
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    fail "'$python' cannot make environments: its modules venv and ensurepip are missing." \
        "On Debian and Ubuntu: sudo apt install python$(version "$python")-venv. Elsewhere: use a complete Python."
fi

# What made an activated environment: the environment may be the one that is removed below.
python=$("$python" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')
echo "Installing $what into $folder with Python $(version "$python"), once."
if [ -z "$onto" ]; then
    rm -f "$folder"/.stamp-*  # first: what is half removed must not look whole
    rm -rf "$folder"
    "$python" -m venv "$folder"
fi
rm -f "$stamp"
# By 'python -m': the scripts of an environment know its place, and not every system takes a space in it.
# Wheels only: building one would fetch tools that no hash vouches for. A lock has all that is needed, or says on top
# of what.
PIP_USER=0 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
    --require-hashes --no-deps --only-binary :all: --requirement "$lock"
cp "$lock" "$stamp"
