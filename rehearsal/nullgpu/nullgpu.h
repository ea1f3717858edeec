// The null GPU: a pretended NVIDIA device that hands out memory and computes nothing.
//
// One library stands in for the CUDA runtime and driver, for the parts of cuBLAS that compute, and for NCCL. It is
// preloaded into a process that runs the CUDA build of torch; everything above it (the caching allocator, Dynamo,
// Inductor, Triton, ptxas) is the real thing.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

#define MAX_DEVICES 64
#define CUDA_VERSION_SPOKEN 13000

// Copies and fills up to this size are carried out, because flags, token ids and DDP's checks are small and must
// arrive. Larger ones would only fill the host's memory with values that no kernel ever reads; the host gets zeros.
#define LARGEST_REAL_COPY MIB

// What a process's context takes of a device before the first tensor: a guess, not measured on a card.
#define CONTEXT_BYTES (520 * MIB)

// The card that is pretended, from the environment:
//   NULLGPU_COUNT        how many of them                         (8)
//   NULLGPU_CAPABILITY   compute capability, such as 8.6          (9.0)
//   NULLGPU_MEMORY_GIB   memory of each                           (what such a card has)
//   NULLGPU_NAME         its name                                 (that of such a card); "(null GPU)" follows it
typedef struct {
    int count;
    int major, minor;
    size_t memory_bytes;
    char name[128];
    int multiprocessors;
    size_t shared_memory_per_block;            // what a kernel may ask for, at most
    size_t shared_memory_per_multiprocessor;
    int threads_per_multiprocessor;
    size_t l2_cache_bytes;
    int clock_khz, memory_clock_khz, memory_bus_bits;
} Card;

const Card *nullgpu_card(void);

// A fresh value for an opaque handle (stream, event, graph, module): never null, never dereferenced.
void *nullgpu_handle(void);

// Memory, shared by the runtime's cudaMalloc and the driver's cuMemCreate so that both meet the same limit.
#define HOST (-1)   // in place of a device number: pinned host memory, which the card's size does not limit

bool nullgpu_charge(int device, size_t bytes);     // false: it does not fit
void nullgpu_refund(int device, size_t bytes);
size_t nullgpu_free_bytes(int device);
void *nullgpu_map(int device, size_t bytes);       // address space only: pages appear when they are touched
void nullgpu_unmap(void *start);
bool nullgpu_find(const void *address, int *device, void **start, size_t *bytes);
void nullgpu_copy(void *to, const void *from, size_t bytes);
int nullgpu_current_device(void);

// One line of the trace of what the device is asked to do (see steps.c); nothing unless it is being recorded.
__attribute__((format(printf, 1, 2))) void nullgpu_note(const char *format, ...);

