// Dense replay: many copies in one launch, as they are or rounded from fp32 to bf16.
//
// Owns: copies of ranges and of two-dimensional boxes between any alignments. Must not: know what they are copies of;
// boxes of more dimensions are several of two. Copies of one launch must not overlap.

struct Copy {
    u64 from, to;             // addresses, less `CopyArgs::from` and `CopyArgs::to`
    u64 from_pitch, to_pitch; // bytes from one run to the next
    u64 run;                  // bytes in a run, of the target where there is a cast
    u64 count;                // runs
};

struct CopyArgs {
    u64 copies; // of Copy; a few hundred KiB each at the most, so that many CTAs share the work
    u64 from;   // added to where every copy reads, so that a table serves any place of the source
    u64 to;     // and to where it writes
    u64 tally;
    u32 count; // of `copies`
    u32 work;
};

#ifndef COPY_DEEP
#define COPY_DEEP 4u
#endif

struct Shared {
    u32 next;
};
SHARED(Shared)

INLINE void copy_bytes(u64 from, u64 to, u32 bytes) {
    for (u32 i = threadIdx.x; i < bytes; i += THREADS) ((u8*)to)[i] = ((const u8*)from)[i];
}

// One run: whole chunks of the target, however the source is aligned.
INLINE void copy_run(u64 from, u64 to, u64 bytes) {
    u64 head = min(bytes, (16 - (to & 15)) & 15);
    copy_bytes(from, to, (u32)head);
    from += head, to += head, bytes -= head;
    u64 chunks = bytes / 16, i = threadIdx.x;
    for (; i + (COPY_DEEP - 1) * THREADS < chunks; i += COPY_DEEP * THREADS) {
        uint4 v[COPY_DEEP];
#pragma unroll
        for (u32 j = 0; j < COPY_DEEP; j++) v[j] = load_chunk(from + (i + j * THREADS) * 16);
#pragma unroll
        for (u32 j = 0; j < COPY_DEEP; j++) __stcs((uint4*)to + i + j * THREADS, v[j]);
    }
    for (; i < chunks; i += THREADS) __stcs((uint4*)to + i, load_chunk(from + i * 16));
    copy_bytes(from + chunks * 16, to + chunks * 16, (u32)(bytes & 15));
}

template <typename T> INLINE void copy_grains(const Copy& c) {
    u32 grains = (u32)(c.run / sizeof(T));
    for (u64 i = threadIdx.x; i < grains * c.count; i += THREADS) {
        u64 run = i / grains, at = (i - run * grains) * sizeof(T);
        *(T*)(c.to + run * c.to_pitch + at) = *(const T*)(c.from + run * c.from_pitch + at);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) windlass_copy(const __grid_constant__ CopyArgs a) {
    for (u32 i = blockIdx.x; i < a.count;) {
        u32 taken = 0;
        if (threadIdx.x == 0) taken = gridDim.x + atomicAdd(&((Tally*)a.tally)->next[a.work], 1u);
        Copy c = ((const Copy*)a.copies)[i];
        c.from += a.from, c.to += a.to;
        u64 grain = c.from | c.to | c.from_pitch | c.to_pitch | c.run;
        if (c.count == 1)
            copy_run(c.from, c.to, c.run);
        else if (c.run >= 16 * THREADS)
            for (u64 r = 0; r < c.count; r++) copy_run(c.from + r * c.from_pitch, c.to + r * c.to_pitch, c.run);
        else if (grain % 16 == 0)
            copy_grains<uint4>(c);
        else if (grain % 4 == 0)
            copy_grains<u32>(c);
        else if (grain % 2 == 0)
            copy_grains<u16>(c);
        else
            copy_grains<u8>(c);
        i = hand_out(&shared().next, taken);
    }
}

INLINE void cast_units(u64 from, u64 to, u64 units) {
    for (u64 i = threadIdx.x; i < units; i += THREADS) ((u16*)to)[i] = (u16)bf16_pair(((const u32*)from)[i], 0);
}

INLINE void cast_run(u64 from, u64 to, u64 units) {
    u64 head = min(units, ((16 - (to & 15)) & 15) / 2);
    cast_units(from, to, head);
    from += 4 * head, to += 2 * head, units -= head;
    u64 chunks = units / 8;
    for (u64 i = threadIdx.x; i < chunks; i += THREADS) {
        uint4 x = load_chunk(from + 32 * i), y = load_chunk(from + 32 * i + 16);
        __stcs((uint4*)to + i, make_uint4(bf16_pair(x.x, x.y), bf16_pair(x.z, x.w), bf16_pair(y.x, y.y),
                                          bf16_pair(y.z, y.w)));
    }
    cast_units(from + 32 * chunks, to + 16 * chunks, units & 7);
}

extern "C" __global__ void __launch_bounds__(THREADS) windlass_cast(const __grid_constant__ CopyArgs a) {
    for (u32 i = blockIdx.x; i < a.count;) {
        u32 taken = 0;
        if (threadIdx.x == 0) taken = gridDim.x + atomicAdd(&((Tally*)a.tally)->next[a.work], 1u);
        Copy c = ((const Copy*)a.copies)[i];
        c.from += a.from, c.to += a.to;
        u64 units = c.run / 2;
        if (c.count == 1 || c.run >= 16 * THREADS)
            for (u64 r = 0; r < c.count; r++) cast_run(c.from + r * c.from_pitch, c.to + r * c.to_pitch, units);
        else
            for (u64 n = threadIdx.x; n < units * c.count; n += THREADS) {
                u64 run = n / units, at = n - run * units;
                *(u16*)(c.to + run * c.to_pitch + 2 * at) =
                    (u16)bf16_pair(*(const u32*)(c.from + run * c.from_pitch + 4 * at), 0);
            }
        i = hand_out(&shared().next, taken);
    }
}
