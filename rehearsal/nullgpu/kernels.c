// Kernels: what ptxas says of each compiled one, launches, and how long one would take compared with another.
//
// Inductor and Triton ask for a kernel's registers and spills, and time several configurations of it to keep the best.
// Registers, spills and shared memory are read from the compiled code. The device's clock then moves by an estimate
// with each launch, and events read that clock: so the choice is repeatable, and near to what a card would choose.
#define _GNU_SOURCE
#include "nullgpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <elf.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define REGISTERS_PER_MULTIPROCESSOR 65536
#define BLOCKS_PER_MULTIPROCESSOR 32
#define RESERVED_SHARED_PER_BLOCK KIB
#define ANY_WORK_MS 1.0             // all configurations of a kernel do the same work; how much does not matter here
#define ENOUGH_OCCUPANCY 0.5        // with half of the threads a multiprocessor can hold, memory is kept busy
#define SPILL_BYTES_THAT_DOUBLE 256.0     // local memory for each thread that takes as much time as the work itself

typedef struct {
    int registers;          // of a thread
    int local_bytes;        // of a thread: spilled registers
    int shared_bytes;       // of a block, known at compile time
} Resources;

typedef struct {
    Resources resources;
} Module;

typedef struct {
    Resources resources;
    char name[200];
} Function;

// ---- Reading a cubin: an ELF file whose section .nv.info lists attributes of its kernels

enum { FORMAT_SIZED = 4, FRAME_SIZE = 0x11, REGISTER_COUNT = 0x2f };

static void read_attributes(const uint8_t *at, const uint8_t *end, Resources *found) {
    while (at + 4 <= end) {
        uint8_t format = at[0], attribute = at[1];
        uint16_t size = (uint16_t)(at[2] | at[3] << 8);
        const uint8_t *payload = at + 4;
        at = payload + (format == FORMAT_SIZED ? size : 0);
        if (format != FORMAT_SIZED || size < 8 || at > end) continue;
        uint32_t value;
        memcpy(&value, payload + 4, sizeof value);      // the first word names the function; Triton writes one a file
        if (attribute == REGISTER_COUNT && (int)value > found->registers) found->registers = (int)value;
        if (attribute == FRAME_SIZE && (int)value > found->local_bytes) found->local_bytes = (int)value;
    }
}

static Resources read_cubin(const uint8_t *image) {
    Resources found = {0};
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) || header->e_ident[EI_CLASS] != ELFCLASS64) return found;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    const char *names = (const char *)image + sections[header->e_shstrndx].sh_offset;
    for (int i = 0; i < header->e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        const uint8_t *start = image + sections[i].sh_offset;
        if (!strcmp(name, ".nv.info")) read_attributes(start, start + sections[i].sh_size, &found);
        if (!strncmp(name, ".nv.shared.", 11)) found.shared_bytes = (int)sections[i].sh_size;
    }
    return found;
}

// ---- Modules and functions

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    Module *loaded = malloc(sizeof *loaded);
    loaded->resources = read_cubin(image);
    *module = (CUmodule)loaded;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file < 0 || fstat(file, &status)) return CUDA_ERROR_FILE_NOT_FOUND;
    void *image = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (image == MAP_FAILED) return CUDA_ERROR_INVALID_IMAGE;
    cuModuleLoadData(module, image);
    munmap(image, (size_t)status.st_size);
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    Function *found = malloc(sizeof *found);
    found->resources = ((Module *)module)->resources;
    snprintf(found->name, sizeof found->name, "%s", name);
    *function = (CUfunction)found;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    const Resources *resources = &((Function *)function)->resources;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = resources->registers; break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = resources->local_bytes; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = resources->shared_bytes; break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

// A kernel that wants more shared memory than the card has must fail here as on the real one.
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    bool too_much = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    && (size_t)value > nullgpu_card()->shared_memory_per_block;
    return too_much ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static int least(int a, int b) {
    return a < b ? a : b;
}

