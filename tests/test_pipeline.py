"""dvc.yaml, params.yaml, the dataclasses and the imports must tell the same story."""

import ast
import dataclasses
import sys
from pathlib import Path

import pytest
import tiny
import yaml

from ponderttt import params
from ponderttt.stage import PLUMBING

ROOT = Path(__file__).parent.parent
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
HOW = {"ray"}  # how the work is done, never what it computes


def module_file(name: str) -> Path | None:
    path = ROOT / (name.replace(".", "/") + ".py")
    return path if path.exists() else None


def imported(path: Path) -> set[str]:
    """Package modules that a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("ponderttt.") and module_file(name)}


def closure(path: Path) -> set[str]:
    seen: set[str] = set()
    waiting = imported(path)
    while waiting:
        name = waiting.pop()
        if name in PLUMBING or name in seen:
            continue
        seen.add(name)
        waiting |= imported(module_file(name))
    return seen


def resolved(dep: str) -> str:
    """A dependency as DVC sees it where it is the value of a param."""
    if not dep.startswith("${corpus."):
        return dep
    value = yaml.safe_load((ROOT / "params.yaml").read_text())
    for name in dep[2:-1].split("."):
        value = value[name]
    return value


def source_deps(stage: dict) -> set[str]:
    return {dep for dep in stage["deps"] if dep.endswith(".py")}


def reads(name: str) -> set[str]:
    """The sections and keys that a stage script asks for."""
    tree = ast.parse((ROOT / f"stages/{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "reads":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"stages/{name}.py names no sections")


@pytest.mark.parametrize("name", STAGES)
def test_deps_are_the_files_a_stage_imports(name):
    wanted = {f"stages/{name}.py"}
    wanted |= {module.replace(".", "/") + ".py" for module in closure(ROOT / f"stages/{name}.py")}
    assert source_deps(STAGES[name]) == wanted


@pytest.mark.parametrize("name", STAGES)
def test_params_are_what_a_stage_reads(name):
    wanted = reads(name) - HOW
    if "budget" in wanted:
        wanted.add("budgets.${budget}")
    if "scales" in wanted and "matrix" in STAGES[name]:
        wanted = wanted - {"scales"} | {"scales.${item.scale}"}
    assert set(STAGES[name].get("params", [])) == wanted


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_its_script_and_its_folder(name):
    command = STAGES[name]["cmd"].split()
    assert command[:4] == ["exec", "python", "-m", f"stages.{name}"]
    assert (ROOT / f"stages/{name}.py").exists()


def test_every_script_is_a_stage():
    assert {path.stem for path in (ROOT / "stages").glob("*.py")} == set(STAGES)


def test_every_section_is_read_by_some_stage():
    sections = {f.name for f in dataclasses.fields(params.Params)} - HOW - {"budgets"}
    read = {key.split(".")[0] for name in STAGES for key in reads(name) - HOW}
    assert sections == read


def test_every_data_file_of_the_package_is_a_dependency():
    listed = {resolved(dep) for stage in STAGES.values() for dep in stage["deps"]}
    listed.add("ponderttt/shapes.json")  # serves `ponderttt plan` only
    kinds = (".json", ".txt", ".html", ".css", ".js")
    files = [p for p in (ROOT / "ponderttt").rglob("*") if p.suffix in kinds]
    assert {p.relative_to(ROOT).as_posix() for p in files} <= listed


def test_the_lists_that_a_param_names_are_dependencies_and_there():
    named = [dep for dep in STAGES["corpus"]["deps"] if dep.startswith("${")]
    assert named == ["${corpus.packages}", "${corpus.stack.opt_out}", "${corpus.decontaminate}"]
    assert all((ROOT / resolved(dep)).is_file() for dep in named)


def test_dvc_sees_another_list(tmp_path):
    project = tiny.project(tmp_path)
    dvc = (sys.executable, "-m", "dvc")
    tiny.run(project, *dvc, "init", "--no-scm", "-q")
    tiny.run(project, *dvc, "repro", "-q", "corpus")
    assert tiny.run(project, *dvc, "status", "-q", "corpus", check=False).returncode == 0
    for name in ("opt_out.txt", "benchmarks.json", "packages.json"):
        path = project / "ponderttt" / name
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        assert f"ponderttt/{name}" in tiny.run(project, *dvc, "status", "corpus").stdout
        path.write_bytes(before)


def test_every_package_file_is_used_by_some_stage():
    used = {dep for stage in STAGES.values() for dep in source_deps(stage)}
    used |= {name.replace(".", "/") + ".py" for name in PLUMBING}
    known = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ponderttt").rglob("*.py")}
    unused = {name for name in known - used if not name.endswith("__init__.py")}
    # The slow twin of the layer serves the tests only; the others are the command line.
    alone = ("reference", "cli", "plan", "plan_text", "shapes", "speed", "doctor", "__main__")
    assert unused <= {f"ponderttt/{name}.py" for name in alone}
