// The CUDA runtime (libcudart): devices, memory, streams, events, graphs, launches.
//
// Calls that only have to succeed are in accept.c; whatever is in neither reaches the real runtime and fails there
// with "no driver", which is how a missing call shows.
#define _GNU_SOURCE
#include "nullgpu.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define THREADS_PER_BLOCK 1024
#define REGISTERS 65536
#define DEFAULT_SHARED_MEMORY (48 * KIB)
#define WARP_SIZE 32
#define MAX_GRID_X 2147483647
#define MAX_GRID_YZ 65535
#define MAX_BLOCK_Z 64
#define LOWEST_PRIORITY 0
#define HIGHEST_PRIORITY (-5)

// ---- Devices

static __thread int current_device = 0;

int nullgpu_current_device(void) {
    return current_device;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = nullgpu_card()->count;
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= nullgpu_card()->count) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION_SPOKEN;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION_SPOKEN;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    const Card *card = nullgpu_card();
    if (device < 0 || device >= card->count) return cudaErrorInvalidDevice;
    *properties = (struct cudaDeviceProp){
        .totalGlobalMem = card->memory_bytes,
        .major = card->major,
        .minor = card->minor,
        .multiProcessorCount = card->multiprocessors,
        .l2CacheSize = (int)card->l2_cache_bytes,
        .memoryBusWidth = card->memory_bus_bits,
        .sharedMemPerBlock = DEFAULT_SHARED_MEMORY,
        .sharedMemPerBlockOptin = card->shared_memory_per_block,
        .sharedMemPerMultiprocessor = card->shared_memory_per_multiprocessor,
        .reservedSharedMemPerBlock = KIB,
        .regsPerBlock = REGISTERS,
        .regsPerMultiprocessor = REGISTERS,
        .warpSize = WARP_SIZE,
        .maxThreadsPerBlock = THREADS_PER_BLOCK,
        .maxThreadsPerMultiProcessor = card->threads_per_multiprocessor,
        .maxBlocksPerMultiProcessor = 32,
        .maxThreadsDim = {THREADS_PER_BLOCK, THREADS_PER_BLOCK, MAX_BLOCK_Z},
        .maxGridSize = {MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ},
        .totalConstMem = 64 * KIB,
        .asyncEngineCount = 3,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .cooperativeLaunch = 1,
        .clusterLaunch = card->major >= 9,
        .ECCEnabled = 1,
        .managedMemory = 1,
        .memoryPoolsSupported = 1,
        .streamPrioritiesSupported = 1,
        .unifiedAddressing = 1,
        .pciBusID = device + 1,
    };
    snprintf(properties->name, sizeof properties->name, "%s", card->name);
    properties->uuid.bytes[0] = (char)(device + 1);   // distinct, or torch takes the devices for one
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    const Card *card = nullgpu_card();
    if (device < 0 || device >= card->count) return cudaErrorInvalidDevice;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = card->major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = card->minor; break;
    case cudaDevAttrMultiProcessorCount: *value = card->multiprocessors; break;
    case cudaDevAttrL2CacheSize: *value = (int)card->l2_cache_bytes; break;
    case cudaDevAttrClockRate: *value = card->clock_khz; break;
    case cudaDevAttrMemoryClockRate: *value = card->memory_clock_khz; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = card->memory_bus_bits; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = DEFAULT_SHARED_MEMORY; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)card->shared_memory_per_block; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)card->shared_memory_per_multiprocessor; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card->threads_per_multiprocessor; break;
    case cudaDevAttrWarpSize: *value = WARP_SIZE; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = REGISTERS; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = REGISTERS; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = THREADS_PER_BLOCK; break;
    case cudaDevAttrMaxBlockDimX: *value = THREADS_PER_BLOCK; break;
    case cudaDevAttrMaxBlockDimY: *value = THREADS_PER_BLOCK; break;
    case cudaDevAttrMaxBlockDimZ: *value = MAX_BLOCK_Z; break;
    case cudaDevAttrMaxGridDimX: *value = MAX_GRID_X; break;
    case cudaDevAttrMaxGridDimY: *value = MAX_GRID_YZ; break;
    case cudaDevAttrMaxGridDimZ: *value = MAX_GRID_YZ; break;
    default: *value = 1;   // most of the others ask whether a feature is there
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, (size_t)length, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
    if (lowest) *lowest = LOWEST_PRIORITY;
    if (highest) *highest = HIGHEST_PRIORITY;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}

// ---- Errors: none are kept, each call returns its own

cudaError_t cudaGetLastError(void) {
    return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void) {
    return cudaSuccess;
}

