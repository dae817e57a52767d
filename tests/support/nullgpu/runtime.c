/* CUDA's runtime (libcudart) for a GPU that computes nothing. It is preloaded, and replaces NVIDIA's library.

   The memory of the device is host memory. Kernels and copies within the device do nothing. Copies between host and
   device are real, and are made as late as CUDA allows: a copy from or to pinned memory is made when the program waits
   for it. A program that reads or changes the bytes too early therefore gets wrong values. See README.md.

   These environment variables are read once:
     NULLGPU_ARCHITECTURE=80    the device is an sm_80 instead of an sm_90
     NULLGPU_DEVICES=2          the number of devices; a process uses one of them
     NULLGPU_MEMORY=BYTES       the memory of the device, instead of the memory of the card
     NULLGPU_LOST=N             every call fails from the N-th launch on
     NULLGPU_HANG=N             the N-th launch never ends */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_runtime_api.h"
#include "device.h"

#define PAGE 4096
#define MOST_GRID_YZ 65535
#define MOST_THREADS 1024
#define SHARED_WITHOUT_ASKING 49152

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---------------------------------------------------------------------------------------------- the simulated card */

static const struct limits CARDS[] = {
    {90, "NVIDIA H100 80GB HBM3", 132, 232448, 233472, 80ul << 30},
    {80, "NVIDIA A100-SXM4-40GB", 108, 166912, 167936, 40ul << 30},
    {86, "NVIDIA A10G", 80, 101376, 102400, 24ul << 30},
    {89, "NVIDIA L4", 58, 101376, 102400, 24ul << 30},
};

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

const struct limits *nullgpu_limits(void) {
    static const struct limits *chosen = NULL;
    if (!chosen) {
        long architecture = setting("NULLGPU_ARCHITECTURE", CARDS[0].architecture);
        for (size_t i = 0; i < sizeof CARDS / sizeof *CARDS; i++)
            if (CARDS[i].architecture == architecture)
                chosen = &CARDS[i];
        if (!chosen) {
            fprintf(stderr, "nullgpu: no card of architecture %ld\n", architecture);
            exit(2);
        }
    }
    return chosen;
}

static size_t total_memory(void) {
    static size_t bytes = 0;
    if (!bytes)
        bytes = setting("NULLGPU_MEMORY", nullgpu_limits()->memory);
    return bytes;
}

/* ---------------------------------------------------------------------------------------------- counters */

static long counters[COUNTERS];
static size_t bytes_of[4]; /* the bytes in use of each kind of memory */

void nullgpu_count(enum counter counter, long by) {
    __atomic_add_fetch(&counters[counter], by, __ATOMIC_RELAXED);
}

/* Tests call these two functions with ctypes. The arguments are values of `enum counter` and `enum memory`. */
long nullgpu_counter(int counter) { return counters[counter]; }
long nullgpu_bytes(int kind) { return (long)bytes_of[kind]; }

/* ---------------------------------------------------------------------------------------------- errors */

/* CUDA keeps the last error of a thread until cudaGetLastError is called. A lost device stays lost. */
static __thread cudaError_t last_error = cudaSuccess;
static int is_lost = 0;

static cudaError_t fail(cudaError_t error) {
    last_error = error;
    return error;
}

/* Every function that uses the device begins with this macro. */
#define FAIL_IF_LOST                                                                                                   \
    if (is_lost)                                                                                                       \
    return fail(cudaErrorLaunchFailure)

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return is_lost ? cudaErrorLaunchFailure : error;
}

cudaError_t cudaPeekAtLastError(void) { return is_lost ? cudaErrorLaunchFailure : last_error; }

/* ---------------------------------------------------------------------------------------------- the device */

static __thread int current_device = 0;

