"""A proxy in front of a relay that flips one bit in the first large answer of every connection.

Started as ``liar.py ADDRESS PORT``: it listens there, passes everything on to the same port of 127.0.0.1, and says when it has flipped.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

#: The bytes of an answer before the flipped one: more than a handshake, less than a stripe.
TRUE_BYTES = 10_000


def main() -> None:
    address, port = sys.argv[1], int(sys.argv[2])
    with socket.create_server((address, port)) as server:
        say("listening")
        while True:
            asked, _ = server.accept()
            relay = socket.create_connection(("127.0.0.1", port))
            for ends in ((asked, relay, None), (relay, asked, TRUE_BYTES)):
                threading.Thread(target=pump, args=ends, daemon=True).start()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def pump(source: socket.socket, sink: socket.socket, true: int | None) -> None:
    """Passes on what comes until an end is closed. The bit after ``true`` bytes is flipped."""
    passed = 0
    with contextlib.suppress(OSError):
        while data := bytearray(source.recv(1 << 16)):
            if true is not None and passed <= true < passed + len(data):
                data[true - passed] ^= 1
                say("flipped")
            passed += len(data)
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
