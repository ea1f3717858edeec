// NCCL: nothing is sent, every collective is written down.
//
// If NULLGPU_TRACE names a folder, each collective becomes one line of rank<R>.collectives there:
//     AllReduce 1024 bfloat16 2048        (kind, elements, element type, bytes of this rank's message)
// Every line is one write, so that the file of a killed rank is complete up to its last collective.
#include "nullgpu.h"

#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    const char *name;
    size_t bytes;
} ElementType;

static const ElementType ELEMENT_TYPES[ncclNumTypes] = {
    [ncclInt8] = {"int8", 1},
    [ncclUint8] = {"uint8", 1},
    [ncclInt32] = {"int32", 4},
    [ncclUint32] = {"uint32", 4},
    [ncclInt64] = {"int64", 8},
    [ncclUint64] = {"uint64", 8},
    [ncclFloat16] = {"float16", 2},
    [ncclFloat32] = {"float32", 4},
    [ncclFloat64] = {"float64", 8},
    [ncclBfloat16] = {"bfloat16", 2},
    [ncclFloat8e4m3] = {"float8_e4m3", 1},
    [ncclFloat8e5m2] = {"float8_e5m2", 1},
};

static size_t message_bytes(size_t count, ncclDataType_t type) {
    return count * ELEMENT_TYPES[type].bytes;
}

// ---- The trace

struct ncclComm {
    int size, rank;
};

static int trace_file = -1;
static pthread_once_t trace_once = PTHREAD_ONCE_INIT;

static void open_trace(void) {
    const char *folder = getenv("NULLGPU_TRACE");
    const char *rank = getenv("RANK");
    if (!folder || !*folder) return;
    char path[4096];
    snprintf(path, sizeof path, "%s/rank%s.collectives", folder, rank ? rank : "0");
    trace_file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static void trace(
    const char *kind, size_t count, ncclDataType_t type, ncclComm_t communicator, cudaStream_t stream) {
    nullgpu_note("collective %s %zu %d %p", kind, message_bytes(count, type), communicator->size, (void *)stream);
    pthread_once(&trace_once, open_trace);
    if (trace_file < 0) return;
    char line[128];
    int length = snprintf(line, sizeof line, "%s %zu %s %zu\n", kind, count, ELEMENT_TYPES[type].name,
                          message_bytes(count, type));
    if (write(trace_file, line, (size_t)length) != length) trace_file = -1;   // a full disk: stop, do not lie
}

// ---- Communicators

static ncclResult_t new_communicator(ncclComm_t *communicator, int size, int rank) {
    *communicator = malloc(sizeof **communicator);
    **communicator = (struct ncclComm){size, rank};
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *communicator, int size, ncclUniqueId id, int rank) {
    return new_communicator(communicator, size, rank);
}

ncclResult_t ncclCommInitRankConfig(
    ncclComm_t *communicator, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return new_communicator(communicator, size, rank);
}

ncclResult_t ncclCommInitRankScalable(
    ncclComm_t *communicator, int size, int rank, int id_count, ncclUniqueId *ids, ncclConfig_t *config) {
    return new_communicator(communicator, size, rank);
}

// The size of the part is not known without talking to the other ranks; torch keeps it on its own.
ncclResult_t ncclCommSplit(
    ncclComm_t communicator, int color, int key, ncclComm_t *part, ncclConfig_t *config) {
    return new_communicator(part, communicator->size, communicator->rank);
}

ncclResult_t ncclCommCount(const ncclComm_t communicator, int *size) {
    *size = communicator->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int *rank) {
    *rank = communicator->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t *operation, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence,
    ncclComm_t communicator) {
    *operation = ncclSum;
    return ncclSuccess;
}

// ---- Collectives: small messages arrive as if every rank had sent what this one sent, because DDP compares the
// shapes of all ranks in its constructor

ncclResult_t ncclAllReduce(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t communicator,
    cudaStream_t stream) {
    trace("AllReduce", count, type, communicator, stream);
    nullgpu_copy(to, from, message_bytes(count, type));
    return ncclSuccess;
}

ncclResult_t ncclAllGather(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t communicator, cudaStream_t stream) {
    trace("AllGather", count, type, communicator, stream);
    size_t bytes = message_bytes(count, type);
    if (bytes * (size_t)communicator->size > LARGEST_REAL_COPY) return ncclSuccess;
    for (int rank = 0; rank < communicator->size; rank++) nullgpu_copy((char *)to + (size_t)rank * bytes, from, bytes);
    return ncclSuccess;
}

ncclResult_t ncclReduceScatter(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t communicator,
    cudaStream_t stream) {
    trace("ReduceScatter", count, type, communicator, stream);
    size_t bytes = message_bytes(count, type);
    nullgpu_copy(to, (const char *)from + (size_t)communicator->rank * bytes, bytes);
    return ncclSuccess;
}

ncclResult_t ncclAlltoAll(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t communicator, cudaStream_t stream) {
    trace("AllToAll", count, type, communicator, stream);
    nullgpu_copy(to, from, message_bytes(count, type) * (size_t)communicator->size);
    return ncclSuccess;
}

ncclResult_t ncclBroadcast(
    const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
    cudaStream_t stream) {
    trace("Broadcast", count, type, communicator, stream);
    if (communicator->rank == root) nullgpu_copy(to, from, message_bytes(count, type));
    return ncclSuccess;
}

ncclResult_t ncclBcast(
    void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t communicator, cudaStream_t stream) {
    trace("Broadcast", count, type, communicator, stream);
    return ncclSuccess;
}

ncclResult_t ncclReduce(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root,
    ncclComm_t communicator, cudaStream_t stream) {
    trace("Reduce", count, type, communicator, stream);
    if (communicator->rank == root) nullgpu_copy(to, from, message_bytes(count, type));
    return ncclSuccess;
}

// ---- Point to point: differs between ranks by nature, so the peer is not part of the line

ncclResult_t ncclSend(
    const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator, cudaStream_t stream) {
    trace("Send", count, type, communicator, stream);
    return ncclSuccess;
}

ncclResult_t ncclRecv(
    void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator, cudaStream_t stream) {
    trace("Recv", count, type, communicator, stream);
    return ncclSuccess;
}
