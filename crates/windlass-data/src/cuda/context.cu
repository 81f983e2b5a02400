// Apply: context records of a delta into an engine's parameters, in one pass over the blocks that they change.
//
// Owns: decoding of context records (`windlass_core::delta`), whose positions count only units of the class of their old
// value. Must not: trust a record or the weights. Nothing is written before all of a record is known to be good, its
// sections are never read beyond its end, and positions are those of units that were counted.
//
// A CTA takes a record. It reads the block's units where the engine keeps them and leaves of each its class, in four bits
// of shared memory, one plane for each bit, so that the members of a class among 32 units are three operations away. With
// the members before every group of 128 units, the n-th unit of a class is found by halving and counting. Changes are
// decoded as those of plain records are, by counting ones, 256 at a time; records with more than the lists hold, window by
// window, twice.
//
// A record whose head or table of classes cannot be meant is malformed. Whatever else is wrong may lie with the record
// or with the weights in place, as on a CPU, and is answered so: other weights than the base's.

#define LIST 1024u
#define PAYLOAD_WORDS 512u
#define MAX_CLASSES 16u
// Of 32 units, and of 128, in a block.
#define WORDS 2048u
#define GROUPS 512u
#ifndef CTAS
#define CTAS 3
#endif

struct Class {
    u32 count, size;    // changes, units
    u32 first;          // of its changes
    u32 gap, value;     // parameters
    u32 gap_at, value_at; // bits at which its low bits begin, in their sections
};

// What a record's head says, and where its sections begin, in bytes.
struct Sections {
    u32 good;
    u32 changes, top, classes;
    u32 gap_low, gap_ones, value_low, value_ones, escapes;
};

struct Shared {
    uint4 plane[WORDS];                  // the classes of 32 units, lowest bit in x
    u32 before[MAX_CLASSES / 2][GROUPS]; // members of two classes before a group, the even class in the lower half
    uint2 low[1024];
    Sum sum[WARPS];
    Class classes[MAX_CLASSES];
    Sections sections;
    int one[LIST + 1]; // the one before the window's first, and those of the window
    u32 reach[LIST];   // units of the class up to a change, from the class before on
    Unit value[LIST];  // the code, the new unit
    u16 position[LIST];
    u32 payload[PAYLOAD_WORDS];
    u32 part[WARPS];
};
SHARED(Shared)

// ---- The head

// Reads a count that a class table can hold, below 2^21.
INLINE bool take_count(Bytes b, u32& at, u32& count) {
    count = 0;
    for (u32 i = 0; i < 3; i++, at++) {
        u32 byte = word_at(b, at) & 0xff;
        if (at >= b.length) return false;
        count |= (byte & 0x7f) << (7 * i);
        if (byte < 0x80) {
            at++;
            return byte != 0 || i == 0;
        }
    }
    return false;
}

// Reads the head and the class table, for one thread. False if they can't be meant for a block of so many units.
INLINE bool take_head(Shared& s, Bytes b, u32 units) {
    Sections& r = s.sections;
    u32 word = word_at(b, 0), at = 4, all = 0, bits = 0;
    r.changes = (word & 0xffff) + 1;
    r.top = word >> 16 & 0xfff;
    r.classes = (word >> 28) + 1;
    if (b.length < 4 || r.changes > units) return false;
    for (u32 c = 0; c < MAX_CLASSES; c++) {
        u32 count = 0;
        if (c < r.classes && (!take_count(b, at, count) || count > r.changes)) return false;
        s.classes[c].count = count;
        all += count;
    }
    const u32 width = UNIT == 1 ? 3 : UNIT == 2 ? 4 : UNIT == 4 ? 5 : 6;
    for (u32 c = 0; c < MAX_CLASSES; c++) {
        s.classes[c].value = s.classes[c].count ? (u32)bits_at(b, 8 * at + bits, width) : 0;
        if (s.classes[c].count) bits += width;
    }
    r.gap_low = at + section(bits);
    return all == r.changes && r.gap_low <= b.length && is_filled(b, at, bits);
}

// ---- Classes

// The members of a class among 32 units.
INLINE u32 members(uint4 plane, u32 c) {
    u32 low = (c & 1 ? plane.x : ~plane.x) & (c & 2 ? plane.y : ~plane.y);
    return low & (c & 4 ? plane.z : ~plane.z) & (c & 8 ? plane.w : ~plane.w);
}

