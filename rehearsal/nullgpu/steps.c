// What the device is asked to do, in order: one line for each launch, product, copy, collective and event.
//
// The watcher switches it on once everything is compiled, with the file to write to. Each line is one write, in the
// order of the calls. The watcher adds lines of its own to the same file, with what only torch knows: how many bytes
// the kernel reads and writes that is launched next. Streams and events are opaque numbers:
//     launch <kernel> <blocks> <threads> <stream>       a kernel that Triton compiled, or "native" for one of torch's
//     product <m> <n> <k> <batches> <type> <stream>     of cuBLAS
//     copy <bytes> <kind> <stream>                      fill <bytes> <stream>
//     collective <kind> <bytes> <ranks> <stream>        bytes of this rank's message
//     record <event> <stream>                           await <stream> <event>
#define _GNU_SOURCE
#include "nullgpu.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

static int file = -1;

void nullgpu_record_steps(const char *path);      // called through ctypes by the watcher
void nullgpu_record_steps(const char *path) {
    file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

void nullgpu_note(const char *format, ...) {
    if (file < 0) return;
    char line[512];
    va_list values;
    va_start(values, format);
    int length = vsnprintf(line, sizeof line - 1, format, values);
    va_end(values);
    if (length > (int)sizeof line - 2) length = (int)sizeof line - 2;
    line[length++] = '\n';
    if (write(file, line, (size_t)length) != length) file = -1;     // a full disk: stop, do not lie
}
