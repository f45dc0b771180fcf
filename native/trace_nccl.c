// Write down every NCCL call that a program makes, without changing the program:
//
//     LD_PRELOAD=./libtrace_nccl.so NCCL_TRACE_FILE=trace.%p.txt python train.py
//
// One line a call, to stderr or to the file (%p becomes the process id), in the order in which the
// calls return; `#` counts them in the order in which they were made. `us` is how long the call
// kept the CPU: the time to put the work on a stream, NOT the time of the collective itself. The
// GPU does that later, and nothing here waits for it. `bytes` is count times the size of an element.
//
// The loader finds these functions before NCCL's own of the same names; each notes its arguments
// and calls the next one. Calls made by pointer, or into an NCCL linked statically, are not seen.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// ------------------------------------------------------------------------ finding the real NCCL

static void *next(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) {  // not in the program's own list of libraries: Python has loaded it, as with torch
        void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
        if (library) found = dlsym(library, name);
    }
    if (!found) {
        fprintf(stderr, "trace_nccl: no libnccl.so.2 with %s is loaded\n", name);
        abort();
    }
    return found;
}

// ----------------------------------------------------------------------------- names and numbers

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_ulong calls;
static _Thread_local int depth;  // of nested groups

// Pointers differ from run to run; c0, c1, … and s0, s1, … in the order of appearance do not.
typedef struct {
    const void *pointer[256];
    int number[256], rank[256], size[256], next;
} Table;
static Table comms, streams;

static int slot_of(Table *table, const void *pointer) {
    for (int i = 0; i < 256; i++)
        if (table->pointer[i] == pointer) return i;
    for (int i = 0; i < 256; i++)
        if (!table->pointer[i]) {
            table->pointer[i] = pointer;
            table->number[i] = table->next++;
            table->size[i] = 0;
            return i;
        }
    return -1;
}

static void learn(ncclComm_t comm, int rank, int size) {
    pthread_mutex_lock(&lock);
    int i = comm ? slot_of(&comms, comm) : -1;
    if (i >= 0) comms.rank[i] = rank, comms.size[i] = size;
    pthread_mutex_unlock(&lock);
}

static void forget(ncclComm_t comm) {  // its address may come back as another communicator
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 256; i++)
        if (comms.pointer[i] == comm) comms.pointer[i] = NULL;
    pthread_mutex_unlock(&lock);
}

