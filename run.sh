#!/usr/bin/env bash
# The one command: set up, get the data, train on what is here.
#
#   ./run.sh [--setting value ...]                  train the current script
#   ./run.sh records/<name> [--setting value ...]   train a record's script
#   ./run.sh test [--rehearsal] [pytest's flags]    run the tests
#   ./run.sh rehearse [record] [--setting value]    try the 8xH100 run without a GPU
#
# Environment: PYTHON (python3) makes the virtual environment, VENV (.venv) is where, PROCESSES says how many to start.
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
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "Python 3.10 or newer is needed"
        "${PYTHON:-python3}" -m venv "$venv" || die "cannot make the virtual environment $venv"
    fi
    "$python" -m pip install --quiet --disable-pip-version-check -r "$1" || die "pip could not install $1"
    echo "$wanted" > "$stamp"
}

case ${1:-} in
test)
    shift
    install requirements-dev.txt
    marks="not rehearsal"
    if [ "${1:-}" = --rehearsal ]; then
        shift
        marks=rehearsal
    fi
    exec "$python" -m pytest -m "$marks" "$@"
    ;;
rehearse)
    shift
    install requirements.txt
    exec "$python" -m rehearsal "$@"
    ;;
esac

script=train_gpt.py
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    script=${1%/}
    script=${script%/train_gpt.py}/train_gpt.py
    [ -f "$script" ] || die "$script does not exist; there are: test rehearse $(ls -d records/[0-9]*/ 2>/dev/null | tr '\n' ' ')"
    shift
fi
case " $* " in *" --help "* | *" -h "*) install requirements.txt; exec "$python" "$script" --help ;; esac

case ${PROCESSES:-1} in 0* | *[!0-9]*) die "PROCESSES=$PROCESSES: must be a number of processes, 1 or more" ;; esac

own_data=
case " $*" in *" --train_files"*) own_data="your training files" ;; esac

install requirements.txt
read -r gpus cores < <("$python" -c 'import os, torch; print(torch.cuda.device_count(), os.cpu_count())')
if [ "$gpus" -gt 0 ]; then
    processes=${PROCESSES:-$gpus}
    echo "$gpus GPUs: ${own_data:-FineWeb}, the record's settings, one process on each of $processes"
    get_data=(data/cached_fineweb10B.py 10)
else
    # Two processes, because a batch of LAPTOP has two sequences; the cores are shared out between them.
    processes=${PROCESSES:-$((cores >= 2 ? 2 : 1))}
    # glibc would hand large blocks back to the system after each use, and get them again page by page.
    export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / processes > 0 ? cores / processes : 1))}
    echo "no GPU: ${own_data:-the embedded corpus}, the LAPTOP settings, $processes processes of $OMP_NUM_THREADS threads on $cores cores"
    get_data=(data/embedded_corpus.py)
fi
[ -n "$own_data" ] || "$python" "${get_data[@]}"

# torchrun, except that its exit code is the script's, a failure adds no traceback, and a sample follows a checkpoint.
# After a signal the processes have this many seconds to finish their step and save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
exec "$python" -c '
import glob, logging, os, signal, subprocess, sys, time
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
logging.disable(logging.ERROR)
started = time.time()
try:
    main()
except ChildFailedError as failed:
    for rank, failure in failed.failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # torchrun itself ends the others by SIGTERM
            print(f"run.sh: rank {rank} was killed by {signal.Signals(-failure.exitcode).name}", file=sys.stderr)
            sys.exit(128 - failure.exitcode)
    code = failed.get_first_failure()[1].exitcode
    sys.exit(code if code >= 0 else 128 - code)
except SignalException as received:
    sys.exit(128 + received.sigval)
saved = [path for path in glob.glob("checkpoints/*/step_*.pt") if os.path.getmtime(path) > started]
if saved and sys.argv[3] == "train_gpt.py":
    print("\nwhat the model writes (python sample.py latest):", flush=True)
    sys.exit(subprocess.call([sys.executable, "sample.py", max(saved, key=os.path.getmtime), "--tokens", "300"]))
' --standalone --nproc_per_node="$processes" "$script" "$@"
