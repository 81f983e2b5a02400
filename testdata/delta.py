"""A second decoder of deltas, from the documentation of windlass-core's module `delta`, to check delta/*.json.

`python3 testdata/delta.py` decodes every golden container, applies it to the base and compares the outcome with
the target, block by block with the sums in its records, and whole. The Rust tests encode the same files. The
XXH3 check sums of header, parts and end are skipped, and layout, cuts and state digests are not recomputed:
XXH3 is not in the standard library.
"""

import json
import pathlib
import sys

sys.dont_write_bytecode = True

from digest import block_sum  # noqa: E402

BLOCK_UNITS = 1 << 16
ESCAPE = 16
MAX_K = 15
MODES = {1: "sparse", 2: "context", 3: "bitmap", 4: "dense"}
# Bytes of a unit and, for floats, explicit bits of the mantissa.
FLOATS = {
    "F8_E5M2": (1, 2), "F8_E5M2FNUZ": (1, 2), "F8_E4M3": (1, 3), "F8_E4M3FNUZ": (1, 3),
    "F16": (2, 10), "BF16": (2, 7), "F32": (4, 23), "C64": (4, 23), "F64": (8, 52),
}  # fmt: skip
INTEGERS = {"I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}


class Reader:
    """Takes numbers off the front of some bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        assert self.at + size <= len(self.data), "the bytes end too early"
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def varint(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self.number(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                assert byte or shift == 7, "a varint is longer than it needs to be"
                assert value < 1 << 32, "a varint is larger than 32 bits"
                return value

    def fields(self, widths: list[int]) -> list[int]:
        """A section of bit fields of these widths."""
        bits = sum(widths)
        word, out = self.number((bits + 7) // 8), []
        for width in widths:
            out.append(word & (1 << width) - 1)
            word >>= width
        assert word == 0, "a section is not filled up with zeros"
        return out

    def unary(self, count: int) -> list[int]:
        """A section of so many unary numbers."""
        out, zeros, byte, left = [], 0, 0, 0
        while len(out) < count:
            if left == 0:
                byte, left = self.number(1), 8
            if byte & 1:
                out.append(zeros)
                zeros = 0
            else:
                zeros += 1
            byte, left = byte >> 1, left - 1
        assert byte == 0, "a section is not filled up with zeros"
        return out

    def end(self) -> None:
        assert self.at == len(self.data), "something follows"


class Block:
    """A tile: where its runs begin within the tensor, and how long each is, in units."""

    def __init__(self, tensor: dict, runs: list[int], run: int) -> None:
        self.tensor, self.runs, self.run = tensor, runs, run
        self.unit, self.mantissa = unit_of(tensor["dtype"])
        self.units = len(runs) * run

    def places(self) -> list[slice]:
        starts = [self.tensor["offset"] + r * self.unit for r in self.runs]
        return [slice(s, s + self.run * self.unit) for s in starts]

    def read(self, image: bytes) -> list[int]:
        data = b"".join(image[p] for p in self.places())
        return [int.from_bytes(data[i : i + self.unit], "little") for i in range(0, len(data), self.unit)]

    def write(self, image: bytearray, units: list[int]) -> None:
        data = b"".join(u.to_bytes(self.unit, "little") for u in units)
        size = self.run * self.unit
        for i, place in enumerate(self.places()):
            image[place] = data[i * size : (i + 1) * size]

    def sum(self, image: bytes) -> list[int]:
        runs = [block_sum(r * self.unit, image[p]) for r, p in zip(self.runs, self.places())]
        return [sum(lane) & (1 << 64) - 1 for lane in zip(*runs)]


def unit_of(dtype: str) -> tuple[int, int | None]:
    return FLOATS[dtype] if dtype in FLOATS else (INTEGERS.get(dtype, 1), None)


def product(sizes: list[int]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out


def cut(tensor: dict, cuts: list[dict]) -> list[Block]:
    """The blocks of a tensor, as the documentation of `manifest::cut` says."""
    units = tensor["bytes"] // unit_of(tensor["dtype"])[0]
    if units == 0:
        return []
    *outer, inner = [c for c in cuts if c["bounds"]] or [None]
    rows, row, columns = [0, 1], units, [0, units]
    if inner is not None:
        shape, dim = tensor["shape"], inner["dim"]
        count = product(shape[:dim])
        row = units // count
        columns = [0, *(b * row // shape[dim] for b in inner["bounds"]), row]
        breaks = {0, count}
        for c in outer:
            below = product(shape[c["dim"] + 1 : dim])
            for o in range(product(shape[: c["dim"]])):
                breaks |= {(o * shape[c["dim"]] + b) * below for b in (0, *c["bounds"])}
        rows = sorted(breaks)
    if len(rows) == 2 and rows[1] == 1:
        # Cuts of what is outermost: every cell is contiguous.
        return [b for c0, c1 in zip(columns, columns[1:]) for b in contiguous(tensor, c0, c1)]
    blocks = []
    for r0, r1 in zip(rows, rows[1:]):
        for c0, c1 in zip(columns, columns[1:]):
            if c1 - c0 > BLOCK_UNITS:
                for r in range(r0, r1):
                    blocks += contiguous(tensor, r * row + c0, r * row + c1)
                continue
            height = BLOCK_UNITS // (c1 - c0)
            for r in range(r0, r1, height):
                runs = [i * row + c0 for i in range(r, min(r + height, r1))]
                blocks.append(Block(tensor, runs, c1 - c0))
    return blocks


def contiguous(tensor: dict, start: int, end: int) -> list[Block]:
    return [Block(tensor, [s], min(BLOCK_UNITS, end - s)) for s in range(start, end, BLOCK_UNITS)]


def gaps(reader: Reader, groups: list[tuple[int, int]]) -> list[list[int]]:
    """Positions of groups of (count, k); each group begins anew."""
    low = reader.fields([k for count, k in groups for _ in range(count)])
    high = reader.unary(len(low))
    out, i = [], 0
    for count, k in groups:
        position, positions = -1, []
        for _ in range(count):
            position += (high[i] << k | low[i]) + 1
            positions.append(position)
            i += 1
        out.append(positions)
    return out


def values(reader: Reader, groups: list[tuple[int, int]], unit: int) -> list[int]:
    """Signed steps of groups of (count, k)."""
    ks = [k for count, k in groups for _ in range(count)]
    assert all(k < unit * 8 for k in ks)
    low, high = reader.fields(ks), reader.unary(len(ks))
    assert all(h <= ESCAPE for h in high)
    escaped = [i for i, h in enumerate(high) if h == ESCAPE]
    for i, full in zip(escaped, reader.fields([unit * 8 - ks[i] for i in escaped])):
        assert full >= ESCAPE, "a value is escaped without need"
        high[i] = full
    zigzag = [(h << k | lo) + 1 for h, k, lo in zip(high, ks, low)]
    assert all(z < 1 << unit * 8 for z in zigzag), "a step leads nowhere"
    return [-(z + 1) // 2 if z % 2 else z // 2 for z in zigzag]


def changes(mode: str, payload: bytes, block: Block, old: list[int]) -> list[tuple[int, int]]:
    """(position, step) of every change."""
    reader = Reader(payload)
    count = reader.number(2) + 1
    if mode == "context":
        return context(reader, count, block, old)
    if mode == "sparse":
        k, values_k = reader.number(1), reader.number(1)
        assert k <= MAX_K
        (positions,) = gaps(reader, [(count, k)])
    else:
        values_k = reader.number(1)
        positions = [i for i, bit in enumerate(reader.fields([1] * block.units)) if bit]
        assert len(positions) == count
    steps = values(reader, [(count, values_k)], block.unit)
    reader.end()
    return list(zip(positions, steps))


def context(reader: Reader, count: int, block: Block, old: list[int]) -> list[tuple[int, int]]:
    assert block.mantissa is not None, "integers have no context records"
    head = reader.number(2)
    top, classes = head & 0xFFF, (head >> 12) + 1
    members: list[list[int]] = [[] for _ in range(classes)]
    for position, bits in enumerate(old):
        exponent = (bits & (1 << block.unit * 8 - 1) - 1) >> block.mantissa
        members[min(max(top - exponent, 0), classes - 1)].append(position)
    counts = [reader.varint() for _ in range(classes)]
    parameters = iter(reader.fields([(block.unit * 8).bit_length() - 1] * sum(n > 0 for n in counts)))
    table = [(n, next(parameters) if n else 0) for n in counts]
    assert sum(n for n, _ in table) == count
    ks = [gap_parameter(len(m), n) for m, (n, _) in zip(members, table)]
    ranks = gaps(reader, [(n, k) for (n, _), k in zip(table, ks)])
    positions = [m[rank] for m, these in zip(members, ranks) for rank in these]
    steps = values(reader, table, block.unit)
    reader.end()
    return list(zip(positions, steps))


def gap_parameter(size: int, count: int) -> int:
    return max((k for k in range(MAX_K + 1) if count and 10 * (count << k) <= 7 * size), default=0)


def stepped(old: int, step: int, block: Block) -> int:
    width = block.unit * 8
    sign, mask = 1 << width - 1, (1 << width) - 1
    if block.mantissa is None:
        return old + step & mask
    place = old ^ mask if old & sign else old ^ sign
    place = place + step & mask
    return place ^ sign if place & sign else place ^ mask


def parse(data: bytes) -> tuple[dict, list[dict]]:
    """The header and the records of a container."""
    reader = Reader(data)
    assert reader.take(8) == b"WLDELTA1"
    length = reader.number(4)
    header: dict = {name: reader.take(16).hex() for name in ("layout", "cuts", "base_digest", "target_digest")}
    header |= {name: (reader.number(8), reader.number(8)) for name in ("base", "target")}
    header["blocks"] = reader.number(4)
    header["model_id"] = reader.take(reader.number(2)).decode()
    reader.take(8)
    assert reader.at == length
    records: list[dict] = []
    header["parts"] = 0
    while (tag := reader.take(4)) == b"PART":
        header["parts"] += 1
        records += part(reader)
    assert tag == b"END\0"
    assert (reader.number(4), reader.number(8)) == (header["parts"], len(records))
    header["changes"] = reader.number(8)
    reader.take(8)
    reader.end()
    records.sort(key=lambda r: r["block"])
    assert len({r["block"] for r in records}) == len(records), "a block has two records"
    return header, records


def part(reader: Reader) -> list[dict]:
    count, index_size, payload_size = (reader.number(4) for _ in range(3))
    reader.take(8)
    index, payload = Reader(reader.take(index_size)), Reader(reader.take(payload_size))
    records, block = [], -1
    for _ in range(count):
        block += index.varint() + 1
        mode, size = MODES[index.number(1)], index.varint()
        total = [index.number(8), index.number(8)]
        records.append({"block": block, "mode": mode, "sum": total, "payload": payload.take(size)})
    index.end()
    payload.end()
    return records


def check(vector: dict) -> int:
    """Applies a golden container; answers how many units it changed."""
    manifest = vector["manifest"]
    blocks = [b for t in manifest["tensors"] for b in cut(t, manifest["cuts"].get(t["name"], []))]
    base = bytes.fromhex(vector["base"]).ljust(manifest["data_bytes"], b"\0")
    target = bytearray(base)
    for offset, text in vector["target"]:
        new = bytes.fromhex(text)
        target[offset : offset + len(new)] = new
    header, records = parse(bytes.fromhex(vector["container"]))
    assert header["layout"] == manifest["layout_hash"] and header["blocks"] == len(blocks)
    assert [[r["block"], r["mode"]] for r in records] == vector["records"]
    image, changed = bytearray(base), 0
    for record in records:
        block = blocks[record["block"]]
        old = block.read(base)
        if record["mode"] == "dense":
            size = block.unit
            units = [int.from_bytes(record["payload"][i : i + size], "little") for i in range(0, block.units * size, size)]
            assert len(record["payload"]) == block.units * size
        else:
            units = list(old)
            for position, step in changes(record["mode"], record["payload"], block, old):
                units[position] = stepped(old[position], step, block)
        changed += sum(a != b for a, b in zip(old, units))
        block.write(image, units)
        assert block.sum(image) == record["sum"], f"block {record['block']} has another sum"
    assert image == target, "not the target"
    assert changed == header["changes"]
    return changed


def main() -> None:
    files = sorted(pathlib.Path(__file__).with_name("delta").glob("*.json"))
    assert files, "no golden deltas"
    for file in files:
        try:
            changed = check(json.loads(file.read_text()))
        except AssertionError as error:
            sys.exit(f"{file.name}: {error!r}")
        print(f"{file.name}: {changed} changes")


if __name__ == "__main__":
    main()