// How many of its blocks a multiprocessor holds at once: threads, registers or shared memory run out first.
static int resident_blocks(const Resources *resources, int threads, size_t dynamic_shared) {
    const Card *card = nullgpu_card();
    int registers = (resources->registers + 7) / 8 * 8 * threads;
    size_t shared = (size_t)resources->shared_bytes + dynamic_shared + RESERVED_SHARED_PER_BLOCK;
    int blocks = least(BLOCKS_PER_MULTIPROCESSOR, card->threads_per_multiprocessor / threads);
    if (registers) blocks = least(blocks, REGISTERS_PER_MULTIPROCESSOR / registers);
    return least(blocks, (int)(card->shared_memory_per_multiprocessor / shared));
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, CUfunction function, int block_size, size_t shared_memory) {
    *blocks = resident_blocks(&((Function *)function)->resources, block_size, shared_memory);
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    *clusters = nullgpu_card()->multiprocessors / 2;
    return CUDA_SUCCESS;
}

// ---- The device's clock, and launches

static double clock_ms;

// Full waves of blocks, enough threads to hide the memory's latency, no spills: that is ANY_WORK_MS; else it is more.
static double estimated_ms(const Resources *resources, uint64_t blocks, int threads, size_t dynamic_shared) {
    int resident = resident_blocks(resources, threads, dynamic_shared);
    if (resident < 1 || !blocks) return ANY_WORK_MS * 100;
    double slots = (double)resident * nullgpu_card()->multiprocessors;
    uint64_t waves = (uint64_t)(((double)blocks + slots - 1) / slots);
    double filled = (double)blocks / ((double)waves * slots);
    double occupancy = (double)resident * threads / nullgpu_card()->threads_per_multiprocessor;
    double busy = occupancy < ENOUGH_OCCUPANCY ? occupancy / ENOUGH_OCCUPANCY : 1;
    return ANY_WORK_MS * (1 + resources->local_bytes / SPILL_BYTES_THAT_DOUBLE) / (filled * busy);
}

static CUresult launch(CUfunction function, uint64_t blocks, unsigned threads, unsigned shared, CUstream stream) {
    const Function *kernel = (const Function *)function;
    clock_ms += estimated_ms(&kernel->resources, blocks, (int)threads, shared);
    nullgpu_note("launch %s %llu %u %p", kernel->name, (unsigned long long)blocks, threads, (void *)stream);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared, CUstream stream, void **parameters, void **extra) {
    return launch(function, (uint64_t)grid_x * grid_y * grid_z, block_x * block_y * block_z, shared, stream);
}

CUresult cuLaunchCooperativeKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared, CUstream stream, void **parameters) {
    return launch(function, (uint64_t)grid_x * grid_y * grid_z, block_x * block_y * block_z, shared, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **parameters, void **extra) {
    return launch(function, (uint64_t)c->gridDimX * c->gridDimY * c->gridDimZ,
                  c->blockDimX * c->blockDimY * c->blockDimZ, c->sharedMemBytes, c->hStream);
}

static cudaError_t launch_native(dim3 grid, dim3 block, cudaStream_t stream) {
    clock_ms += ANY_WORK_MS;
    nullgpu_note("launch native %llu %u %p", (unsigned long long)grid.x * grid.y * grid.z, block.x * block.y * block.z,
                 (void *)stream);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(
    const void *function, dim3 grid, dim3 block, void **parameters, size_t shared, cudaStream_t stream) {
    return launch_native(grid, block, stream);
}

cudaError_t __cudaLaunchKernel(
    void *kernel, dim3 grid, dim3 block, void **parameters, size_t shared, cudaStream_t stream) {
    return launch_native(grid, block, stream);
}

cudaError_t cudaLaunchCooperativeKernel(
    const void *function, dim3 grid, dim3 block, void **parameters, size_t shared, cudaStream_t stream) {
    return launch_native(grid, block, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **parameters) {
    return launch_native(config->gridDim, config->blockDim, config->stream);
}

// ---- Events: each keeps the clock at which it was recorded

typedef struct {
    double ms;
} Event;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = (cudaEvent_t)calloc(1, sizeof(Event));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (event) ((Event *)event)->ms = clock_ms;
    nullgpu_note("record %p %p", (void *)event, (void *)stream);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    nullgpu_note("await %p %p", (void *)stream, (void *)event);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    double ms = ((Event *)end)->ms - ((Event *)start)->ms;
    *milliseconds = ms > 0 ? (float)ms : 1e-3f;       // never zero: autotuners divide by it
    return cudaSuccess;
}