cudaError_t cudaGetDeviceCount(int *count) {
    *count = (int)setting("NULLGPU_DEVICES", 1);
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    FAIL_IF_LOST;
    if (device < 0 || device >= setting("NULLGPU_DEVICES", 1))
        return fail(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    const struct limits *limits = nullgpu_limits();
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "%s", limits->name);
    properties->major = limits->architecture / 10;
    properties->minor = limits->architecture % 10;
    properties->totalGlobalMem = total_memory();
    properties->multiProcessorCount = limits->multiprocessors;
    properties->sharedMemPerBlock = SHARED_WITHOUT_ASKING;
    properties->sharedMemPerBlockOptin = limits->shared_per_block;
    properties->sharedMemPerMultiprocessor = limits->shared_per_multiprocessor;
    properties->warpSize = 32;
    properties->regsPerBlock = 65536;
    properties->regsPerMultiprocessor = 65536;
    properties->maxThreadsPerBlock = MOST_THREADS;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxThreadsDim[0] = MOST_THREADS;
    properties->maxThreadsDim[1] = MOST_THREADS;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = MOST_GRID_YZ;
    properties->maxGridSize[2] = MOST_GRID_YZ;
#if CUDART_VERSION < 13000
    properties->clockRate = 1980000;
    properties->memoryClockRate = 2619000;
#endif
    properties->memoryBusWidth = 5120;
    properties->l2CacheSize = 50 << 20;
    properties->totalConstMem = 65536;
    properties->textureAlignment = 512;
    properties->unifiedAddressing = 1;
    properties->concurrentKernels = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    const struct limits *limits = nullgpu_limits();
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = limits->multiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)limits->shared_per_block; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = MOST_THREADS; break;
    case cudaDevAttrComputeCapabilityMajor: *value = limits->architecture / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = limits->architecture % 10; break;
    default: *value = 1; /* all other attributes are features, which the device has */
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* ---------------------------------------------------------------------------------------------- memory */

struct block {
    char *start;
    size_t bytes;
    enum memory kind;
};

static struct block *blocks = NULL;
static size_t block_count = 0, block_room = 0;

/* The following five functions are called with the lock held. */

static void add_block(void *start, size_t bytes, enum memory kind) {
    if (block_count == block_room) {
        block_room = block_room ? 2 * block_room : 1024;
        blocks = realloc(blocks, block_room * sizeof *blocks);
    }
    blocks[block_count++] = (struct block){start, bytes, kind};
    bytes_of[kind] += bytes;
}

/* Removes the block of this kind that begins at `start`, and returns it. Returns a block of 0 bytes if none does. */
static struct block take_block(void *start, enum memory kind) {
    for (size_t i = 0; i < block_count; i++)
        if (blocks[i].start == start && blocks[i].kind == kind) {
            struct block taken = blocks[i];
            blocks[i] = blocks[--block_count];
            bytes_of[kind] -= taken.bytes;
            return taken;
        }
    return (struct block){NULL, 0, PAGEABLE};
}

static enum memory kind_of(const void *pointer) {
    const char *at = pointer;
    for (size_t i = 0; i < block_count; i++)
        if (blocks[i].start <= at && at < blocks[i].start + blocks[i].bytes)
            return blocks[i].kind;
    return PAGEABLE;
}

static int overlaps_pinned(const char *start, size_t bytes) {
    for (size_t i = 0; i < block_count; i++)
        if (blocks[i].kind != DEVICE && blocks[i].start < start + bytes && start < blocks[i].start + blocks[i].bytes)
            return 1;
    return 0;
}

static int is_pinned(const void *pointer) {
    enum memory kind = kind_of(pointer);
    return kind == PINNED || kind == REGISTERED;
}

enum memory nullgpu_memory_of(const void *pointer) {
    pthread_mutex_lock(&lock);
    enum memory kind = kind_of(pointer);
    pthread_mutex_unlock(&lock);
    return kind;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    FAIL_IF_LOST;
    *pointer = NULL;
    if (!bytes) /* CUDA also returns NULL without an error */
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    int fits = bytes_of[DEVICE] + bytes <= total_memory();
    void *start = MAP_FAILED;
    if (fits) /* the host provides a page only when it is written */
        start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start != MAP_FAILED)
        add_block(start, bytes, DEVICE);
    pthread_mutex_unlock(&lock);
    if (start == MAP_FAILED)
        return fail(cudaErrorMemoryAllocation);
    *pointer = start;
    return cudaSuccess;
}

static void run_all(void);

