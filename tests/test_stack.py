"""The Stack v2 source: a local data set of its layout, contents from a real S3 server."""

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ponderttt import blobs, corpus, files, near, params, sources, stack, tables
from ponderttt.errors import UserError

ROOT = Path(__file__).parent.parent
KEY = {"aws_access_key_id": "AKIAPLANTEDKEYID", "aws_secret_access_key": "plantedsecretkey"}
BLOBS = 2000
REPOS = 100


@dataclass(frozen=True)
class Planned:
    """A file of the data set, and what is wrong with it."""

    number: int
    content: bytes
    encoding: str = "UTF-8"
    fault: str = ""  # of the server
    failures: int = 0  # of the server, before it answers
    reason: str = ""  # why it is not in the corpus

    @property
    def blob_id(self) -> str:
        return hashlib.sha1(self.content).hexdigest()

    @property
    def stored(self) -> bytes | None:
        body = gzip.compress(self.content, mtime=0)
        changed = {
            "missing": None,
            "bad gzip": body[: len(body) // 2],
            "wrong hash": gzip.compress(b"x" + self.content, mtime=0),
        }
        return changed.get(self.reason, body)


def source(number: int, word: str = "plain") -> str:
    lines = (
        f"def {word}_{number}_{i}(value_{number}):\n    return value_{number} + {i}\n"
        for i in range(12)
    )
    return "\n".join(lines)


def planned(number: int) -> Planned:
    """One file in a hundred meets errors of the server, others are troublesome in other ways."""
    content = source(number).encode()
    kinds: dict[int, Planned] = {
        10: Planned(number, content, fault="error", failures=1),
        110: Planned(number, content, fault="error", failures=3),
        20: Planned(number, content, fault="slow"),
        40: Planned(number, source(number, "naïve").encode("latin-1"), reason="wrong encoding"),
        60: Planned(number, content, "x-unknown", reason="wrong encoding"),
        80: Planned(number, source(number, "汉字").encode("gb18030"), "GB18030"),
        100: Planned(number, content, reason="missing"),
        120: Planned(number, content, reason="bad gzip"),
        140: Planned(number, content, reason="wrong hash"),
        160: Planned(number, content, fault="cut"),
    }
    return kinds.get(number % 200, Planned(number, content))


PLAN = [planned(number) for number in range(BLOBS)]
LONE = Planned(9999, source(9999).encode())  # on no server
WEAK = PLAN[3].blob_id  # fails for ever once the server is told to


def row(plan: Planned) -> dict[str, Any]:
    """A file as The Stack v2 describes it, without its repository."""
    return {
        "blob_id": plan.blob_id,
        "path": f"/src/module_{plan.number}.py",
        "content_id": "c" * 40,
        "language": "Python",
        "length_bytes": len(plan.content),
        "detected_licenses": ["MIT"],
        "license_type": "permissive",
        "src_encoding": plan.encoding,
        "is_vendor": False,
        "is_generated": False,
    }


def repository(number: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    when = datetime(2023, 9, 6)
    return {
        "repo_name": f"owner{number}/project",
        "repo_url": "git",
        "snapshot_id": "s" * 40,
        "revision_id": "r" * 40,
        "directory_id": "d" * 40,
        "branch_name": "refs/heads/main",
        "visit_date": when,
        "github_id": number,
        "star_events_count": 3,
        "gha_license_id": None,
        "num_files": len(found),
        "files": found,
    }


EXTRA = [  # every reason that the metadata alone gives
    {"license_type": "no_license", "blob_id": "1" * 40},
    {"is_vendor": True, "blob_id": "2" * 40},
    {"is_generated": True, "blob_id": "3" * 40},
    {"length_bytes": 10, "blob_id": "4" * 40},
    {"length_bytes": 10**9, "blob_id": "5" * 40},
    {"blob_id": "../../../etc/passwd"},
    {"blob_id": PLAN[1].blob_id},
    {"language": "Java", "blob_id": "6" * 40},
]


def write_dataset(folder: Path) -> None:
    """Repository rows with a list of files, over two Parquet files."""
    repos = [[row(plan) for plan in PLAN[i::REPOS]] for i in range(REPOS)]
    repos[0] += [row(PLAN[0]) | extra for extra in EXTRA]
    rows = [repository(i, found) for i, found in enumerate(repos)]
    rows.append(repository(999, [row(LONE)]))
    folder.mkdir(parents=True)
    for part in range(2):
        pq.write_table(pa.Table.from_pylist(rows[part::2]), folder / f"train-{part}.parquet")


@dataclass(frozen=True)
class Server:
    url: str

    def ask(self, word: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/__{word}__") as answer:
            found: dict[str, Any] = json.load(answer)
            return found


def put(client: Any, bucket: str, plan: Planned, acl: str) -> None:
    if plan.stored is not None:
        key = f"content/{plan.blob_id}"
        client.put_object(Bucket=bucket, Key=key, Body=plan.stored, ACL=acl)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """moto's server in a process of its own, with all blobs, public and private."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    faults = {f: [p.blob_id for p in PLAN if p.fault == f] for f in ("slow", "cut")}
    failures = {p.blob_id: p.failures for p in PLAN if p.fault == "error"}
    assert len(failures) == BLOBS // 100
    path.write_text(json.dumps({**faults, "error": failures, "weak": [WEAK]}))
    command = [sys.executable, str(Path(__file__).parent / "s3_server.py"), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **KEY)
        for bucket in ("softwareheritage", "private"):
            client.create_bucket(Bucket=bucket)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda p: put(client, "softwareheritage", p, "public-read"), PLAN))
            list(pool.map(lambda p: put(client, "private", p, "private"), PLAN[:100]))
        yield Server(url)
        process.terminate()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "ids"
    write_dataset(folder)
    return folder


def prepare(folder: Path, dataset: Path, url: str, **stack_changes: Any) -> dict[str, str]:
    """A place to run the stage in; the environment to run it with."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["run"]["languages"] = ["python"]
    raw["corpus"] |= {"source": "stack_v2", "test_share": 0.3}
    raw["corpus"] |= {"decontaminate": str(ROOT / raw["corpus"]["decontaminate"])}
    raw["corpus"]["stack"] |= {"opt_out": str(ROOT / raw["corpus"]["stack"]["opt_out"])}
    raw["corpus"]["stack"] |= {"dataset": str(dataset), "endpoint": url, "connections": 8}
    raw["corpus"]["stack"] |= {"train_files": 5000} | stack_changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(raw))
    planted = {"HF_TOKEN": "hf_plantedtoken", "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    aws = {name.upper(): value for name, value in KEY.items()}
    return {**os.environ, "PYTHONPATH": str(ROOT), **planted, **aws}


def start(folder: Path, env: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(ROOT / "stages/corpus.py")],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, env: dict[str, str]) -> tuple[int, str]:
    process = start(folder, env)
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err


def kept_blobs(folder: Path) -> list[Path]:
    return [p for p in (folder / "data/.downloads/stack/blobs").glob("??/*") if len(p.name) == 40]


def table(folder: Path) -> Path:
    return folder / "data/corpus/language=python/part-00000.parquet"


@pytest.fixture(scope="module")
def first(server: Server, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage run once, undisturbed."""
    folder = tmp_path_factory.mktemp("first")
    server.ask("reset")
    code, said = run(folder, prepare(folder, dataset, server.url))
    assert code == 0, said
    (folder / "seen.json").write_text(json.dumps(server.ask("seen")))
    return folder


def test_all_good_blobs_are_kept_once_and_bad_ones_counted(first: Path) -> None:
    found = tables.read(table(first), tables.CORPUS).to_pylist()
    good = {p.content.decode(p.encoding) for p in PLAN if not p.reason}
    assert sorted(r["text"] for r in found) == sorted(good)
    assert len(found) == len(good) == BLOBS - 50
    assert tables.notes(table(first))["dropped"] == {
        "wrong encoding": 20,
        "missing": 11,  # the lone file of the last repository is on no server
        "bad gzip": 10,
        "wrong hash": 10,
        "licence": 1,
        "vendored": 1,
        "generated": 1,
        "too short": 1,
        "too long": 1,
        "bad id": 1,
        "duplicate": 1,
    }


def test_rows_say_where_they_come_from(first: Path) -> None:
    notes = tables.notes(table(first))
    assert notes["source"] == "stack_v2"
    assert len(notes["revision"]) == 64
    row = tables.read(table(first), tables.CORPUS).to_pylist()[0]
    assert row["repo"].startswith("owner")
    assert row["path"].startswith("src/module_")
    assert row["licence"] == "MIT"


def most_alike(some: list[str], others: list[str]) -> float:
    """The largest overlap of any two, counted over all pairs without a hash."""
    sets = [near.shingles(text) for text in some]
    holders = defaultdict(list)
    for number, found in enumerate(sets):
        for shingle in found:
            holders[shingle].append(number)
    most = 0.0
    for text in others:
        mine = near.shingles(text)
        shared = Counter(number for shingle in mine for number in holders.get(shingle, ()))
        most = max([most, *(n / (len(mine) + len(sets[i]) - n) for i, n in shared.items())])
    return most


def test_no_leak_over_repositories_contents_and_near_duplicates(first: Path) -> None:
    found = tables.read(table(first), tables.CORPUS)
    corpus.check_leak(found)
    texts = {
        side: [r["text"] for r in found.to_pylist() if r["split"] == side]
        for side in ("train", "test")
    }
    assert list(near.between(texts["train"], texts["test"], 0.7)) == []
    assert most_alike(texts["train"], texts["test"]) < 0.7
    sides = {
        side: {r["repo"] for r in found.to_pylist() if r["split"] == side}
        for side in ("train", "test")
    }
    assert len(sides["test"]) == 30
    assert len(sides["train"]) == 69  # of one repository nothing could be had


def test_transient_faults_are_tried_again_and_final_ones_are_not(first: Path) -> None:
    seen = json.loads((first / "seen.json").read_text())
    for plan in PLAN:
        expected = 1 + plan.failures + (plan.fault == "cut")
        assert seen["asked"][plan.blob_id] == expected, plan
    assert seen["most"] <= 8
    assert seen["signed"] == 0


def test_the_same_bytes_whatever_the_concurrency(
    first: Path, server: Server, dataset: Path, tmp_path: Path
) -> None:
    server.ask("reset")
    code, said = run(tmp_path, prepare(tmp_path, dataset, server.url, connections=32))
    assert code == 0, said
    assert files.folder_hash(tmp_path / "data/corpus") == files.folder_hash(first / "data/corpus")


def test_kill_and_resume(first: Path, server: Server, dataset: Path, tmp_path: Path) -> None:
    server.ask("reset")
    env = prepare(tmp_path, dataset, server.url, connections=3)
    process = start(tmp_path, env)
    while len(kept_blobs(tmp_path)) < 300 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path.name for path in kept_blobs(tmp_path)}
    assert 300 <= len(before) < BLOBS - 50
    assert not (tmp_path / "data/corpus").exists()
    torn = kept_blobs(tmp_path)[0]
    torn.write_bytes(torn.read_bytes()[:50])
    server.ask("reset")
    code, said = run(tmp_path, prepare(tmp_path, dataset, server.url, connections=16))
    assert code == 0, said
    asked = server.ask("seen")["asked"]
    assert asked.keys() & before == {torn.name}
    assert files.folder_hash(tmp_path / "data/corpus") == files.folder_hash(first / "data/corpus")
    assert not (tmp_path / "data/.downloads/stack/blobs/.part").exists()


def test_a_blob_that_keeps_failing_stops_the_run_and_the_next_one_goes_on(
    first: Path, server: Server, dataset: Path, tmp_path: Path
) -> None:
    server.ask("reset")
    server.ask("break")
    env = prepare(tmp_path, dataset, server.url, attempts=4)
    code, said = run(tmp_path, env)
    assert code == 1
    assert "corpus.stack: 1 blobs could not be had for now (server error 1)" in said
    assert "Run `dvc repro` again, it goes on where it was." in said
    assert "Traceback" not in said
    assert server.ask("seen")["asked"][WEAK] == 8  # all attempts, and once more at the end
    assert not (tmp_path / "data/corpus").exists()
    server.ask("reset")
    code, said = run(tmp_path, env)
    assert code == 0, said
    bad = {p.blob_id for p in PLAN if p.reason in ("missing", "bad gzip", "wrong hash")}
    assert server.ask("seen")["asked"].keys() - bad - {LONE.blob_id} == {WEAK}
    assert files.folder_hash(tmp_path / "data/corpus") == files.folder_hash(first / "data/corpus")


class Busy(BaseHTTPRequestHandler):
    """A store that asks everybody to come back in half a minute."""

    asked = threading.Event()

    def do_GET(self) -> None:
        self.asked.set()
        self.send_response(503)
        self.send_header("Retry-After", "30")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request."""


def test_an_interrupt_does_not_wait_for_those_who_wait(dataset: Path, tmp_path: Path) -> None:
    busy = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=busy.serve_forever, daemon=True).start()
    env = prepare(tmp_path, dataset, f"http://127.0.0.1:{busy.server_port}")
    process = start(tmp_path, env)
    assert Busy.asked.wait(timeout=60)
    time.sleep(0.5)  # the answer arrives, and the wait begins
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    busy.shutdown()
    assert process.returncode == 1
    assert time.monotonic() - begun < 5
    assert "interrupted" in said
    assert "Traceback" not in said


def changed_params(folder: Path, **changes: Any) -> None:
    raw = yaml.safe_load((folder / "params.yaml").read_text())
    raw["corpus"] |= changes
    (folder / "params.yaml").write_text(yaml.safe_dump(raw))


def written_below(folder: Path) -> Iterator[bytes]:
    """All that a run leaves behind, unpacked where it is packed."""
    for path in folder.rglob("*"):
        if path.suffix == ".parquet":
            rows = pq.read_table(path)
            yield json.dumps([rows.to_pylist(), tables.notes(path)], default=str).encode()
        elif path.is_file():
            content = path.read_bytes()
            yield gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def test_signed_access_and_no_secret_anywhere(
    server: Server, dataset: Path, tmp_path: Path
) -> None:
    """The token and the keys are planted in the environment; DVC itself runs the stage."""
    server.ask("reset")
    for name in ("stages", "ponderttt"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "dvc.yaml", tmp_path / "dvc.yaml")
    env = prepare(tmp_path, dataset, server.url, bucket="private", train_files=60)
    env |= {"PYTHONPATH": str(tmp_path)}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    code, refused = run(tmp_path, env)
    assert code == 1
    assert "corpus.max_missing" in refused
    assert "access denied" in refused
    raw = yaml.safe_load((tmp_path / "params.yaml").read_text())
    changed_params(tmp_path, max_missing=1.0, stack=raw["corpus"]["stack"] | {"signed": True})
    said = refused
    for command in (["init", "--no-scm", "-q"], ["repro", "-v", "corpus"]):
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *command],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        said += done.stdout + done.stderr
        assert done.returncode == 0, said
    assert server.ask("seen")["signed"] > 0
    assert (tmp_path / "dvc.lock").exists()
    found = [said.encode(), *written_below(tmp_path)]
    assert any(b"def plain_" in text for text in found)  # so a secret would have been seen
    for text in found:
        assert b"planted" not in text.lower()
        assert b"Signature=" not in text


@pytest.mark.parametrize("tqdm_disable", ["", "1"])
def test_too_many_failures_stop_the_run_and_keep_what_was_fetched(
    tqdm_disable: str, server: Server, dataset: Path, tmp_path: Path
) -> None:
    env = prepare(tmp_path, dataset, server.url) | {"TQDM_DISABLE": tqdm_disable}
    changed_params(tmp_path, max_missing=0.001)
    code, said = run(tmp_path, env)
    assert code == 1
    assert re.search(r"corpus.max_missing: \d+ of 500 blobs could not be had \(", said)
    assert not (tmp_path / "data/corpus").exists()
    assert len(kept_blobs(tmp_path)) > 400


def settings(seed: int = 42, **changes: Any) -> params.Corpus:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["corpus"] |= {"source": "stack_v2"}
    raw["corpus"]["stack"] |= {"opt_out": str(ROOT / raw["corpus"]["stack"]["opt_out"])} | changes
    return params.parse(raw | {"corpus": raw["corpus"] | {"seed": seed}}).corpus


@pytest.fixture
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Five seconds after every stream, so that its threads end before the interpreter does.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.2)


