"""What makes receivers known to vLLM, in the driver and in the servers."""


def register_receive_engines() -> None:
    pass
