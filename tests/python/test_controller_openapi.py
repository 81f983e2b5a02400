"""The controller's endpoints hold what their description says, whatever is sent to them."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import children

TOKEN = "0123456789abcdef0123456789abcdef"
# Waits are short, so that gates and evals that nothing will ever open do not take the test's time.
CONTROLLER = ["controller", "--json", "--with-parent", "--set=main=actor,verifier"]
DEADLINES = ["--max-wait=0.1", "--eval-timeout=0.1", "--heartbeat=5"]

# What the description promises for valid requests, and what no schema can say: names that nobody knows (404), words
# of an earlier life (409), fields that contradict each other (400), waits that end (504) and limits (507).
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503, 504, 507]
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 401, 404, 409, 503, 504, 507]
"""


@pytest.fixture
def endpoint() -> Iterator[str]:
    environment = {**children.environment(), "WINDLASS_TOKEN": TOKEN}
    command = [sys.executable, "-m", "windlass", *CONTROLLER, *DEADLINES]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        listening = json.loads(process.stdout.readline())
        yield listening["endpoint"]
        # It ends with its standard input, and well.
        process.stdin.close()
        assert process.wait(timeout=10) == 0


def fetch(url: str) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def attack(home: pathlib.Path, endpoint: str, description: dict[str, Any], *options: str) -> None:
    """Every endpoint but the stream, which does not end."""
    (home / "schemathesis.toml").write_text(CONFIG)
    (home / "openapi.json").write_text(json.dumps(description))
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "--config-file",
        "schemathesis.toml",
        "run",
        "openapi.json",
    ]
    whom = ["--url", endpoint, "--header", f"Authorization: Bearer {TOKEN}", "--exclude-path", "/events"]
    how = ["--generation-deterministic", "--no-color", *options]
    ran = subprocess.run([*command, *whom, *how], cwd=home, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert "Tested: 14" in ran.stdout, ran.stdout[-2000:]


@pytest.mark.timeout(240)
def test_no_request_makes_the_controller_break_its_description(tmp_path: pathlib.Path, endpoint: str) -> None:
    attack(tmp_path, endpoint, fetch(f"{endpoint}/openapi.json"), "--max-examples=8")
    assert fetch(f"{endpoint}/healthz") == {"ok": True}


@pytest.mark.timeout(240)
def test_requests_about_models_that_exist_are_answered_as_described(
    tmp_path: pathlib.Path, endpoint: str
) -> None:
    description = fetch(f"{endpoint}/openapi.json")
    # With few names, joins, notifies, polls and reports are about each other.
    schemas = description["components"]["schemas"]
    schemas["ModelId"] = {"type": "string", "enum": ["actor", "verifier"]}
    schemas["SetName"] = {"type": "string", "enum": ["main"]}
    schemas["ReceiverId"] = {"type": "string", "enum": ["a", "b"]}
    # Without an incarnation an agent would have to be asked, and there is none.
    schemas["NotifyVersion"]["required"].append("incarnation")
    properties = schemas["NotifyVersion"]["properties"]
    properties["sender_endpoint"] = {"type": "string", "enum": ["http://127.0.0.1:9", "agent:7000"]}
    attack(tmp_path, endpoint, description, "--mode=positive", "--max-examples=20")
    status = fetch(f"{endpoint}/status")
    assert {trainer["model_id"] for trainer in status["trainers"]} == {"actor", "verifier"}
    assert len(status["sets"]) == 1
    assert len(status["errors"]) <= 50