// Where the unit is, or 0; from it on, `side_by_side` units of the block follow one another in memory. Looks first into
// the piece in which the last one was, since neighbours are in the same piece or in the next.
INLINE u64 stretch(const Piece* pieces, const Place& p, u32 position, u32& hint, u32& side_by_side) {
    u32 run = p.count == 1 ? 0 : position / p.run;
    u32 left = p.run - (position - run * p.run);
    u64 byte = tensor_byte(p, position);
    for (u32 n = 0; n < p.pieces; n++) {
        const Piece& piece = pieces[p.first + hint];
        if (u64 at = locate(piece, byte)) {
            u64 ahead = byte - piece.begin;
            if (piece.count > 1) ahead %= piece.pitch;
            side_by_side = (u32)min((u64)left, (piece.run - ahead) / UNIT);
            return at;
        }
        if (p.is_apart && n)
            return 0;
        else if (p.is_apart)
            hint = last_before(pieces, p, byte);
        else
            hint = hint + 1 < p.pieces ? hint + 1 : 0;
    }
    return 0;
}

// Puts the classes of the units from `first` on, at most 32, into planes. False if one is in no piece.
INLINE bool classify(const Sections& r, const Piece* pieces, const Place& p, u64 base, u32 first, uint4& plane) {
    u32 units = p.run * p.count, hint = 0;
    auto add = [&](u32 i, Unit unit) {
        u32 exponent = (u32)((Unit)(unit & (Unit)~TOP) >> p.mantissa);
        u32 c = min(r.top - min(r.top, exponent), r.classes - 1);
        plane.x |= (c & 1) << i;
        plane.y |= (c >> 1 & 1) << i;
        plane.z |= (c >> 2 & 1) << i;
        plane.w |= (c >> 3 & 1) << i;
    };
    if (base && first + 32 <= units) {
#pragma unroll
        for (u32 j = 0; j < 32; j += CHUNK_UNITS) {
            uint4 chunk = load_chunk(base + (u64)(first + j) * UNIT);
#pragma unroll
            for (u32 i = 0; i < CHUNK_UNITS; i++) add(j + i, unit_of(chunk, i));
        }
        return true;
    }
    for (u32 i = 0; i < 32 && first + i < units;) {
        u32 side_by_side = units - (first + i);
        u64 at = base ? base + (u64)(first + i) * UNIT : stretch(pieces, p, first + i, hint, side_by_side);
        if (!at) return false;
        if (side_by_side >= CHUNK_UNITS && i + CHUNK_UNITS <= 32) {
            uint4 chunk = load_chunk(at);
#pragma unroll
            for (u32 j = 0; j < CHUNK_UNITS; j++) add(i + j, unit_of(chunk, j));
            i += CHUNK_UNITS;
        } else {
            u32 end = min(i + side_by_side, 32u);
            for (; i < end; i++, at += UNIT) add(i, *(const Unit*)at);
        }
    }
    return true;
}

// Fills `plane`, and `before` with the members of each group. False if a unit is in no piece.
INLINE bool fill_planes(Shared& s, const Piece* pieces, const Place& p, u64 base) {
    u32 units = p.run * p.count, lane = lane_id();
    bool good = true;
#pragma unroll 1
    for (u32 word = threadIdx.x; (word - lane) * 32 < units; word += THREADS) {
        uint4 plane = make_uint4(0, 0, 0, 0);
        u32 first = word * 32, valid = 0;
        if (first < units) {
            good = classify(s.sections, pieces, p, base, first, plane) && good;
            valid = units - first < 32 ? (1u << (units - first)) - 1 : ALL;
        }
        __syncwarp();
        s.plane[word] = plane;
#pragma unroll
        for (u32 c = 0; c < MAX_CLASSES; c += 2) {
            u32 two = __popc(members(plane, c) & valid) | __popc(members(plane, c + 1) & valid) << 16;
            two += __shfl_xor_sync(ALL, two, 1);
            two += __shfl_xor_sync(ALL, two, 2);
            // One lane in four writes each.
            if ((lane & 3) == (c >> 1 & 3)) s.before[c / 2][word / 4] = two;
        }
    }
    return good;
}

// Turns the members of groups into those before groups; a warp for every two classes. Sizes of classes follow.
INLINE void count_before(Shared& s, u32 units) {
    u32 groups = (units + 127) / 128, all = 0, even = 0, odd = 0;
    u32* row = s.before[warp_id()];
    for (u32 first = 0; first < groups; first += 32) {
        u32 group = first + lane_id(), two = group < groups ? row[group] : 0;
        even += two & 0xffff;
        odd += two >> 16;
        // A half overflows only behind the last group, where a class has all units of the largest block.
        u32 end = all + warp_scan(two);
        if (group < groups) row[group] = end - two;
        all = __shfl_sync(ALL, end, 31);
    }
    even = __reduce_add_sync(ALL, even);
    odd = __reduce_add_sync(ALL, odd);
    if (lane_id() == 0) {
        s.classes[2 * warp_id()].size = even;
        s.classes[2 * warp_id() + 1].size = odd;
    }
}

