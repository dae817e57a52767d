/* What the three libraries of the null device share: its state is in runtime.c. */
#ifndef NULLGPU_DEVICE_H
#define NULLGPU_DEVICE_H

#include <stddef.h>

/* The kinds of memory that a pointer can lie in. */
enum memory { PAGEABLE = 0, DEVICE = 1, PINNED = 2, REGISTERED = 3 };

/* What an architecture allows. */
struct limits {
    int architecture;          /* 90 is sm_90 */
    const char *name;          /* as its driver names a card */
    int multiprocessors;
    size_t shared_per_block;   /* bytes, for a kernel that asks for more than 48 KiB */
    size_t shared_per_multiprocessor;
    size_t memory;             /* bytes of the device */
};

/* Counters that tests read by ctypes. */
enum counter { TORCH_LAUNCHES, TRITON_LAUNCHES, BLAS_CALLS, WAITS, COPIES, STREAMS, EVENTS, COUNTERS };

const struct limits *nullgpu_limits(void);
enum memory nullgpu_memory_of(const void *pointer);
void nullgpu_count(enum counter counter, long by);

/* Returns 0, or the error of CUDA's runtime that a launch meets: the device is lost, or the shape passes a limit. */
int nullgpu_launch(enum counter kind, const char *kernel, const unsigned grid[3], const unsigned block[3], size_t shared);

#endif
