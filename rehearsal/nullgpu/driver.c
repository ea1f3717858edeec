// The CUDA driver (libcuda): what Triton and Inductor's launchers use, and the virtual memory calls behind torch's
// expandable segments.
#define CUDA_ENABLE_DEPRECATED
#define _GNU_SOURCE
#include "nullgpu.h"

#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define THREADS_PER_BLOCK 1024
#define REGISTERS 65536
#define DEFAULT_SHARED_MEMORY (48 * KIB)
#define WARP_SIZE 32
#define ANY_LIMIT 1024
#define ALLOCATION_GRANULARITY (2 * MIB)

static const CUcontext THE_CONTEXT = (CUcontext)0x77770;

// ---- Devices

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION_SPOKEN;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = nullgpu_card()->count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= nullgpu_card()->count) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    const Card *card = nullgpu_card();
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = card->major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = card->minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = card->multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = (int)card->l2_cache_bytes; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = card->clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = card->memory_clock_khz; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = card->memory_bus_bits; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = DEFAULT_SHARED_MEMORY; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = (int)card->shared_memory_per_block; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        *value = (int)card->shared_memory_per_multiprocessor;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = card->threads_per_multiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = THREADS_PER_BLOCK; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = REGISTERS; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = WARP_SIZE; break;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: *value = 0; break;             // symmetric memory is out of reach
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: *value = 0; break;
    default: *value = 1;   // most of the others ask whether a feature is there
    }
    return CUDA_SUCCESS;
}

// ---- Contexts: one for all

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = THE_CONTEXT;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (context) *context = THE_CONTEXT;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = ANY_LIMIT;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = THE_CONTEXT;
    return CUDA_SUCCESS;
}

// ---- Errors

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory (null GPU)" : "error of the null GPU";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    return cuGetErrorString(error, text);
}

// ---- Linking at run time

CUresult cuLinkCreate_v2(unsigned count, CUjit_option *options, void **values, CUlinkState *state) {
    *state = nullgpu_handle();
    return CUDA_SUCCESS;
}

// ---- Pointers

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = pointer;
    else *(int *)value = 0;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(
    unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr pointer) {
    for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(values[i], attributes[i], pointer);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *bytes, CUdeviceptr pointer) {
    int device;
    void *found_start;
    size_t found_bytes;
    if (!nullgpu_find((void *)pointer, &device, &found_start, &found_bytes)) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = (CUdeviceptr)found_start;
    if (bytes) *bytes = found_bytes;
    return CUDA_SUCCESS;
}

// ---- Virtual memory (expandable segments): addresses are reserved once, memory is created, charged and put there

typedef struct {
    int device;
    size_t bytes;
} Creation;

CUresult cuMemGetAllocationGranularity(
    size_t *granularity, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option) {
    *granularity = ALLOCATION_GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(
    CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    void *reserved = nullgpu_map(nullgpu_current_device(), bytes);
    *start = (CUdeviceptr)reserved;
    return reserved ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
    nullgpu_unmap((void *)start);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
    unsigned long long flags) {
    int device = properties->location.id;
    if (!nullgpu_charge(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    Creation *creation = malloc(sizeof *creation);
    *creation = (Creation){device, bytes};
    *handle = (CUmemGenericAllocationHandle)creation;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Creation *creation = (Creation *)handle;
    nullgpu_refund(creation->device, creation->bytes);
    free(creation);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(
    CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
    madvise((void *)start, bytes, MADV_DONTNEED);   // give touched pages back to the host
    return CUDA_SUCCESS;
}
