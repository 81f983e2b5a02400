"""A second implementation of the block sum, from its definition, to make and check digest.json.

`python3 testdata/digest.py` writes the sums of the cases into digest.json; the Rust tests compare theirs with it. The
final hash (XXH3-128 over layout hash and raw state sum) is not in the standard library and is taken from Rust.
"""

import json
import pathlib

M = (1 << 64) - 1


def splitmix(x: int) -> int:
    x = x * 0x9E3779B97F4A7C15 & M
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M
    return x ^ x >> 31


LOW_SEED = (0x57494E444C4153, 0x532D4C4F572D42)
HIGH_SEED = (0x6A09E667F3BCC908, 0xBB67AE8584CAA73B)
TENSOR_SEED = (0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1)
LOW = [[splitmix(s + i + 1 & M) >> 32 for i in range(1024)] for s in LOW_SEED]


def noise(n: int, seed: int) -> bytes:
    return bytes(splitmix(seed + i & M) & 0xFF for i in range(n))


def block_sum(offset: int, data: bytes) -> list[int]:
    total = [0, 0]
    for i, byte in enumerate(data, offset):
        for lane in (0, 1):
            high = splitmix(HIGH_SEED[lane] + i // 4096 & M) | 1
            total[lane] += (byte + 1) * 256 ** (i % 4) * LOW[lane][i // 4 % 1024] * high
    return [t & M for t in total]


def state_sum(tensors: list[bytes]) -> list[int]:
    total = [0, 0]
    for index, data in enumerate(tensors):
        for lane, value in enumerate(block_sum(0, data)):
            total[lane] += value * (splitmix(TENSOR_SEED[lane] + index & M) | 1)
    return [t & M for t in total]


def text(total: list[int]) -> str:
    return b"".join(t.to_bytes(8, "little") for t in total).hex()


def main() -> None:
    path = pathlib.Path(__file__).with_name("digest.json")
    golden = json.loads(path.read_text())
    cases = [(0, 0, 1), (0, 1, 2), (0, 4, 3), (1, 2, 4), (3, 9, 5), (4094, 7, 6), (0, 5000, 7), (1 << 33, 4099, 8)]
    golden["sums"] = [
        {"offset": o, "len": n, "seed": s, "sum": text(block_sum(o, noise(n, s)))} for o, n, s in cases
    ]
    state = golden["state"]
    data = noise(state["manifest"]["data_bytes"], state["seed"])
    tensors = [data[t["offset"] : t["offset"] + t["bytes"]] for t in state["manifest"]["tensors"]]
    state["raw"] = text(state_sum(tensors))
    path.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
