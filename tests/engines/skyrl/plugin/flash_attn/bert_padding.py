"""See the package."""


def pad_input(*_: object) -> None:
    """Not for a CPU."""
    raise NotImplementedError


def unpad_input(*_: object) -> None:
    """Not for a CPU."""
    raise NotImplementedError
