"""What the adapters of training frameworks share.

:mod:`windlass.frameworks.sender` publishes the streams that frameworks hand over, :mod:`windlass.frameworks.servers` brings the
versions to vLLM servers and has them loaded. The adapters themselves are modules of their frameworks' names, such as
:mod:`windlass.trl`. Importing this package imports neither torch nor a framework.
"""
