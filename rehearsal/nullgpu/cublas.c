// cuBLAS: matrix products are not computed but their operations are counted, 2*m*n*k each.
//
// The calls that only describe a product (layouts, preferences) stay the real ones.
#define _GNU_SOURCE
#include "nullgpu.h"

#include <cublasLt.h>
#include <cublas_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

static uint64_t matmul_flops;

// Read through ctypes by the watcher, before and after each optimizer step.
uint64_t nullgpu_matmul_flops(void);
uint64_t nullgpu_matmul_flops(void) {
    return __atomic_load_n(&matmul_flops, __ATOMIC_RELAXED);
}

static const char *type_name(cudaDataType type) {
    switch (type) {
    case CUDA_R_16BF: return "bfloat16";
    case CUDA_R_16F: return "float16";
    case CUDA_R_32F: return "float32";
    case CUDA_R_64F: return "float64";
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2: return "float8";
    default: return "other";
    }
}

static cublasStatus_t count_on(
    cudaStream_t stream, uint64_t m, uint64_t n, uint64_t k, uint64_t batches, cudaDataType type) {
    __atomic_add_fetch(&matmul_flops, 2 * m * n * k * batches, __ATOMIC_RELAXED);
    nullgpu_note("product %llu %llu %llu %llu %s %p", (unsigned long long)m, (unsigned long long)n,
                 (unsigned long long)k, (unsigned long long)(batches ? batches : 1), type_name(type), (void *)stream);
    return CUBLAS_STATUS_SUCCESS;
}

static __thread cudaStream_t stream_of_handle;      // torch sets it before each product

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    stream_of_handle = stream;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t count(uint64_t m, uint64_t n, uint64_t k, uint64_t batches, cudaDataType type) {
    return count_on(stream_of_handle, m, n, k, batches, type);
}

// ---- Handles

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = nullgpu_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

// ---- One product

cublasStatus_t cublasSgemm_v2(
    cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op, int m, int n, int k, const float *alpha,
    const float *a, int lda, const float *b, int ldb, const float *beta, float *c, int ldc) {
    return count(m, n, k, 1, CUDA_R_32F);
}

cublasStatus_t cublasDgemm_v2(
    cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op, int m, int n, int k, const double *alpha,
    const double *a, int lda, const double *b, int ldb, const double *beta, double *c, int ldc) {
    return count(m, n, k, 1, CUDA_R_64F);
}

cublasStatus_t cublasSgemmEx(
    cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op, int m, int n, int k, const float *alpha,
    const void *a, cudaDataType a_type, int lda, const void *b, cudaDataType b_type, int ldb, const float *beta,
    void *c, cudaDataType c_type, int ldc) {
    return count(m, n, k, 1, a_type);
}

cublasStatus_t cublasGemmEx(
    cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op, int m, int n, int k, const void *alpha,
    const void *a, cudaDataType a_type, int lda, const void *b, cudaDataType b_type, int ldb, const void *beta,
    void *c, cudaDataType c_type, int ldc, cublasComputeType_t compute_type, cublasGemmAlgo_t algorithm) {
    return count(m, n, k, 1, a_type);
}

// ---- A batch of products

cublasStatus_t cublasSgemmStridedBatched(
    cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op, int m, int n, int k, const float *alpha,
    const float *a, int lda, long long a_stride, const float *b, int ldb, long long b_stride, const float *beta,
    float *c, int ldc, long long c_stride, int batches) {
    return count(m, n, k, batches, CUDA_R_32F);
}

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op, int m, int n, int k, const void *alpha,
    const void *a, cudaDataType a_type, int lda, long long a_stride, const void *b, cudaDataType b_type, int ldb,
    long long b_stride, const void *beta, void *c, cudaDataType c_type, int ldc, long long c_stride, int batches,
    cublasComputeType_t compute_type, cublasGemmAlgo_t algorithm) {
    return count(m, n, k, batches, a_type);
}

// ---- cuBLASLt: the sizes are in layout descriptors, which the real library reads for us

typedef cublasStatus_t (*ReadLayout)(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, void *, size_t, size_t *);

static uint64_t layout_size(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute) {
    static ReadLayout read_layout;
    if (!read_layout) {
        void *real_library = dlopen("libcublasLt.so.13", RTLD_LAZY | RTLD_NOLOAD);
        read_layout = real_library ? (ReadLayout)dlsym(real_library, "cublasLtMatrixLayoutGetAttribute") : NULL;
    }
    uint64_t value = 0;
    bool is_small = attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT || attribute == CUBLASLT_MATRIX_LAYOUT_TYPE;
    size_t size = is_small ? sizeof(int32_t) : sizeof(uint64_t);
    if (read_layout) read_layout(layout, attribute, &value, size, NULL);
    return value;
}

cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha, const void *a,
    cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
    cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm,
    void *workspace, size_t workspace_bytes, cudaStream_t stream) {
    uint64_t m = layout_size(d_layout, CUBLASLT_MATRIX_LAYOUT_ROWS);
    uint64_t n = layout_size(d_layout, CUBLASLT_MATRIX_LAYOUT_COLS);
    uint64_t batches = layout_size(d_layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
    // A is m by k, stored either way round
    uint64_t a_size = layout_size(a_layout, CUBLASLT_MATRIX_LAYOUT_ROWS)
                      * layout_size(a_layout, CUBLASLT_MATRIX_LAYOUT_COLS);
    cudaDataType type = (cudaDataType)layout_size(a_layout, CUBLASLT_MATRIX_LAYOUT_TYPE);
    return count_on(stream, m, n, m ? a_size / m : 0, batches, type);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a_layout,
    cublasLtMatrixLayout_t b_layout, cublasLtMatrixLayout_t c_layout, cublasLtMatrixLayout_t d_layout,
    cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t results[], int *found) {
    memset(&results[0], 0, sizeof results[0]);
    results[0].state = CUBLAS_STATUS_SUCCESS;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}
