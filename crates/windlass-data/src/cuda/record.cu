// What applying records needs: tables, bits of a payload, the way from a unit of a tensor to memory.
//
// Owns: the way from a unit of a tensor to where an engine keeps it, and reads of payloads that end where the payload
// does. Must not: have kernels, or trust a record.

// What a block is made of, and which pieces hold it.
struct Place {
    u64 start; // byte of its tensor at which it begins
    u64 pitch; // bytes of its tensor from one run to the next
    u32 run;   // units in a run
    u32 count; // runs
    u32 first; // of its pieces
    u32 pieces;
    u16 is_float;
    u16 is_apart; // whether each of its pieces ends before the next begins
    u32 mantissa; // bits of it in a float
};

// Bytes of a tensor, and where they are in memory. Pieces of a block are in the order in which they begin, and may overlap
// unless it says otherwise: all copies are written.
struct Piece {
    u64 begin;  // byte of the tensor
    u64 run;    // bytes in a run
    u64 pitch;  // bytes of the tensor from one run to the next
    u64 count;  // runs
    u64 target; // address of the first byte
    u64 target_pitch;
};

struct Patch {
    u64 offset; // of the payload
    u64 sum[2]; // of the block after the change
    u32 length; // of the payload
    u32 mode;
    u32 place; // its block's
    u32 unused;
};

struct ApplyArgs {
    u64 places;   // of Place
    u64 pieces;   // of Piece
    u64 patches;  // of Patch, for different blocks
    u64 payload;  // what offsets count from; the allocation goes on to a multiple of 4
    u64 sums;     // two u64 for each of `places`, or 0
    u64 outcomes; // a u32 for each of `patches`
    u64 tally;
    u32 count; // of `patches`
    u32 work;
};

#define SKIPPED 0u
#define APPLIED 1u
#define REFETCH 2u
#define MALFORMED 3u

// ---- Bits of a payload

struct Bytes {
    u64 at;
    u32 length;
};

// Four bytes; those beyond the end are zeros.
INLINE u32 word_at(Bytes b, u32 byte) {
    if (byte >= b.length) return 0;
    u64 at = b.at + byte;
    u32 ahead = (u32)(at & 3), left = b.length - byte;
    const u32* words = (const u32*)(at - ahead);
    u32 word = words[0];
    if (ahead) word = __funnelshift_r(word, left > 4 - ahead ? words[1] : 0, 8 * ahead);
    return left < 4 ? word & ((1u << (8 * left)) - 1) : word;
}

INLINE u64 bits_at(Bytes b, u64 bit, u32 width) {
    if (width == 0) return 0;
    u32 byte = (u32)(bit >> 3), shift = (u32)(bit & 7);
    u64 value = word_at(b, byte) >> shift;
    if (shift + width > 32) value |= (u64)word_at(b, byte + 4) << (32 - shift);
    if (shift + width > 64) value |= (u64)word_at(b, byte + 8) << (64 - shift);
    return width == 64 ? value : value & (((u64)1 << width) - 1);
}

// Whether a section of so many bits, at byte `from`, is filled up with zeros.
INLINE bool is_filled(Bytes b, u32 from, u32 bits) {
    return bits % 8 == 0 || bits_at(b, 8ull * from + bits, 8 - bits % 8) == 0;
}

// ---- Memory

INLINE u64 tensor_byte(const Place& p, u32 position) {
    if (p.count == 1) return p.start + (u64)position * UNIT;
    u32 run = position / p.run;
    return p.start + run * p.pitch + (u64)(position - run * p.run) * UNIT;
}

// Where the byte of the tensor is, or 0.
INLINE u64 locate(const Piece& p, u64 byte) {
    if (byte < p.begin) return 0;
    u64 rest = byte - p.begin, run = 0;
    if (p.count > 1) {
        run = rest / p.pitch;
        rest -= run * p.pitch;
    }
    return run < p.count && rest < p.run ? p.target + run * p.target_pitch + rest : 0;
}

// Of a block's pieces, the last that begins no later than the byte, or the first.
INLINE u32 last_before(const Piece* pieces, const Place& p, u64 byte) {
    u32 piece = 0, past = p.pieces;
    while (past - piece > 1) {
        u32 middle = (piece + past) / 2;
        if (pieces[p.first + middle].begin <= byte)
            piece = middle;
        else
            past = middle;
    }
    return piece;
}

// The unit's first place, or 0.
INLINE u64 find(const Piece* pieces, const Place& p, u64 byte) {
    if (p.is_apart) return locate(pieces[p.first + last_before(pieces, p, byte)], byte);
    for (u32 i = 0; i < p.pieces; i++)
        if (u64 at = locate(pieces[p.first + i], byte)) return at;
    return 0;
}

INLINE void store(const Piece* pieces, const Place& p, u64 byte, Unit unit) {
    if (p.is_apart) {
        if (u64 at = find(pieces, p, byte)) *(Unit*)at = unit;
        return;
    }
    for (u32 i = 0; i < p.pieces; i++)
        if (u64 at = locate(pieces[p.first + i], byte)) *(Unit*)at = unit;
}

// The address of the block's first unit if all of it is one run in one place, or 0.
INLINE u64 flat(const Piece* pieces, const Place& p) {
    if (p.count != 1 || p.pieces != 1) return 0;
    const Piece& only = pieces[p.first];
    bool within = only.count == 1 && only.begin <= p.start && p.start + (u64)p.run * UNIT <= only.begin + only.run;
    return within ? only.target + (p.start - only.begin) : 0;
}

INLINE bool is_equal(Sum a, const u64* b) { return a.a == b[0] && a.b == b[1]; }
