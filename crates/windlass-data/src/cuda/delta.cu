// Diff and encode: one pass over new and old weights.
//
// Owns: the records of `windlass_core::delta` in plain mode, byte for byte those of its encoder, and the baseline, the
// last published state in the device's memory. Must not: know tensors; it sees blocks of the cut table.
//
// A CTA takes a block. Each warp scans its own stretch of the block in order, sixteen bytes a lane, and lists what
// changed in shared memory; as warps' stretches are in order, so are their lists, and nothing is sorted. From the lists
// come the parameters, the sizes, the sections and the step of the block's sum, all in shared memory. The baseline is
// updated during the scan, while its line is in the cache: where one in a hundred changes, that costs more time than all
// of the encoding, and writing longer pieces or with other cache hints costs no less.
//
// Blocks with more changes than the lists hold are slow but exact: the scan is undone, and the block is gone through
// window by window, three times (parameters, sizes, sections). Windows begin at half a block and are halved until none
// has more than the lists hold; at the smallest that is so whatever the weights are.
//
// Invariants:
// - Afterwards the baseline is the new state and `sums` are its sums, also where a payload found no room. The host
//   reads such blocks as dense records from the baseline, or publishes a copy.
// - Nothing is written at or beyond `capacity` bytes of output, or `entry_capacity` entries.
// - A block has at most one entry, and none if it did not change. Entries and payloads are in no order.

// A block of the cut table, in the new state and in the baseline.
struct Block {
    u64 fresh;       // address of its first unit in the new state, aligned to the unit
    u64 fresh_pitch; // bytes from one run to the next there
    u64 base;        // address in the baseline, a multiple of 16: units run after run, and room for whole chunks of 16
    u64 start;       // byte of its tensor at which it begins
    u64 pitch;       // bytes of its tensor from one run to the next
    u32 run;         // units in a run
    u32 count;       // runs
    u32 number;      // in the cut table
    u32 is_float;    // the line
};

struct Entry {
    u64 offset; // of the payload in the output, a multiple of 4, or LOST
    u64 sum[2]; // of the block after the change
    u32 number; // of the block
    u32 mode;   // its code in an index
    u32 length; // of the payload
    u32 changes;
};

struct EncodeArgs {
    u64 blocks;   // of Block
    u64 sums;     // two u64 for each of `blocks`
    u64 out;      // payloads, a multiple of 4
    u64 entries;  // of Entry
    u64 tally;    // a Tally
    u64 capacity; // bytes of `out`, a multiple of 4
    u32 count;    // of `blocks`
    u32 entry_capacity;
    u32 work; // which counter of the tally
    u32 unused;
};

#define LOST (~0ull)
#define OVER 0x80000000u
#define STAGE_WORDS 2048u

// CTAs of a multiprocessor, and chunks of a lane that are on their way at a time: what keeps the memory busy. Shared
// memory must leave room for the cache, through which all loads go: longer lists were slower.
#ifndef CTAS
#define CTAS 4
#endif
#ifndef DEEP
#define DEEP (CAST ? 2 : 4)
#endif

// Changes that a warp lists, chunks of a warp in a window of so many changes, groups of 4 KiB of a contiguous block.
#define LIST (UNIT == 1 ? 1024u : UNIT == 2 ? 640u : UNIT == 4 ? 384u : 256u)
#define STRETCH (LIST / (32 * CHUNK_UNITS) * 32)
#define GROUPS (16 * UNIT + 2)

struct alignas(2 * UNIT) Change {
    Unit old; // its code, once that is known
    Unit fresh;
};

struct Shared {
    uint2 low[1024];
    Sum high[GROUPS];
    Sum sum[WARPS];
    u64 offset;
    u32 stage[STAGE_WORDS];
    Change change[WARPS * LIST];
    u16 position[WARPS * LIST];
    u32 length[BITS + 1]; // codes by bit length
    u32 gaps[16];         // all high parts of gaps, by parameter
    u32 count[WARPS];     // of the lists, with OVER if one is too short
    u32 gap_high[WARPS], value_high[WARPS], escapes[WARPS];
    u32 next;
};
SHARED(Shared)

