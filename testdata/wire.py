"""A second implementation of the wire format, from the tables in the documentation of `wire`.

`python3 testdata/wire.py` writes wire/frames.json and wire/handshake.json: every frame again from the header and
message beside it, and the proofs and frames of the handshake from its key, nonces and numbers. The Rust tests
compare theirs with the same files. The check of a header is XXH3-64 of 28 bytes; only that case of the hash (17 to
32 bytes, seed 0) is implemented here. The hash in "stripe end with xxh3" is a number like any other and stays as it
is in the file. The tickets (wire/ticket_*.json) are plain JSON that no generator makes.
"""

import hashlib
import hmac
import json
import pathlib
import struct

M = (1 << 64) - 1
SECRET = bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f")
KINDS = {
    "hello": 1, "challenge": 2, "proof": 3, "accept": 4, "refuse": 5,
    "claim": 16, "data": 17, "stripe_end": 18, "ack": 19, "done": 20, "error": 21, "holds": 22, "reach": 23, "memory": 24,
    "ping": 32, "pong": 33,
}  # fmt: skip
ERRORS = [
    "invalid", "not_found", "stale", "corrupt", "timeout", "peer_lost",
    "exhausted", "unsupported", "denied", "cancelled", "bug",
]  # fmt: skip
STAGES = ["handshake", "claim", "data", "verify", "complete"]
MINOR = 1
PAYLOAD = b"sixteen bytes..."


def xxh3_64(data: bytes) -> int:
    """XXH3-64, seed 0, of 17 to 32 bytes."""
    assert 17 <= len(data) <= 32
    total = len(data) * 0x9E3779B185EBCA87
    for part, secret in ((data[:16], SECRET[:16]), (data[-16:], SECRET[16:])):
        (a, b), (c, d) = struct.unpack("<QQ", part), struct.unpack("<QQ", secret)
        product = (a ^ c) * (b ^ d)
        total += product & M ^ product >> 64
    total &= M
    total = (total ^ total >> 37) * 0x165667919E3779F9 & M
    return total ^ total >> 32


def frame(header: dict, body: bytes) -> bytes:
    version, stream = header["version"], header["stream"]
    assert header["body_len"] == len(body), f"{header} is beside a body of {len(body)} bytes"
    start = struct.pack(
        "<4sBBBBHHIQI",
        b"WDLS",
        version["major"],
        version["minor"],
        KINDS[header["kind"]],
        0,
        stream["index"],
        stream["epoch"],
        header["stripe"],
        header["offset"],
        len(body),
    )
    return start + struct.pack("<I", xxh3_64(start) & 0xFFFFFFFF) + body


def body(kind: str, m) -> bytes:
    """The body of a message, in the JSON form of the file."""
    match kind:
        case "hello":
            return bytes.fromhex(m["ticket"]) + struct.pack("<II", m["source"], 0) + bytes.fromhex(m["nonce"])
        case "challenge" | "proof":
            return bytes.fromhex(m)
        case "accept":
            return bytes.fromhex(m["proof"]) + struct.pack("<H6x", m["window"])
        case "refuse":
            versions = [m[side][part] for side in ("ours", "theirs") for part in ("major", "minor")]
            return struct.pack("<B4B3x", ERRORS.index(m["kind"]) + 1, *versions) + m["message"].encode()
        case "claim":
            ((extent, e),) = m["extent"].items()
            carriage = {"sent": 0, "read": 1}[m["carriage"]]
            if extent == "blocks":
                return struct.pack("<HBBIQQ", m["attempt"], 0, carriage, 0, e["first"], e["count"])
            return struct.pack("<HBBIQQ", m["attempt"], 1, carriage, e["payload"], e["offset"], e["len"])
        case "stripe_end":
            ((check, sums),) = m["check"].items()
            if check == "xxh3":
                return struct.pack("<B3xIQ", 0, 0, sums)
            return struct.pack("<B3xI", 1, len(sums)) + bytes.fromhex("".join(sums))
        case "ack":
            verdict = m["verdict"]
            if isinstance(verdict, dict):
                return struct.pack("<B3xI", 1, verdict["bad_block"])
            return struct.pack("<B3xI", {"good": 0, "bad_stripe": 2}[verdict], 0)
        case "done":
            identity = m["identity"]
            numbers = struct.pack("<QQ", identity["incarnation"], identity["version"])
            return bytes.fromhex(m["ticket"] + m["digest"]) + numbers + identity["model_id"].encode()
        case "error":
            codes = ERRORS.index(m["kind"]) + 1, STAGES.index(m["stage"]) + 1, m["stripe"] is not None
            return struct.pack("<BBBx", *codes) + m["message"].encode()
        case "holds":
            return b"".join(struct.pack("<II", r["start"], r["end"] - r["start"]) for r in m)
        case "reach":
            ((answer, r),) = m.items()
            text = r["library" if answer == "able" else "why"].encode()
            head = struct.pack("<BxH", {"able": 0, "unable": 1}[answer], len(text))
            return head + text + bytes(r.get("metadata", []))
        case "memory":
            return struct.pack("<QQ", m["address"], m["bytes"])
        case "ping" | "pong":
            return struct.pack("<Q", m)
    raise ValueError(f"no body is known for {kind}")


def vector(v: dict) -> bytes:
    header, message = v["header"], v["message"]
    if header["kind"] == "data":
        return frame(header, PAYLOAD)
    ((kind, content),) = message.items()
    stripe = content.get("stripe") or 0 if isinstance(content, dict) else 0
    assert (kind, stripe) == (header["kind"], header["stripe"]), v["name"]
    return frame(header, body(kind, content))


def handshake(h: dict) -> None:
    stream, nonces = h["stream"], h["receiver_nonce"] + h["sender_nonce"]

    def proof(label: bytes) -> str:
        numbers = struct.pack("<24sBBBxHHI", label, 1, MINOR, MINOR, stream["index"], stream["epoch"], h["source"])
        covered = numbers + bytes.fromhex(h["ticket"] + nonces)
        assert len(covered) == 116
        return hmac.new(bytes.fromhex(h["key"]), covered, hashlib.sha256).hexdigest()

    def say(kind: str, content) -> str:
        content = body(kind, content)
        version = {"major": 1, "minor": MINOR}
        header = {"version": version, "kind": kind, "stream": stream, "stripe": 0, "offset": 0}
        return frame(header | {"body_len": len(content)}, content).hex()

    h["receiver_proof"] = proof(b"windlass-wire-receiver")
    h["sender_proof"] = proof(b"windlass-wire-sender")
    h["frames"] = [
        say("hello", {"ticket": h["ticket"], "source": h["source"], "nonce": h["receiver_nonce"]}),
        say("challenge", h["sender_nonce"]),
        say("proof", h["receiver_proof"]),
        say("accept", {"proof": h["sender_proof"], "window": h["window"]}),
    ]


def main() -> None:
    folder = pathlib.Path(__file__).with_name("wire")
    frames = json.loads((folder / "frames.json").read_text())
    for v in frames:
        v["hex"] = vector(v).hex()
    shake = json.loads((folder / "handshake.json").read_text())
    handshake(shake)
    for name, content in (("frames", frames), ("handshake", shake)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
