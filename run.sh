#!/usr/bin/env bash
# The one command: set up, get the data, train on what is here. ./run.sh --help lists what else it does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
venv=${VENV:-.venv}
python=$venv/bin/python

die() { echo "run.sh: $*" >&2; exit 2; }

make_venv() {
    local base=${PYTHON:-python3} said
    said=$("$base" --version 2>&1) || said="missing"
    [[ $said =~ ^Python\ 3\.1[0-4]\. ]] || die "Python 3.10 to 3.14 is needed, $base is $said: PYTHON=... names another"
    "$base" -m ensurepip --version &>/dev/null || die "$base has no venv (Debian, Ubuntu: apt install python3-venv)"
    said=$("$base" -m venv "$venv" 2>&1) || die "cannot make the virtual environment $venv: ${said##*$'\n'}"
}

install() {  # a requirements file; done once, and again when it changes
    local wanted pin cpu_build="" size="about 5 GB, with CUDA's libraries" stamp=$venv/.installed-$1 said=$venv/pip.txt
    wanted=$(cat requirements.txt "$1")
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    [ -x "$venv/bin/pip" ] || make_venv
    pin=$(grep ^torch== requirements.txt)
    if ! nvidia-smi -L &>/dev/null; then
        if "$python" -m pip index versions --retries 0 torch 2>/dev/null | grep -F "${pin#torch==}+cpu" >/dev/null; then
            cpu_build=$pin+cpu size="about 1 GB"
        elif [ "$(uname)" = Darwin ]; then
            size="about 1 GB"
        else
            size="about 5 GB: pip is offered no CPU build of torch here, and the default one brings CUDA's libraries"
        fi
    fi
    echo "setting up $venv, only this once: $(echo "$wanted" | grep -oE '^[a-z_]+' | sort -u | xargs); $size"
    # What pip says goes into a file: its warnings are about its own configuration, and nobody has to act on them here.
    if ! "$python" -m pip install -q --disable-pip-version-check -r "$1" ${cpu_build:+"$cpu_build"} &>"$said"; then
        ! grep -qiE "connection|versions: none" "$said" || die "pip finds no packages; is there a network? (see $said)"
        die "pip could not install $1: $(grep ERROR "$said" | tail -n 1) (see $said)"
    fi
    echo "$wanted" >"$stamp"
}

command=${1:-}
case $command in
setup)
    install requirements.txt
    ;;
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
