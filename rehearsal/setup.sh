#!/usr/bin/env bash
# Prepares the rehearsal: the CUDA build of torch in a virtual environment of its own, and the null GPU, compiled.
#
#   REHEARSAL_HOME   where it goes (default ~/.cache/speedrun-rehearsal; about 5 GB)
#   REHEARSAL_VENV   an environment to use instead of $REHEARSAL_HOME/venv
#
# Safe and quick to run again. Exit code 2, with one line that says why, where it cannot be done; 3 where it could, but
# the null GPU does not compile.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${REHEARSAL_HOME:-$HOME/.cache/speedrun-rehearsal}
venv=${REHEARSAL_VENV:-$home/venv}
library=$home/lib/libcuda.so.1
log=$home/setup.log
compiler=${CC:-cc}
pinned=$(sed -n 's/^torch==//p' "$here/../requirements.txt")
cuda_crt=nvidia-cuda-crt==13.0.88   # headers that cuda_runtime_api.h includes and the torch wheel does not bring

cannot() {
    echo "rehearsal: $1" >&2
    exit "${2:-2}"
}

check_machine() {
    [ "$(uname -s)" = Linux ] || cannot "needs Linux: there is no CUDA build of torch for $(uname -s)"
    case $(uname -m) in
    x86_64 | aarch64) ;;
    *) cannot "there is no CUDA build of torch for $(uname -m)" ;;
    esac
    command -v "$compiler" >/dev/null || cannot "needs a C compiler: install gcc or clang, or set CC"
    mkdir -p "$home/lib" 2>/dev/null || cannot "cannot write to $home: set REHEARSAL_HOME"
}

packages() {
    echo "$venv"/lib/python3*/site-packages
}

has_cuda_torch() {
    [ -x "$venv/bin/python" ] && [ -f "$(packages)/nvidia/cu13/include/crt/host_defines.h" ] &&
        grep -qE "^cuda.*= '13" "$(packages)/torch/version.py" 2>/dev/null &&
        grep -qE "^__version__ = '${pinned//./\\.}[+']" "$(packages)/torch/version.py"
}

install_torch() {
    has_cuda_torch && return
    echo "rehearsal: installing the CUDA build of torch into $venv (5 GB, a few minutes)"
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv" >"$log" 2>&1 || cannot "python3 -m venv failed; see $log"
    # The user's own pip settings are left out of it: where they prefer a CPU build of torch, it would win.
    env -u PIP_FIND_LINKS "$venv/bin/pip" --isolated install --disable-pip-version-check \
        -r "$here/../requirements.txt" "$cuda_crt" >"$log" 2>&1 ||
        cannot "the CUDA build of torch could not be installed (no network?); see $log"
    has_cuda_torch || cannot "the torch for this machine is not $pinned, built for CUDA 13; see $log"
}

compile_null_gpu() {
    local sources=("$here"/nullgpu/*.c) nvidia checksum stamp=$home/lib/sources.sha256
    checksum=$(cat "$here"/nullgpu/*.[ch] "$here/setup.sh" | sha256sum)     # the compiler's flags are in setup.sh
    [ -f "$library" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$checksum" ] && return
    nvidia=$(packages)/nvidia
    # Unused parameters are the nature of a device that does nothing. The headers of the 16-bit and 8-bit types are
    # declared as already read: they want C++ headers that the wheels do not bring, and nothing here uses them.
    "$compiler" -O1 -std=gnu11 -Wall -Wextra -Wno-unused-parameter -fPIC -shared \
        -D__CUDA_FP16_H__ -D__CUDA_BF16_H__ -D__CUDA_FP8_H__ \
        -I"$nvidia/cu13/include" -I"$nvidia/nccl/include" "${sources[@]}" \
        -Wl,-soname,libcuda.so.1 -o "$library.$$" -ldl -lpthread >"$log" 2>&1 ||
        cannot "the null GPU did not compile; see $log" 3
    mv "$library.$$" "$library"
    ln -sf libcuda.so.1 "$home/lib/libcuda.so"           # the name that Triton links its launchers against
    ln -sf libcuda.so.1 "$home/lib/libnvidia-ml.so.1"    # the name that torch opens
    echo "$checksum" >"$stamp"
}

check_machine
install_torch
compile_null_gpu
echo "rehearsal: ready in $home"
