// A stand-in for libnccl.so.2: NOT NCCL. It has the same functions for ranks in one process or in
// several on one machine, and really adds numbers, in ordinary memory and with no care for speed.
// It lets the tests run all_reduce.c and trace_nccl.c on a machine without a GPU.
//
// Ranks meet in a file of $TMPDIR, mapped into all of them: a few counters, then one slot of
// memory a rank. A collective: everyone copies its input to its slot; when all have arrived, each
// computes its output from the slots; when all have left, the slots may be used again.
// Send and receive work only between ranks of one process, in one group. STAND_IN_FAIL: stand_in.h.

#define _GNU_SOURCE
#include "stand_in.h"
#include <fcntl.h>
#include <nccl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SLOT ((size_t)1 << 26)  // bytes
#define PATIENCE 5              // seconds until a missing rank becomes ncclRemoteError
enum { MAX_QUEUED = 1024 };

typedef struct {
    atomic_int joined, arrived, left, aborted;
} Clique;

struct ncclComm {
    Clique *clique;
    char *slots, path[NCCL_UNIQUE_ID_BYTES];
    int rank, size, blocking, round;
    ncclResult_t state;
};

typedef enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV } Kind;

typedef struct {
    Kind kind;
    const void *send;
    void *recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer;  // or root
    ncclComm_t comm;
    bool done;
} Op;

static _Thread_local Op queue[MAX_QUEUED];
static _Thread_local ncclComm_t joining[MAX_QUEUED];
static _Thread_local int depth, queued, to_join;
static atomic_int comms;

#define FAIL_IF_ASKED(error)                                                               \
    do {                                                                                   \
        if (fails(__func__)) return error;                                                 \
    } while (0)

__attribute__((destructor)) static void leftovers(void) {
    if (comms) fprintf(stderr, "stand-in: left behind: %d communicators\n", comms);
}

// ------------------------------------------------------------------------------------ arithmetic

static size_t width(ncclDataType_t type) {
    switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 0;  // types that C has no arithmetic for
    }
}

#define ACCUMULATE(T)                                                                      \
    for (size_t i = 0; i < count; i++) {                                                   \
        T *x = (T *)into + i, y = ((const T *)from)[i];                                    \
        *x = op == ncclProd  ? *x * y                                                      \
             : op == ncclMax ? (*x > y ? *x : y)                                           \
             : op == ncclMin ? (*x < y ? *x : y)                                           \
                             : *x + y;                                                     \
    }                                                                                      \
    break

static void accumulate(void *into, const void *from, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    switch (type) {
    case ncclInt8: ACCUMULATE(int8_t);
    case ncclUint8: ACCUMULATE(uint8_t);
    case ncclInt32: ACCUMULATE(int32_t);
    case ncclUint32: ACCUMULATE(uint32_t);
    case ncclInt64: ACCUMULATE(int64_t);
    case ncclUint64: ACCUMULATE(uint64_t);
    case ncclFloat32: ACCUMULATE(float);
    default: ACCUMULATE(double);
    }
}

// ----------------------------------------------------------------------------------- collectives

// Wait until `counter` has reached `value`; false if a rank has aborted or does not come.
static bool reach(ncclComm_t comm, atomic_int *counter, int value) {
    time_t deadline = time(NULL) + PATIENCE;
    while (*counter < value) {
        if (comm->clique->aborted || time(NULL) > deadline) {
            comm->state = ncclRemoteError;
            return false;
        }
        sched_yield();
    }
    return true;
}

static void publish(Op *op) {
    ncclComm_t comm = op->comm;
    size_t bytes = op->count * width(op->type) * (op->kind == REDUCE_SCATTER ? comm->size : 1);
    if (!reach(comm, &comm->clique->left, comm->size * comm->round)) return;
    if (op->kind != BROADCAST || op->peer == comm->rank) memcpy(comm->slots + comm->rank * SLOT, op->send, bytes);
    comm->clique->arrived++;
}

static void compute(Op *op) {
    ncclComm_t comm = op->comm;
    size_t bytes = op->count * width(op->type);
    size_t offset = op->kind == REDUCE_SCATTER ? comm->rank * bytes : 0;
    if (!reach(comm, &comm->clique->arrived, comm->size * (comm->round + 1))) return;
    if (op->kind == BROADCAST)
        memcpy(op->recv, comm->slots + op->peer * SLOT, bytes);
    else if (op->kind == ALL_GATHER)
        for (int r = 0; r < comm->size; r++) memcpy((char *)op->recv + r * bytes, comm->slots + r * SLOT, bytes);
    else if (op->kind != REDUCE || op->peer == comm->rank) {
        memcpy(op->recv, comm->slots + offset, bytes);
        for (int r = 1; r < comm->size; r++)
            accumulate(op->recv, comm->slots + r * SLOT + offset, op->count, op->type, op->op);
    }
}

static ncclResult_t exchange(Op *recv) {
    for (int i = 0; i < queued; i++) {
        Op *send = &queue[i];
        if (send->kind != SEND || send->done || strcmp(send->comm->path, recv->comm->path)) continue;
        if (send->peer != recv->comm->rank || send->comm->rank != recv->peer) continue;
        memcpy(recv->recv, send->send, recv->count * width(recv->type));
        send->done = recv->done = true;
        return ncclSuccess;
    }
    return ncclInvalidUsage;  // the sender is not in this group
}

