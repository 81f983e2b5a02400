// What all kernels share: units, the line, the keys of sums, loads of any alignment.
//
// Owns: the device's form of `windlass_core::delta::line` and `windlass_core::digest`, whose documentation is the
// specification. Must not: have kernels.
//
// A program is the text of this file and of those behind it. `scripts/ptx.py` compiles programs for compute capability
// 8.0, and the driver translates them for the device at hand:
//
// | program | files | options |
// |---|---|---|
// | encode | unit, delta | `UNIT` bytes of a unit, `CAST=1` if the new state is fp32 and the image bf16 |
// | apply | unit, record, apply | `UNIT` |
// | sum | unit, sum | |
// | copy | unit, copy | |
//
// Every kernel takes one structure by value, 8-byte fields before 4-byte ones, so that its host form is a `repr(C)`
// structure of the same fields; addresses are u64. CTAs have THREADS threads and the dynamic shared memory that the
// program's global `windlass_shared_bytes` says. There may be any number of them, best as many as the device holds at a
// time: they take work from a counter in `Tally::next`, which the host has set to zero.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256u
#define WARPS 8u
#define ALL 0xffffffffu
#define INLINE __device__ __forceinline__

#ifndef UNIT
#define UNIT 1
#endif
#ifndef CAST
#define CAST 0
#endif
#define BITS (8u * UNIT)        // of a unit
#define CHUNK_UNITS (16u / UNIT) // of sixteen bytes

// Codes of modes.
#define SPARSE 1u
#define BITMAP 3u
#define DENSE 4u
// The high part of a value from which on it is written in full.
#define ESCAPE 16u

// Counters of a launch or of several launches after one another. The host sets all of it to zero before.
struct Tally {
    u64 cursor;     // bytes of output asked for; more than the capacity if some records did not fit
    u64 changes;    // units that changed
    u32 entries;    // index entries written
    u32 lost;       // records whose payload did not fit; their entries have the offset LOST
    u32 outcome[4]; // records by outcome (apply.cu)
    u32 next[8];    // work taken, one counter for each launch that shares this tally
};

INLINE u32 lane_id() { return threadIdx.x & 31; }
INLINE u32 warp_id() { return threadIdx.x >> 5; }
INLINE u32 lanes_below() { return (1u << lane_id()) - 1; }

// ---- Sums

struct Sum {
    u64 a, b;
};

INLINE u64 splitmix(u64 x) {
    x *= 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The high keys of a group of 4 KiB of a tensor.
INLINE Sum high_keys(u64 group) {
    return {splitmix(0x6a09e667f3bcc908ull + group) | 1, splitmix(0xbb67ae8584caa73bull + group) | 1};
}

// The low keys of a column, lane 0 in x.
INLINE uint2 low_keys(u32 column) {
    return make_uint2((u32)(splitmix(0x0057494e444c4153ull + column + 1) >> 32),
                      (u32)(splitmix(0x00532d4c4f572d42ull + column + 1) >> 32));
}

// Fills a table of all low keys; whoever reads it synchronises first.
INLINE void fill_low_keys(uint2* low) {
    for (u32 i = threadIdx.x; i < 1024; i += THREADS) low[i] = low_keys(i);
}

INLINE void add_product(Sum& sum, u64 difference, uint2 low, Sum high) {
    sum.a += difference * low.x * high.a;
    sum.b += difference * low.y * high.b;
}

INLINE Sum plus(Sum x, Sum y) { return {x.a + y.a, x.b + y.b}; }

INLINE Sum warp_sum(Sum sum) {
    for (u32 d = 16; d > 0; d >>= 1) {
        sum.a += __shfl_xor_sync(ALL, sum.a, d);
        sum.b += __shfl_xor_sync(ALL, sum.b, d);
    }
    return sum;
}

// ---- Units

#if UNIT == 1
typedef u8 Unit;
#elif UNIT == 2
typedef u16 Unit;
#elif UNIT == 4
typedef u32 Unit;
#else
typedef u64 Unit;
#endif
#define TOP ((Unit)((u64)1 << (BITS - 1)))
#define ONES ((Unit) ~(Unit)0)

INLINE Unit to_line(Unit v, bool is_float) {
    if (!is_float) return v;
    return v & TOP ? (Unit)~v : (Unit)(v | TOP);
}

INLINE Unit from_line(Unit v, bool is_float) {
    if (!is_float) return v;
    return v & TOP ? (Unit)(v ^ TOP) : (Unit)~v;
}

// The step from `old` to `fresh` as a code: -1, +1, -2, … are 0, 1, 2, ….
INLINE Unit code_of(Unit old, Unit fresh, bool is_float) {
    Unit step = (Unit)(to_line(fresh, is_float) - to_line(old, is_float));
    return (Unit)(((Unit)(step << 1) ^ (step & TOP ? ONES : (Unit)0)) - 1);
}

// What `old` becomes by the step of this code.
INLINE Unit step_by(Unit old, Unit code, bool is_float) {
    Unit z = (Unit)(code + 1), step = (Unit)((z >> 1) ^ (z & 1 ? ONES : (Unit)0));
    return from_line((Unit)(to_line(old, is_float) + step), is_float);
}

INLINE u32 bit_length(Unit v) { return UNIT == 8 ? 64 - __clzll((long long)v) : 32 - __clz((int)v); }

// Bytes of a section of so many bits.
INLINE u32 section(u32 bits) { return (bits + 7) / 8; }

// Adds what the change of the unit at byte `at` of its tensor does to the tensor's sum.
INLINE void add_change(Sum& sum, const uint2* low, u64 at, Sum high, Unit old, Unit fresh) {
    u32 column = (u32)(at & 4095) >> 2;
    if (UNIT == 8) {
        add_product(sum, (u64)(u32)fresh - (u32)old, low[column], high);
        add_product(sum, ((u64)fresh >> 32) - ((u64)old >> 32), low[column + 1], high);
    } else {
        add_product(sum, ((u64)fresh - (u64)old) << (8 * (at & 3)), low[column], high);
    }
}

// ---- Chunks: sixteen bytes in registers

INLINE bool is_zero(uint4 v) { return (v.x | v.y | v.z | v.w) == 0; }
INLINE uint4 differ(uint4 a, uint4 b) { return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w); }

