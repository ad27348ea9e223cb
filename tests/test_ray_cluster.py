"""A cluster: what it must offer, who may join it, and what happens when it loses a node."""

import shutil
import threading
import time

import pytest
import tiny
from disturb import (
    TwoNodes,
    failing_start,
    set_workers,
    settings,
    slow_run,
    wanted_hidden,
    without_leftovers,
)
from tqdm import tqdm

from ponderttt import cores, ray_cluster, ray_pool
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
    set_workers(copied, workers=cores.here().cpus + 1)
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

    def remove():
        while len(list(out.rglob("part-*.safetensors"))) < half:
            time.sleep(0.02)
        kept.update((path, path.stat().st_mtime_ns) for path in out.rglob("part-*.safetensors"))
        two_nodes.lose_one()

    remover = threading.Thread(target=remove, daemon=True)
    remover.start()
    # Half of `auto`'s two workers can go on alone, while the other's successor finds no place.
    slow_run("hidden", log, 0.4, workers="auto", address=two_nodes.address, max_retries=3)
    remover.join(timeout=30)
    assert not remover.is_alive()
    # Somebody began a shard again, so the node had a worker, and lost it in the middle.
    assert any(len(path.read_text().splitlines()) == 2 for path in log.glob("*"))
    assert without_leftovers(out) == wanted_hidden(in_project)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())


def test_when_the_last_node_with_room_is_lost_nobody_waits(in_project, tmp_path):
    """The second node alone has the two cores that the worker asks for."""
    nodes, log = TwoNodes(tmp_path / "cluster.log", cpus=2), tmp_path / "log"
    try:

        def remove():
            while not any(path.read_text() for path in log.glob("*")):
                time.sleep(0.02)
            nodes.lose_one()

        threading.Thread(target=remove, daemon=True).start()
        words = r"1 workers ask for 2 CPU, 0 GPU; the cluster has 1 CPU.*lower ray\.workers"
        with pytest.raises(UserError, match=words):
            slow_run("hidden", log, 0.4, workers=1, threads=2, address=nodes.address)
    finally:
        nodes.stop()


def test_a_wait_for_others_on_the_cluster_is_told(in_project, capsys):
    import ray

    class Other:
        def here(self):
            pass

    with ray_cluster.cluster(settings(workers=2)) as split:
        ray_cluster.tell_of_wait(split)
        assert "held by other work" not in capsys.readouterr().err
        other = ray.remote(num_cpus=1)(Other).remote()
        ray.get(other.here.remote())
        while ray.available_resources()["CPU"] == cores.here().cpus:
            time.sleep(0.05)
        ray_cluster.tell_of_wait(cores.Split(workers=int(cores.here().cpus), threads=1, gpus=0))
        told = capsys.readouterr().err
    assert f"ask for {cores.here().cpus} CPU, 0 GPU; {cores.here().cpus - 1} CPU" in told
    assert "who finds no place waits" in told


def test_a_node_without_the_project_folder_says_so(in_project, tmp_path):
    with ray_cluster.cluster(settings(workers=1)):
        ray_cluster.check_folder(str(in_project))
        with pytest.raises(UserError, match=r"does not see the project folder .*every node mounts"):
            ray_cluster.check_folder(str(tmp_path))
        shutil.copy(in_project / "params.yaml", tmp_path)  # as a node with a clone of its own has
        with pytest.raises(UserError, match=r"does not see the project folder"):
            ray_cluster.check_folder(str(tmp_path))
        with pytest.raises(UserError, match=r"does not see the project folder"):
            ray_cluster.check_folder("/" + "x" * 300)  # the node may not even look there
    assert not list((in_project / "data/.work").glob(".seen-*"))