// The warp's part of the lists, and what is before it.
struct Segment {
    u32 count;        // of this warp
    u32 rank;         // of its first change
    u32 all;          // of all warps
    int before, last; // position before its first change, and the last of all warps
    bool over;
};

struct Parameters {
    u32 gap, value;
};

struct Totals {
    u32 gap_high, value_high, escapes;
};

// Where the sections of a payload begin, in bits.
struct Layout {
    u32 mode, length;
    u32 gap_low, gap_high, value_low, value_high, escapes; // a bitmap is at `gap_high`
};

// ---- Loading

INLINE uint4 fresh_chunk(u64 at) {
    if (!CAST) return load_chunk(at);
    uint4 a = load_chunk(at), b = load_chunk(at + 16);
    return make_uint4(bf16_pair(a.x, a.y), bf16_pair(a.z, a.w), bf16_pair(b.x, b.y), bf16_pair(b.z, b.w));
}

// A chunk of a block whose chunks are whole and aligned.
INLINE uint4 fresh_plain(const Block& b, u32 chunk) {
    u64 from = b.fresh;
    if (b.count > 1) {
        u32 run = chunk / (b.run / CHUNK_UNITS);
        chunk -= run * (b.run / CHUNK_UNITS);
        from += run * b.fresh_pitch;
    }
    const uint4* at = (const uint4*)from + (CAST ? 2 : 1) * chunk;
    uint4 x = __ldcg(at);
    if (!CAST) return x;
    uint4 y = __ldcg(at + 1);
    return make_uint4(bf16_pair(x.x, x.y), bf16_pair(x.z, x.w), bf16_pair(y.x, y.y), bf16_pair(y.z, y.w));
}

INLINE u64 fresh_address(const Block& b, u32 position, u32& left) {
    const u32 size = CAST ? 4 : UNIT;
    if (b.count == 1) {
        left = b.run - position;
        return b.fresh + (u64)position * size;
    }
    u32 run = position / b.run, within = position - run * b.run;
    left = b.run - within;
    return b.fresh + run * b.fresh_pitch + (u64)within * size;
}

// A chunk of the new state. Units beyond the block are those of `old`.
INLINE uint4 load_fresh(const Block& b, u32 chunk, uint4 old) {
    u32 left, units = b.run * b.count;
    u64 at = fresh_address(b, chunk * CHUNK_UNITS, left);
    if (left >= CHUNK_UNITS) return fresh_chunk(at);
    for (u32 i = 0; i < CHUNK_UNITS && chunk * CHUNK_UNITS + i < units; i++) {
        at = fresh_address(b, chunk * CHUNK_UNITS + i, left);
        old = with_unit(old, i, CAST ? (Unit)bf16_pair(*(const u32*)at, 0) : *(const Unit*)at);
    }
    return old;
}

// Whether `fresh_plain` will do.
INLINE bool is_plain(const Block& b) {
    return ((b.fresh | (b.count > 1 ? b.fresh_pitch : 0)) & 15) == 0 && b.run % CHUNK_UNITS == 0;
}

// ---- Finding changes

INLINE void put_change(Change* to, uint4 old, uint4 fresh, u32 unit) {
#if UNIT == 2
    *(u32*)to = __byte_perm(word_of(old, unit / 2), word_of(fresh, unit / 2), unit & 1 ? 0x7632 : 0x5410);
#else
    *to = {unit_of(old, unit), unit_of(fresh, unit)};
#endif
}

