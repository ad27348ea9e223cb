import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import disturb
import pytest
import tiny
import torch

# Two threads of a busy machine wait for each other; one is as fast on small tensors.
torch.set_num_threads(1)

# DVC runs stages in the plain shell, whatever the user's own is, and neither reports its use nor
# looks for a newer version.
os.environ |= {"SHELL": "/bin/sh", "DVC_TEST": "1"}


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


@pytest.fixture(scope="session")
def undisturbed(
    scored: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], disturb.Trained]:
    """A long training run by so many workers, made once."""

    @functools.cache
    def train(workers: int) -> disturb.Trained:
        folder = shutil.copytree(scored, tmp_path_factory.mktemp("trained") / "project")
        disturb.set_workers(folder, workers=workers, steps=disturb.STEPS)
        tiny.stage(folder, "ttt", "tiny", "0")
        return disturb.trained(folder)

    return train


@pytest.fixture
def in_project(
    copied: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """The copy as working folder; Ray's workers get the functions of the tests by value."""
    from ray import cloudpickle

    monkeypatch.chdir(copied)
    for module in (disturb, request.module):
        cloudpickle.register_pickle_by_value(module)
    yield copied
    for module in (disturb, request.module):
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[disturb.TwoNodes]:
    """A cluster of two nodes with one CPU each."""
    cluster = disturb.TwoNodes(tmp_path / "cluster.log")
    yield cluster
    cluster.stop()
