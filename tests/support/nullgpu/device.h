/* Declarations that the sources of the null device share. The state of the device is in runtime.c. */
#ifndef NULLGPU_DEVICE_H
#define NULLGPU_DEVICE_H

#include <stddef.h>

/* The kinds of memory to which a pointer can point. */
enum memory { PAGEABLE = 0, DEVICE = 1, PINNED = 2, REGISTERED = 3 };

/* The properties of a card. */
struct limits {
    int architecture;          /* 90 means sm_90 */
    const char *name;          /* the name that NVIDIA's driver shows */
    int multiprocessors;
    size_t shared_per_block;   /* in bytes, for a kernel that has requested more than 48 KiB */
    size_t shared_per_multiprocessor;
    size_t memory;             /* the memory of the device in bytes */
};

/* The counters, which tests read with ctypes. */
enum counter { TORCH_LAUNCHES, TRITON_LAUNCHES, BLAS_CALLS, WAITS, COPIES, STREAMS, EVENTS, COUNTERS };

const struct limits *nullgpu_limits(void);
enum memory nullgpu_memory_of(const void *pointer);
void nullgpu_count(enum counter counter, long by);

/* Counts a launch. Returns 0, or an error of CUDA's runtime if the device is lost or a size exceeds a limit. */
int nullgpu_launch(enum counter kind, const char *kernel, const unsigned grid[3], const unsigned block[3], size_t shared);

#endif