// Lists the changes of one chunk for each lane, in order. False if the list is too short, and then nothing is written.
template <bool UPDATE>
INLINE bool list_changes(Shared& s, u64 base, u32 chunk, uint4 old, uint4 fresh, u32& have) {
    uint4 difference = differ(old, fresh);
    bool changed = !is_zero(difference);
    u32 some = __ballot_sync(ALL, changed);
    if (some == 0) return true;
    u32 mask = nonzero_units(difference), count = __popc(mask);
    u32 below = __popc(some & lanes_below()), total = __popc(some);
    if (__any_sync(ALL, count > 1)) {
        below = total = 0;
#pragma unroll
        for (u32 bit = 0; (1u << bit) <= CHUNK_UNITS; bit++) {
            u32 plane = __ballot_sync(ALL, count >> bit & 1);
            below += __popc(plane & lanes_below()) << bit;
            total += __popc(plane) << bit;
        }
    }
    if (have + total > LIST) return false;
    if (changed) {
        if (UPDATE) __stcg((uint4*)base + chunk, fresh);
        u32 at = warp_id() * LIST + have + below;
        do {
            u32 unit = __ffs((int)mask) - 1;
            put_change(s.change + at, old, fresh, unit);
            s.position[at] = (u16)(chunk * CHUNK_UNITS + unit);
            mask &= mask - 1;
            at++;
        } while (mask);
    }
    have += total;
    return true;
}

// Lists the changes of the warp's stretch of the chunks `first..last`.
template <bool PLAIN, bool UPDATE> INLINE void scan(Shared& s, const Block& b, u32 first, u32 last) {
    const u32 deep = PLAIN ? DEEP : DEEP / 2;
    u32 stretch = ((last - first + WARPS - 1) / WARPS + 31) / 32 * 32;
    u32 begin = min(last, first + warp_id() * stretch), end = min(last, begin + stretch);
    u32 have = 0;
    bool fits = true;
    for (u32 at = begin; at < end && fits; at += 32 * deep) {
        uint4 old[deep], fresh[deep];
#pragma unroll
        for (u32 i = 0; i < deep; i++) {
            u32 chunk = at + 32 * i + lane_id();
            old[i] = fresh[i] = make_uint4(0, 0, 0, 0);
            if (chunk < end) {
                old[i] = __ldcg((const uint4*)b.base + chunk);
                fresh[i] = PLAIN ? fresh_plain(b, chunk) : load_fresh(b, chunk, old[i]);
            }
        }
#pragma unroll
        for (u32 i = 0; i < deep; i++)
            fits = fits && list_changes<UPDATE>(s, b.base, at + 32 * i + lane_id(), old[i], fresh[i], have);
    }
    if (lane_id() == 0) s.count[warp_id()] = fits ? have : have | OVER;
}

// What the warps have listed, after everybody has; `before` is the last position before that.
INLINE Segment segment(const Shared& s, int before) {
    Segment g = {0, 0, 0, before, before, false};
    for (u32 w = 0; w < WARPS; w++) {
        u32 count = s.count[w] & ~OVER;
        g.over |= (s.count[w] & OVER) != 0;
        if (w == warp_id()) {
            g.count = count;
            g.rank = g.all;
            g.before = g.last;
        }
        g.all += count;
        if (count) g.last = s.position[w * LIST + count - 1];
    }
    return g;
}

// ---- Parameters

INLINE u32 gap_of(const Shared& s, const Segment& g, u32 i) {
    u32 at = warp_id() * LIST + i;
    int before = i ? (int)s.position[at - 1] : g.before;
    return (u32)((int)s.position[at] - before - 1);
}

