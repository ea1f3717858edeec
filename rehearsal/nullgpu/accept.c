// Calls that only have to succeed: on a device that computes nothing there is nothing to do for them.
//
// The CUDA headers are left out on purpose. Declared without arguments, a function takes whatever its caller passes
// and returns 0, which means success to the runtime, the driver, cuBLAS and NCCL alike.

#define ACCEPT(call)          \
    int call(void);           \
    int call(void) {          \
        return 0;             \
    }

// ---- Runtime: waiting, for work that is already done
ACCEPT(cudaDeviceSynchronize)
ACCEPT(cudaStreamSynchronize)
ACCEPT(cudaStreamQuery)
ACCEPT(cudaEventSynchronize)
ACCEPT(cudaEventQuery)

// ---- Runtime: letting go of handles that own nothing
ACCEPT(cudaStreamDestroy)
ACCEPT(cudaGraphDestroy)
ACCEPT(cudaGraphExecDestroy)

// ---- Runtime: graphs and attributes of kernels
ACCEPT(cudaGraphLaunch)
ACCEPT(cudaFuncSetAttribute)

// ---- Runtime: copies of shapes that never carry a flag or a token
ACCEPT(cudaMemcpy2DAsync)
ACCEPT(cudaMemcpyPeerAsync)
ACCEPT(cudaMemcpyToSymbol)

// ---- Runtime: host memory, pools, peers, capture and profiler switches
ACCEPT(cudaHostRegister)
ACCEPT(cudaHostUnregister)
ACCEPT(cudaMemPoolSetAttribute)
ACCEPT(cudaMemPoolSetAccess)
ACCEPT(cudaMemPoolTrimTo)
ACCEPT(cudaDeviceEnablePeerAccess)
ACCEPT(cudaThreadExchangeStreamCaptureMode)
ACCEPT(cudaGraphDebugDotPrint)
ACCEPT(cudaProfilerStart)
ACCEPT(cudaProfilerStop)

// ---- Driver: start, contexts and limits
ACCEPT(cuInit)
ACCEPT(cuCtxSetCurrent)
ACCEPT(cuCtxPushCurrent_v2)
ACCEPT(cuCtxSetLimit)

// ---- Driver: kernels
ACCEPT(cuFuncSetCacheConfig)
ACCEPT(cuTensorMapEncodeTiled)
ACCEPT(cuTensorMapEncodeIm2col)

// ---- Driver: linking at run time
ACCEPT(cuLinkAddData_v2)
ACCEPT(cuLinkComplete)

// ---- Driver: fills of device memory
ACCEPT(cuMemsetD32Async)
ACCEPT(cuStreamWriteValue32)

// ---- cuBLAS: handles and modes
ACCEPT(cublasDestroy_v2)
ACCEPT(cublasSetWorkspace_v2)
ACCEPT(cublasSetMathMode)
ACCEPT(cublasSetPointerMode_v2)
ACCEPT(cublasSetSmCountTarget)

// ---- cuBLAS: vector products, too small to count
ACCEPT(cublasSgemv_v2)
ACCEPT(cublasDgemv_v2)
ACCEPT(cublasSdot_v2)
ACCEPT(cublasDdot_v2)
ACCEPT(cublasDotEx)

// ---- NCCL: groups, registration and shutdown
ACCEPT(ncclGroupStart)
ACCEPT(ncclGroupEnd)
ACCEPT(ncclCommRegister)
ACCEPT(ncclCommDeregister)
ACCEPT(ncclCommFinalize)
ACCEPT(ncclCommDestroy)
ACCEPT(ncclCommAbort)
ACCEPT(ncclRedOpDestroy)
