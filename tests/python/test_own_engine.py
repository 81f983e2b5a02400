"""The guide for engines of one's own: what it shows for a GPU runs as it stands there, here on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from windlass import WeightManager

GUIDE = Path(__file__).parent.parent.parent / "docs" / "own-engine.md"


def test_the_snippet_for_an_engine_on_a_gpu_follows_every_version(tmp_path: Path) -> None:
    found = re.search(r"## On a GPU\n.*?```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert found is not None
    trainer = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8)).requires_grad_(False)
    told: list[str] = []
    with WeightManager(model_id="own", region_dir=str(tmp_path)) as wm:

        def publish(version: int) -> None:
            trainer[0].weight[version] += 1
            wm.offload(trainer, version, 0, 1)
            wm.wait_delta_ready(version, timeout=60)

        def tell(line: str) -> None:
            told.append(line)
            if len(told) < 3:
                publish(len(told) + 1)

        publish(1)
        assert wm.token_file is not None
        token = Path(wm.token_file).read_text().strip()
        scope = {"endpoint": wm.endpoint, "token": token, "last": 3, "print": tell}
        snippet = found.group(1).replace("/dev/shm/images", str(tmp_path / "images"))
        exec(compile(snippet, str(GUIDE), "exec"), scope)
    assert [line.rpartition(", ")[0] for line in told] == [
        "version 1, loaded session",
        "version 2, loaded sparse",
        "version 3, loaded sparse",
    ]
    engine = scope["engine"]
    for name, parameter in trainer.named_parameters():
        assert torch.equal(parameter, engine.model.get_parameter(name).cpu()), name  # type: ignore[attr-defined]