// ---- Memory

static cudaError_t allocate(void **pointer, size_t bytes, int device) {
    *pointer = NULL;
    if (!nullgpu_charge(device, bytes)) return cudaErrorMemoryAllocation;
    *pointer = nullgpu_map(device, bytes);
    if (*pointer) return cudaSuccess;
    nullgpu_refund(device, bytes);
    return cudaErrorMemoryAllocation;
}

static cudaError_t release(void *pointer) {
    int device;
    void *start;
    size_t bytes;
    if (!pointer || !nullgpu_find(pointer, &device, &start, &bytes)) return cudaSuccess;
    nullgpu_refund(device, bytes);
    nullgpu_unmap(start);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    return allocate(pointer, bytes, current_device);
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    return allocate(pointer, bytes, current_device);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    return allocate(pointer, bytes, HOST);
}

cudaError_t cudaFree(void *pointer) {
    return release(pointer);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    return release(pointer);
}

cudaError_t cudaFreeHost(void *pointer) {
    return release(pointer);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = nullgpu_card()->memory_bytes;
    *free_bytes = nullgpu_free_bytes(current_device);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    int device;
    void *start;
    size_t bytes;
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = current_device};
    if (!nullgpu_find(pointer, &device, &start, &bytes)) return cudaSuccess;
    attributes->type = device == HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = device == HOST ? current_device : device;
    attributes->devicePointer = (void *)pointer;
    attributes->hostPointer = device == HOST ? (void *)pointer : NULL;
    return cudaSuccess;
}

// ---- Copies and fills: the small ones are real (see LARGEST_REAL_COPY)

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    nullgpu_copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    nullgpu_note("copy %zu %d %p", bytes, (int)kind, (void *)stream);
    nullgpu_copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *start, int value, size_t bytes) {
    if (bytes <= LARGEST_REAL_COPY) memset(start, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *start, int value, size_t bytes, cudaStream_t stream) {
    nullgpu_note("fill %zu %p", bytes, (void *)stream);
    return cudaMemset(start, value, bytes);
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char any_symbol[64 * KIB];
    *pointer = any_symbol;
    return cudaSuccess;
}

// ---- Memory pools: there, and empty

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = nullgpu_handle();
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    memset(value, 0, sizeof(unsigned long long));
    return cudaSuccess;
}

// ---- Streams: all work is done at once, so every stream is always idle

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = nullgpu_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    *stream = nullgpu_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = nullgpu_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = LOWEST_PRIORITY;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    function(argument);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *argument, unsigned flags) {
    function(stream, cudaSuccess, argument);
    return cudaSuccess;
}

// ---- Graph capture: torch captures one stream at a time and asks which; the graph itself stays empty

static cudaStream_t captured_stream;
static unsigned long long capture_id;
static bool capturing;

static cudaError_t begin_capture(cudaStream_t stream) {
    captured_stream = stream;
    capturing = true;
    capture_id++;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    return begin_capture(stream);
}

cudaError_t cudaStreamBeginCaptureToGraph(
    cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *dependencies, const cudaGraphEdgeData *edges,
    size_t dependency_count, enum cudaStreamCaptureMode mode) {
    return begin_capture(stream);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    capturing = false;
    *graph = nullgpu_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    bool is_captured = capturing && stream == captured_stream;
    *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *dependency_count) {
    bool is_captured = capturing && stream == captured_stream;
    if (status) *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = is_captured ? capture_id : 0;
    if (graph) *graph = is_captured ? nullgpu_handle() : NULL;
    if (dependency_count) *dependency_count = 0;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    *executable = nullgpu_handle();
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    if (nodes) nodes[0] = nullgpu_handle();
    *count = 1;   // an empty graph would make torch warn
    return cudaSuccess;
}

// ---- Kernels that were compiled into torch

cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    int architecture = nullgpu_card()->major * 10 + nullgpu_card()->minor;
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = THREADS_PER_BLOCK,
        .numRegs = 32,
        .binaryVersion = architecture,
        .ptxVersion = architecture,
    };
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, const void *function, int block_size, size_t shared_memory) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int block_size, size_t shared_memory, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

// ---- The way from runtime to driver: torch asks here for the driver's calls by name

static int unknown_driver_call(void) {
    return cudaErrorNotSupported;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
    char newer_name[128];
    snprintf(newer_name, sizeof newer_name, "%s_v2", name);   // like the real one: the newest form of a call
    void *found = dlsym(RTLD_DEFAULT, newer_name);
    if (!found) found = dlsym(RTLD_DEFAULT, name);
    *function = found ? found : (void *)unknown_driver_call;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
