"""``python -m windlass`` is the ``windlass`` command."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """The command line; see ``windlass --help``."""
    from windlass import _windlass

    arguments = ["windlass", *sys.argv[1:]]
    # The command has signal handlers and output of its own: Ctrl-C is no KeyboardInterrupt, and the interpreter's
    # buffers go out first.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(_windlass.main(arguments, [sys.executable, "-m", "windlass"]))


if __name__ == "__main__":
    main()
