"""The order of layers in DESIGN: imports point downwards, and every module can be imported. No module unpickles."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Upper layers first. A package may import its own layer and those below it.
LAYERS = [
    {"launch", "hydra_plugins"},
    {"asyncrl.modes"},
    {"asyncrl.actors", "asyncrl.lora", "asyncrl.zo", "asyncrl.training"},
    {"asyncrl.algorithms", "asyncrl.rollouts", "asyncrl.weights", "asyncrl.envs", "asyncrl.data", "asyncrl.report"},
    {"asyncrl.transport", "asyncrl.config"},
    {"kernels"},
]
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING = {  # functions that pickle or unpickle unasked
    "torch.save",
    "torch.distributed.all_gather_object",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.gather_object",
    "torch.distributed.recv_object_list",
    "torch.distributed.scatter_object_list",
    "torch.distributed.send_object_list",
}
DEPTH = {package: depth for depth, layer in enumerate(LAYERS) for package in layer}
FILES = sorted(
    path for folder in ("launch", "hydra_plugins", "asyncrl", "kernels") for path in (ROOT / folder).rglob("*.py")
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str | None:
    """The layered package that ``module`` lies in; None for asyncrl's own __init__ and for other libraries."""
    parts = module.split(".")
    return next((name for name in (".".join(parts[:2]), parts[0]) if name in DEPTH), None)


def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything a file imports, function-level imports included."""
    found: set[str] = set()
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def package_edges() -> dict[str, dict[str, str]]:
    """importing package -> imported package -> an example, for layered packages that differ."""
    edges: dict[str, dict[str, str]] = {}
    for path in FILES:
        source = package_of(module_name(path))
        for module in imported_modules(path):
            target = package_of(module)
            if source and target and source != target:
                edges.setdefault(source, {}).setdefault(target, f"{path.relative_to(ROOT)} imports {module}")
    return edges


def test_every_package_has_a_layer():
    packages = {f"asyncrl.{path.parent.name}" for path in (ROOT / "asyncrl").glob("*/__init__.py")}
    assert packages <= set(DEPTH), "give the new package a layer in this test and in the design document"


def test_imports_point_downwards():
    wrong = [
        example
        for source, targets in package_edges().items()
        for target, example in targets.items()
        if DEPTH[target] < DEPTH[source]
    ]
    assert not wrong, "imports that look upwards:\n" + "\n".join(wrong)


def test_no_cycle_between_packages():
    edges = package_edges()
    done: set[str] = set()

    def visit(package: str, trail: list[str]) -> None:
        assert package not in trail, "cycle of imports: " + " -> ".join([*trail, package])
        if package not in done:
            for target in edges.get(package, {}):
                visit(target, [*trail, package])
            done.add(package)

    for package in edges:
        visit(package, [])


def test_relative_imports_are_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "asyncrl" / "config").mkdir(parents=True)
    file = tmp_path / "asyncrl" / "config" / "bad.py"
    file.write_text("from ..modes import grpo\nfrom . import schema\n")
    assert imported_modules(file) == {"asyncrl.modes.grpo", "asyncrl.config.schema"}


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """The absolute dotted name that ``node`` is; empty if it is none. ``known``: what the file's imports call what."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, known)):
        return f"{owner}.{node.attr}"
    return ""


def says(call: ast.Call, keyword: str) -> bool:
    """Whether ``call`` is given a true constant as ``keyword``."""
    return any(k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value is True for k in call.keywords)


def pickling(path: Path) -> list[str]:
    """What in a file could pickle or unpickle something."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    known = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    safe = {call.func for call in calls if says(call, "weights_only")}
    found = [module for module in imported_modules(path) if module.partition(".")[0] in PICKLES]
    found += ["allow_pickle=True" for call in calls if says(call, "allow_pickle")]
    for node in nodes:
        name = dotted(node, known)
        if name in PICKLING:
            found.append(name)
        elif name == "torch.load" and node not in safe:
            found.append("torch.load without weights_only=True")
    return [f"{path.relative_to(ROOT)} uses {name}" for name in found]


def test_nothing_is_pickled():
    """What is unpickled runs code: a file or a message that somebody else wrote must not."""
    assert not [line for path in FILES for line in pickling(path)]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", True),
        ("from pickle import loads", True),
        ("def read():\n    import cloudpickle as p", True),
        ("import torch\ntorch.save({}, 'x')", True),
        ("from torch import save as write\nwrite({}, 'x')", True),
        ("import torch.distributed as dist\ndist.broadcast_object_list([1])", True),
        ("import torch\ntorch.distributed.all_gather_object([], 1)", True),
        ("import torch\ntorch.load('x')", True),
        ("import torch\ntorch.load('x', weights_only=False)", True),
        ("import torch\nread = torch.load", True),
        ("import numpy\nnumpy.load('x', allow_pickle=True)", True),
        ("import torch\ntorch.load('x', weights_only=True)", False),
        ("import torch\ntorch.zeros(3)\n'pickle'  # torch.save", False),
    ],
)
def test_pickling_is_seen(tmp_path, monkeypatch, source, found):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "file.py").write_text(source)
    assert bool(pickling(tmp_path / "file.py")) == found


@pytest.mark.parametrize("name", [module_name(path) for path in FILES if path.parts[len(ROOT.parts)] != "launch"])
def test_row_1_every_module_imports(name):
    """torchtune #2465: the losses of DPO and PPO could not be imported."""
    importlib.import_module(name)