// The position of a class's n-th unit; it has more.
INLINE u32 select(const Shared& s, u32 units, u32 c, u32 n) {
    const u32* row = s.before[c / 2];
    const u32 shift = 16 * (c & 1);
    u32 group = 0, past = (units + 127) / 128;
    // The last group that has no more members before it than n.
    while (past - group > 1) {
        u32 middle = (group + past) / 2;
        if ((row[middle] >> shift & 0xffff) <= n)
            group = middle;
        else
            past = middle;
    }
    n -= row[group] >> shift & 0xffff;
    u32 word = group * 4, mask = members(s.plane[word], c);
    while (n >= (u32)__popc(mask) && (word & 3) < 3) {
        n -= __popc(mask);
        mask = members(s.plane[++word], c);
    }
    u32 bit = 0;
#pragma unroll
    for (u32 half = 16; half > 0; half >>= 1) {
        u32 below = __popc(mask & ((1u << half) - 1));
        if (n >= below) {
            n -= below;
            mask >>= half;
            bit += half;
        }
    }
    return word * 32 + bit;
}

// ---- Changes

// How far a unary section has been read: a multiple of 1,024 bytes, and the ones before it.
struct Mark {
    u32 byte, rank;
};

// What a window leaves to the next.
struct Carry {
    Mark gaps, values;
    int gap_one, value_one; // the last ones
    u32 reach;              // units of the class up to the last change, if the next is of the same class
    u32 escapes;            // bits so far
};

// Lists the ones of the section at byte `from` whose ranks are in `first..last`, from a mark before them on. False if
// there are too few. Everybody sees them on return.
INLINE bool list_ones(Shared& s, Bytes b, u32 from, u32 first, u32 last, Mark& mark) {
#pragma unroll 1
    for (Mark here = mark; here.rank < last; here.byte += 4 * THREADS) {
        if (from + here.byte >= b.length) return false;
        mark = here;
        u32 byte = here.byte + 4 * threadIdx.x, word = word_at(b, from + byte), total;
        u32 rank = here.rank + block_scan(__popc(word), s.part, total);
        for (; word; word &= word - 1, rank++)
            if (rank >= first && rank < last) s.one[1 + rank - first] = (int)(byte * 8) + __ffs((int)word) - 1;
        here.rank += total;
    }
    __syncthreads();
    return true;
}

// The bytes of a unary section of so many ones, or 0 if it has fewer or is not filled up with zeros.
INLINE u32 unary_section(Shared& s, Bytes b, u32 from, u32 count) {
    Mark mark = {0, 0};
    if (!list_ones(s, b, from, count - 1, count, mark)) return 0;
    u32 bits = (u32)s.one[1] + 1;
    __syncthreads();
    return is_filled(b, from, bits) ? section(bits) : 0;
}

// Finds parameters and sections, once the sizes of classes are known. All threads answer the same.
INLINE bool find_sections(Shared& s, Bytes b) {
    Sections& r = s.sections;
    u32 c = lane_id();
    Class mine = {0, 0, 0, 0, 0, 0, 0};
    if (c < MAX_CLASSES) mine = s.classes[c];
    u32 ratio = max(mine.size * 7 / max(mine.count * 10, 1u), 1u);
    mine.gap = min(31u - (u32)__clz((int)ratio), 15u);
    u32 gap_bits = mine.count * mine.gap, value_bits = mine.count * mine.value;
    u32 gap_end = warp_scan(gap_bits), value_end = warp_scan(value_bits);
    mine.first = warp_scan(mine.count) - mine.count;
    mine.gap_at = gap_end - gap_bits;
    mine.value_at = value_end - value_bits;
    gap_end = __shfl_sync(ALL, gap_end, 31);
    value_end = __shfl_sync(ALL, value_end, 31);
    // Everybody has read the classes and the head.
    __syncthreads();
    if (threadIdx.x < MAX_CLASSES) s.classes[c] = mine;
    u32 gap_ones = r.gap_low + section(gap_end), bytes = unary_section(s, b, gap_ones, r.changes);
    if (!bytes) return false;
    u32 value_low = gap_ones + bytes, value_ones = value_low + section(value_end);
    bytes = unary_section(s, b, value_ones, r.changes);
    if (!bytes) return false;
    if (threadIdx.x == 0) {
        r.gap_ones = gap_ones;
        r.value_low = value_low;
        r.value_ones = value_ones;
        r.escapes = value_ones + bytes;
    }
    __syncthreads();
    return is_filled(b, r.gap_low, gap_end) && is_filled(b, r.value_low, value_end);
}

