"""``python -m windlass`` is the ``windlass`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line; see ``windlass --help``."""
    from windlass import _windlass

    arguments = ["windlass", *sys.argv[1:]]
    # The command has signal handlers and output of its own; the interpreter's buffers go out first.
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(_windlass.main(arguments, [sys.executable, "-m", "windlass"]))


if __name__ == "__main__":
    main()
