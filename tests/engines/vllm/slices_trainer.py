"""The trainer of test_slices.py, on a host of its own: publishes versions, has a server bring and load them, and compares
its answers with the model's. Prints a line of JSON for each version.

    python slices_trainer.py CHECKPOINT ADDRESS URL TOKEN
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import tiny  # noqa: E402
from windlass.frameworks.sender import Sender  # noqa: E402
from windlass.http import HttpClient  # noqa: E402

PATIENCE = 600.0


def main() -> None:
    checkpoint, address, url, token = sys.argv[1:]
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    client = HttpClient(url, token=token, timeout=PATIENCE, attempts=1)
    settings = {"region_dir": "/dev/shm", "slices": 2, "agent": {"bind": address}, "timeout": PATIENCE}

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        return client.post(path, body, stage="ask", timeout=PATIENCE).object()

    sender = Sender(settings)
    try:
        for version in (1, 2, 3):
            (tiny.stir if version == 1 else tiny.stir_some)(model, version)
            published = sender.publish_model(model)
            digest, source = sender.sealed(PATIENCE), sender.source()
            pulled = post("/windlass/v1/pull", source.order(published.identity, PATIENCE, "/dev/shm/images"))
            order = {"image": pulled["image"], "digest": digest, "timeout": PATIENCE}
            identity = published.identity
            order |= {"model_id": identity.model_id, "incarnation": identity.incarnation, "version": version}
            told = post("/windlass/v1/load", {"order": order})
            asked = [list(prompt) for prompt in tiny.PROMPTS]
            answers = [
                post(
                    "/v1/completions",
                    {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0.0}
                    | {"ignore_eos": True, "return_token_ids": True},
                )["choices"][0]["token_ids"]
                for prompt in asked
            ]
            same = answers == [tiny.greedy(model, tuple(prompt), 12) for prompt in asked]
            hows = [worker["last"]["how"] for worker in told["workers"]]
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            said = {"pulled": pulled, "same": same, "hows": hows, "bytes": size, "version": version}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
            # The test looks at what the hosts have before the next one.
            sys.stdin.readline()
    finally:
        sender.close()


if __name__ == "__main__":
    main()
