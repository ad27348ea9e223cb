"""How cores and GPUs are split into workers."""

import math

import pytest
from disturb import settings

from ponderttt import cores
from ponderttt.errors import UserError


def test_cores_are_split_as_told():
    count = cores.here().cpus
    one = cores.split_cores(settings(workers="auto", threads=1))
    assert one == cores.Split(workers=count if count > 1 else 0, threads=1, gpus=0)
    assert cores.split_cores(settings(workers=3, threads=2)).workers == 3
    more = cores.split_cores(settings(workers="auto", threads=count + 1))
    assert more.workers == 1  # never quietly in this process: `check_room` says what is missing
    whole = cores.split_cores(settings(workers="auto", threads=count))
    assert whole == cores.Split(workers=0, threads=count, gpus=0)
    trial = cores.split_cores(settings(workers="auto", threads="auto"))
    assert max(1, trial.workers) * trial.threads == count


@pytest.mark.parametrize(
    ("speed", "fastest"),
    [({1: 80, 2: 120, 4: 100}, 2), ({1: 109, 2: 90, 4: 100}, 4), ({1: 111, 2: 90, 4: 100}, 1)],
)
def test_the_trial_takes_the_fastest_split_that_pays_for_ray(monkeypatch, speed, fastest):
    monkeypatch.setattr(cores, "rate", lambda threads, _: speed[threads])
    assert cores.fastest_threads.__wrapped__(4) == fastest


def test_a_containers_limit_counts(tmp_path):
    assert cores.quota(tmp_path) == math.inf
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    for limit, wanted in (("-1", math.inf), ("150000", 1.5)):
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{limit}\n")
        assert cores.quota(tmp_path) == wanted
    for limit, wanted in (("max", 1.5), ("400000", 4)):  # version 2 goes first
        (tmp_path / "cpu.max").write_text(f"{limit} 100000\n")
        assert cores.quota(tmp_path) == wanted


def test_auto_counts_the_clusters_gpus_not_this_machines():
    boxes = [cores.Node(1, 0), cores.Node(64, 8), cores.Node(64, 8)]
    auto = settings(workers="auto", threads="auto")
    assert cores.split_cores(auto, boxes) == cores.Split(workers=16, threads=1, gpus=1.0)
    halves = settings(workers="auto", threads=1, gpus_per_worker=0.5)
    split = cores.split_cores(halves, boxes)
    assert split.workers == 32
    assert cores.for_training(split, share=64) == cores.Split(workers=16, threads=1, gpus=1.0)
    assert cores.for_training(split, share=4).workers == 4
    thirds = settings(workers="auto", threads=1, gpus_per_worker=0.3)
    assert cores.for_training(cores.split_cores(thirds, boxes), share=64).workers == 16
    fixed = cores.split_cores(settings(workers=4, threads=1), boxes)
    assert fixed == cores.Split(workers=4, threads=1, gpus=1.0)
    assert not cores.without_ray(settings(workers="auto", address="head:6379"))


def test_what_fits_no_single_node_is_refused():
    boxes = [cores.Node(4, 0), cores.Node(4, 0)]
    with pytest.raises(UserError, match=r"1 workers ask for 8 CPU.*8 CPU.*room for 0"):
        cores.check_room(boxes, cores.Split(workers=1, threads=8, gpus=0))