// Turns the listed changes into codes; adds to the counts by which parameters are chosen, and to the block's sum.
INLINE void collect(Shared& s, const Block& b, const Segment& g, Sum& sum) {
    u32 gaps[16];
#pragma unroll
    for (u32 k = 0; k < 16; k++) gaps[k] = 0;
    for (u32 first = 0; first < g.count; first += 32) {
        u32 i = first + lane_id(), length = ~0u;
        if (i < g.count) {
            u32 gap = gap_of(s, g, i);
#pragma unroll
            for (u32 k = 0; k < 16; k++) gaps[k] += gap >> k;
            Change& change = s.change[warp_id() * LIST + i];
            Change it = change;
            u32 position = s.position[warp_id() * LIST + i];
            if (b.count == 1) {
                u64 at = b.start + (u64)position * UNIT;
                add_change(sum, s.low, at, s.high[(at >> 12) - (b.start >> 12)], it.old, it.fresh);
            } else {
                u32 run = position / b.run;
                u64 at = b.start + run * b.pitch + (u64)(position - run * b.run) * UNIT;
                add_change(sum, s.low, at, high_keys(at >> 12), it.old, it.fresh);
            }
            Unit code = code_of(it.old, it.fresh, b.is_float);
            change.old = code;
            length = bit_length(code);
        }
        // Most codes have one of three lengths: count each length once, whoever has it.
        u32 left = __ballot_sync(ALL, i < g.count);
        while (left) {
            u32 leader = __ffs((int)left) - 1;
            u32 same = __ballot_sync(ALL, length == __shfl_sync(ALL, length, leader));
            if (lane_id() == leader) atomicAdd(&s.length[length], __popc(same));
            left &= ~same;
        }
    }
    if (g.count) {
        u32 mine = 0;
#pragma unroll
        for (u32 k = 0; k < 16; k++) {
            u32 all = __reduce_add_sync(ALL, gaps[k]);
            if (lane_id() == k) mine = all;
        }
        if (lane_id() < 16) atomicAdd(&s.gaps[lane_id()], mine);
    }
}

// The parameters by the rules of `gaps::parameter` and `values::parameter`, in every warp for itself.
INLINE Parameters choose(const Shared& s, u32 changes) {
    u32 lane = lane_id(), best = ~0u, longest = 0;
    if (lane < 16) best = (changes * (lane + 1) + s.gaps[lane]) << 4 | lane;
    u32 gap = __reduce_min_sync(ALL, best) & 15;
    for (u32 l = lane; l <= BITS; l += 32)
        if (s.length[l]) longest = l;
    longest = __reduce_max_sync(ALL, longest);
    best = ~0u;
    for (u32 k = lane; k <= min(longest, BITS - 1); k += 32) {
        u32 cost = 2 * k * changes;
        for (u32 l = k + 1; l <= longest; l++) {
            u32 d = l - k;
            cost += s.length[l] * (d == 1 ? 2 : d == 2 ? 5 : d == 3 ? 11 : d == 4 ? 23 : 2 * (ESCAPE + BITS - k));
        }
        best = min(best, cost << 6 | k);
    }
    return {gap, __reduce_min_sync(ALL, best) & 63};
}

// The bits of the warp's unary parts and the count of its escapes, for all to see.
INLINE void measure(Shared& s, const Segment& g, Parameters k) {
    u32 gap_high = 0, value_high = 0, escapes = 0;
    for (u32 i = lane_id(); i < g.count; i += 32) {
        u64 high = (u64)s.change[warp_id() * LIST + i].old >> k.value;
        gap_high += gap_of(s, g, i) >> k.gap;
        value_high += high < ESCAPE ? (u32)high : ESCAPE;
        escapes += high >= ESCAPE;
    }
    __syncwarp();
    gap_high = __reduce_add_sync(ALL, gap_high);
    value_high = __reduce_add_sync(ALL, value_high);
    escapes = __reduce_add_sync(ALL, escapes);
    if (lane_id() == 0) {
        s.gap_high[warp_id()] = gap_high;
        s.value_high[warp_id()] = value_high;
        s.escapes[warp_id()] = escapes;
    }
}

// What was measured, of the warps below `warps`.
INLINE Totals totals(const Shared& s, u32 warps, Totals t) {
    for (u32 w = 0; w < warps; w++) {
        t.gap_high += s.gap_high[w];
        t.value_high += s.value_high[w];
        t.escapes += s.escapes[w];
    }
    return t;
}

