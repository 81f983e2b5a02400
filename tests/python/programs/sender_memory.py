"""Sends chunks, and tells how far the memory of the sender grew meanwhile."""

import asyncio
import json
import sys
from pathlib import Path

import torch

from windlass import strategy_from_config
from windlass.extract.chunk import WeightChunk
from windlass.transfer.spool import Spool

settings, size, count = json.loads(sys.argv[1])


def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    parts = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
    return [parts["RssAnon"], parts["RssFile"]]


seen = []
read = Spool.__getitem__


def look(spool, name):
    seen.append(memory())
    return read(spool, name)


Spool.__getitem__ = look


def chunks(value):
    for number in range(count):
        # Written, so that it is memory and not a promise.
        tensor = torch.full((size // 4,), float(value + number))
        chunk = WeightChunk.of([(f"layers.{number}.q.lora_A.weight", tensor)])
        del tensor
        yield chunk
        del chunk
        seen.append(memory())


class Client:
    async def update_weights(self, request):
        seen.append(memory())


async def run():
    strategy = strategy_from_config(settings)
    with strategy.create_sender(strategy.create_sync_info()) as sender:
        before = memory()
        for value in range(2):
            await sender.send_chunks(chunks(value), Client())
        return [max(moment[i] for moment in seen) - before[i] for i in (0, 1)]


sys.stdout.write(json.dumps(asyncio.run(run())))
