// Faults on demand, for both stand-in libraries: STAND_IN_FAIL=cudaMalloc:2 makes the second
// cudaMalloc of each process fail, STAND_IN_FAIL=cudaStreamQuery:hang makes every stream stay busy.
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static int fault_calls;

static const char *fault(const char *function) {
    const char *wanted = getenv("STAND_IN_FAIL"), *colon = wanted ? strchr(wanted, ':') : NULL;
    size_t length = strlen(function);
    if (!colon || (size_t)(colon - wanted) != length || strncmp(wanted, function, length)) return NULL;
    return colon + 1;
}

static bool fails(const char *function) {
    const char *call = fault(function);
    return call && atoi(call) == ++fault_calls;
}
