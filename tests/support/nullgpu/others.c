/* cuBLAS, cublasLt and NVRTC for a GPU that computes nothing. This file contains the functions that create
   handles, set options or return results. build.py generates all other functions, such as matrix products, and the
   functions of NVIDIA's other libraries that are not installed. The generated functions only count their calls. */
#include <stddef.h>

#include "cuda_runtime_api.h"
#include "device.h"

static int handle; /* all handles and descriptors point to it */

#define MAKES_A_HANDLE(name)                                                                                           \
    int name(void **made) {                                                                                            \
        *made = &handle;                                                                                               \
        return 0;                                                                                                      \
    }

#define READS_A_ZERO(name)                                                                                             \
    int name(void *of, int *value) {                                                                                   \
        *value = 0;                                                                                                    \
        return 0;                                                                                                      \
    }

#define DOES_NOTHING(name)                                                                                             \
    int name(void) { return 0; }

MAKES_A_HANDLE(cublasCreate_v2)
MAKES_A_HANDLE(cublasLtMatmulDescCreate)
MAKES_A_HANDLE(cublasLtMatmulPreferenceCreate)
MAKES_A_HANDLE(cublasLtMatrixLayoutCreate)

READS_A_ZERO(cublasGetMathMode)
READS_A_ZERO(cublasGetPointerMode_v2)

DOES_NOTHING(cublasDestroy_v2)
DOES_NOTHING(cublasSetMathMode)
DOES_NOTHING(cublasSetPointerMode_v2)
DOES_NOTHING(cublasSetStream_v2)
DOES_NOTHING(cublasSetWorkspace_v2)
DOES_NOTHING(cublasLtMatmulDescDestroy)
DOES_NOTHING(cublasLtMatmulDescSetAttribute)
DOES_NOTHING(cublasLtMatmulPreferenceDestroy)
DOES_NOTHING(cublasLtMatmulPreferenceSetAttribute)
DOES_NOTHING(cublasLtMatrixLayoutDestroy)

/* Returns one algorithm, because torch needs at least one. */
int cublasLtMatmulAlgoGetHeuristic(void *lt, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    *found = 1;
    return 0;
}

/* NVRTC, which compiles some elementwise kernels of torch when they are first called. */

int nvrtcVersion(int *major, int *minor) {
    *major = CUDART_VERSION / 1000;
    *minor = CUDART_VERSION % 1000 / 10;
    return 0;
}

int nvrtcGetCUBINSize(void *program, size_t *size) {
    *size = 1;
    return 0;
}

int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
    *lowered = name;
    return 0;
}
