import shutil
from pathlib import Path

import pytest
import tiny
import torch

# Two threads of a busy machine wait for each other; one is as fast on small tensors.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny project run up to its scores; tests read it, or copy it to change it."""
    folder = tiny.project(tmp_path_factory.mktemp("project"))
    tiny.stage(folder, "corpus")
    tiny.stage(folder, "backbone", "tiny")
    tiny.stage(folder, "chunks", "tiny")
    tiny.stage(folder, "hidden", "tiny")
    tiny.stage(folder, "ttt", "tiny", "0")
    tiny.stage(folder, "scores", "tiny", "0")
    return folder


@pytest.fixture
def copied(scored: Path, tmp_path: Path) -> Path:
    """A copy of the scored project that a test may spoil."""
    return shutil.copytree(scored, tmp_path / "project")
