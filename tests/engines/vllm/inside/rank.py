"""One of two ranks of an engine, for the tests of this directory: loads the orders it is given, line by line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="")
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

import pytest  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import building  # noqa: E402
from windlass.load import Live, LoadOrder, series  # noqa: E402


def main() -> None:
    rank, world, address, checkpoint = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    # Names what ranks on a CPU share.
    os.environ["VLLM_DIST_IDENT"] = address.rpartition(":")[2]
    building.keep_plain(pytest.MonkeyPatch())
    worker = building.session(checkpoint, rank=rank, world=world, address=address)
    live = Live(worker, rank=rank, engine="vllm")
    say({"ready": rank})
    for line in sys.stdin:
        asked = json.loads(line)
        if "order" in asked:
            say(live.load(LoadOrder.from_dict(asked["order"])).to_dict())
        elif "series" in asked:
            # Rehearsed request by request, in the middle of vLLM's own session.
            series.TOGETHER = 1
            pairs = list(load_file(asked["series"]).items())
            for at in range(0, len(pairs), 4):
                live.series.feed(pairs[at : at + 4])
            live.series.finish()
            say(live.report().to_dict())
        elif "digest" in asked:
            say(live.digest())
        else:
            fresh = building.session(Path(asked["fresh"]), rank=rank, world=world, address=address)
            ours, theirs = building.bits(worker.model), building.bits(fresh.model)
            say({"different": [name for name in theirs if ours[name] != theirs[name]], "all": len(theirs)})


def say(value: object) -> None:
    sys.stdout.write("windlass " + json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
