"""Run by SGLang's Python: an ``sglang.Engine`` in this process, driven by lines of JSON.

Each line in is ``{"load": order, "options": {…}}`` or ``{"generate": [prompts], "tokens": n}``; each line out is what came
of it, behind a mark that no log has.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Any

MARK = "windlass-answer: "


def main(model: str) -> None:
    import sglang
    from windlass.engines.sglang import SGLangWeightLoader
    from windlass.engines.sglang.custom import PATH
    from windlass.errors import WindlassError

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        dtype="float32",
        disable_overlap_schedule=True,
        attention_backend="torch_native",
        mem_fraction_static=0.4,
        max_total_tokens=4096,
        custom_weight_loader=[PATH],
        log_level="warning",
    )

    def answer(words: dict[str, Any]) -> Any:
        if "generate" in words:
            sampling = {"temperature": 0.0, "max_new_tokens": words["tokens"], "ignore_eos": True}
            told = [
                engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in words["generate"]
            ]
            return [one["output_ids"] for one in told]
        loader = SGLangWeightLoader(engine, **words["options"])
        try:
            loaded = asyncio.run(loader.load_image(words["load"]))
        except WindlassError as e:
            return {"error": str(e), "name": e.name, "dirty": loader.dirty}
        seen = asyncio.run(loader.weight_version())
        return {"way": loaded.way, "label": loaded.label, "seen": seen, "reports": len(loaded.reports)}

    sys.stdout.write(f"{MARK}{json.dumps('ready')}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(f"{MARK}{json.dumps(answer(json.loads(line)), default=dataclasses.asdict)}\n")
        sys.stdout.flush()
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