static const char *type_name(int type) {
    static const char *const names[] = {"int8",    "uint8",   "int32",    "uint32",      "int64",      "uint64",
                                        "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
    return type < ncclNumTypes ? names[type] : "?";
}

static size_t type_size(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type < ncclNumTypes ? sizes[type] : 0;
}

static const char *op_name(ncclRedOp_t op) {
    static const char *const names[] = {"sum", "prod", "max", "min", "avg"};
    return op < ncclNumOps ? names[op] : "custom";
}

// ------------------------------------------------------------------------------- writing one line

typedef struct {
    const char *name;
    bool data, stream_known;
    size_t count;
    ncclDataType_t type;
    const char *op, *other;  // other: "root" or "peer"
    int who;                 // that rank
    ncclComm_t comm;
    cudaStream_t stream;
    unsigned long number;
    double start;
} Call;

static double microseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int output(void) {
    static int file = -1;
    pthread_mutex_lock(&lock);
    if (file < 0) {
        char path[4096], *name = getenv("NCCL_TRACE_FILE"), *mark = name ? strstr(name, "%p") : NULL;
        if (mark) snprintf(path, sizeof path, "%.*s%d%s", (int)(mark - name), name, getpid(), mark + 2);
        file = name ? open(mark ? path : name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : STDERR_FILENO;
        if (file < 0) file = STDERR_FILENO;
    }
    pthread_mutex_unlock(&lock);
    return file;
}

static void begin(Call *call) {
    call->number = atomic_fetch_add(&calls, 1);
    call->start = microseconds();
}

static void end(const Call *call, ncclResult_t result) {
    double spent = microseconds() - call->start;
    char line[512];
    int n = snprintf(line, 256, "#%lu %*s%s", call->number, 2 * depth, "", call->name);
#define ADD(...) n += snprintf(line + n, sizeof line - n, __VA_ARGS__)
    if (call->data)
        ADD(" count=%zu type=%s bytes=%zu", call->count, type_name(call->type), call->count * type_size(call->type));
    if (call->op) ADD(" op=%s", call->op);
    if (call->other) ADD(" %s=%d", call->other, call->who);
    pthread_mutex_lock(&lock);
    int c = call->comm ? slot_of(&comms, call->comm) : -1, s = call->stream ? slot_of(&streams, call->stream) : -1;
    if (c >= 0) ADD(" comm=c%d", comms.number[c]);
    if (c >= 0 && comms.size[c]) ADD(" rank=%d/%d", comms.rank[c], comms.size[c]);
    if (s >= 0) ADD(" stream=s%d", streams.number[s]);
    else if (call->data) ADD(" stream=default");
    pthread_mutex_unlock(&lock);
    const char *name = result == ncclSuccess ? "ok" : result == ncclInProgress ? "in progress" : NULL;
    if (name) ADD(" result=%s us=%.1f\n", name, spent);
    else ADD(" result=error %d us=%.1f\n", result, spent);
    if (write(output(), line, n) < 0) return;  // one write, so that lines of several threads do not mix
}

// Find the real function once, note the arguments, call it, write the line.
#define TRACE(function, arguments, ...)                                                    \
    static _Atomic(void *) found;                                                          \
    if (!found) found = next(#function);                                                   \
    Call call = {.name = #function, __VA_ARGS__};                                          \
    begin(&call);                                                                          \
    ncclResult_t result = ((__typeof__(&function))found)arguments
#define DATA .data = true, .count = count, .type = type, .comm = comm, .stream = stream
#define END                                                                                \
    end(&call, result);                                                                    \
    return result

// ------------------------------------------------------------------------------------ collectives

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    TRACE(ncclAllReduce, (send, recv, count, type, op, comm, stream), DATA, .op = op_name(op));
    END;
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    TRACE(ncclReduce, (send, recv, count, type, op, root, comm, stream), DATA, .op = op_name(op), .other = "root",
          .who = root);
    END;
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    TRACE(ncclBroadcast, (send, recv, count, type, root, comm, stream), DATA, .other = "root", .who = root);
    END;
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {  // the older name, which torch still calls
    TRACE(ncclBcast, (data, count, type, root, comm, stream), DATA, .other = "root", .who = root);
    END;
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    TRACE(ncclAllGather, (send, recv, count, type, comm, stream), DATA);
    END;
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    TRACE(ncclReduceScatter, (send, recv, count, type, op, comm, stream), DATA, .op = op_name(op));
    END;
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    TRACE(ncclSend, (send, count, type, peer, comm, stream), DATA, .other = "peer", .who = peer);
    END;
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    TRACE(ncclRecv, (recv, count, type, peer, comm, stream), DATA, .other = "peer", .who = peer);
    END;
}

ncclResult_t ncclGroupStart(void) {
    TRACE(ncclGroupStart, ());
    end(&call, result);
    depth += result == ncclSuccess;
    return result;
}

ncclResult_t ncclGroupEnd(void) {
    depth -= depth > 0;
    TRACE(ncclGroupEnd, ());
    END;
}

// ---------------------------------------------------------------------------------- communicators

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    TRACE(ncclCommInitRank, (comm, size, id, rank));
    if (result == ncclSuccess || result == ncclInProgress) learn(call.comm = *comm, rank, size);
    END;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    TRACE(ncclCommInitRankConfig, (comm, size, id, rank, config));
    if (result == ncclSuccess || result == ncclInProgress) learn(call.comm = *comm, rank, size);
    END;
}

ncclResult_t ncclCommInitAll(ncclComm_t *made, int size, const int *devices) {
    TRACE(ncclCommInitAll, (made, size, devices), .other = "ranks", .who = size);
    for (int rank = 0; rank < size && result == ncclSuccess; rank++) learn(made[rank], rank, size);
    END;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
    TRACE(ncclCommSplit, (comm, color, key, made, config), .comm = comm, .other = "color", .who = color);
    END;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    TRACE(ncclCommFinalize, (comm), .comm = comm);
    END;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    TRACE(ncclCommDestroy, (comm), .comm = comm);
    end(&call, result);
    forget(comm);
    return result;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    TRACE(ncclCommAbort, (comm), .comm = comm);
    end(&call, result);
    forget(comm);
    return result;
}