// The shortest of the three forms, of equal ones the first.
INLINE Layout lay_out(u32 units, u32 changes, Parameters k, Totals t) {
    u32 value_low = section(changes * k.value), value_high = section(changes + t.value_high);
    u32 values = value_low + value_high + section(t.escapes * (BITS - k.value));
    u32 gap_low = section(changes * k.gap), gap_high = section(changes + t.gap_high);
    u32 sparse = 4 + gap_low + gap_high + values, bitmap = 3 + section(units) + values;
    Layout l;
    if (units * UNIT < min(sparse, bitmap)) {
        l.mode = DENSE;
        l.length = units * UNIT;
        l.gap_low = l.gap_high = l.value_low = 0;
    } else if (sparse <= bitmap) {
        l.mode = SPARSE;
        l.length = sparse;
        l.gap_low = 4 * 8;
        l.gap_high = l.gap_low + gap_low * 8;
        l.value_low = l.gap_high + gap_high * 8;
    } else {
        l.mode = BITMAP;
        l.length = bitmap;
        l.gap_low = 0;
        l.gap_high = 3 * 8;
        l.value_low = l.gap_high + section(units) * 8;
    }
    l.value_high = l.value_low + value_low * 8;
    l.escapes = l.value_high + value_high * 8;
    return l;
}

// ---- Sections

// Sets `width` bits, up to 64, at bit `at`. The words were zero.
INLINE void put_bits(u32* words, u32 at, u64 value, u32 width) {
    if (width == 0) return;
    u32 word = at >> 5, shift = at & 31;
    u64 low = value << shift;
    if ((u32)low) atomicOr(words + word, (u32)low);
    if ((u32)(low >> 32)) atomicOr(words + word + 1, (u32)(low >> 32));
    if (shift && (u32)(value >> (64 - shift))) atomicOr(words + word + 2, (u32)(value >> (64 - shift)));
}

INLINE void put_one(u32* words, u32 at) { atomicOr(words + (at >> 5), 1u << (at & 31)); }

// Writes the warp's changes into a payload of zeros; `t` is what was measured before them and `rank` how many changes
// there are before.
INLINE void put_changes(u32* words, const Shared& s, const Layout& l, const Segment& g, Parameters k, Totals t,
                        u32 rank) {
    for (u32 first = 0; first < g.count; first += 32) {
        u32 i = first + lane_id();
        bool here = i < g.count;
        u32 gap = here ? gap_of(s, g, i) : 0;
        u64 code = here ? (u64)s.change[warp_id() * LIST + i].old : 0, high = code >> k.value;
        bool escaped = high >= ESCAPE;
        u32 gap_end = t.gap_high + warp_scan(gap >> k.gap);
        u32 value_end = t.value_high + warp_scan(escaped ? ESCAPE : (u32)high);
        u32 escapes = __ballot_sync(ALL, escaped);
        if (here) {
            u32 r = rank + i;
            if (l.mode == SPARSE) {
                put_bits(words, l.gap_low + r * k.gap, gap & ((1u << k.gap) - 1), k.gap);
                put_one(words, l.gap_high + gap_end + r);
            } else {
                put_one(words, l.gap_high + s.position[warp_id() * LIST + i]);
            }
            put_bits(words, l.value_low + r * k.value, code & (((u64)1 << k.value) - 1), k.value);
            put_one(words, l.value_high + value_end + r);
            if (escaped) {
                u32 width = BITS - k.value;
                put_bits(words, l.escapes + (t.escapes + __popc(escapes & lanes_below())) * width, high, width);
            }
        }
        t.gap_high = __shfl_sync(ALL, gap_end, 31);
        t.value_high = __shfl_sync(ALL, value_end, 31);
        t.escapes += __popc(escapes);
    }
}

// The bytes in front of the sections.
INLINE void put_head(u32* words, const Layout& l, u32 changes, Parameters k) {
    u32 parameters = l.mode == SPARSE ? k.gap | k.value << 8 : k.value;
    atomicOr(words, (changes - 1) | parameters << 16);
}

// ---- A block

