"""Trainers and receivers that only talk: they do over HTTP what real ones do, at the moment a test wants."""

from __future__ import annotations

import json
import pathlib
import queue
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

from children import environment

Json = dict[str, Any]

PATIENCE = 30.0
MIB = 1 << 20


class Controller:
    """A controller in a process of its own. One that is started again has the same port and the same token."""

    def __init__(self, home: pathlib.Path, *flags: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "windlass", "controller", "--json", "--with-parent"]
        # Who joins here is there at once.
        command += ["--settle=0.001"]
        command += [f"--token-file={home / 'token'}", f"--ports={port}", *flags]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        told: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: told.put(self.process.stdout.readline()), daemon=True).start()  # type: ignore[union-attr]
        self.url: str = json.loads(told.get(timeout=PATIENCE))["endpoint"]
        self.port = int(self.url.rsplit(":", 1)[1])
        self.token = (home / "token").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, path: str, body: Json | None = None) -> Json:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            said: Json = json.load(answer)
            return said

    def status(self) -> Json:
        return self.ask("/status")

    def notify(self, model_id: str, version: int, ratio: float | None = None, incarnation: int = 1) -> Json:
        """A trainer has published a version: it took 100 ms to offload and 50 ms to seal."""
        spans = [
            {"lane": "trainer", "what": "offload", "began_ms_ago": 160.0, "ended_ms_ago": 60.0},
            {"lane": "agent", "what": "seal", "began_ms_ago": 58.0, "ended_ms_ago": 8.0, "bytes": 3 * MIB},
        ]
        body: Json = {"model_id": model_id, "incarnation": incarnation, "version": version, "spans": spans}
        body["sender_endpoint"] = "http://127.0.0.1:7000"
        if ratio is not None:
            body.update(delta_ratio=ratio, delta_sparsity=1 - ratio / 2)
        return self.ask("/notify_version", body)


class Member:
    """A receiver of the controller."""

    def __init__(self, controller: Controller, name: str, models: list[str], host: str = "node-1") -> None:
        self.controller = controller
        self.peer = {"receiver": name, "session": time.time_ns()}
        self.taken = 0
        self.doing: list[Json] = []
        join = {"peer": self.peer, "models": models, "host": host, "release": "0.1.0"}
        controller.ask("/register_receiver", join)

    def poll(self) -> list[Json]:
        """What it is to do. Says that it is alive, and what it is doing."""
        poll = {"peer": self.peer, "after": self.taken, "timeout_ms": 0, "doing": self.doing}
        orders: list[Json] = self.controller.ask("/poll_orders", poll)["orders"]
        self.taken = max([self.taken, *(o["seq"] for o in orders)])
        return [o["task"] for o in orders]

    def report(self, order: int, identity: Json, outcome: Any, spans: list[Json], **more: Any) -> None:
        report = {
            "peer": self.peer,
            "order": order,
            "identity": identity,
            "outcome": outcome,
            "spans": spans,
            **more,
        }
        self.controller.ask("/report", report)

    def carry_out(self, task: Json) -> None:
        """Does a task well: a pull of 40 ms and an apply, or a pause of 12.25 ms and a load."""
        if task["do"] == "stage":
            spans = [
                {
                    "lane": "wire",
                    "what": "pull delta",
                    "began_ms_ago": 60.0,
                    "ended_ms_ago": 20.0,
                    "bytes": 3 * MIB,
                },
                {"lane": "wire", "what": "apply", "began_ms_ago": 20.0, "ended_ms_ago": 0.0},
            ]
            self.report(task["order"], task["identity"], "staged", spans, mode="delta")
        if task["do"] == "load":
            for identity in task["identities"]:
                spans = [{"lane": "engine", "what": "load", "began_ms_ago": 12.25, "ended_ms_ago": 0.0}]
                self.report(task["order"], identity, "loaded", spans, pause_ms=12.25)

    def fail(self, task: Json, reason: str) -> None:
        phase = {"stage": "staging", "load": "loading"}[task["do"]]
        identity = task.get("identity") or task["identities"][0]
        self.report(
            task["order"], identity, {"failed": {"phase": phase, "kind": "peer_lost", "reason": reason}}, []
        )


def settle(members: list[Member]) -> None:
    """Everybody does what there is to do, until nothing is left."""
    for _ in range(20):
        tasks = [(member, task) for member in members for task in member.poll()]
        for member, task in tasks:
            member.carry_out(task)
        if not tasks:
            return
    raise AssertionError("the controller always has more to do")
