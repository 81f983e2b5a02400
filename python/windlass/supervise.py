"""Interim."""
import sys
from windlass._windlass import Supervisor
class AgentSupervisor:
    def __init__(self, region, *, bind, advertise_host, ports, data_ports, token_file, history, history_bytes, threads, streams, timeout, log):
        o=["--bind",bind,"--ports",ports,"--data-ports",data_ports,"--history",str(history),"--history-bytes",str(history_bytes),"--streams",str(streams),"--timeout",str(int(timeout))]
        self._s=Supervisor(region, program=[sys.executable,"-m","windlass"], options=o, log=log)
    def endpoint(self, timeout): return self._s.endpoint(timeout)
    def status(self): return self._s.status()
    def ports(self): return None
    def stop(self): self._s.stop(5.0)
