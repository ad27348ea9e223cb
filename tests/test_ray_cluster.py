"""A cluster: what it must offer, who may join it, and what happens when it loses a node."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
from disturb import (
    TwoNodes,
    failing_start,
    hold_cpus,
    meanwhile,
    set_workers,
    settings,
    slow_run,
    wait_until,
    wanted_hidden,
    without_leftovers,
)
from tqdm import tqdm

from ponderttt import backbone, cores, ray_cluster, ray_pool
from ponderttt.errors import UserError

pytestmark = pytest.mark.ray


def test_a_request_that_cannot_be_met_shows_asked_and_available(in_project):
    cpus, began = int(cores.here().cpus), time.perf_counter()
    there = f"{cpus + 1} workers ask for {cpus + 1} CPU, 0 GPU; the cluster has {cpus} CPU, 0 GPU"
    with tqdm(disable=True) as bar, pytest.raises(UserError, match=f"{there} on 1 nodes"):
        ray_pool.run(failing_start, ["one"], settings(workers=cpus + 1), bar)
    assert time.perf_counter() - began < 10  # seconds are what is promised here


def test_what_a_cluster_cannot_give_is_refused(in_project, two_nodes):
    for changes, asked, room in (
        ({"workers": 3}, "3 workers ask for 3 CPU", 2),
        ({"threads": 2}, "1 workers ask for 2 CPU", 0),
    ):
        chosen = settings(**{"workers": 1, "address": two_nodes.address} | changes)
        began = time.perf_counter()
        there = f"{asked}, 0 GPU; the cluster has 2 CPU, 0 GPU on 2 nodes, room for {room};"
        with tqdm(disable=True) as bar, pytest.raises(UserError, match=there):
            ray_pool.run(failing_start, ["one"], chosen, bar)
        assert time.perf_counter() - began < 10  # seconds are what is promised here


@pytest.mark.parametrize("name", ["hidden", "ttt"])
def test_a_stage_that_asks_for_too_much_ends_before_any_work(copied, name):
    """Even before `ttt` reads its hidden states, which would show that one is damaged."""
    set_workers(copied, workers=cores.here().cpus + 1)
    shard = next(copied.glob("data/hidden/*/set=train/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    done = tiny.stage(copied, name, "tiny", *(["0"] if name == "ttt" else []), check=False)
    assert done.returncode == 1
    assert f"workers ask for {cores.here().cpus + 1} CPU, 0 GPU; the cluster has" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dead_address_is_told(in_project):
    with (
        tqdm(disable=True) as bar,
        pytest.raises(UserError, match=r"nothing answers at 127\.0\.0\.1:9 .*ray start --head"),
    ):
        ray_pool.run(failing_start, ["one"], settings(workers=1, address="127.0.0.1:9"), bar)


def test_a_cluster_that_asks_for_a_token(copied, tmp_path, monkeypatch):
    """Ray asks for one as soon as its head finds a token, and never sends one by itself."""
    key = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    monkeypatch.setenv("HOME", str(tmp_path))  # where no token is
    for name in key:
        monkeypatch.delenv(name, raising=False)
    cluster = TwoNodes(tmp_path / "cluster.log", **key)
    try:
        set_workers(copied, workers="auto", address=cluster.address)
        shutil.rmtree(copied / "data/hidden")
        refused = tiny.stage(copied, "hidden", "tiny", check=False)
        for name, text in key.items():
            monkeypatch.setenv(name, text)
        let_in = tiny.stage(copied, "hidden", "tiny")
    finally:
        cluster.stop()
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert "does not let us in" in refused.stderr
    assert "export RAY_AUTH_MODE=token" in refused.stderr
    assert key["RAY_AUTH_TOKEN"] not in refused.stderr + let_in.stderr


def test_two_nodes_and_one_is_lost(in_project, tmp_path, two_nodes):
    log, out = tmp_path / "log", in_project / "data/.work/log"
    half = len(list(in_project.glob("data/chunks/*/*/*.parquet"))) // 2
    kept = {}

    def both_at_work():
        pids = {pid for path in log.glob("*") for pid in path.read_text().split()}
        return len(pids) == 2 and len(list(out.rglob("part-*.safetensors"))) >= half

    def remove():
        wait_until(both_at_work)
        kept.update((path, path.stat().st_mtime_ns) for path in out.rglob("part-*.safetensors"))
        two_nodes.lose_one()

    # Half of `auto`'s two workers can go on alone, while the other's successor finds no place.
    with meanwhile(remove):
        slow_run("hidden", log, 0.4, workers="auto", address=two_nodes.address, max_retries=3)
    assert 0 < len(kept) < 2 * half
    assert without_leftovers(out) == wanted_hidden(in_project)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())


def test_when_the_last_node_with_room_is_lost_nobody_waits(in_project, tmp_path):
    """The second node alone has the two cores that the worker asks for."""
    nodes, log = TwoNodes(tmp_path / "cluster.log", cpus=2), tmp_path / "log"
    try:

        def remove():
            wait_until(lambda: any(path.read_text() for path in log.glob("*")))
            nodes.lose_one()

        words = r"1 workers ask for 2 CPU, 0 GPU; the cluster has 1 CPU.*lower ray\.workers"
        with meanwhile(remove), pytest.raises(UserError, match=words):
            slow_run("hidden", log, 0.4, workers=1, threads=2, address=nodes.address)
    finally:
        nodes.stop()


def test_a_wait_for_others_on_the_cluster_is_told(in_project, capsys):
    import ray

    with ray_cluster.cluster(settings(workers=2)) as split:
        ray_cluster.tell_of_wait(split)
        assert "held by other work" not in capsys.readouterr().err
        others = hold_cpus(1)
        wait_until(lambda: ray.available_resources()["CPU"] < cores.here().cpus)
        ray_cluster.tell_of_wait(cores.Split(workers=int(cores.here().cpus), threads=1, gpus=0))
        told = capsys.readouterr().err
        assert len(others) == 1  # held to here
    assert f"ask for {cores.here().cpus} CPU, 0 GPU; {cores.here().cpus - 1} CPU" in told
    assert "who finds no place waits" in told


def test_a_stage_in_a_folder_that_other_nodes_do_not_see_says_so(copied, tmp_path, two_nodes):
    """The stage alone sees the file system that its folder is on."""
    if subprocess.run(["sh", "-c", "unshare --mount true"], check=False).returncode:
        pytest.skip("no right to mount a file system")
    set_workers(copied, workers=2, address=two_nodes.address)
    shutil.rmtree(copied / "data/hidden")
    place = tmp_path / "mine"
    place.mkdir()
    steps = f"mount -t tmpfs tmpfs {place} && cp -r {copied}/. {place} && cd {place}"
    inside = f"{steps} && {sys.executable} -m stages.hidden tiny; code=$?; ls data; exit $code"
    done = tiny.run(tmp_path, "unshare", "--mount", "sh", "-c", inside, check=False)
    assert done.returncode == 1
    assert done.stderr.count("ray: node ") == 1
    assert f"does not see the project folder {place}; put it on storage" in done.stderr
    assert "Traceback" not in done.stderr
    assert "ttt" in done.stdout.split()
    assert "hidden" not in done.stdout.split()


def test_a_node_without_the_project_folder_says_so(in_project, tmp_path):
    sign = in_project / "data/.work/sign"
    sign.parent.mkdir(exist_ok=True)
    sign.touch()
    with ray_cluster.cluster(settings(workers=1)) as split:
        ray_cluster.check_nodes(sign, split)
        for unseen in (tmp_path / "sign", Path("/" + "x" * 300)):  # the node may not even look
            with pytest.raises(UserError, match=r"does not see the project folder .*every node"):
                ray_cluster.check_nodes(unseen, split)


def test_a_node_that_joined_later_without_the_project_folder_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(ray_cluster.SIGN, str(tmp_path / "sign"))
    with pytest.raises(UserError, match=r"does not see the project folder .*every node mounts"):
        ray_cluster.enter(str(tmp_path), cores.Split(workers=1, threads=1, gpus=0))


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU here")


@without_gpu
def test_a_gpu_that_torch_cannot_use_is_told_before_any_work(copied, tmp_path):
    """Else its workers would compute on CPUs what others compute on GPUs."""
    nodes = TwoNodes(tmp_path / "cluster.log", gpus=1)
    try:
        set_workers(copied, workers="auto", address=nodes.address)
        shutil.rmtree(copied / "data/hidden")
        done = tiny.stage(copied, "hidden", "tiny", check=False)
    finally:
        nodes.stop()
    assert done.returncode == 1
    assert f"has a GPU that its torch ({torch.__version__}) cannot use" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (copied / "data/hidden").exists()


@without_gpu
def test_no_worker_takes_a_cpu_for_the_gpu_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ray_cluster.SIGN, raising=False)
    with pytest.raises(UserError, match=r"gave a worker a GPU that its torch .* cannot use"):
        ray_cluster.enter(str(tmp_path), cores.Split(workers=1, threads=1, gpus=1))


def test_workers_without_a_gpu_see_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    ray_cluster.enter(str(tmp_path), cores.Split(workers=1, threads=1, gpus=0))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as if it was asked before
    assert backbone.best_device() == "cpu"


@without_gpu
def test_gpus_that_stay_idle_are_told(in_project, tmp_path, capsys):
    nodes = TwoNodes(tmp_path / "cluster.log", gpus=3)
    chosen = settings(workers="auto", address=nodes.address, gpus_per_worker=2)
    try:
        with pytest.raises(UserError, match="cannot use"), ray_cluster.cluster(chosen):
            pass
    finally:
        nodes.stop()
    words = "2 of 3 GPUs will be used, as each worker takes 2 GPU and 1 CPU"
    assert words in capsys.readouterr().err
