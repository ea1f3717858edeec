#!/usr/bin/env bash
# The one command: set up, get the data, train on what is here. ./run.sh --help lists what else it does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
venv=${VENV:-.venv}
python=$venv/bin/python

die() { echo "run.sh: $*" >&2; exit 2; }

install() {  # a requirements file; done once, and again when it changes
    local wanted stamp=$venv/.installed-$1
    wanted=$(cat requirements.txt "$1")
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    echo "setting up $venv with $1 (only this once)"
    if [ ! -x "$python" ]; then
        [[ $("${PYTHON:-python3}" --version) =~ ^Python\ 3\.[1-9][0-9] ]] || die "Python 3.10 or newer is needed"
        "${PYTHON:-python3}" -m venv "$venv" || die "cannot make the virtual environment $venv"
    fi
    "$python" -m pip install --quiet --disable-pip-version-check -r "$1" || die "pip could not install $1"
    echo "$wanted" > "$stamp"
}

command=${1:-}
case $command in
test)
    install requirements-dev.txt
    shift
    marks="not rehearsal"
    if [ "${1:-}" = --rehearsal ]; then
        marks=rehearsal
        shift
    fi
    exec "$python" -m pytest -m "$marks" "$@"
    ;;
rehearse | bench)
    install requirements.txt
    shift
    case $command in rehearse) exec "$python" -m rehearsal "$@" ;; bench) exec "$python" bench.py "$@" ;; esac
    ;;
*)
    install requirements.txt
    exec "$python" launch.py "$@"
    ;;
esac