cudaError_t cudaFree(void *pointer) {
    FAIL_IF_LOST;
    if (!pointer)
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    run_all(); /* like CUDA, waits for all work that can still use the memory */
    struct block block = take_block(pointer, DEVICE);
    pthread_mutex_unlock(&lock);
    if (!block.bytes)
        return fail(cudaErrorInvalidValue);
    munmap(block.start, block.bytes);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    FAIL_IF_LOST;
    *total = total_memory();
    *left = *total - bytes_of[DEVICE];
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    FAIL_IF_LOST;
    if (posix_memalign(pointer, PAGE, bytes) != 0)
        return fail(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&lock);
    add_block(*pointer, bytes, PINNED);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) {
    FAIL_IF_LOST;
    pthread_mutex_lock(&lock);
    run_all();
    struct block block = take_block(pointer, PINNED);
    pthread_mutex_unlock(&lock);
    if (!block.bytes)
        return fail(cudaErrorInvalidValue);
    free(block.start);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    FAIL_IF_LOST;
    pthread_mutex_lock(&lock);
    int is_there = overlaps_pinned(pointer, bytes);
    if (!is_there)
        add_block(pointer, bytes, REGISTERED);
    pthread_mutex_unlock(&lock);
    return is_there ? fail(cudaErrorHostMemoryAlreadyRegistered) : cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    FAIL_IF_LOST;
    pthread_mutex_lock(&lock);
    run_all();
    struct block block = take_block(pointer, REGISTERED);
    pthread_mutex_unlock(&lock);
    return block.bytes ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **pointer, void *host, unsigned flags) {
    *pointer = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    FAIL_IF_LOST;
    memset(attributes, 0, sizeof *attributes);
    switch (nullgpu_memory_of(pointer)) {
    case PAGEABLE: attributes->type = cudaMemoryTypeUnregistered; return cudaSuccess;
    case DEVICE: attributes->type = cudaMemoryTypeDevice; break;
    default: attributes->type = cudaMemoryTypeHost;
    }
    attributes->device = current_device;
    attributes->devicePointer = (void *)pointer;
    attributes->hostPointer = (void *)pointer;
    return cudaSuccess;
}

/* ---------------------------------------------------------------------------------------------- the queue of work

   The work of all streams is in one queue, in the order of the calls. A program that waits for a piece of work makes
   the queue do this piece and all earlier ones. CUDA could choose the same order. Only copies between host and device
   have an effect. After a launch that hangs, no further work is done. */

struct work {
    void *to;
    const void *from; /* NULL if the work has no effect */
    size_t bytes;
};

static struct work *queue = NULL;
static size_t queue_room = 0;
static long asked = 0, done = 0; /* how many pieces of work were requested and done so far */
static long hanging = -1;        /* the index of the piece that never ends, or -1 */

/* The following three functions are called with the lock held. */

static void ask(struct work work) {
    size_t waiting = asked - done;
    if (waiting == queue_room) {
        queue_room = queue_room ? 2 * queue_room : 1024;
        queue = realloc(queue, queue_room * sizeof *queue);
    }
    queue[waiting] = work;
    asked++;
}

/* Does the first `last` pieces of work. Returns whether it has done them all. */
static int run_until(long last) {
    long end = last;
    if (hanging >= 0 && end > hanging)
        end = hanging;
    long count = end - done;
    for (long i = 0; i < count; i++)
        if (queue[i].from)
            memmove(queue[i].to, queue[i].from, queue[i].bytes);
    if (count > 0) {
        memmove(queue, queue + count, (asked - done - count) * sizeof *queue);
        done = end;
    }
    return end == last;
}

static void run_all(void) { run_until(asked); }

/* Waits until the first `last` pieces of work are done. Never returns if one of them hangs. */
static cudaError_t await(long last) {
    FAIL_IF_LOST;
    nullgpu_count(WAITS, 1);
    pthread_mutex_lock(&lock);
    int is_done = run_until(last);
    pthread_mutex_unlock(&lock);
    while (!is_done)
        pause();
    return cudaSuccess;
}

static cudaError_t look(long last) {
    FAIL_IF_LOST;
    pthread_mutex_lock(&lock);
    int is_done = run_until(last);
    pthread_mutex_unlock(&lock);
    return is_done ? cudaSuccess : cudaErrorNotReady; /* not kept as the last error */
}