// Run what is queued, the next operation of every communicator together, until nothing is left.
static ncclResult_t run_queue(void) {
    ncclResult_t result = ncclSuccess;
    for (int i = 0; i < queued; i++)
        if (queue[i].kind == RECV && exchange(&queue[i]) != ncclSuccess) result = ncclInvalidUsage;
    for (int i = 0; i < queued; i++)
        if (queue[i].kind == SEND && !queue[i].done) result = ncclInvalidUsage;
    while (result == ncclSuccess) {
        Op *round[MAX_QUEUED];
        int n = 0;
        for (int i = 0; i < queued; i++) {
            bool first = !queue[i].done;
            for (int j = 0; j < n; j++) first = first && round[j]->comm != queue[i].comm;
            if (first) round[n++] = &queue[i];
        }
        if (n == 0) break;
        for (int i = 0; i < n; i++) {
            publish(round[i]);
            round[i]->done = true;
        }
        for (int i = 0; i < n; i++) compute(round[i]);
        for (int i = 0; i < n; i++) {
            round[i]->comm->round++;
            round[i]->comm->clique->left++;
        }
    }
    queued = 0;
    return result;
}

static ncclResult_t enqueue(Op op) {
    size_t parts = op.kind == REDUCE_SCATTER ? op.comm->size : 1;
    if (!width(op.type) || op.op >= ncclAvg || op.count > SLOT / width(op.type) / parts || queued == MAX_QUEUED)
        return ncclInvalidArgument;
    if (op.peer < 0 || op.peer >= op.comm->size) return ncclInvalidArgument;
    queue[queued++] = op;
    return depth ? ncclSuccess : run_queue();
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    FAIL_IF_ASKED(ncclUnhandledCudaError);
    (void)stream;
    return enqueue((Op){ALL_REDUCE, send, recv, count, type, op, 0, comm, false});
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return enqueue((Op){REDUCE, send, recv, count, type, op, root, comm, false});
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return enqueue((Op){BROADCAST, send, recv, count, type, ncclSum, root, comm, false});
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return ncclBroadcast(data, data, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    (void)stream;
    return enqueue((Op){ALL_GATHER, send, recv, count, type, ncclSum, 0, comm, false});
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    (void)stream;
    return enqueue((Op){REDUCE_SCATTER, send, recv, count, type, op, 0, comm, false});
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    (void)stream;
    return enqueue((Op){SEND, send, NULL, count, type, ncclSum, peer, comm, false});
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    (void)stream;
    return enqueue((Op){RECV, NULL, recv, count, type, ncclSum, peer, comm, false});
}

// --------------------------------------------------------------------------------- communicators

static ncclResult_t all_joined(ncclComm_t comm) {
    bool here = comm->clique->joined >= comm->size || (comm->blocking && reach(comm, &comm->clique->joined, comm->size));
    if (here) unlink(comm->path);
    return here ? ncclSuccess : comm->state != ncclSuccess ? comm->state : ncclInProgress;
}

ncclResult_t ncclGroupStart(void) {
    FAIL_IF_ASKED(ncclSystemError);
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (depth == 0) return ncclInvalidUsage;
    if (--depth > 0) return ncclSuccess;
    ncclResult_t result = run_queue();
    for (int i = 0; i < to_join; i++)
        if (result == ncclSuccess) result = all_joined(joining[i]);
    to_join = 0;
    if (fails(__func__)) return ncclSystemError;
    return result;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    FAIL_IF_ASKED(ncclSystemError);
    const char *folder = getenv("TMPDIR");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s/stand_in_nccl.XXXXXX", folder ? folder : "/tmp");
    int file = mkstemp(id->internal);
    if (file < 0) return ncclSystemError;
    close(file);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (fails(__func__)) {
        unlink(id.internal);
        return ncclSystemError;
    }
    if (rank < 0 || rank >= size) return ncclInvalidArgument;
    size_t bytes = 4096 + size * SLOT;
    int file = open(id.internal, O_RDWR);
    if (file < 0 || ftruncate(file, bytes)) return ncclSystemError;
    Clique *clique = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (clique == MAP_FAILED) return ncclSystemError;
    ncclComm_t made = calloc(1, sizeof *made);
    *made = (struct ncclComm){.clique = clique, .slots = (char *)clique + 4096, .rank = rank, .size = size};
    memcpy(made->path, id.internal, sizeof made->path);
    made->blocking = !config || config->blocking != 0;
    clique->joined++;
    comms++;
    *comm = made;
    if (depth) joining[to_join++] = made;
    return depth ? ncclSuccess : all_joined(made);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, size, id, rank, NULL);
}

ncclResult_t ncclCommInitAll(ncclComm_t *made, int size, const int *devices) {
    FAIL_IF_ASKED(ncclUnhandledCudaError);
    (void)devices;
    ncclUniqueId id;
    ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess) return result;
    int rank = 0;
    depth++;
    for (; rank < size && result == ncclSuccess; rank++)
        result = ncclCommInitRankConfig(&made[rank], size, id, rank, NULL);
    depth--;
    to_join = 0;
    unlink(id.internal);
    if (result != ncclSuccess)
        for (rank--; rank > 0; rank--) ncclCommDestroy(made[rank - 1]);
    return result;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    unlink(comm->path);
    munmap(comm->clique, 4096 + comm->size * SLOT);
    free(comm);
    comms--;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->clique->aborted++;
    return ncclCommDestroy(comm);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    (void)comm;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    if (fails(__func__)) comm->state = ncclRemoteError;
    if (comm->clique->aborted) comm->state = ncclRemoteError;
    *state = comm->state != ncclSuccess ? comm->state : all_joined(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *size) {
    *size = comm->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {"no error", "CUDA error", "system error", "internal error",
                                        "invalid argument", "invalid usage", "remote error", "in progress"};
    static _Thread_local char text[64];
    snprintf(text, sizeof text, "stand-in: %s", result < ncclNumResults ? texts[result] : "unknown");
    return text;
}
