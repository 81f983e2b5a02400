// Enough of CUDA to run the kernels on a CPU, one CTA at a time, for tests where there is no GPU.
//
// Threads of a CTA are coroutines that run until they meet: at a barrier, or in an operation of their warp, which all
// of its lanes must reach. Threads that wait for ever are found and reported. Shared memory begins as garbage. It shows
// that the kernels are right, not that they are free of races or fast.

#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Dim {
    unsigned x;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static Dim threadIdx, blockIdx, gridDim;
alignas(16) static unsigned char windlass_shared[256 << 10];

template <typename T> static inline T min(T a, T b) { return a < b ? a : b; }
template <typename T> static inline T max(T a, T b) { return a < b ? b : a; }
template <typename T> static inline T __ldcs(const T* p) { return *p; }
template <typename T> static inline T __ldcg(const T* p) { return *p; }
template <typename T> static inline void __stcs(T* p, T v) { *p = v; }
template <typename T> static inline void __stcg(T* p, T v) { *p = v; }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
static inline unsigned __vminu2(unsigned a, unsigned b) {
    return min(a & 0xffff, b & 0xffff) | min(a >> 16, b >> 16) << 16;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned out = 0;
    for (unsigned i = 0; i < 4; i++) out |= (unsigned)(bytes >> (8 * (select >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}
template <typename T, typename V> static inline T atomicAdd(T* p, V v) {
    T old = *p;
    *p = (T)(old + (T)v);
    return old;
}
template <typename T> static inline T atomicOr(T* p, T v) {
    T old = *p;
    *p = old | v;
    return old;
}

namespace host {

const unsigned COUNT = 256, STACK = 128 << 10;

struct Meeting {
    unsigned arrived = 0, turn = 0;
};

static ucontext_t home, threads[COUNT];
static jmp_buf places[COUNT];
static bool begun[COUNT], done[COUNT];
static unsigned long long slots[COUNT];
static Meeting all, warps[COUNT / 32];
static unsigned idle;
static void (*body)(const void*);
static const void* argument;

// Goes on with another thread. Contexts would save the signal mask, two system calls each time, which was most of the
// time of a run: they only give every thread its stack.
[[noreturn]] static void go_to(unsigned next) {
    threadIdx.x = next;
    if (begun[next]) _longjmp(places[next], 1);
    begun[next] = true;
    setcontext(&threads[next]);
    abort();
}

static void pass_on() {
    unsigned me = threadIdx.x, next = me;
    if (++idle > 64 * COUNT) {
        fprintf(stderr, "threads wait for others that never come (CTA %u, thread %u)\n", blockIdx.x, me);
        abort();
    }
    do next = (next + 1) % COUNT;
    while (done[next] && next != me);
    if (next == me) return;
    if (_setjmp(places[me]) == 0) go_to(next);
}

static void meet(Meeting& m, unsigned count) {
    unsigned turn = m.turn;
    if (++m.arrived == count) {
        m.arrived = 0;
        m.turn++;
        idle = 0;
    }
    while (m.turn == turn) pass_on();
}

static void run_thread() {
    body(argument);
    done[threadIdx.x] = true;
    idle = 0;
    for (unsigned i = 0; i < COUNT; i++)
        if (!done[i]) go_to(i);
    setcontext(&home);
}

static void launch(unsigned grid, unsigned shared, void (*kernel)(const void*), const void* args) {
    static std::vector<char> stacks(COUNT * STACK);
    body = kernel;
    argument = args;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        memset(windlass_shared, 0xa5, sizeof windlass_shared);
        for (unsigned i = 0; i < COUNT; i++) {
            begun[i] = done[i] = false;
            getcontext(&threads[i]);
            threads[i].uc_stack.ss_sp = &stacks[i * STACK];
            threads[i].uc_stack.ss_size = STACK;
            threads[i].uc_link = nullptr;
            makecontext(&threads[i], run_thread, 0);
        }
        idle = 0;
        threadIdx.x = 0;
        begun[0] = true;
        swapcontext(&home, &threads[0]);
        for (unsigned i = shared; i < sizeof windlass_shared; i++) {
            if (windlass_shared[i] == 0xa5) continue;
            fprintf(stderr, "byte %u of %u bytes of shared memory was written (CTA %u)\n", i, shared, blockIdx.x);
            abort();
        }
    }
}

template <typename T, typename F> static inline auto exchange(T v, F read) {
    unsigned me = threadIdx.x, warp = me / 32;
    slots[me] = 0;
    memcpy(&slots[me], &v, sizeof v);
    meet(warps[warp], 32);
    auto result = read([&](unsigned lane) {
        T other;
        memcpy(&other, &slots[warp * 32 + lane % 32], sizeof other);
        return other;
    });
    meet(warps[warp], 32);
    return result;
}

} // namespace host

static inline void __syncthreads() { host::meet(host::all, host::COUNT); }
static inline int __syncthreads_or(int v) {
    static int any;
    any |= v != 0;
    __syncthreads();
    int told = any;
    __syncthreads();
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    return told;
}
static inline void __syncwarp() { host::meet(host::warps[threadIdx.x / 32], 32); }
static inline unsigned __ballot_sync(unsigned, unsigned v) {
    return host::exchange(v, [](auto lane) {
        unsigned bits = 0;
        for (unsigned i = 0; i < 32; i++) bits |= (unsigned)(lane(i) != 0) << i;
        return bits;
    });
}
static inline bool __any_sync(unsigned mask, unsigned v) { return __ballot_sync(mask, v) != 0; }
template <typename T> static inline T __shfl_sync(unsigned, T v, unsigned from) {
    return host::exchange(v, [=](auto lane) { return lane(from); });
}
template <typename T> static inline T __shfl_xor_sync(unsigned, T v, unsigned by) {
    unsigned me = threadIdx.x % 32;
    return host::exchange(v, [=](auto lane) { return lane(me ^ by); });
}
template <typename T> static inline T __shfl_up_sync(unsigned, T v, unsigned by) {
    unsigned me = threadIdx.x % 32;
    return host::exchange(v, [=](auto lane) { return lane(me < by ? me : me - by); });
}
template <typename F> static inline unsigned reduce(unsigned v, F f) {
    return host::exchange(v, [=](auto lane) {
        unsigned r = lane(0);
        for (unsigned i = 1; i < 32; i++) r = f(r, lane(i));
        return r;
    });
}
static inline unsigned __reduce_add_sync(unsigned, unsigned v) {
    return reduce(v, [](unsigned a, unsigned b) { return a + b; });
}
static inline unsigned __reduce_min_sync(unsigned, unsigned v) {
    return reduce(v, [](unsigned a, unsigned b) { return min(a, b); });
}
static inline unsigned __reduce_max_sync(unsigned, unsigned v) {
    return reduce(v, [](unsigned a, unsigned b) { return max(a, b); });
}

// A way to start a kernel from outside: how many CTAs, and its argument.
#define HOST_KERNEL(NAME, ARGS)                                                                                        \
    extern "C" void host_##NAME(unsigned grid, const ARGS* args) {                                                     \
        host::launch(grid, windlass_shared_bytes, [](const void* a) { NAME(*(const ARGS*)a); }, args);                 \
    }
