"""OpenRLHF with two policy actors and real vLLM engines, synced by Windlass: a program that test_openrlhf.py starts in OpenRLHF's
environment.

    end_to_end.py TRAINED SERVED RESULT OPTION...

TRAINED and SERVED are checkpoints: what the policy begins with, and what the engines do. Options are OpenRLHF's own.
"""

from __future__ import annotations

import copy
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import on_cpu
import patient_ray
import ray

# As in every worker.
on_cpu.setup()

import openrlhf.utils  # noqa: E402
import torch  # noqa: E402
from openrlhf.trainer.ppo_trainer import PPOTrainer  # noqa: E402
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync  # noqa: E402
from openrlhf.trainer.ray.launcher import RayActorGroup  # noqa: E402
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer, PolicyModelActor  # noqa: E402
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor  # noqa: E402

import tiny  # noqa: E402
from windlass import WindlassUnsupported  # noqa: E402


class Parsed(Exception):
    """Options as OpenRLHF's own program reads them."""


def options(words: list[str]) -> Any:
    """OpenRLHF parses and checks them in its program only."""
    make = openrlhf.utils.get_strategy

    def parsed(args: Any) -> Any:
        raise Parsed(args)

    openrlhf.utils.get_strategy = parsed
    sys.argv[1:] = words
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    except Parsed as e:
        return e.args[0]
    finally:
        openrlhf.utils.get_strategy = make


def engine(model: str, reward: list[str]) -> Any:
    """As ``create_vllm_engines`` makes one, but in float32: answers are then the same by transformers, token by token."""
    return RolloutRayActor.options(num_cpus=1, num_gpus=1).remote(
        model=model,
        dtype="float32",
        num_gpus=1,
        enforce_eager=True,
        worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        tensor_parallel_size=1,
        distributed_executor_backend="uni",
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=True,
        remote_rm_url=reward,
    )


def refused(strategy: Any, engines: list[Any]) -> list[str]:
    """What the policy says where it cannot sync its engines."""
    said = []
    for group, option in (("train", "colocate_all"), ("ds", "load_in_4bit")):
        asked = copy.deepcopy(strategy)
        asked.args.train.async_enable = False
        setattr(getattr(asked.args, group), option, True)
        try:
            ActorPPOTrainer(asked, None, None, None, None, vllm_engines=engines)
        except WindlassUnsupported as e:
            said.append(str(e))
    return said


def answers(engine: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    told = ray.get([engine.generate.remote(list(prompt), sampling) for prompt in tiny.PROMPTS], timeout=600)
    return [list(one.outputs[0].token_ids) for one in told]


def expected(policy: Any) -> Any:
    """In each of the policy's actors: what the model answers."""
    import deepspeed

    model = policy.actor.model.module
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        state = {name: value.detach().float().clone() for name, value in model.named_parameters()}
    if torch.distributed.get_rank() != 0:
        return None
    whole = tiny.model("qwen3")
    whole.load_state_dict(state, strict=False)
    return tiny.answers(whole)


def close(policy: Any) -> None:
    """In each of the policy's actors: leaves the region, which the last one removes."""
    policy.trainer.windlass._sender.close()


def main(trained: str, served: str, result: str, *words: str) -> None:
    begun = time.monotonic()
    told: dict[str, Any] = {"seconds": {}}

    def mark(what: str) -> None:
        told["seconds"][what] = round(time.monotonic() - begun, 1)
        sys.stderr.write(f"{what}: {told['seconds'][what]} s\n")

    patient_ray.start(num_cpus=8, num_gpus=8, include_dashboard=False, _node_ip_address="127.0.0.1")
    mark("ray")
    args = options(list(words))
    strategy = openrlhf.utils.get_strategy(args)
    engines = [engine(served, args.reward.remote_url) for _ in range(args.vllm.num_engines)]
    group = RayActorGroup(1, 2, PolicyModelActor)
    trainer = (PPOTrainerAsync if args.train.async_enable else PPOTrainer).remote(
        trained, strategy, group, None, None, None, engines, do_sample=True, max_len=64, max_new_tokens=16,
        temperature=1.0, top_p=1.0,
    )  # fmt: skip
    steps = ray.get(trainer.get_max_steps.remote())
    ray.get(group.async_init_model_from_pretrained(strategy, trained, steps, engines))
    mark("policy")
    told["before"] = [answers(one) for one in engines]
    mark("engines")
    told["refused"] = refused(strategy, engines)
    ray.get(trainer.fit.remote())
    mark("steps")
    told["after"] = [answers(one) for one in engines]
    told["expected"] = ray.get([one.__ray_call__.remote(expected) for one in group._actor_handlers])[0]
    ray.kill(engines[0])
    killed = time.monotonic()
    try:
        ray.get(group.async_run_method(method_name="broadcast_to_vllm"), timeout=600)
    except Exception as e:
        told["killed"] = {"kind": type(e.cause).__name__, "text": str(e.cause)}  # type: ignore[attr-defined]
    told["killed_s"] = time.monotonic() - killed
    mark("killed")
    # OpenRLHF ends its actors without a word.
    ray.get([one.__ray_call__.remote(close) for one in group._actor_handlers], timeout=600)
    Path(result).write_text(json.dumps(told))
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
