// Apply: the records of a delta into an engine's parameters, in O(changes).
//
// Owns: decoding of plain records (`windlass_core::delta`); the host recodes context records before it gives a delta to a device. Must not: trust a
// record. A malformed one is told apart before anything is written; its sections are never read beyond its end, nor
// positions used beyond the block.
//
// A warp takes a record and waits for no other. Unary sections are decoded by counting ones: a scan over words gives
// every one its rank, and so every change its gap and its code, 32 at a time. Records with more changes than the warp's
// list holds are decoded window by window, twice.
//
// With a table of sums a record is applied as on a CPU: skipped where the block has its sum already, refused where the
// units in place do not lead to it. Without one, for workers that hold only parts of blocks, whoever calls vouches for
// the base, and units that no piece covers are left out.

#define LIST (UNIT <= 2 ? 1024u : 512u)
#define PAYLOAD_WORDS 384u
// Units of a lane that are on their way at a time, and CTAs of a multiprocessor.
#ifndef APPLY_DEEP
#define APPLY_DEEP 8u
#endif
#ifndef CTAS
#define CTAS 2
#endif

// What a warp works on: a payload, if it fits, and the changes of a window.
struct Desk {
    u32 payload[PAYLOAD_WORDS];
    Unit value[LIST];   // the high part of the code, the code, the new unit
    u16 position[LIST]; // the high part of the gap, the position
};

struct Shared {
    uint2 low[1024];
    Desk desk[WARPS];
};
SHARED(Shared)

// ---- Ones

// How far a section has been read: a multiple of 128 bytes, the ones before it, and the last of these.
struct Mark {
    u32 byte, rank;
    int one;
};

// Gives `put` the ones of the section at byte `from` whose ranks are in `first..last`, each with the one before it, from
// a mark before them on. False if there are too few.
template <typename Put> INLINE bool take_ones(Bytes b, u32 from, u32 first, u32 last, Mark& mark, Put put) {
#pragma unroll 1
    for (Mark here = mark; here.rank < last; here.byte += 4 * 32) {
        if (from + here.byte >= b.length) return false;
        mark = here;
        u32 byte = here.byte + 4 * lane_id(), word = word_at(b, from + byte), count = __popc(word);
        u32 end = here.rank + warp_scan(count), rank = end - count;
        u32 some = __ballot_sync(ALL, word != 0), below = some & lanes_below();
        int highest = (int)(byte * 8) + 31 - __clz((int)word);
        int before = __shfl_sync(ALL, highest, below ? 31 - __clz((int)below) : 0);
        if (!below) before = here.one;
        for (; word; word &= word - 1, rank++) {
            int one = (int)(byte * 8) + __ffs((int)word) - 1;
            if (rank >= first && rank < last) put(rank - first, one, before);
            before = one;
        }
        __syncwarp();
        here.rank = __shfl_sync(ALL, end, 31);
        int highest_of_all = __shfl_sync(ALL, highest, some ? 31 - __clz((int)some) : 0);
        if (some) here.one = highest_of_all;
    }
    return true;
}

// The last of so many ones.
INLINE u32 last_one(Bytes b, u32 from, u32 count, bool& good) {
    Mark mark = {0, 0, -1};
    u32 last = 0;
    good = good && take_ones(b, from, count - 1, count, mark, [&](u32, int one, int) { last = (u32)one; });
    return __reduce_max_sync(ALL, last);
}

// ---- Records

// A sparse or bitmap payload, its sections found.
struct Sections {
    Bytes bytes;
    u32 mode, changes, gap, value; // parameters
    u32 ones;                      // bytes at which sections begin: unary gaps or the bitmap
    u32 low, high, escapes;        // values
};

// What a window leaves to the next.
struct Carry {
    Mark gaps, values;
    u32 position; // after the last change
    u32 escapes;  // so far
};

// Reads the head and finds the sections. All lanes answer the same.
INLINE bool find_sections(Bytes b, u32 mode, u32 units, Sections& r) {
    const u32 head = mode == SPARSE ? 4 : 3;
    u32 word = word_at(b, 0);
    r.bytes = b;
    r.mode = mode;
    r.changes = (word & 0xffff) + 1;
    r.gap = mode == SPARSE ? word >> 16 & 0xff : 0;
    r.value = word >> (mode == SPARSE ? 24 : 16) & 0xff;
    if (b.length < head || r.changes > units || r.gap > 15 || r.value >= BITS) return false;
    bool good = true;
    if (mode == SPARSE) {
        r.ones = head + section(r.changes * r.gap);
        u32 last = last_one(b, r.ones, r.changes, good);
        r.low = r.ones + section(last + 1);
        good = good && is_filled(b, head, r.changes * r.gap) && is_filled(b, r.ones, last + 1);
    } else {
        r.ones = head;
        r.low = head + section(units);
        u32 count = 0;
        Bytes map = {b.at, min(b.length, r.low)};
        for (u32 i = lane_id() * 4; i < section(units); i += 4 * 32) count += __popc(word_at(map, head + i));
        __syncwarp();
        good = __reduce_add_sync(ALL, count) == r.changes;
    }
    if (!good) return false;
    r.high = r.low + section(r.changes * r.value);
    u32 last = last_one(b, r.high, r.changes, good);
    r.escapes = r.high + section(last + 1);
    return good && is_filled(b, r.low, r.changes * r.value) && is_filled(b, r.high, last + 1);
}

