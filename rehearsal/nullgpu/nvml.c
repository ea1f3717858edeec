// NVML (libnvidia-ml): what torch asks it about counting devices and about expandable segments on an H100.
#include "nullgpu.h"

// There is no nvml.h in the wheels; these are its values.
typedef int nvmlReturn_t;
#define NVML_SUCCESS 0
#define NVML_ERROR_NOT_SUPPORTED 3

#define DECLARED(declaration) declaration; declaration

DECLARED(nvmlReturn_t nvmlInit(void)) {
    return NVML_SUCCESS;
}

DECLARED(nvmlReturn_t nvmlInit_v2(void)) {
    return NVML_SUCCESS;
}

DECLARED(nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)) {
    *count = (unsigned)nullgpu_card()->count;
    return NVML_SUCCESS;
}

DECLARED(nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **device)) {
    *device = nullgpu_handle();
    return NVML_SUCCESS;
}

DECLARED(nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)) {
    *version = CUDA_VERSION_SPOKEN;
    return NVML_SUCCESS;
}

DECLARED(nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes)) {
    *count = 0;
    return NVML_SUCCESS;
}

// NVLink and multi-node fabrics are not pretended.

DECLARED(nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(void)) {
    return NVML_ERROR_NOT_SUPPORTED;
}

DECLARED(nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(void)) {
    return NVML_ERROR_NOT_SUPPORTED;
}

typedef struct {
    unsigned version;
    unsigned char cluster_uuid[16];
    nvmlReturn_t status;
    unsigned clique;
    unsigned char state;
} FabricInfo;
#define FABRIC_NOT_SUPPORTED 0

DECLARED(nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(void *device, FabricInfo *info)) {
    info->status = NVML_SUCCESS;
    info->state = FABRIC_NOT_SUPPORTED;
    return NVML_SUCCESS;   // torch insists on this before it looks at the state
}
