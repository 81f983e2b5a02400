"""The trainer of `windlass demo --engine`: teaches a tiny model one sentence, and publishes every version.

    python train.py '{"checkpoint": DIR, "region_dir": DIR, "controller": URL, "token_file": FILE, "steps": N, "pace": SECONDS}'

It asks the controller for an eval of every version. The eval names the question and the answer of the trainer's own model; the demo
asks the server. Standard input is a pipe from the demo. The first line says that the server serves; the trainer ends when the
pipe closes.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from windlass import WeightManager

SENTENCE = "A windlass hauls the anchor up, link by link."
PROMPT = "A wind"
#: Optimizer steps after which the model knows the sentence, with room to spare.
UPDATES = 24
#: The longest wait for the server's answer to one version, in seconds.
TIMEOUT = 300.0


begin = threading.Event()


def obey_the_demo() -> None:
    while os.read(0, 4096):
        begin.set()
    os.kill(os.getpid(), signal.SIGINT)


def tell(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def make_tokenizer() -> PreTrainedTokenizerFast:
    # One token for each letter. Byte-level tokenizers write a space as Ġ.
    letters = sorted({*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZĠ.,"})
    tokens = {letter: i for i, letter in enumerate(["<end>", *letters])}
    tokenizer = Tokenizer(models.BPE(tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def make_model(vocabulary: int) -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        # Random answers should look random.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def main(options: SimpleNamespace) -> None:
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    policy = make_model(len(tokenizer))
    # On a GPU, engines serve half precision only.
    gpu = torch.cuda.is_available()
    dtype = "bfloat16" if gpu else "float32"
    policy.to(getattr(torch, dtype)).save_pretrained(options.checkpoint)
    policy.float()
    tokenizer.save_pretrained(options.checkpoint)
    # All answers have one length.
    policy.generation_config.eos_token_id = None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=4e-4)
    sentence = tokenizer(SENTENCE, return_tensors="pt").input_ids
    prompt = tokenizer(PROMPT, return_tensors="pt")
    start = prompt.input_ids.shape[1]
    tokens = sentence.shape[1] - start
    tell("ready", gpu=gpu, dtype=dtype, sentence=SENTENCE)
    begin.wait()

    agent = {"token_file": options.token_file}
    with WeightManager(
        model_id="policy",
        region_dir=options.region_dir,
        generator_dtype=dtype,
        controller=options.controller,
        controller_token_file=options.token_file,
        agent=agent,
    ) as wm:
        for version in range(options.steps + 1):
            begun = time.monotonic()
            # Version 0 is what the server was started with: random weights.
            for _ in range(-(-UPDATES // options.steps) if version else 0):
                loss = policy(input_ids=sentence, labels=sentence).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            wm.offload(policy, version)
            with torch.no_grad():
                loss = policy(input_ids=sentence, labels=sentence).loss.item()
                output = policy.generate(**prompt, max_new_tokens=tokens, do_sample=False)
            own = tokenizer.decode(output[0, start:], skip_special_tokens=True)
            question = {"prompt": PROMPT, "max_tokens": tokens, "own": own, "loss": loss}
            told = wm.notify_version(version, eval=question, timeout=TIMEOUT)
            if told is None or told.eval_error is not None:
                raise RuntimeError(f"version {version} was not evaluated: {told}")
            time.sleep(max(0.0, options.pace - (time.monotonic() - begun)))
        tell("trained")
        signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=obey_the_demo, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        main(SimpleNamespace(**json.loads(sys.argv[1])))