// Adds the block's entry and its sum's step; tells everybody where the payload goes. Everybody synchronises afterwards.
INLINE void add_entry(Shared& s, const EncodeArgs& a, u32 index, u32 number, u32 changes,
                      const Layout& l) {
    if (threadIdx.x != 0) return;
    Tally* tally = (Tally*)a.tally;
    u64 room = (l.length + 3) & ~3u;
    u64 offset = atomicAdd(&tally->cursor, room);
    u32 slot = atomicAdd(&tally->entries, 1u);
    atomicAdd(&tally->changes, (u64)changes);
    Sum* sums = (Sum*)a.sums + index;
    Sum sum = *sums;
    for (u32 w = 0; w < WARPS; w++) sum = plus(sum, s.sum[w]);
    *sums = sum;
    if (offset + room > a.capacity || slot >= a.entry_capacity) {
        offset = LOST;
        atomicAdd(&tally->lost, 1u);
    }
    s.offset = offset;
    Entry entry = {offset, {sum.a, sum.b}, number, l.mode, l.length, changes};
    if (slot < a.entry_capacity) ((Entry*)a.entries)[slot] = entry;
}

// A dense payload is the baseline, once that is updated.
INLINE void copy_dense(u32* words, u64 base, u32 length) {
    for (u32 i = threadIdx.x; i < length / 4; i += THREADS) words[i] = __ldcg((const u32*)base + i);
    if (threadIdx.x == 0 && length % 4) {
        u32 last = 0;
        for (u32 i = 0; i < length % 4; i++) last |= (u32) * ((const u8*)base + length / 4 * 4 + i) << (8 * i);
        words[length / 4] = last;
    }
}

INLINE void to_codes(Shared& s, const Block& b, u32 count) {
    for (u32 i = lane_id(); i < count; i += 32) {
        Change& change = s.change[warp_id() * LIST + i];
        change.old = code_of(change.old, change.fresh, b.is_float);
    }
    __syncwarp();
}

// A block with more changes than the lists hold. The baseline is the old state.
__device__ __noinline__ void encode_in_windows(const EncodeArgs& a, u32 index) {
    Shared& s = shared();
    const Block b = ((const Block*)a.blocks)[index];
    u32 units = b.run * b.count, chunks = (units + CHUNK_UNITS - 1) / CHUNK_UNITS, changes = 0;
    u32 window = max(WARPS * STRETCH, (chunks / 2 + 255) / 256 * 256);
    bool plain = is_plain(b), lost = false;
    Parameters k;
    Layout l;
    u32* words = 0;
    // Three times: to choose parameters, to measure, and to write.
#pragma unroll 1
    for (u32 turn = 0; turn < 3; turn++) {
        Sum sum = {0, 0};
        Totals t = {0, 0, 0};
        u32 rank = 0;
        int before = -1;
        bool over = false;
#pragma unroll 1
        for (u32 first = 0; first < chunks && !over; first += window) {
            u32 last = min(chunks, first + window);
            if (plain)
                scan<true, false>(s, b, first, last);
            else
                scan<false, false>(s, b, first, last);
            __syncthreads();
            Segment g = segment(s, before);
            before = g.last;
            over = g.over;
            if (over) {
                // Only while parameters are chosen: later turns have the same windows.
            } else if (turn == 0) {
                collect(s, b, g, sum);
            } else {
                to_codes(s, b, g.count);
                measure(s, g, k);
                __syncthreads();
                if (turn == 2) put_changes(words, s, l, g, k, totals(s, warp_id(), t), rank + g.rank);
                t = totals(s, WARPS, t);
            }
            rank += g.all;
            __syncthreads();
        }
        if (over) {
            window = max(WARPS * STRETCH, window / 2);
            if (threadIdx.x <= BITS) s.length[threadIdx.x] = 0;
            if (threadIdx.x < 16) s.gaps[threadIdx.x] = 0;
            __syncthreads();
            turn--;
        } else if (turn == 0) {
            changes = rank;
            sum = warp_sum(sum);
            if (lane_id() == 0) s.sum[warp_id()] = sum;
            k = choose(s, changes);
        } else if (turn == 1) {
            l = lay_out(units, changes, k, t);
            add_entry(s, a, index, b.number, changes, l);
            __syncthreads();
            lost = s.offset == LOST;
            words = (u32*)(a.out + s.offset);
            if (l.mode == DENSE || lost) break;
            for (u32 i = threadIdx.x; i < (l.length + 3) / 4; i += THREADS) words[i] = 0;
            __syncthreads();
            if (threadIdx.x == 0) put_head(words, l, changes, k);
        }
    }
    for (u32 i = threadIdx.x; i < chunks; i += THREADS) {
        uint4* base = (uint4*)b.base + i;
        *base = load_fresh(b, i, *base);
    }
    __syncthreads();
    if (l.mode == DENSE && !lost) copy_dense(words, b.base, l.length);
}

