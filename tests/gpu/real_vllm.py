"""A real vLLM on a GPU takes versions by plan: dense, tied and mixture-of-experts models, eager and compiled, bf16 and quantised.

    PYTHONPATH=python python tests/gpu/real_vllm.py [SCENARIO...] [--vllm-python PYTHON]

Needs a Python with vLLM (this one, or ``--vllm-python`` / ``WINDLASS_VLLM_PYTHON``), transformers, a CUDA device and the built
extension. Scenarios run at the same time, each in processes of its own: a trainer and an ``LLM`` that began with random weights,
then an ``LLM`` that has never heard of Windlass, on the checkpoint that the trainer wrote. For each version

- every module is written directly, by what changed, and nothing falls to vLLM's own loader;
- the digest of the live weights is that of the version.

At the end all parameters and buffers are those of the fresh engine, bit by bit. In eager mode greedy tokens and their log
probabilities are, too; compiled engines of one checkpoint differ among themselves (torch.compile), so that tokens prove nothing
there. Quantised models are published quantised (``dtypes``), and the fresh engine's checkpoint has the tensors of the last image.
``slice`` publishes a tensor that the engine does not read; the worker says what it reads, and brings a slice without that tensor.
``online`` is an engine that quantises bf16 weights while it loads them: its own loader does that, each time, and it is said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import needs

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 300.0
VERSIONS = 4

#: Keyword arguments of the engine, and of the model's configuration.
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eager": ({"enforce_eager": True}, {}),
    "tied": ({"enforce_eager": True}, {"tie_word_embeddings": True}),
    "moe": ({"enforce_eager": True}, {"moe": True}),
    "compiled": ({}, {}),
    "lora": ({"enforce_eager": True, "enable_lora": True, "max_lora_rank": 8}, {}),
    "sleep": ({"enforce_eager": True, "enable_sleep_mode": True}, {}),
    "slice": ({"enforce_eager": True}, {}),
    "fp8_block128": ({"enforce_eager": True}, {}),
    "fp8_block128_moe": ({"enforce_eager": True}, {"moe": True}),
    "fp8_channel": ({"enforce_eager": True}, {}),
    "int8_channel": ({"enforce_eager": True}, {}),
    "online": ({"enforce_eager": True, "quantization": "fp8"}, {}),
}
#: How weights are published, where that is not as they are.
SCHEMES = {name: name.removesuffix("_moe") for name in SCENARIOS if "_channel" in name or "_block" in name}
#: Where no plan can be used, what must be said instead.
REFUSED = {"lora": "LoRA is on"}
#: Where vLLM's own loader does some modules: it quantises, or lays weights out anew.
PARTLY = {"online", "fp8_block128_moe", "fp8_channel", "int8_channel"}
#: Scales of a quantised cache, which these engines do not have: `dummy` makes them up in quantised models.
UNUSED = ("attn._k_scale", "attn._v_scale", "attn._q_scale", "attn._prob_scale")
PROMPTS = [[5, 77, 130, 9], [300, 301, 302, 44, 7, 19], [42]]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def make(folder: Path, tie_word_embeddings: bool = False, moe: bool = False) -> Any:
    """A random model on the GPU; its configuration in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": 16_000,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.05,
    }
    if moe:
        experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
        config: Any = Qwen3MoeConfig(**common, **experts, decoder_sparse_step=1)
        config.architectures = ["Qwen3MoeForCausalLM"]
    else:
        config = Qwen3Config(**common)
        config.architectures = ["Qwen3ForCausalLM"]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return model


def step(model: Any) -> None:
    """Changes about 1 % of the weights."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, device=parameter.device) < 0.01
            parameter += chosen * (0.05 * torch.randn_like(parameter))


def engine(folder: str, scenario: str, *, dummy: bool) -> Any:
    from vllm import LLM

    options = dict(SCENARIOS[scenario][0])
    return LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        # Without it vLLM measures what is free, which others change meanwhile.
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.1,
        load_format="dummy" if dummy else "auto",
        seed=0,
        **options,
    )


def answers(llm: Any) -> list[list[Any]]:
    """Greedy tokens, each with its logarithmic probability."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=0)
    done = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], how, use_tqdm=False)
    found = [one.outputs[0] for one in done]
    return [[[t, at[t].logprob] for t, at in zip(o.token_ids, o.logprobs, strict=True)] for o in found]


def sums(worker: Any) -> dict[str, int]:
    """A number for the bits of every parameter and buffer of a worker's model."""
    import torch

    model = worker.get_model()
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(UNUSED):
            continue
        bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
        place = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64)
        found[name] = int(((bits + 1) * (place * 2654435761 + 97)).sum().item())
    return found


#: What only the trainer of ``slice`` has, and its bytes.
OTHER, OTHER_BYTES = "other.weight", 2 * 4096 * 4096


