"""A supervised agent, through Python: started, killed, orphaned, and inherited by forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import windlass
from controlled import is_gone, until
from windlass.config import SenderAgentConfig
from windlass.publish.supervise import AgentSupervisor

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE = 30.0
PACKAGE = str(Path(windlass.__file__).resolve().parent.parent)


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def region(home: Path) -> Iterator[Path]:
    """A region with a publisher."""
    path = home / "region"
    words = [
        sys.executable,
        "-m",
        "windlass",
        "demo-rank",
        "--rank=0",
        "--ranks=1",
        "--model-bytes=1Mi",
        "--json",
    ]
    rank = subprocess.Popen(
        [*words, f"--region={path}", "--model-id=policy"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PACKAGE},
    )
    assert rank.stdout is not None and rank.stdin is not None
    assert json.loads(rank.stdout.readline())["event"] == "ready"
    yield path
    rank.stdin.close()
    rank.wait(PATIENCE)
    rank.stdout.close()


def pid_of(agent: AgentSupervisor) -> int:
    pid = agent.status()["pid"]
    assert isinstance(pid, int)
    return pid


class Script:
    """Another interpreter that runs a script and says lines of JSON."""

    def __init__(
        self, text: str, *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None
    ):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": PACKAGE} if env is None else env,
        )

    def line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate(timeout=PATIENCE)
            pytest.fail(f"it ended with {self.process.returncode}: {errors}")
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def test_an_agent_is_started_found_and_stopped(region: Path, home: Path) -> None:
    with AgentSupervisor(region, log=home / "agent.log", history=3, threads=1) as agent:
        endpoint = agent.endpoint(PATIENCE)
        assert endpoint.startswith("http://127.0.0.1:")
        status = agent.status()
        pid = pid_of(agent)
        assert (status["running"], status["endpoint"], status["restarts"]) == (True, endpoint, 0)
        assert status["token_file"] == str(region / "token")
        assert status["log"] == str(home / "agent.log")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert b"--with-parent" in words and b"--history=3" in words
        assert f"pid={pid}" in repr(agent)
    assert is_gone(pid)
    status = agent.status()
    assert (status["running"], status["pid"], status["endpoint"]) == (False, None, None)
    agent.stop()
    with pytest.raises(windlass.WindlassStale, match="start a new one"):
        agent.endpoint(PATIENCE)


def test_data_has_a_port_of_the_range_of_requests_unless_it_has_its_own(region: Path) -> None:
    agent = SenderAgentConfig(ports="28100-28199")
    with AgentSupervisor(str(region), ports=agent.ports, data_ports=agent.data_ports) as supervisor:
        endpoint = supervisor.endpoint(PATIENCE)
        ports = [int(endpoint.rpartition(":")[2]), int(str(supervisor.status()["data_port"]))]
    assert all(28100 <= port <= 28199 for port in ports) and ports[0] != ports[1], ports


def test_a_killed_agent_comes_back_where_it_was(region: Path) -> None:
    with AgentSupervisor(region) as agent:
        endpoint = agent.endpoint(PATIENCE)
        pid = pid_of(agent)
        os.kill(pid, signal.SIGKILL)
        until("another agent", lambda: agent.status()["restarts"] == 1)
        assert agent.endpoint(PATIENCE) == endpoint
        assert pid_of(agent) != pid
        assert "signal 9" in str(agent.status()["last_error"])
        log = Path(str(agent.status()["log"]))
        assert log.parent == Path(tempfile.gettempdir())
    assert not log.exists(), "it said nothing"


FORKING = """
    import json, os, signal, sys
    from windlass.publish.supervise import AgentSupervisor

    agent = AgentSupervisor(sys.argv[1])
    agent.endpoint(30)
    child = os.fork()
    if child == 0:
        signal.pause()
    print(json.dumps([agent.status()["pid"], child]), flush=True)
    signal.pause()
