// Sums from scratch: the digest of weights where they are.
//
// Owns: the sum of `windlass_core::digest` over any memory. Must not: know blocks or tensors; it sees spans, and adds
// each to the sum that it belongs to, so that a block, a tensor or a whole fused parameter may have several.
//
// A thread's sixteen bytes of every group of 4 KiB have the same columns, so that its low keys stay in registers; the
// high keys of a span are computed once. Spans of several runs are cut into chunks run by run and look their keys up.

// Some bytes of a tensor in memory; a few hundred KiB at the most, so that many CTAs share the work.
struct Span {
    u64 at;     // address of its first byte
    u64 pitch;  // bytes from one run to the next there
    u64 start;  // byte of the tensor at which it begins
    u64 stride; // bytes of the tensor from one run to the next
    u32 run;    // bytes in a run
    u32 count;  // runs
    u32 sum;    // which sum it is added to
    u32 unused;
};

struct SumArgs {
    u64 spans; // of Span
    u64 sums;  // two u64 each, which the host has set to zero
    u64 tally;
    u32 count; // of `spans`
    u32 work;
};

#define SUM_GROUPS 132u
#define SUM_DEEP 4u

struct Shared {
    uint2 low[1024];
    Sum high[SUM_GROUPS];
    u32 next;
};
SHARED(Shared)

INLINE void dot(Sum& sum, u32 word, u32 a, u32 b) {
    sum.a += (u64)word * a;
    sum.b += (u64)word * b;
}

// The sum of the bytes from `at` that are among the sixteen from tensor byte `chunk` on and within `start..end`.
INLINE Sum sum_some_bytes(const uint2* low, u64 at, u64 chunk, u64 start, u64 end) {
    Sum sum = {0, 0};
    u64 first = max(chunk, start), last = min(chunk + 16, end);
    if (first >= last) return sum;
    for (u64 i = first; i < last; i++) {
        u64 byte = (u64)(*(const u8*)(at + (i - start)) + 1) << (8 * (i & 3));
        uint2 keys = low[(i & 4095) >> 2];
        sum.a += byte * keys.x;
        sum.b += byte * keys.y;
    }
    Sum high = high_keys(chunk >> 12);
    return {sum.a * high.a, sum.b * high.b};
}

INLINE Sum sum_chunk(const uint2* low, uint4 v, u64 chunk) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    Sum sum = {0, 0};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        uint2 keys = low[((chunk & 4095) >> 2) + i];
        // A word plus one for each of its bytes may need 33 bits.
        u64 word = (u64)words[i] + 0x01010101;
        sum.a += word * keys.x;
        sum.b += word * keys.y;
    }
    Sum high = high_keys(chunk >> 12);
    return {sum.a * high.a, sum.b * high.b};
}

// Runs shorter than a group: chunks of all runs in a row.
__device__ __noinline__ Sum sum_runs(Span p) {
    const Shared& s = shared();
    Sum sum = {0, 0};
    u32 chunks = p.run / 16 + 2;
    for (u64 i = threadIdx.x; i < (u64)chunks * p.count; i += THREADS) {
        u64 run = i / chunks, start = p.start + run * p.stride, end = start + p.run;
        u64 chunk = (start & ~15ull) + (i - run * chunks) * 16, at = p.at + run * p.pitch;
        if (chunk >= start && chunk + 16 <= end)
            sum = plus(sum, sum_chunk(s.low, load_chunk(at + (chunk - start)), chunk));
        else
            sum = plus(sum, sum_some_bytes(s.low, at, chunk, start, end));
    }
    return sum;
}

// One run: a group of 4 KiB for all threads at a time.
INLINE Sum sum_run(Shared& s, const Span& p, const uint2* keys) {
    Sum sum = {0, 0}, ones = {0, 0};
    for (u32 i = 0; i < 4; i++) dot(ones, 0x01010101, keys[i].x, keys[i].y);
    u64 end = p.start + p.run, last = (end - 1) >> 12;
    for (u64 first = p.start >> 12; first <= last; first += SUM_GROUPS) {
        u32 groups = (u32)min((u64)SUM_GROUPS, last - first + 1);
        __syncthreads();
        for (u32 i = threadIdx.x; i < groups; i += THREADS) s.high[i] = high_keys(first + i);
        __syncthreads();
        for (u32 g = 0; g < groups; g += SUM_DEEP) {
            uint4 v[SUM_DEEP];
            bool whole[SUM_DEEP];
#pragma unroll
            for (u32 i = 0; i < SUM_DEEP; i++) {
                u64 chunk = (first + g + i) * 4096 + threadIdx.x * 16;
                whole[i] = g + i < groups && chunk >= p.start && chunk + 16 <= end;
                if (whole[i]) v[i] = load_chunk(p.at + (chunk - p.start));
            }
#pragma unroll
            for (u32 i = 0; i < SUM_DEEP; i++) {
                if (whole[i]) {
                    Sum inner = ones, high = s.high[g + i];
                    dot(inner, v[i].x, keys[0].x, keys[0].y);
                    dot(inner, v[i].y, keys[1].x, keys[1].y);
                    dot(inner, v[i].z, keys[2].x, keys[2].y);
                    dot(inner, v[i].w, keys[3].x, keys[3].y);
                    sum.a += inner.a * high.a;
                    sum.b += inner.b * high.b;
                }
            }
        }
    }
    // At most the first and the last chunk of the run are not whole.
    if (threadIdx.x == 0) {
        u64 head = p.start & ~15ull, tail = (end - 1) & ~15ull;
        if (head < p.start || head + 16 > end) sum = plus(sum, sum_some_bytes(s.low, p.at, head, p.start, end));
        if (tail != head && tail + 16 > end) sum = plus(sum, sum_some_bytes(s.low, p.at, tail, p.start, end));
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) windlass_sum(const __grid_constant__ SumArgs a) {
    Shared& s = shared();
    fill_low_keys(s.low);
    uint2 keys[4];
    for (u32 i = 0; i < 4; i++) keys[i] = low_keys(threadIdx.x * 4 + i);
    __syncthreads();
    for (u32 i = blockIdx.x; i < a.count;) {
        u32 taken = 0;
        if (threadIdx.x == 0) taken = gridDim.x + atomicAdd(&((Tally*)a.tally)->next[a.work], 1u);
        Span p = ((const Span*)a.spans)[i];
        Sum sum = {0, 0};
        if (p.count == 1 && p.run)
            sum = sum_run(s, p, keys);
        else if (p.run)
            sum = sum_runs(p);
        sum = warp_sum(sum);
        if (lane_id() == 0) {
            atomicAdd((u64*)a.sums + 2 * (u64)p.sum, sum.a);
            atomicAdd((u64*)a.sums + 2 * (u64)p.sum + 1, sum.b);
        }
        i = hand_out(&s.next, taken);
    }
}