// Puts the baseline back to what it was before the scan.
INLINE void undo(const Shared& s, const Block& b, u32 count) {
    for (u32 i = lane_id(); i < count; i += 32) {
        u32 at = warp_id() * LIST + i;
        ((Unit*)b.base)[s.position[at]] = s.change[at].old;
    }
}

INLINE void encode_block(Shared& s, const EncodeArgs& a, const Block& b, u32 index) {
    u32 units = b.run * b.count, chunks = (units + CHUNK_UNITS - 1) / CHUNK_UNITS;
    u64 group = b.start >> 12;
    if (b.count == 1)
        for (u32 i = threadIdx.x; group + i <= (b.start + (u64)units * UNIT - 1) >> 12; i += THREADS)
            s.high[i] = high_keys(group + i);
    if (threadIdx.x <= BITS) s.length[threadIdx.x] = 0;
    if (threadIdx.x < 16) s.gaps[threadIdx.x] = 0;
    if (is_plain(b))
        scan<true, true>(s, b, 0, chunks);
    else
        scan<false, true>(s, b, 0, chunks);
    __syncthreads();
    Segment g = segment(s, -1);
    if (g.over) {
        undo(s, b, g.count);
        __syncthreads();
        return encode_in_windows(a, index);
    }
    if (g.all == 0) return;
    Sum sum = {0, 0};
    collect(s, b, g, sum);
    sum = warp_sum(sum);
    if (lane_id() == 0) s.sum[warp_id()] = sum;
    __syncthreads();
    Parameters k = choose(s, g.all);
    measure(s, g, k);
    __syncthreads();
    Totals none = {0, 0, 0}, t = totals(s, warp_id(), none);
    Layout l = lay_out(units, g.all, k, totals(s, WARPS, none));
    u32 length = (l.length + 3) / 4;
    add_entry(s, a, index, b.number, g.all, l);
    bool staged = length <= STAGE_WORDS;
    if (staged)
        for (u32 i = threadIdx.x; i < length; i += THREADS) s.stage[i] = 0;
    __syncthreads();
    if (s.offset == LOST) return;
    u32* words = (u32*)(a.out + s.offset);
    if (l.mode == DENSE) return copy_dense(words, b.base, l.length);
    if (!staged) {
        for (u32 i = threadIdx.x; i < length; i += THREADS) words[i] = 0;
        __syncthreads();
    }
    u32* into = staged ? s.stage : words;
    if (threadIdx.x == 0) put_head(into, l, g.all, k);
    put_changes(into, s, l, g, k, t, g.rank);
    if (staged) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < length; i += THREADS) words[i] = s.stage[i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) windlass_encode(const __grid_constant__ EncodeArgs a) {
    Shared& s = shared();
    fill_low_keys(s.low);
    __syncthreads();
    for (u32 i = blockIdx.x; i < a.count;) {
        u32 taken = 0;
        if (threadIdx.x == 0) taken = gridDim.x + atomicAdd(&((Tally*)a.tally)->next[a.work], 1u);
        Block b = ((const Block*)a.blocks)[i];
        encode_block(s, a, b, i);
        i = hand_out(&s.next, taken);
    }
}

// Makes the baseline the new state, whatever it was.
extern "C" __global__ void __launch_bounds__(THREADS) windlass_fill(const __grid_constant__ EncodeArgs a) {
    for (u32 i = blockIdx.x; i < a.count; i += gridDim.x) {
        Block b = ((const Block*)a.blocks)[i];
        for (u32 c = threadIdx.x; c < (b.run * b.count + CHUNK_UNITS - 1) / CHUNK_UNITS; c += THREADS)
            ((uint4*)b.base)[c] = load_fresh(b, c, make_uint4(0, 0, 0, 0));
    }
}
