"""The processes around a controller, as a user starts them: ``python -m windlass controller`` and ``receive``."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from children import environment

PATIENCE = 60.0


def until(what: str, look: Callable[[], Any]) -> Any:
    """Waits until ``look`` gives something."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
    return found


class Command:
    """A command whose lines of JSON go into a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        words = [sys.executable, "-m", "windlass", *arguments, "--json", "--with-parent"]
        variables = {k: v for k, v in environment().items() if k != "WINDLASS_TOKEN"}
        with log.open("ab") as out:
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, env=variables)

    def lines(self) -> list[dict[str, Any]]:
        whole = self.log.read_bytes().rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def event(self, name: str, start: int = 0) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found = next((line for line in self.lines()[start:] if line.get("event") == name), None)
            assert found is not None or self.process.poll() is None, self.log.read_text()
            return found

        told: dict[str, Any] = until(f"{name} in {self.log}", look)
        return told

    def end(self, *, kill: bool = False) -> int:
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        if self.process.stdin is not None:
            self.process.stdin.close()
        return self.process.wait(PATIENCE)


class World:
    """A controller and whoever follows it, below one directory and with one secret."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.token_file = home / "token"
        self.token = secrets.token_hex(16)
        self.token_file.touch(0o600)
        self.token_file.write_text(self.token)
        self.commands: list[Command] = []
        self.url = ""
        self._options: tuple[str, ...] = ()

    def start_controller(self, *options: str) -> Command:
        """Starts the controller; again on the port that it had."""
        self._options = options or self._options
        port = f"--ports={self.url.rpartition(':')[2]}" if self.url else "--ports=0"
        log = self.home / f"controller-{len(self.commands)}.log"
        command = Command(log, "controller", f"--token-file={self.token_file}", port, *self._options)
        self.commands.append(command)
        self.url = str(command.event("listening")["endpoint"])
        return command

    def receiver(self, name: str, *words: str) -> Command:
        """Starts a receiver of models; words that begin with dashes are further options."""
        models = [word for word in words if not word.startswith("--")]
        command = Command(
            self.home / f"{name}.log",
            "receive",
            f"--controller={self.url}",
            f"--token-file={self.token_file}",
            f"--dir={self.home / name}",
            f"--name={name}",
            *(f"--model={model}" for model in models),
            *(word for word in words if word.startswith("--")),
        )
        self.commands.append(command)
        command.event("joined")
        return command

    def close(self) -> None:
        for command in reversed(self.commands):
            if command.process.poll() is None:
                command.end(kill=True)


@contextlib.contextmanager
def world(home: Path, *options: str) -> Iterator[World]:
    """A controller that runs, and everything that was started for it ended in the end."""
    made = World(home)
    try:
        made.start_controller(*options)
        yield made
    finally:
        made.close()


def is_gone(pid: int) -> bool:
    """Whether nothing of it runs; nobody may have reaped an orphan."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
