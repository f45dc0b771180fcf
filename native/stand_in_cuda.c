// A stand-in for libcudart.so: NOT CUDA, and nothing here runs on a GPU. "GPU memory" is ordinary
// memory, every stream does its work at once, and events hold the CPU's clock. It lets the tests
// run all_reduce.c, and each of its error paths, on a machine without a GPU.
//
// STAND_IN_GPUS: how many GPUs to claim, 2 if unset. STAND_IN_FAIL: see stand_in.h.
// What a process leaves behind is told on stderr when it ends.

#define _GNU_SOURCE
#include "stand_in.h"
#include <cuda_runtime.h>
#include <stdio.h>
#include <time.h>

static int streams, events, blocks;

#define FAIL_IF_ASKED(error)                                                               \
    do {                                                                                   \
        if (fails(__func__)) return error;                                                 \
    } while (0)

static cudaError_t create(void **handle, int *counter) {
    *handle = calloc(1, sizeof(double));
    *counter += *handle != NULL;
    return *handle ? cudaSuccess : cudaErrorMemoryAllocation;
}

static cudaError_t destroy(void *handle, int *counter) {
    *counter -= handle != NULL;
    free(handle);
    return cudaSuccess;
}

__attribute__((destructor)) static void leftovers(void) {
    if (streams || events || blocks)
        fprintf(stderr, "stand-in: left behind: %d streams, %d events, %d blocks of memory\n",
                streams, events, blocks);
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorNoDevice: return "stand-in: no CUDA-capable device is detected";
    case cudaErrorMemoryAllocation: return "stand-in: out of memory";
    default: return "stand-in: a fault on demand";
    }
}

cudaError_t cudaGetDeviceCount(int *count) {
    const char *wanted = getenv("STAND_IN_GPUS");
    *count = wanted ? atoi(wanted) : 2;
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaSetDevice(int device) {
    FAIL_IF_ASKED(cudaErrorInvalidDevice);
    int count;
    cudaGetDeviceCount(&count);
    return device >= 0 && device < count ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaMalloc(void **memory, size_t size) {
    FAIL_IF_ASKED(cudaErrorMemoryAllocation);
    *memory = malloc(size);
    blocks += *memory != NULL;
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *memory) {
    return destroy(memory, &blocks);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    FAIL_IF_ASKED(cudaErrorUnknown);
    (void)kind, (void)stream;
    memcpy(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    FAIL_IF_ASKED(cudaErrorUnknown);
    (void)flags;
    return create((void **)stream, &streams);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    const char *how = fault(__func__);
    if (how && !strcmp(how, "hang")) return cudaErrorNotReady;
    FAIL_IF_ASKED(cudaErrorLaunchFailure);
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return destroy(stream, &streams);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    FAIL_IF_ASKED(cudaErrorUnknown);
    return create((void **)event, &events);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    FAIL_IF_ASKED(cudaErrorUnknown);
    struct timespec t;
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *(double *)event = t.tv_sec * 1e3 + t.tv_nsec / 1e6;
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t stop) {
    FAIL_IF_ASKED(cudaErrorUnknown);
    *ms = (float)(*(double *)stop - *(double *)start);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return destroy(event, &events);
}