// The class of a change; of those that begin with it, the last has it.
INLINE u32 class_of(const Shared& s, u32 change) {
    u32 c = 0;
    for (u32 i = 1; i < MAX_CLASSES; i++)
        if (s.classes[i].first <= change) c = i;
    return c;
}

// Decodes the positions of the changes `first..last`. False if one of them is beyond its class.
INLINE bool take_positions(Shared& s, Bytes b, u32 units, u32 first, u32 last, Carry& c) {
    const Sections& r = s.sections;
    bool good = true;
    if (threadIdx.x == 0) s.one[0] = c.gap_one;
    if (!list_ones(s, b, r.gap_ones, first, last, c.gaps)) return false;
    c.gap_one = s.one[last - first];
    u32 reach = c.reach;
#pragma unroll 1
    for (u32 at = 0; at < last - first; at += THREADS) {
        u32 i = at + threadIdx.x, step = 0;
        if (first + i < last) {
            const Class k = s.classes[class_of(s, first + i)];
            u32 high = (u32)(s.one[i + 1] - s.one[i] - 1);
            u64 low_at = 8ull * r.gap_low + k.gap_at + (u64)(first + i - k.first) * k.gap;
            good = good && high < units;
            // No sum of steps overflows as long as they are good.
            step = good ? (high << k.gap | (u32)bits_at(b, low_at, k.gap)) + 1 : 0;
            good = good && step <= units;
            step = good ? step : 0;
        }
        u32 total, end = reach + block_scan(step, s.part, total) + step;
        if (first + i < last) s.reach[i] = end;
        reach += total;
    }
    __syncthreads();
    // Where a class begins within the window, its units count from there.
    auto begin = [&](const Class& k) { return k.first > first ? s.reach[k.first - first - 1] : 0; };
    for (u32 i = threadIdx.x; i < last - first; i += THREADS) {
        u32 number = class_of(s, first + i);
        const Class& k = s.classes[number];
        u32 rank = s.reach[i] - begin(k) - 1;
        good = good && rank < k.size;
        s.position[i] = good ? (u16)select(s, units, number, rank) : 0;
    }
    c.reach = 0;
    if (last < r.changes) {
        const Class& next = s.classes[class_of(s, last)];
        if (next.first < last) c.reach = reach - begin(next);
    }
    return !__syncthreads_or(!good);
}

// Decodes the codes of the changes `first..last`. False if one of them can't be meant.
INLINE bool take_values(Shared& s, Bytes b, u32 first, u32 last, Carry& c) {
    const Sections& r = s.sections;
    bool good = true;
    if (threadIdx.x == 0) s.one[0] = c.value_one;
    if (!list_ones(s, b, r.value_ones, first, last, c.values)) return false;
    c.value_one = s.one[last - first];
#pragma unroll 1
    for (u32 at = 0; at < last - first; at += THREADS) {
        u32 i = at + threadIdx.x, width = 0, total;
        bool here = first + i < last, is_escaped = false;
        Class k;
        u64 high = 0;
        if (here) {
            k = s.classes[class_of(s, first + i)];
            width = BITS - k.value;
            high = (u32)(s.one[i + 1] - s.one[i] - 1);
            is_escaped = high == ESCAPE;
            good = good && (width >= 5 ? high <= ESCAPE : high < (1u << width));
        }
        u32 escape = c.escapes + block_scan(is_escaped ? width : 0, s.part, total);
        c.escapes += total;
        if (is_escaped) {
            high = bits_at(b, 8ull * r.escapes + escape, width);
            good = good && high >= ESCAPE;
        }
        if (here) {
            u64 low = bits_at(b, 8ull * r.value_low + k.value_at + (u64)(first + i - k.first) * k.value, k.value);
            Unit code = (Unit)(high << k.value | low);
            s.value[i] = code;
            // The last code would be a step of zero.
            good = good && code != ONES;
        }
    }
    if (last == r.changes)
        good = good && r.escapes + section(c.escapes) == b.length && is_filled(b, r.escapes, c.escapes);
    return !__syncthreads_or(!good);
}