def slice_order(llm: Any, manager: Any, version: int, home: Path) -> dict[str, Any]:
    """Has the worker bring what it reads of a version, and returns the order to load it."""
    from windlass import open_image
    from windlass.load import LoadOrder

    token = Path(manager.token_file).read_text().strip()
    pull = {
        "endpoint": manager.endpoint,
        "token": token,
        "image_dir": str(home / "slices"),
        "slice": "always",
    }
    pull |= {"model_id": "policy", "incarnation": manager.incarnation, "version": version}
    told, until = llm.collective_rpc("windlass_pull", args=(pull,))[0], time.monotonic() + PATIENCE
    while not told["done"]:
        assert time.monotonic() < until, "the slice did not come"
        time.sleep(0.005)
        told = llm.collective_rpc("windlass_pulled")[0]
    assert told["error"] is None, told["error"]
    with open_image(told["image"]) as image:
        kept = image.path.stat().st_blocks * 512
        whole = image.path.stat().st_size
        assert kept <= whole - OTHER_BYTES, (kept, whole)
        return dict(LoadOrder.of(image).to_dict())


def follow(scenario: str, home: Path) -> dict[str, Any]:
    """An engine that starts with weights of no meaning, through several versions."""
    import torch

    from windlass import Receiver, WeightManager, _windlass
    from windlass.load import LoadOrder

    folder = home / "model"
    model = make(folder, **SCENARIOS[scenario][1])
    scheme = SCHEMES.get(scenario)
    rows: list[dict[str, Any]] = []
    options: dict[str, Any] = {} if scheme is None else {"dtypes": {"*.weight": scheme}}
    with WeightManager(
        model_id="policy", region_dir=str(home), offload_mode="copy", generator_dtype="bfloat16", **options
    ) as manager:

        def weights() -> Any:
            if scenario != "slice":
                return model
            other = torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda")
            return [*model.named_parameters(), (OTHER, other)]

        manager.offload(weights(), 1, 0, 1)
        config = json.loads((folder / "config.json").read_text())
        if scheme is not None:
            config["quantization_config"] = manager.quantization_config()
            (folder / "config.json").write_text(json.dumps(config))
        llm = engine(str(folder), scenario, dummy=True)
        source = {"endpoint": manager.endpoint, "token_file": manager.token_file}
        with Receiver(home / "images", keep_deltas=16, **source) as receiver:
            for version in range(1, VERSIONS + 1):
                if version > 1:
                    step(model)
                    manager.offload(weights(), version, 0, 1)
                if scenario == "slice":
                    order = slice_order(llm, manager, version, home)
                    report = llm.collective_rpc("windlass_load", args=(order,))[0]
                    assert report["error"] is None and report["state"] == "clean", report
                    rows.append({"version": version, "ms": report["last"]["ms"], "digest": None, **report})
                    continue
                receiver.wait(version, PATIENCE)
                if scenario == "sleep" and version > 2:
                    level = version - 2
                    llm.sleep(level)
                    llm.wake_up()
                with receiver.hold() as image:
                    order = LoadOrder.of(image).to_dict()
                    checked = llm.collective_rpc("windlass_check", args=(order,))[0]
                    assert checked["error"] is None, checked["error"]
                    began = time.perf_counter()
                    report = llm.collective_rpc("windlass_load", args=(order,))[0]
                    took = 1e3 * (time.perf_counter() - began)
                    assert report["error"] is None and report["state"] == "clean", report
                    told = llm.collective_rpc("windlass_digest")[0]
                    digest = None
                    if told["parts"] is not None:
                        held = _windlass.open_image(order["image"], 60.0, 60.0)
                        combined = _windlass.combine_digests(held.layout(), [json.dumps(told["parts"])])
                        held.finish()
                        digest = json.loads(combined)["digest"]
                    rows.append({"version": version, "ms": took, "digest": digest == image.digest, **report})
                assert llm.reset_prefix_cache() is not False
                answers(llm)
            if scheme is not None:
                from safetensors.torch import save_file

                (home / "checkpoint").mkdir()
                with receiver.hold() as image:
                    tensors = {name: tensor.clone() for name, tensor in image.tensors.items()}
                save_file(tensors, home / "checkpoint" / "model.safetensors", {"format": "pt"})
    tokens = answers(llm)
    if scheme is None:
        model.save_pretrained(home / "checkpoint")
    (home / "checkpoint" / "config.json").write_text((folder / "config.json").read_text())
    return {"rows": rows, "answers": tokens, "sums": llm.collective_rpc(sums)[0]}


