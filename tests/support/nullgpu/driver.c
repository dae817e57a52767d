/* CUDA's driver (libcuda.so.1) for a GPU that computes nothing. Triton uses it to load and launch the kernels that
   it has compiled. The state of the device is in runtime.c. As with NVIDIA's driver, a launch fails if an argument points to
   pageable memory of the host. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "device.h"

#undef cuMemAlloc
#undef cuMemFree
#undef cuMemcpyHtoD

#define SHARED_WITHOUT_ASKING 49152

/* A loaded kernel. */
struct CUfunc_st {
    char name[256];
    size_t shared_allowed; /* the largest shared memory of a launch, in bytes */
};

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
    *version = 12020;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_LAUNCH_FAILED ? "unspecified launch failure" : "an error of the null device";
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    const struct limits *limits = nullgpu_limits();
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = (int)limits->shared_per_block; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = SHARED_WITHOUT_ASKING; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        *value = (int)limits->shared_per_multiprocessor;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = limits->multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1755000; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 2619000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 5120; break;
    default: *value = 1; /* all other attributes are features, which the device has */
    }
    return CUDA_SUCCESS;
}

/* There is one context, which is always current. */

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

/* ---------------------------------------------------------------------------------------------- kernels */

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = malloc(1);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}

/* torch's compiler loads its kernels from files. */
CUresult cuModuleLoad(CUmodule *module, const char *file) { return cuModuleLoadData(module, file); }

CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = calloc(1, sizeof **function);
    snprintf((*function)->name, sizeof (*function)->name, "%s", name);
    (*function)->shared_allowed = SHARED_WITHOUT_ASKING;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = 0; /* kernels have no spilled registers and no static shared memory */
    if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS)
        *value = 128;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        *value = 1024;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        return CUDA_SUCCESS;
    if (value < 0 || (size_t)value > nullgpu_limits()->shared_per_block)
        return CUDA_ERROR_INVALID_VALUE;
    function->shared_allowed = value;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (nullgpu_memory_of((void *)pointer) == PAGEABLE) {
        fprintf(stderr, "nullgpu: a kernel of Triton is given a pointer of the CPU\n");
        return CUDA_ERROR_INVALID_VALUE;
    }
    *(CUdeviceptr *)value = pointer;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    const unsigned grid[3] = {grid_x, grid_y, grid_z};
    const unsigned block[3] = {block_x, block_y, block_z};
    if (shared > function->shared_allowed) {
        fprintf(stderr, "nullgpu: %s takes %u bytes of shared memory and asked for %zu\n", function->name, shared,
                function->shared_allowed);
        return CUDA_ERROR_INVALID_VALUE;
    }
    return (CUresult)nullgpu_launch(TRITON_LAUNCHES, function->name, grid, block, shared);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                          config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, arguments,
                          extra);
}

/* ---------------------------------------------------------------------------------------------- functions that Triton links but does not call */

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemFree_v2(CUdeviceptr pointer) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_ERROR_NOT_SUPPORTED; }