// One bit for each unit of the chunk that is not zero, the first unit lowest.
INLINE u32 nonzero_units(uint4 v) {
#if UNIT == 8
    return (u32)((v.x | v.y) != 0) | (u32)((v.z | v.w) != 0) << 1;
#elif UNIT == 4
    return (u32)(v.x != 0) | (u32)(v.y != 0) << 1 | (u32)(v.z != 0) << 2 | (u32)(v.w != 0) << 3;
#elif UNIT == 2
    const u32 one = 0x00010001;
    // The even units' bits in the lower half, the odd ones' in the upper, then one between the other.
    u32 m = __vminu2(v.x, one) + 2 * __vminu2(v.y, one) + 4 * __vminu2(v.z, one) + 8 * __vminu2(v.w, one);
    m = (m | m << 2) & 0x00330033;
    m = (m | m << 1) & 0x00550055;
    return (m | m >> 15) & 0xff;
#else
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    u32 mask = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 t = (((words[i] & 0x7f7f7f7f) + 0x7f7f7f7f) | words[i]) & 0x80808080;
        mask |= ((t >> 7) * 0x10204080u >> 28) << (4 * i);
    }
    return mask;
#endif
}

INLINE u32 word_of(uint4 v, u32 i) {
    u32 even = i & 2 ? v.z : v.x, odd = i & 2 ? v.w : v.y;
    return i & 1 ? odd : even;
}

INLINE Unit unit_of(uint4 v, u32 i) {
#if UNIT == 8
    return i ? (u64)v.w << 32 | v.z : (u64)v.y << 32 | v.x;
#else
    return (Unit)(word_of(v, i / (4 / UNIT)) >> (BITS * (i % (4 / UNIT))));
#endif
}

INLINE uint4 with_unit(uint4 v, u32 i, Unit unit) {
    u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 w = 0; w < 4; w++) {
#if UNIT == 8
        if (w / 2 == i) words[w] = (u32)(unit >> (32 * (w & 1)));
#else
        u32 shift = BITS * (i % (4 / UNIT));
        if (w == i / (4 / UNIT)) words[w] = (words[w] & ~((u32)ONES << shift)) | (u32)unit << shift;
#endif
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Sixteen bytes at any address. Reads whole aligned words, so up to three bytes on either side that are not asked for:
// they belong to the same allocation, whose ends are aligned.
INLINE uint4 load_chunk(u64 at) {
    if ((at & 15) == 0) return __ldcs((const uint4*)at);
    const u32* words = (const u32*)(at & ~3ull);
    u32 shift = (u32)(at & 3) * 8;
    u32 w[5];
#pragma unroll
    for (u32 i = 0; i < 4; i++) w[i] = __ldcs(words + i);
    w[4] = shift ? __ldcs(words + 4) : 0;
    return make_uint4(__funnelshift_r(w[0], w[1], shift), __funnelshift_r(w[1], w[2], shift),
                      __funnelshift_r(w[2], w[3], shift), __funnelshift_r(w[3], w[4], shift));
}

// The lower half is `low`, rounded to nearest even as the hardware and torch on it do; every NaN becomes 0x7fff.
INLINE u32 bf16_pair(u32 low, u32 high) {
#if defined(__CUDA_ARCH__)
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(__uint_as_float(high)), "f"(__uint_as_float(low)));
    return pair;
#else
    u32 in[2] = {low, high}, out[2];
    for (u32 i = 0; i < 2; i++)
        out[i] = (in[i] & 0x7fffffff) > 0x7f800000 ? 0x7fff : (in[i] + 0x7fff + (in[i] >> 16 & 1)) >> 16;
    return out[0] | out[1] << 16;
#endif
}

// ---- Scans

INLINE u32 warp_scan(u32 v) {
    for (u32 d = 1; d < 32; d <<= 1) {
        u32 below = __shfl_up_sync(ALL, v, d);
        if (lane_id() >= d) v += below;
    }
    return v;
}

// The sum of `v` over all threads below this one, and over all of them in `total`. `part` has WARPS words.
INLINE u32 block_scan(u32 v, u32* part, u32& total) {
    u32 inclusive = warp_scan(v);
    if (lane_id() == 31) part[warp_id()] = inclusive;
    __syncthreads();
    u32 below = 0;
    total = 0;
    for (u32 w = 0; w < WARPS; w++) {
        u32 p = part[w];
        if (w < warp_id()) below += p;
        total += p;
    }
    __syncthreads();
    return below + inclusive - v;
}

// ---- Shared memory of the CTA

#if defined(__CUDACC__)
extern __shared__ uint4 windlass_shared[];
#endif

// What a program keeps there, and how many bytes that is.
#define SHARED(TYPE)                                                                                                   \
    extern "C" { __device__ u32 windlass_shared_bytes = sizeof(TYPE); }                                                \
    INLINE TYPE& shared() { return *(TYPE*)windlass_shared; }

// Hands the number of the CTA's next piece of work, which thread 0 has `taken`, to all of its threads. Everybody is
// done with the last piece, and with `slot`, on return.
INLINE u32 hand_out(u32* slot, u32 taken) {
    if (threadIdx.x == 0) *slot = taken;
    __syncthreads();
    taken = *slot;
    __syncthreads();
    return taken;
}