def judge(scenario: str, found: dict[str, Any], fresh: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    wrong = []
    for row in found["rows"]:
        version, plan, last, loads = row["version"], row["plan"], row["last"], row["loads"]
        refused = REFUSED.get(scenario)
        if refused is not None:
            if refused not in last["why"] or last["how"] != "session" or loads.get("unplanned") != version:
                wrong.append(f"version {version}: {last}, {loads}: expected a reason with {refused!r}")
            continue
        # The weights are gone after a sleep of level 2.
        asleep = scenario == "sleep" and version == 4
        expected = ("session",) if version == 1 else ("dense", "session") if asleep else ("sparse",)
        partly = scenario in PARTLY
        if partly:
            # Some of it by the session, which must be said of every version but the first.
            if version > 1 and not last["why"]:
                wrong.append(f"version {version}: {last}: vLLM's own loader was used, and nothing said so")
            continue
        if last["how"] not in expected or (last["why"] and not asleep):
            wrong.append(f"version {version} was loaded by {last}, not {' or '.join(expected)}")
        if plan["session"] or not plan["replayed"]:
            wrong.append(f"version {version}: modules by vLLM's own loader: {plan['why']}")
        # Of a slice, the bits at the end are compared alone.
        if row["digest"] is not True and scenario != "slice":
            wrong.append(f"version {version}: the digest of the live weights is not that of the version")
    differ = [name for name in fresh["sums"] if found["sums"].get(name) != fresh["sums"][name]]
    if differ or found["sums"].keys() != fresh["sums"].keys():
        wrong.append(
            f"{len(differ)} of {len(fresh['sums'])} tensors differ from a fresh engine's: {differ[:5]}"
        )
    if SCENARIOS[scenario][0].get("enforce_eager") and found["answers"] != fresh["answers"]:
        wrong.append(f"greedy tokens {found['answers']} are not those of a fresh engine, {fresh['answers']}")
    return wrong


def child(part: str, scenario: str, home: Path) -> None:
    """One engine in this process; what it found in a file."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if part == "follow":
        found = follow(scenario, home)
    else:
        llm = engine(str(home / "checkpoint"), scenario, dummy=False)
        found = {"answers": answers(llm), "sums": llm.collective_rpc(sums)[0]}
    (home / f"{part}.json").write_text(json.dumps(found))
    # Engines of some versions take their time to end.
    sys.stdout.flush()
    os._exit(0)


def run(scenarios: list[str], python: str, homes: dict[str, Path], part: str) -> dict[str, dict[str, Any]]:
    """Engines side by side; what those found that ended well."""
    paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "WINDLASS_LOG": os.environ.get("WINDLASS_LOG", "info")}
    processes = {}
    for scenario in scenarios:
        log = (homes[scenario] / f"{part}.log").open("wb")
        command = [python, __file__, "--part", part, "--home", str(homes[scenario]), scenario]
        processes[scenario] = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    found = {}
    until = time.monotonic() + PATIENCE
    for scenario, process in processes.items():
        try:
            code: int | str = process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = f"killed after {PATIENCE:g} s"
        if code == 0:
            found[scenario] = json.loads((homes[scenario] / f"{part}.json").read_text())
        else:
            text = (homes[scenario] / f"{part}.log").read_text(errors="replace").splitlines()
            say(f"{scenario}, {part}: ended with {code}; the end of what it said:")
            say("\n".join("    " + line[:400] for line in text[-40:]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="*", choices=[*SCENARIOS, []], help=", ".join(SCENARIOS))
    parser.add_argument("--vllm-python", default=os.environ.get("WINDLASS_VLLM_PYTHON", sys.executable))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    scenarios = given.scenario or list(SCENARIOS)
    if given.part:
        child(given.part, scenarios[0], given.home)
    needs.need("torch")
    needs.need_device("vLLM on a GPU")
    asked = subprocess.run(
        [given.vllm_python, "-c", "import vllm"], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        line = f"SKIPPED: no vLLM in {given.vllm_python} ({last}); nothing of vLLM on a GPU was tested: name a Python that has it"
        needs.end(f"{line} by --vllm-python or WINDLASS_VLLM_PYTHON", 0)
    failed = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="windlass-vllm-") as folder:
        homes = {scenario: Path(folder) / scenario for scenario in scenarios}
        for home in homes.values():
            home.mkdir()
        found = run(scenarios, given.vllm_python, homes, "follow")
        fresh = run(list(found), given.vllm_python, homes, "fresh")
        for scenario in scenarios:
            if scenario not in fresh:
                failed += 1
                continue
            wrong = judge(scenario, found[scenario], fresh[scenario])
            failed += bool(wrong)
            rows = found[scenario]["rows"]
            plan = rows[-1]["plan"]
            times = ", ".join(f"{row['last']['how']} {row['ms']:.1f} ms" for row in rows)
            say(
                f"{scenario}: {'FAILED' if wrong else 'passed'}: {plan['replayed']} modules written directly, "
                f"{plan['session']} by vLLM's own loader; {times}"
            )
            for module, why in list(plan["why"].items())[:2]:
                say(f"    by vLLM's own loader: {module}: {why}")
            for line in wrong:
                say(f"    {line}")
            kept = os.environ.get("OUT")
            if wrong and kept:
                (Path(kept) / f"{scenario}.log").write_bytes((homes[scenario] / "follow.log").read_bytes())
    say(f"{len(scenarios) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
