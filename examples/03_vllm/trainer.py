"""Teaches the policy a sentence, publishes every version, and asks the server that follows.

    python trainer.py CHECKPOINT REGION_DIR vllm=http://127.0.0.1:8000 STEPS

The trainer does not know how the weights reach the server: `windlass receive --engine` brings them there. It waits for each
version as a rollout would, and compares the server's answer with its own.
"""

import json
import sys
import time
import urllib.request
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from windlass import WeightManager

SENTENCE = "A windlass hauls the anchor up, link by link."
PROMPT = "A wind"
#: The route of each server that names its weights' version, as `windlass:<incarnation>:<version>`.
VERSION_ROUTES = {"vllm": "/weight_info", "sglang": "/model_info"}


def request(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def wait_for(version: int, engine: str, url: str, timeout: float = 600.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            served = str(request(url + VERSION_ROUTES[engine])["weight_version"])
        except OSError:
            served = "nothing yet"
        if served.endswith(f":{version}"):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{url} did not serve version {version} within {timeout:g} s; it serves {served}")


def ask_server(url: str, tokens: int) -> str:
    body = {"model": "policy", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    return str(request(url + "/v1/completions", body)["choices"][0]["text"])


def main(checkpoint: str, region_dir: str, server: str, steps: int) -> None:
    engine, _, url = server.partition("=")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    sentence = tokenizer(SENTENCE, return_tensors="pt").input_ids
    prompt = tokenizer(PROMPT, return_tensors="pt")
    start = prompt.input_ids.shape[1]
    tokens = sentence.shape[1] - start

    with WeightManager(model_id="policy", region_dir=region_dir) as wm:
        for version in range(1, steps + 1):
            for _ in range(3):
                loss = policy(input_ids=sentence, labels=sentence).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            wm.offload(policy, version)
            output = policy.generate(**prompt, max_new_tokens=tokens, do_sample=False)
            own = tokenizer.decode(output[0, start:], skip_special_tokens=True)
            wait_for(version, engine, url)
            answer = ask_server(url, tokens)
            print(f"version {version}  loss {loss.item():.3f}  {engine}: {PROMPT + answer!r}", flush=True)
            if answer != own:
                sys.exit(f"version {version}: the trainer's own answer is {PROMPT + own!r}")
    print(f"{engine} gave the trainer's own answer at every version")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
