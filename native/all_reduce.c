// Sum an array over all GPUs of this machine with NCCL's C API, in one of two ways:
//
//     ./all_reduce one-process [floats [seconds]]    one process drives every GPU
//     ./all_reduce per-gpu     [floats [seconds]]    one process for each GPU
//
// floats: elements per GPU; seconds: how long to wait for other ranks before giving up.
// Exit code: 0 the sum is right on every GPU, 1 something failed, 2 there is no GPU to use.
// Where NCCL and CUDA are installed for all: gcc -std=c11 all_reduce.c -o all_reduce -lnccl -lcudart

#define _GNU_SOURCE
#include <nccl.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_GPUS = 64, TIMED_CALLS = 20 };

static size_t count = 1 << 24;  // floats per GPU: 64 MiB
static double patience = 30;    // seconds

typedef struct {
    int rank, device;
    ncclComm_t comm;          // this rank's end of the communicator
    cudaStream_t stream;      // the queue that the GPU works through, in order
    cudaEvent_t start, stop;  // marks in that queue; the GPU notes when it passes them
    float *data;              // `count` floats in GPU memory
} Rank;

static bool complain(int line, const char *what, const char *why) {
    fprintf(stderr, "all_reduce: line %d: %s: %s\n", line, what, why);
    return false;
}

