"""Ranks that train together: the losses of one, whoever dies."""

import shutil
import sys
from functools import partial

import pytest
import tiny
from disturb import (
    STEPS,
    checkpointed,
    children_of,
    hold_cpus,
    press_ctrl_c,
    set_workers,
    settings,
    some_finished,
    started,
    trained,
    wait_until,
)

from ponderttt import ray_cluster, ray_ranks, shards
from ponderttt.errors import UserError

pytestmark = pytest.mark.ray


def train_disturbed(project, disturb):
    """Train, disturbed after the first checkpoint; exit code and messages."""
    with (
        (project / "errors.txt").open("w") as errors,
        started(sys.executable, "-m", "stages.ttt", "tiny", "0", cwd=project, stderr=errors) as run,
    ):
        wait_until(
            lambda: some_finished(project, "ttt", "checkpoint.safetensors", 1),
            lambda: run.poll() is None,
        )
        disturb(run)
        code = run.wait(timeout=300)
    return code, (project / "errors.txt").read_text()


def test_two_ranks_train_like_one(undisturbed):
    assert len(undisturbed(1).losses) == STEPS
    assert abs(undisturbed(1).losses - undisturbed(2).losses).max() <= 1e-4


def test_training_goes_on_with_the_node_that_is_left(copied, two_nodes, undisturbed):
    """`auto` takes a rank on each node; when one is lost, one rank goes on from the checkpoint,
    and no attempt is spent on the node that is gone."""
    set_workers(copied, workers="auto", address=two_nodes.address, steps=STEPS)
    shutil.rmtree(copied / "data/ttt")
    kept = []

    def lose_one(_):
        kept.extend(checkpointed(copied))
        two_nodes.lose_one()

    code, told = train_disturbed(copied, lose_one)
    assert code == 0, told
    assert "lost or found no place; going on with 1 (attempt 2)" in told
    assert 0 < len(kept) < STEPS
    assert trained(copied).speeds[: len(kept)] == kept
    assert abs(trained(copied).losses - undisturbed(1).losses).max() <= 1e-4


def test_a_fixed_number_of_ranks_that_fits_no_more_ends_the_stage(copied, two_nodes):
    set_workers(copied, workers=2, address=two_nodes.address, steps=STEPS)
    shutil.rmtree(copied / "data/ttt")
    code, told = train_disturbed(copied, lambda _: two_nodes.lose_one())
    assert code == 1
    assert "2 workers ask for 2 CPU, 0 GPU; the cluster has 1 CPU" in told
    assert "Traceback" not in told
    assert checkpointed(copied)


def kill_a_rank(process):
    ranks = children_of(process, lambda line: "RayTrainWorker" in " ".join(line))
    assert len(ranks) == 2
    ranks[-1].kill()


@pytest.mark.parametrize("disturb", [kill_a_rank, press_ctrl_c])
def test_disturbed_training_goes_on_from_its_checkpoint_to_the_same_bits(
    copied, undisturbed, disturb
):
    set_workers(copied, workers=2, steps=STEPS)
    shutil.rmtree(copied / "data/ttt")
    kept = []

    def note(process):
        kept.extend(checkpointed(copied))
        disturb(process)

    code, told = train_disturbed(copied, note)
    if disturb is press_ctrl_c:
        assert code == 1
        assert "interrupted; finished shards are kept" in told
        assert "Traceback" not in told
        tiny.stage(copied, "ttt", "tiny", "0")
    else:
        assert code == 0, told
        assert "lost or found no place; going on with 2" in told
    assert 0 < len(kept) < STEPS
    assert trained(copied).speeds[: len(kept)] == kept
    assert trained(copied).layer == undisturbed(2).layer


def waits_for_places():
    """Whether Ray Train has asked for the places of its ranks, and has not got them."""
    from ray.util import placement_group_table

    return any(group["state"] == "PENDING" for group in placement_group_table().values())


def test_ctrl_c_ends_a_wait_for_places(in_project, two_nodes):
    set_workers(in_project, workers=2, address=two_nodes.address)
    shutil.rmtree(in_project / "data/ttt")
    holder = ray_cluster.cluster(settings(workers=1, address=two_nodes.address))
    errors = in_project / "errors.txt"
    with errors.open("w") as file, holder:
        others = hold_cpus(2)
        with started(sys.executable, "-m", "stages.ttt", "tiny", "0", stderr=file) as process:
            wait_until(
                lambda: "held by other work" in errors.read_text() and waits_for_places(),
                lambda: process.poll() is None,
            )
            press_ctrl_c(process)
            assert process.wait(timeout=45) == 1  # Ray Train would wait for a minute
        assert len(others) == 2  # held to here
    told = (in_project / "errors.txt").read_text()
    assert "interrupted; finished shards are kept" in told
    assert "Traceback" not in told


def faulty_fit(log, rank, tell):
    with log.open("a") as file:
        file.write("tried\n")
    with shards.naming(["abc-0003"]):
        raise RuntimeError(f"rank {rank.index} has a fault")


def test_an_exception_of_a_rank_is_not_retried(in_project, tmp_path):
    fit, log = partial(faulty_fit, tmp_path / "log"), tmp_path / "log"
    with pytest.raises(UserError, match=r"rank \d of ttt failed") as caught:
        ray_ranks.train(fit, list, "faulty", settings(workers=1), lambda *_: None, 4)
    assert log.read_text() == "tried\n"
    assert "has a fault" in str(caught.value)
    assert "Traceback" in str(caught.value)
    assert "abc-0003" in str(caught.value)