// Turns the codes of a window into new units, and adds up what they do to the sum.
INLINE bool step_units(Shared& s, const Piece* pieces, const Place& p, u64 base, u32 count, Sum& sum) {
    bool good = true;
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        u64 byte = tensor_byte(p, s.position[i]);
        u64 at = base ? base + (u64)s.position[i] * UNIT : find(pieces, p, byte);
        good = good && at;
        if (!at) continue;
        Unit old = *(const Unit*)at, fresh = step_by(old, s.value[i], p.is_float);
        s.value[i] = fresh;
        add_change(sum, s.low, byte, high_keys(byte >> 12), old, fresh);
    }
    return !__syncthreads_or(!good);
}

INLINE void store_units(const Shared& s, const Piece* pieces, const Place& p, u64 base, u32 count) {
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        if (base)
            ((Unit*)base)[s.position[i]] = s.value[i];
        else
            store(pieces, p, tensor_byte(p, s.position[i]), s.value[i]);
    }
}

// The sum of all threads, for all of them.
INLINE Sum block_sum(Shared& s, Sum sum) {
    sum = warp_sum(sum);
    if (lane_id() == 0) s.sum[warp_id()] = sum;
    __syncthreads();
    sum = {0, 0};
    for (u32 w = 0; w < WARPS; w++) sum = plus(sum, s.sum[w]);
    return sum;
}

// ---- A record

INLINE u32 apply_context(Shared& s, const Piece* pieces, const Place& p, const Patch& patch, Bytes b,
                         const u64* current) {
    u32 units = p.run * p.count;
    if (threadIdx.x == 0) s.sections.good = p.is_float && units <= 32 * WORDS && take_head(s, b, units);
    __syncthreads();
    if (!s.sections.good) return MALFORMED;
    u64 base = flat(pieces, p);
    if (__syncthreads_or(!fill_planes(s, pieces, p, base))) return REFETCH;
    count_before(s, units);
    __syncthreads();
    if (!find_sections(s, b)) return REFETCH;
    const u32 changes = s.sections.changes;
    Sum sum = {0, 0};
    // Twice, to check and to write, unless one window is all.
#pragma unroll 1
    for (u32 turn = 0; turn < 2; turn++) {
        Carry c = {{0, 0}, {0, 0}, -1, -1, 0, 0};
#pragma unroll 1
        for (u32 first = 0; first < changes; first += LIST) {
            u32 last = min(changes, first + LIST);
            if (!turn || changes > LIST) {
                bool good = take_positions(s, b, units, first, last, c) && take_values(s, b, first, last, c) &&
                            step_units(s, pieces, p, base, last - first, sum);
                if (!good) return REFETCH;
            }
            if (turn) store_units(s, pieces, p, base, last - first);
            __syncthreads();
        }
        if (!turn && current) {
            Sum reached = plus(block_sum(s, sum), {current[0], current[1]});
            if (!is_equal(reached, patch.sum)) return REFETCH;
        }
    }
    return APPLIED;
}

// The payload in shared memory, if it fits. Whoever reads it synchronises first.
INLINE Bytes bring(Shared& s, Bytes b) {
    u32 ahead = (u32)(b.at & 3), words = (ahead + b.length + 3) / 4;
    if (words > PAYLOAD_WORDS) return b;
    for (u32 i = threadIdx.x; i < words; i += THREADS) s.payload[i] = ((const u32*)(b.at - ahead))[i];
    return {(u64)s.payload + ahead, b.length};
}

// Records of other modes are malformed here. CTAs take every so many-th record: all blocks take about as long.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) windlass_context(const __grid_constant__ ApplyArgs a) {
    Shared& s = shared();
    fill_low_keys(s.low);
    Tally* tally = (Tally*)a.tally;
    for (u32 i = blockIdx.x; i < a.count; i += gridDim.x) {
        Patch patch = ((const Patch*)a.patches)[i];
        Place place = ((const Place*)a.places)[patch.place];
        u64* sums = a.sums ? (u64*)a.sums + 2 * (u64)patch.place : 0;
        u32 outcome = MALFORMED;
        if (sums && is_equal({sums[0], sums[1]}, patch.sum)) {
            outcome = SKIPPED;
        } else if (patch.mode == CONTEXT) {
            Bytes bytes = bring(s, {a.payload + patch.offset, patch.length});
            __syncthreads();
            outcome = apply_context(s, (const Piece*)a.pieces, place, patch, bytes, sums);
        }
        // Everybody has read the sums, and is done with shared memory.
        __syncthreads();
        if (threadIdx.x == 0) {
            if (sums && outcome == APPLIED) sums[0] = patch.sum[0], sums[1] = patch.sum[1];
            ((u32*)a.outcomes)[i] = outcome;
            atomicAdd(&tally->outcome[outcome], 1u);
        }
    }
}