def listed(languages: list[str], **changes: Any) -> list[dict[str, str]]:
    found = stack.StackV2(settings(**changes))._listed(languages)
    return [entry for group in found for entry in group]


@pytest.mark.usefixtures("_own_place")
def test_a_data_set_with_one_row_per_file_and_a_part_per_language(tmp_path: Path) -> None:
    configs = []
    for name in ("Python", "Java"):
        rows = [row(p) | {"repo_name": "a/b", "language": name} for p in PLAN[:30]]
        path = tmp_path / "ids/data" / name / "train-0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
        configs.append({"config_name": name, "data_files": f"data/{name}/*.parquet"})
    (tmp_path / "ids/README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    found = listed(["python", "java"], dataset=str(tmp_path / "ids"), train_files=20, test_files=5)
    assert [entry["language"] for entry in found] == ["python"] * 20 + ["java"] * 5


@pytest.mark.usefixtures("_own_place")
def test_the_seed_decides_which_files_are_chosen(dataset: Path) -> None:
    first = listed(["python"], dataset=str(dataset), train_files=50)
    assert listed(["python"], dataset=str(dataset), train_files=50) == first
    stack.FOLDER.rename("elsewhere")
    assert listed(["python"], dataset=str(dataset), train_files=50) == first
    other = listed(["python"], dataset=str(dataset), train_files=50, seed=7)
    chosen = [{e["blob_id"] for e in found if not e["problem"]} for found in (first, other)]
    assert [len(ids) for ids in chosen] == [50, 50]
    assert len(chosen[0] & chosen[1]) < 40


@pytest.mark.usefixtures("_own_place")
def test_licences_and_opt_outs(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("# asked in May\nOwner3\nowner5/PROJECT  # by letter\n")
    found = listed(
        ["python"],
        dataset=str(dataset),
        licences=["permissive", "no_license"],
        opt_out=str(tmp_path / "out.txt"),
    )
    assert "licence" not in {entry["problem"] for entry in found}
    assert {e["repo"] for e in found if e["problem"] == "opted out"} == {
        "owner3/project",
        "owner5/project",
    }
    with pytest.raises(UserError, match=r"corpus.stack.opt_out: nowhere.txt: No such file"):
        listed(["python"], dataset=str(dataset), opt_out="nowhere.txt")


def one_repository(folder: Path, found: list[dict[str, Any]] | None, name: str = "train") -> str:
    folder.mkdir()
    whole = [repository(1, [row(p) for p in PLAN[:5]]), repository(2, found or [])]
    if found is None:
        whole[1]["files"] = None
    pq.write_table(pa.Table.from_pylist(whole), folder / f"{name}-0.parquet")
    return str(folder)


@pytest.mark.usefixtures("_own_place")
def test_only_a_file_that_was_taken_makes_another_a_duplicate(tmp_path: Path) -> None:
    twins = [row(PLAN[9]) | {"license_type": "no_license"}, row(PLAN[9]), row(PLAN[9])]
    found = listed(["python"], dataset=one_repository(tmp_path / "ids", twins))
    problems = [e["problem"] for e in found if e["blob_id"] == PLAN[9].blob_id]
    assert problems == ["licence", "", "duplicate"]


@pytest.mark.usefixtures("_own_place")
def test_a_data_set_that_cannot_be_read_as_one(tmp_path: Path) -> None:
    start = r"corpus\.stack\.dataset: .*"
    empty = one_repository(tmp_path / "empty", None)
    with pytest.raises(UserError, match=start + "'owner2/project' has no list of files"):
        listed(["python"], dataset=empty)
    other = one_repository(tmp_path / "other", [], "test")
    with pytest.raises(UserError, match=start + "cannot be read .*train(.|\n)*split `train`"):
        listed(["python"], dataset=other)
    damaged = one_repository(tmp_path / "damaged", [])
    path = Path(damaged) / "train-0.parquet"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match=start + "cannot be read"):
        listed(["python"], dataset=damaged)


@pytest.mark.usefixtures("_own_place")
def test_a_data_set_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "ids").mkdir()
    pq.write_table(pa.table({"blob_id": ["a"], "text": ["b"]}), tmp_path / "ids/a.parquet")
    with pytest.raises(UserError, match=r"corpus.stack.dataset: .* has no column path"):
        listed(["python"], dataset=str(tmp_path / "ids"))