// Every call can fail. Each check leaves the function; `release` is the one place that cleans up.
#define CUDA(call)                                                                         \
    do {                                                                                   \
        cudaError_t e_ = (call);                                                           \
        if (e_ != cudaSuccess) return complain(__LINE__, #call, cudaGetErrorString(e_));   \
    } while (0)
#define NCCL(call)                                                                         \
    do {                                                                                   \
        ncclResult_t e_ = (call);                                                          \
        if (e_ != ncclSuccess && e_ != ncclInProgress)                                     \
            return complain(__LINE__, #call, ncclGetErrorString(e_));                      \
    } while (0)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Wait until NCCL has accepted what was asked of it and, if `done`, until the GPU has done it.
// cudaStreamSynchronize would wait for ever for a rank that has died.
static bool wait_for(const Rank *r, bool done) {
    double deadline = now() + patience;
    while (now() < deadline) {
        ncclResult_t communicator;
        NCCL(ncclCommGetAsyncError(r->comm, &communicator));
        NCCL(communicator);
        if (communicator == ncclSuccess) {
            cudaError_t stream = done ? cudaStreamQuery(r->stream) : cudaSuccess;
            if (stream == cudaSuccess) return true;
            if (stream != cudaErrorNotReady) CUDA(stream);
        }
        sched_yield();
    }
    return complain(__LINE__, "time-out", "another rank is late or gone");
}

static bool set_up(Rank *r, int rank) {
    r->rank = r->device = rank;
    CUDA(cudaSetDevice(r->device));
    CUDA(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&r->start));
    CUDA(cudaEventCreate(&r->stop));
    CUDA(cudaMalloc((void **)&r->data, count * sizeof(float)));
    return true;
}

// Give back what this rank got as far as creating, the communicator first.
static void release(Rank *r, bool failed) {
    cudaSetDevice(r->device);
    if (r->comm && failed) ncclCommAbort(r->comm);  // waits for nobody, ends what still runs
    if (r->comm && !failed) ncclCommDestroy(r->comm);
    if (r->data) cudaFree(r->data);
    if (r->start) cudaEventDestroy(r->start);
    if (r->stop) cudaEventDestroy(r->stop);
    if (r->stream) cudaStreamDestroy(r->stream);
}

// One in-place all-reduce on each of the `n` ranks of this process, as one group.
static bool all_reduce(Rank *ranks, int n) {
    ncclResult_t each = ncclSuccess;
    NCCL(ncclGroupStart());
    for (int i = 0; i < n && each == ncclSuccess; i++)
        each = ncclAllReduce(ranks[i].data, ranks[i].data, count, ncclFloat, ncclSum,
                             ranks[i].comm, ranks[i].stream);
    ncclResult_t group = ncclGroupEnd();  // also after an error: a group must not stay open
    NCCL(each);
    NCCL(group);
    for (int i = 0; i < n; i++)
        if (!wait_for(&ranks[i], false)) return false;
    return true;
}

// Element k of rank r is (r + 1) * (k % 8), so the sum over n ranks is n (n + 1) / 2 * (k % 8).
static bool verify(Rank *ranks, int n, int world, float *host) {
    size_t size = count * sizeof(float);
    for (int i = 0; i < n; i++) {
        Rank *r = &ranks[i];
        for (size_t k = 0; k < count; k++) host[k] = (r->rank + 1) * (float)(k % 8);
        CUDA(cudaMemcpyAsync(r->data, host, size, cudaMemcpyHostToDevice, r->stream));
        if (!wait_for(r, true)) return false;  // `host` is about to be used again
    }
    if (!all_reduce(ranks, n)) return false;
    for (int i = 0; i < n; i++) {
        Rank *r = &ranks[i];
        CUDA(cudaMemcpyAsync(host, r->data, size, cudaMemcpyDeviceToHost, r->stream));
        if (!wait_for(r, true)) return false;
        for (size_t k = 0; k < count; k++)
            if (host[k] != world * (world + 1) / 2 * (float)(k % 8))
                return complain(__LINE__, "verify", "wrong sum");
    }
    return true;
}

// The time between two marks in the stream of the first rank here; rank 0 prints it.
static bool measure(Rank *ranks, int n, int world) {
    Rank *r = &ranks[0];
    float ms;
    CUDA(cudaEventRecord(r->start, r->stream));
    for (int call = 0; call < TIMED_CALLS; call++)
        if (!all_reduce(ranks, n)) return false;
    CUDA(cudaEventRecord(r->stop, r->stream));
    for (int i = 0; i < n; i++)
        if (!wait_for(&ranks[i], true)) return false;
    CUDA(cudaEventElapsedTime(&ms, r->start, r->stop));
    double seconds = ms / 1e3 / TIMED_CALLS, algbw = count * sizeof(float) / seconds / 1e9;
    if (r->rank == 0)
        printf("%.1f us   algbw %.2f GB/s   busbw %.2f GB/s\n", seconds * 1e6, algbw,
               algbw * 2 * (world - 1) / world);
    return true;
}

static bool run(Rank *ranks, int n, int world) {
    float *host = malloc(count * sizeof(float));
    if (!host) return complain(__LINE__, "malloc", "out of memory");
    bool good = verify(ranks, n, world, host) && measure(ranks, n, world);
    free(host);
    return good;
}

static bool init_all(Rank *ranks, int gpus) {
    ncclComm_t comms[MAX_GPUS];
    NCCL(ncclCommInitAll(comms, gpus, NULL));  // NULL: devices 0 to gpus - 1
    for (int i = 0; i < gpus; i++) ranks[i].comm = comms[i];
    return true;
}

static bool one_process(int gpus) {
    Rank ranks[MAX_GPUS] = {0};
    bool good = true;
    for (int i = 0; i < gpus; i++) good = good && set_up(&ranks[i], i);
    good = good && init_all(ranks, gpus) && run(ranks, gpus, gpus);
    for (int i = 0; i < gpus; i++) release(&ranks[i], !good);
    return good;
}

static bool init_rank(Rank *me, int world, const int id_pipe[2]) {
    ncclUniqueId id;  // 128 bytes that tell the ranks where to meet
    if (me->rank == 0) NCCL(ncclGetUniqueId(&id));
    for (int i = 1; me->rank == 0 && i < world; i++)
        if (write(id_pipe[1], &id, sizeof id) != sizeof id)
            return complain(__LINE__, "write", "cannot hand on the id");
    if (me->rank > 0 && read(id_pipe[0], &id, sizeof id) != sizeof id)
        return complain(__LINE__, "read", "rank 0 sent no id");

    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;  // calls return at once, so that a hang can be noticed and aborted
    NCCL(ncclCommInitRankConfig(&me->comm, world, id, me->rank, &config));
    return wait_for(me, false);
}

static bool one_rank(int rank, int world, const int id_pipe[2]) {
    Rank me = {0};
    if (rank > 0) close(id_pipe[1]);  // should rank 0 die, `read` ends instead of waiting
    bool good = set_up(&me, rank) && init_rank(&me, world, id_pipe) && run(&me, 1, world);
    release(&me, !good);
    return good;
}

static bool per_gpu(int gpus) {
    int id_pipe[2], status, started = 0;
    if (pipe(id_pipe)) return complain(__LINE__, "pipe", "none to be had");
    bool good = true;
    for (; started < gpus && good; started++) {
        pid_t pid = fork();
        if (pid == 0) exit(one_rank(started, gpus, id_pipe) ? 0 : 1);
        if (pid < 0) good = complain(__LINE__, "fork", "no further process");
    }
    close(id_pipe[0]);
    close(id_pipe[1]);
    while (wait(&status) > 0) good = good && status == 0;
    return good;
}

// Asked in a child: once a process has used CUDA, processes forked from it cannot.
static int count_gpus(void) {
    int status, gpus = 0;
    pid_t pid = fork();
    if (pid == 0) {
        cudaError_t result = cudaGetDeviceCount(&gpus);
        if (result == cudaSuccess) _exit(gpus < MAX_GPUS ? gpus : MAX_GPUS);
        fprintf(stderr, "all_reduce: no GPU to use: %s\n", cudaGetErrorString(result));
        _exit(0);
    }
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

int main(int argc, char **argv) {
    bool together = argc > 1 && !strcmp(argv[1], "one-process");
    if (argc > 2) count = strtoull(argv[2], NULL, 10);
    if (argc > 3) patience = atof(argv[3]);
    if (argc < 2 || count == 0 || (!together && strcmp(argv[1], "per-gpu"))) {
        fprintf(stderr, "usage: %s one-process|per-gpu [floats [seconds]]\n", argv[0]);
        return 1;
    }
    int gpus = count_gpus();
    if (gpus == 0) return 2;
    if (!(together ? one_process(gpus) : per_gpu(gpus))) return 1;
    printf("%s: %zu floats on %d GPUs, every sum as expected\n", argv[1], count, gpus);
    return 0;
}
