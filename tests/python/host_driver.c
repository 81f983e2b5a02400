// A libcuda.so.1 whose device memory is this process's: for tests of which memory is taken, and given back.
//
// Allocations are counted and bounded by FREE_BYTES and TOTAL_BYTES of the environment; the one named by FAIL ("device:2",
// "host:1": the second, the first of its kind) is refused. Of the kernels, filling and encoding do what they must for blocks of two-byte
// units that are contiguous, and every record is one that found no room, so that the host reads it from the baseline. A
// kernel that reaches beyond an allocation ends the process with 3.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64;
typedef uint32_t u32;

enum { DEVICE, HOST, KINDS, MOST = 1024 };
static const char *NAMES[KINDS] = {"device", "host"};
static struct { u64 at, bytes; int kind; } made[MOST];
static u64 live[KINDS];
static int asked[KINDS];
static u32 shared = 1024;

static u64 number(const char *name) {
    const char *text = getenv(name);
    return text ? strtoull(text, 0, 10) : 0;
}

u64 windlass_live(int kind) { return live[kind]; }
int windlass_asked(int kind) { return asked[kind]; }

static int take(u64 *at, u64 bytes, int kind) {
    const char *fail = getenv("FAIL");
    char name[32];
    snprintf(name, sizeof name, "%s:%d", NAMES[kind], ++asked[kind]);
    if (fail && !strcmp(fail, name)) return 2;
    if (kind == DEVICE && live[DEVICE] + bytes > number("FREE_BYTES")) return 2;
    for (int i = 0; i < MOST; i++)
        if (!made[i].at) {
            void *memory;
            if (posix_memalign(&memory, 4096, bytes)) return 2;
            memset(memory, 0xee, bytes);
            *at = made[i].at = (u64)memory;
            made[i].bytes = bytes;
            made[i].kind = kind;
            live[kind] += bytes;
            return 0;
        }
    return 2;
}

static int give(u64 at, int kind) {
    for (int i = 0; i < MOST; i++)
        if (made[i].at == at && made[i].kind == kind) {
            live[kind] -= made[i].bytes;
            made[i].at = 0;
            free((void *)at);
            return 0;
        }
    fprintf(stderr, "nothing of kind %s at %lx\n", NAMES[kind], at);
    _Exit(3);
}

static void within(u64 at, u64 bytes) {
    for (int i = 0; i < MOST; i++)
        if (made[i].at && made[i].at <= at && at + bytes <= made[i].at + made[i].bytes) return;
    fprintf(stderr, "%lu bytes at %lx are in no allocation\n", bytes, at);
    _Exit(3);
}

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 2 ? "out of memory" : "an error"; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int bytes, int device) { strncpy(name, "Pretended GPU", bytes); return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 7, 16); return 0; }
int cuDeviceTotalMem_v2(u64 *bytes, int device) { *bytes = number("TOTAL_BYTES"); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &shared; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { return 0; }
int cuCtxSynchronize(void) { return 0; }

int cuMemGetInfo_v2(u64 *free, u64 *total) {
    *free = number("FREE_BYTES") - live[DEVICE];
    *total = number("TOTAL_BYTES");
    return 0;
}
int cuMemAlloc_v2(u64 *at, u64 bytes) { return take(at, bytes, DEVICE); }
int cuMemFree_v2(u64 at) { return give(at, DEVICE); }
int cuMemHostAlloc(u64 *at, u64 bytes, unsigned flags) { return take(at, bytes, HOST); }
int cuMemFreeHost(u64 at) { return give(at, HOST); }
int cuMemHostGetDevicePointer_v2(u64 *device, u64 at, unsigned flags) { *device = at; return 0; }
int cuPointerGetAttributes(unsigned count, int *which, void **into, u64 at) {
    *(u32 *)into[0] = 2;
    *(u32 *)into[1] = 0;
    *(int *)into[2] = 0;
    return 0;
}

int cuStreamCreate(void **stream, unsigned flags) { *stream = &shared; return 0; }
int cuStreamDestroy_v2(void *stream) { return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
int cuEventCreate(void **event, unsigned flags) { *event = &shared; return 0; }
int cuEventDestroy_v2(void *event) { return 0; }
int cuEventQuery(void *event) { return 0; }
int cuEventRecord(void *event, void *stream) { return 0; }

int cuMemcpyHtoDAsync_v2(u64 to, const void *from, u64 bytes, void *stream) {
    within(to, bytes);
    memcpy((void *)to, from, bytes);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, u64 from, u64 bytes, void *stream) {
    within(from, bytes);
    memcpy(to, (void *)from, bytes);
    return 0;
}
int cuMemcpyAsync(u64 to, u64 from, u64 bytes, void *stream) {
    within(to, bytes);
    within(from, bytes);
    memcpy((void *)to, (void *)from, bytes);
    return 0;
}
int cuMemcpyDtoH_v2(void *to, u64 from, u64 bytes) { memcpy(to, (void *)from, bytes); return 0; }
int cuMemsetD8Async(u64 at, unsigned char value, u64 bytes, void *stream) {
    within(at, bytes);
    memset((void *)at, value, bytes);
    return 0;
}

int cuModuleLoadDataEx(void **module, const void *text, unsigned n, void *a, void *b) { *module = &shared; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetGlobal_v2(u64 *at, u64 *bytes, void *module, const char *name) { *at = (u64)&shared; return 0; }
int cuModuleGetFunction(const char **function, void *module, const char *name) { *function = strdup(name); return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *fit, void *f, int threads, u64 bytes) { *fit = 1; return 0; }

struct Block { u64 fresh, fresh_pitch, base, start, pitch; u32 run, count, number, is_float; };
struct Entry { u64 offset, sum[2]; u32 number, mode, length, changes; };
struct Args { u64 blocks, sums, out, entries, tally, capacity; u32 count, entry_capacity, work, unused; };
struct Tally { u64 cursor, changes; u32 entries, lost, outcome[4], next[8]; };

int cuLaunchKernel(const char *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned bytes, void *stream, void **parameters, void **extra) {
    int fill = !strcmp(function, "windlass_fill"), encode = !strcmp(function, "windlass_encode");
    if (!fill && !encode) return 0;
    struct Args *a = parameters[0];
    struct Tally *tally = (struct Tally *)a->tally;
    for (u32 i = 0; i < a->count; i++) {
        struct Block *b = (struct Block *)a->blocks + i;
        u64 size = 2ull * b->run * b->count;
        within(b->base, size);
        if (fill || memcmp((void *)b->base, (void *)b->fresh, size)) {
            memcpy((void *)b->base, (void *)b->fresh, size);
            if (fill) continue;
            struct Entry *e = (struct Entry *)a->entries + tally->entries++;
            *e = (struct Entry){~0ull, {0, 0}, b->number, 4, size, 1};
            tally->lost++;
            tally->changes++;
        }
    }
    return 0;
}
