"""scales.S -> data/backbone/scale=S"""

import shutil
from pathlib import Path
from typing import Any

from ponderttt import fetch, models, stage


def make(view: Any, scale: str) -> None:
    """The frozen language model of one scale, as safetensors with its tokenizer."""
    work = stage.work_folder("backbone", [scale, stage.plain(view.scales[scale])])
    shutil.rmtree(work)
    models.prepare(view.scales[scale], work, fetch.DOWNLOADS)
    stage.publish(work, Path(f"data/backbone/scale={scale}"))


if __name__ == "__main__":
    stage.run(make, reads=["scales"], arguments=["scale"])
