/* NVIDIA's packages contain this header separately from the headers of the runtime. The headers of the runtime need these
   macros, which have no effect in C, except for the alignment. */
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __annotate__(a)
#define __location__(a)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __inline_hint__
