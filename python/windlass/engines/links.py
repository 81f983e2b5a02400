"""A model directory whose weights are an image in place.

``update_weights_from_disk`` takes a directory and reads every ``*.safetensors`` file in it, by the index if there is one.
Configuration and tokenizer are not read again, but the directory becomes the engine's ``model_path``, which clients ask
for; so they are there too. Nothing is copied: all entries are symbolic links. An index and other weights of the
checkpoint are left out; with them the engine would look for shards that are not there, or load old weights.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from windlass.atomic import replacing
from windlass.errors import WindlassInvalid

__all__ = ["WEIGHTS", "link_model", "side_files"]

#: What the image is called in the directory.
WEIGHTS = "model.safetensors"
_LEFT_OUT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".msgpack", ".h5", ".onnx")


def link_model(directory: Path, image: Path, checkpoint: Path | None) -> Path:
    """Makes ``directory`` a model: the file ``image`` as its weights, everything else that ``checkpoint`` has.

    Calling it again brings it up to date; links that are right are left alone.
    """
    if not image.is_file():
        raise WindlassInvalid(
            f"{image} is not a file: an engine cannot read an image that is anonymous memory"
        )
    wanted = {WEIGHTS: image.resolve()}
    if checkpoint is not None and checkpoint.is_dir():
        wanted |= side_files(checkpoint)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        present = list(directory.iterdir())
        own = [entry for entry in present if not entry.is_symlink()]
        if own:
            # A user's files, such as the checkpoint itself: they are neither replaced nor loaded by accident.
            raise WindlassInvalid(
                f"{directory} has {own[0].name}, which is not a link of ours",
                "give links= a directory of its own",
            )
        for entry in present:
            if entry.name not in wanted:
                entry.unlink()
        for name, target in wanted.items():
            _link(directory / name, target)
    except OSError as e:
        raise WindlassInvalid(
            f"the links to {image} cannot be made in {directory}: {e.strerror}",
            "give links= another directory",
        ) from e
    return directory


def side_files(checkpoint: Path) -> dict[str, Path]:
    """The files of a checkpoint without its weights and their index, by name."""
    return {
        entry.name: entry.resolve()
        for entry in sorted(checkpoint.iterdir())
        if entry.is_file() and not entry.name.endswith(_LEFT_OUT) and not entry.name.startswith(".")
    }


def _link(path: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_symlink() and Path(os.readlink(path)) == target:
            return
    # Put in place at once: an engine never finds the name missing.
    with replacing(path) as draft:
        draft.symlink_to(target)