"""


def test_a_killed_trainer_leaves_no_agent_even_if_its_forked_child_lives_on(region: Path) -> None:
    with Script(FORKING, region) as trainer:
        agent, child = trainer.line()
        try:
            trainer.kill()
            until("the agent is gone", lambda: is_gone(agent))
            assert not is_gone(child)
        finally:
            os.kill(child, signal.SIGKILL)
    assert not (region / "agent.json").exists(), "it ended in good order"


def test_a_forked_child_gets_a_clear_error_and_leaves_the_agent_alone(region: Path) -> None:
    with AgentSupervisor(region) as agent:
        agent.endpoint(PATIENCE)
        pid = pid_of(agent)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for call in (lambda: agent.endpoint(PATIENCE), agent.status, agent.stop):
                try:
                    call()
                except NotImplementedError as error:
                    said.append(f"{type(error).__name__}: {error}")
            agent.__exit__(None, None, None)
            del agent
            os.write(writing, json.dumps(said).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            said = json.loads(answer.read())
        assert os.waitpid(child, 0)[1] == 0
        expected = f"WindlassUnsupported: this supervisor belongs to process {os.getpid()}, and this is its forked child"
        assert len(said) == 3 and all(text.startswith(expected) for text in said), said
        assert pid_of(agent) == pid and not is_gone(pid)


WAITING = """
    import json, sys, time
    from windlass.publish.supervise import AgentSupervisor

    deaf = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with AgentSupervisor(sys.argv[1], program=deaf) as agent:
        while agent.status()["pid"] is None:
            time.sleep(0.001)
        print(json.dumps(agent.status()["pid"]), flush=True)
        try:
            agent.endpoint(1000)
        except KeyboardInterrupt:
            print(json.dumps("interrupted"), flush=True)
        agent.stop(0)
    print(json.dumps("ended"), flush=True)
"""


def test_ctrl_c_ends_the_wait_for_an_endpoint(home: Path) -> None:
    with Script(WAITING, home / "region") as trainer:
        agent = trainer.line()
        begun = time.monotonic()
        # Until the interpreter is in the call, the signal may come before the `try`.
        until("it waits", lambda: "windlass-call" in threads(trainer.process.pid))
        trainer.process.send_signal(signal.SIGINT)
        assert trainer.line() == "interrupted"
        assert time.monotonic() - begun < 5
        assert trainer.line() == "ended"
        assert trainer.process.wait(PATIENCE) == 0
        assert is_gone(agent)


def threads(pid: int) -> list[str]:
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except FileNotFoundError:
            continue
    return names


def test_what_the_agent_refuses_is_said_at_once(home: Path) -> None:
    with AgentSupervisor(home / "region", ports="7000-6000", log=home / "log") as agent:
        with pytest.raises(windlass.WindlassInvalid, match="7000-6000") as caught:
            agent.endpoint(1000)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(windlass.WindlassInvalid, match="program is empty"):
        AgentSupervisor(home / "region", program=[])
    with pytest.raises(windlass.WindlassNotFound, match="cannot write the agent's log"):
        AgentSupervisor(home / "region", log=home / "absent" / "log")


def test_an_agent_that_is_not_there_in_time_is_an_error_that_says_why(home: Path) -> None:
    broken = [sys.executable, "-c", "raise SystemExit('it is broken')"]
    with AgentSupervisor(home / "region", program=broken, log=home / "log") as agent:
        until("a failure", lambda: agent.status()["last_error"] is not None)
        with pytest.raises(TimeoutError, match="it is broken"):
            agent.endpoint(0.01)


def test_the_agent_is_found_where_only_the_search_path_leads_to_the_package(region: Path, home: Path) -> None:
    script = """
        import json, sys
        sys.path.insert(0, sys.argv[2])
        from windlass.publish.supervise import AgentSupervisor

        with AgentSupervisor(sys.argv[1]) as agent:
            print(json.dumps(agent.endpoint(30)), flush=True)
    """
    (home / "random.py").write_text("raise SystemExit('a file of the trainer stands in for a module')")
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = {**bare, "PYTHONINSPECT": "", "WINDLASS_LOG": "error"}
    with Script(script, region, PACKAGE, env=env, cwd=home) as trainer:
        assert trainer.line().startswith("http://")
        assert trainer.process.wait(PATIENCE) == 0


def test_starting_the_command_imports_nothing_heavy() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "windlass", "--version"]
    run = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": PACKAGE},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "windlass._windlass" in imported
    assert not imported & {"torch", "numpy", "asyncio", "multiprocessing", "subprocess"}