// Decodes the changes `first..last` into positions and codes. False if one of them can't be meant.
INLINE bool decode(Desk& d, const Sections& r, u32 units, u32 first, u32 last, Carry& c) {
    const u32 high_bits = BITS - r.value;
    bool good = true;
    take_ones(r.bytes, r.ones, first, last, c.gaps, [&](u32 i, int one, int before) {
        u32 high = (u32)(r.mode == SPARSE ? one - before - 1 : one);
        good = good && high < units;
        d.position[i] = (u16)high;
    });
    if (r.mode == SPARSE) {
        for (u32 at = first; at < last; at += 32) {
            u32 rank = at + lane_id(), step = 0;
            if (rank < last) {
                u32 low = (u32)bits_at(r.bytes, 8 * 4 + (u64)rank * r.gap, r.gap);
                step = ((u32)d.position[rank - first] << r.gap | low) + 1;
                good = good && step <= units;
            }
            // No sum of steps overflows as long as they are good.
            u32 end = c.position + warp_scan(good ? step : 0);
            good = good && end <= units;
            if (rank < last) d.position[rank - first] = (u16)(end - 1);
            c.position = __shfl_sync(ALL, end, 31);
        }
    }
    __syncwarp();
    take_ones(r.bytes, r.high, first, last, c.values, [&](u32 i, int one, int before) {
        d.value[i] = (Unit)min((u32)(one - before - 1), ESCAPE + 1);
    });
    for (u32 at = first; at < last; at += 32) {
        u32 rank = at + lane_id();
        bool here = rank < last;
        u64 high = here ? d.value[rank - first] : 0;
        u32 escaped = __ballot_sync(ALL, high == ESCAPE);
        if (here) {
            good = good && (high_bits >= 5 ? high <= ESCAPE : high < (1u << high_bits));
            if (high == ESCAPE) {
                u32 before = c.escapes + __popc(escaped & lanes_below());
                high = bits_at(r.bytes, 8ull * r.escapes + (u64)before * high_bits, high_bits);
                good = good && high >= ESCAPE;
            }
            u64 low = bits_at(r.bytes, 8ull * r.low + (u64)rank * r.value, r.value);
            Unit code = (Unit)(high << r.value | low);
            d.value[rank - first] = code;
            // The last code would be a step of zero.
            good = good && code != ONES;
        }
        c.escapes += __popc(escaped);
    }
    u32 rest = c.escapes * high_bits;
    if (last == r.changes)
        good = good && r.escapes + section(rest) == r.bytes.length && is_filled(r.bytes, r.escapes, rest);
    __syncwarp();
    return !__any_sync(ALL, !good);
}

// ---- Memory

// Turns the codes of a window into new units, and adds up what they do to the sum.
INLINE void step_units(Desk& d, const uint2* low, const Piece* pieces, const Place& p, u64 base, u32 count, Sum& sum) {
    for (u32 first = lane_id(); first < count; first += 32 * APPLY_DEEP) {
        Unit old[APPLY_DEEP];
        bool held[APPLY_DEEP];
#pragma unroll
        for (u32 j = 0; j < APPLY_DEEP; j++) {
            u32 i = first + 32 * j;
            u64 at = 0;
            if (i < count && base) at = base + (u64)d.position[i] * UNIT;
            if (i < count && !base) at = find(pieces, p, tensor_byte(p, d.position[i]));
            held[j] = at != 0;
            if (at) old[j] = *(const Unit*)at;
        }
#pragma unroll
        for (u32 j = 0; j < APPLY_DEEP; j++) {
            u32 i = first + 32 * j;
            if (held[j]) {
                u64 byte = tensor_byte(p, d.position[i]);
                Unit fresh = step_by(old[j], d.value[i], p.is_float);
                d.value[i] = fresh;
                add_change(sum, low, byte, high_keys(byte >> 12), old[j], fresh);
            }
        }
    }
    __syncwarp();
}

INLINE void store_units(const Desk& d, const Piece* pieces, const Place& p, u64 base, u32 count) {
    for (u32 i = lane_id(); i < count; i += 32) {
        if (base)
            ((Unit*)base)[d.position[i]] = d.value[i];
        else
            store(pieces, p, tensor_byte(p, d.position[i]), d.value[i]);
    }
    __syncwarp();
}