static cudaError_t copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, int waits) {
    FAIL_IF_LOST;
    nullgpu_count(COPIES, 1);
    pthread_mutex_lock(&lock);
    int within_device = kind_of(to) == DEVICE && kind_of(from) == DEVICE;
    int is_late = (is_pinned(to) || is_pinned(from)) && !waits;
    if (!within_device)
        ask((struct work){to, from, bytes});
    long last = asked;
    pthread_mutex_unlock(&lock);
    return is_late || (within_device && !waits) ? cudaSuccess : await(last);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, bytes, kind, 0);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return copy(to, from, bytes, kind, 1);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t bytes, cudaStream_t stream) {
    return copy(to, from, bytes, cudaMemcpyDeviceToDevice, 0);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    FAIL_IF_LOST; /* a fill is a computation, so it has no effect */
    return cudaSuccess;
}

/* ---------------------------------------------------------------------------------------------- streams and events */

struct CUevent_st {
    long last; /* the event is complete when this many pieces of work are done */
};

struct CUstream_st {
    int priority;
};

static cudaError_t make_stream(cudaStream_t *stream, int priority) {
    FAIL_IF_LOST;
    *stream = malloc(sizeof **stream);
    (*stream)->priority = priority;
    nullgpu_count(STREAMS, 1);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return make_stream(stream, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return make_stream(stream, 0); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return make_stream(stream, priority);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream ? stream->priority : 0;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    FAIL_IF_LOST;
    free(stream);
    nullgpu_count(STREAMS, -1);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) { return look(asked); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return await(asked); }
cudaError_t cudaDeviceSynchronize(void) { return await(asked); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    FAIL_IF_LOST; /* no wait is needed, because there is only one queue */
    return cudaSuccess;
}

/* CUDA graphs are not simulated, so no stream is capturing. */

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

#if CUDART_VERSION < 13000
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                        size_t *count) {
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
#endif
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    FAIL_IF_LOST;
    *event = calloc(1, sizeof **event);
    nullgpu_count(EVENTS, 1);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    nullgpu_count(EVENTS, -1);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    FAIL_IF_LOST;
    event->last = asked;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return look(event->last); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return await(event->last); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    FAIL_IF_LOST;
    *milliseconds = 1;
    return cudaSuccess;
}

/* ---------------------------------------------------------------------------------------------- launches */

static int passes_a_limit(const unsigned grid[3], const unsigned block[3], size_t shared) {
    for (int i = 0; i < 3; i++)
        if (grid[i] == 0 || block[i] == 0)
            return 1;
    if (grid[0] > 2147483647u || grid[1] > MOST_GRID_YZ || grid[2] > MOST_GRID_YZ)
        return 1;
    if ((long)block[0] * block[1] * block[2] > MOST_THREADS || block[2] > 64)
        return 1;
    return shared > nullgpu_limits()->shared_per_block;
}

int nullgpu_launch(enum counter kind, const char *kernel, const unsigned grid[3], const unsigned block[3],
                   size_t shared) {
    static long launches = 0, lost_at = 0, hangs_at = 0;
    FAIL_IF_LOST;
    if (!lost_at) {
        lost_at = setting("NULLGPU_LOST", -1);
        hangs_at = setting("NULLGPU_HANG", -1);
    }
    if (passes_a_limit(grid, block, shared)) {
        fprintf(stderr, "nullgpu: %s passes a limit: grid %u %u %u, block %u %u %u, shared %zu\n", kernel, grid[0],
                grid[1], grid[2], block[0], block[1], block[2], shared);
        return fail(cudaErrorInvalidConfiguration);
    }
    nullgpu_count(kind, 1);
    long number = __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    if (number == lost_at) {
        is_lost = 1;
        return fail(cudaErrorLaunchFailure);
    }
    if (number == hangs_at) {
        pthread_mutex_lock(&lock);
        ask((struct work){NULL, NULL, 0});
        hanging = asked - 1;
        pthread_mutex_unlock(&lock);
    }
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    const unsigned of_grid[3] = {grid.x, grid.y, grid.z};
    const unsigned of_block[3] = {block.x, block.y, block.z};
    return nullgpu_launch(TORCH_LAUNCHES, "a kernel of torch", of_grid, of_block, shared);
}

/* Code compiled by nvcc 13 calls these two functions instead of cudaLaunchKernel. */

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes,
                            config->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = MOST_THREADS;
    attributes->numRegs = 64;
    attributes->ptxVersion = nullgpu_limits()->architecture;
    attributes->binaryVersion = nullgpu_limits()->architecture;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int block, size_t shared) {
    *count = 8;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int block,
                                                                   size_t shared, unsigned flags) {
    *count = 8;
    return cudaSuccess;
}