class Hub(BaseHTTPRequestHandler):
    """A hub that lets nobody in."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request."""


@pytest.mark.parametrize(
    ("gated", "steps"),
    [
        (True, ["accept its terms", "access token", "hf auth login"]),
        (False, ["cannot be read", "local folder"]),
    ],
)
def test_a_hub_that_refuses_or_is_not_there(gated: bool, steps: list[str], tmp_path: Path) -> None:
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{hub.server_port if gated else 9}"
    env = prepare(tmp_path, Path("bigcode/the-stack-v2-dedup"), "http://127.0.0.1:9")
    code, said = run(tmp_path, {**env, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"})
    hub.shutdown()
    assert code == 1
    assert "Traceback" not in said
    for step in [*steps, "corpus.stack.dataset", "bigcode/the-stack-v2-dedup"]:
        assert step in said
    assert "planted" not in said


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    nowhere = settings(endpoint="http://127.0.0.1:9", attempts=2, timeout=1, connections=2).stack
    store = blobs.Store(nowhere, tmp_path / "blobs", 1000)
    assert [b.problem for b in store.blobs(["a" * 40] * 3)] == ["connection failed"] * 3
    with pytest.raises(
        UserError, match=r"more than 10 requests .*connection failed(.|\n)*goes on where"
    ):
        list(store.blobs(["a" * 40] * 100))


@pytest.mark.parametrize(
    ("content", "encoding", "text"),
    [
        ("naïve".encode(), "utf-8", "naïve"),
        ("naïve".encode("latin-1"), "utf-8", None),
        ("汉字".encode("gb18030"), "GB18030", "汉字"),
        (b"\xef\xbb\xbfa", "utf-8-sig", "a"),
        (b"+2AA-", "utf-7", None),  # half a character
        (b"a", "x-unknown", None),
        (b"a", "rot13", None),
        (b"a", "utf\0", None),
    ],
)
def test_one_rule_says_what_is_text(content: bytes, encoding: str, text: str | None) -> None:
    assert sources.decode(content, encoding) == text


def test_a_bomb_is_not_unpacked() -> None:
    body = gzip.compress(b"\0" * 50_000_000)
    blob_id = hashlib.sha1(b"\0" * 50_000_000).hexdigest()
    assert blobs.unpack(body, blob_id, 1000) == blobs.Blob(b"", "too long")


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ("3", 3, 3),
        ("9999", 30, 30),
        ("9" * 400, 30, 30),
        ("soon", 0, 0),
        ("", 0, 0),
        ("²", 0, 0),
        ("-5", 0, 0),
        ("GMT", 0, 0),
        ("Thu, 99 Jan 2015 00:00:00 GMT", 0, 0),
        ("Thu, 01 Jan 2015 00:00:00 GMT", 0, 0),
        ("Thu, 01 Jan 9999 00:00:00 GMT", 30, 30),
    ],
)
def test_the_pause_a_server_asks_for(value: str, low: float, high: float) -> None:
    assert low <= blobs._asked_pause(value) <= high


def test_no_credentials_and_no_such_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"corpus.stack.signed: this machine has no AWS"):
        blobs.Store(settings(endpoint="http://127.0.0.1:9", signed=True).stack, tmp_path, 10)
    with pytest.raises(UserError, match=r"corpus.stack.region: 'no region' is no region"):
        blobs.Store(settings(region="no region").stack, tmp_path, 10)
    assert blobs.Store(settings().stack, tmp_path, 10).base.endswith("/softwareheritage/content/")