// ---- A record

INLINE u32 apply_dense(const uint2* low, const Piece* pieces, const Place& p, const Patch& patch, Bytes b) {
    u32 units = p.run * p.count;
    if (b.length != units * UNIT) return MALFORMED;
    Sum sum = {0, 0};
    const u64 ones = UNIT == 1 ? 1 : UNIT == 2 ? 0x0101 : 0x01010101;
    for (u32 i = lane_id(); i < units; i += 32) {
        u64 byte = tensor_byte(p, i), unit = bits_at(b, (u64)i * BITS, BITS);
        u32 column = (u32)(byte & 4095) >> 2;
        Sum high = high_keys(byte >> 12);
        add_product(sum, ((u64)(UNIT == 8 ? (u32)unit : unit) + ones) << (8 * (byte & 3)), low[column], high);
        if (UNIT == 8) add_product(sum, (unit >> 32) + ones, low[column + 1], high);
    }
    __syncwarp();
    if (!is_equal(warp_sum(sum), patch.sum)) return MALFORMED;
    for (u32 i = lane_id(); i < units; i += 32)
        store(pieces, p, tensor_byte(p, i), (Unit)bits_at(b, (u64)i * BITS, BITS));
    return APPLIED;
}

INLINE u32 apply_changes(Desk& d, const uint2* low, const Piece* pieces, const Place& p, const Patch& patch, Bytes b,
                         const u64* current) {
    u32 units = p.run * p.count;
    Sections r;
    if (!find_sections(b, patch.mode, units, r)) return MALFORMED;
    u64 base = flat(pieces, p);
    Sum sum = {0, 0};
    // Twice, to check and to write, unless one window is all.
#pragma unroll 1
    for (u32 turn = 0; turn < 2; turn++) {
        Carry c = {{0, 0, -1}, {0, 0, -1}, 0, 0};
#pragma unroll 1
        for (u32 first = 0; first < r.changes; first += LIST) {
            u32 last = min(r.changes, first + LIST);
            if (!turn || r.changes > LIST) {
                if (!decode(d, r, units, first, last, c)) return MALFORMED;
                step_units(d, low, pieces, p, base, last - first, sum);
            }
            if (turn) store_units(d, pieces, p, base, last - first);
        }
        if (!turn && current) {
            Sum reached = plus(warp_sum(sum), {current[0], current[1]});
            if (!is_equal(reached, patch.sum)) return REFETCH;
        }
    }
    return APPLIED;
}

// The payload in shared memory, if it fits.
INLINE Bytes bring(Desk& d, Bytes b) {
    u32 ahead = (u32)(b.at & 3), words = (ahead + b.length + 3) / 4;
    if (words > PAYLOAD_WORDS) return b;
    for (u32 i = lane_id(); i < words; i += 32) d.payload[i] = ((const u32*)(b.at - ahead))[i];
    __syncwarp();
    return {(u64)d.payload + ahead, b.length};
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) windlass_apply(const __grid_constant__ ApplyArgs a) {
    Shared& s = shared();
    fill_low_keys(s.low);
    __syncthreads();
    Desk& d = s.desk[warp_id()];
    Tally* tally = (Tally*)a.tally;
    const Piece* pieces = (const Piece*)a.pieces;
    for (u32 i = blockIdx.x * WARPS + warp_id(); i < a.count;) {
        u32 taken = 0;
        if (lane_id() == 0) taken = gridDim.x * WARPS + atomicAdd(&tally->next[a.work], 1u);
        Patch patch = ((const Patch*)a.patches)[i];
        Place place = ((const Place*)a.places)[patch.place];
        Bytes bytes = {a.payload + patch.offset, patch.length};
        u64* sums = a.sums ? (u64*)a.sums + 2 * (u64)patch.place : 0;
        u32 outcome = MALFORMED;
        if (sums && sums[0] == patch.sum[0] && sums[1] == patch.sum[1])
            outcome = SKIPPED;
        else if (patch.mode == DENSE)
            outcome = apply_dense(s.low, pieces, place, patch, bytes);
        else if (patch.mode == SPARSE || patch.mode == BITMAP)
            outcome = apply_changes(d, s.low, pieces, place, patch, bring(d, bytes), sums);
        __syncwarp();
        if (lane_id() == 0) {
            if (sums && outcome == APPLIED) sums[0] = patch.sum[0], sums[1] = patch.sum[1];
            ((u32*)a.outcomes)[i] = outcome;
            atomicAdd(&tally->outcome[outcome], 1u);
        }
        i = __shfl_sync(ALL, taken, 0);
    }
}
