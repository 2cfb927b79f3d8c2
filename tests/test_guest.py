"""Changes of modules, classes and process states that are not raylight's: docs/architecture.md lists all."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax_trees import parsed

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "raylight"
PAGE = ROOT / "docs" / "architecture.md"
SCOPES = {"warnings.catch_warnings", "torch.random.fork_rng"}
"""Contexts that restore the state at their end."""
STATE = {"os.environ", "sys.modules", "sys.path", "sys.meta_path", "sys.path_hooks", "warnings.filters"}
"""Containers that all code of a process shares. Every method that changes one counts."""
READS = {"get", "items", "keys", "values", "copy", "index", "count"}
CALLS = {
    "logging.basicConfig",
    "logging.captureWarnings",
    "logging.disable",
    "logging.setLoggerClass",
    "os.chdir",
    "os.putenv",
    "os.register_at_fork",
    "os.umask",
    "gc.disable",
    "gc.freeze",
    "gc.set_threshold",
    "numpy.random.seed",
    "random.seed",
    "signal.signal",
    "socket.setdefaulttimeout",
    "sys.setprofile",
    "sys.setrecursionlimit",
    "sys.setswitchinterval",
    "sys.settrace",
    "threading.setprofile",
    "threading.settrace",
    "torch.manual_seed",
    "torch.set_default_device",
    "torch.set_default_dtype",
    "torch.set_num_interop_threads",
    "torch.set_num_threads",
    "unittest.mock.patch",
    "warnings.filterwarnings",
    "warnings.resetwarnings",
    "warnings.simplefilter",
}
"""Functions that change the state of a process."""
LOGGER_CHANGES = {"setLevel", "addHandler", "removeHandler", "addFilter", "propagate", "handlers", "disabled"}


class Changes(ast.NodeVisitor):
    """Collects the changes in a file by their full names.

    A name counts as foreign if the file imports it from another package, or assigns it such a name or an
    attribute of one. Instances do not count: they are ours.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[str] = set()
        self._foreign: dict[str, str] = {}
        self._restored = 0
        for node in ast.walk(tree):
            self._bind(node)
        for name in [name for name, full in self._foreign.items() if full.split(".")[0] == "raylight"]:
            del self._foreign[name]
        self.visit(tree)

    def _bind(self, node: ast.AST) -> None:
        """Note the foreign name that an import or an assignment gives a local name."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                self._foreign[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                self._foreign[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = None if isinstance(node.value, ast.Call) else self._name(node.value)
            if name and isinstance(target, ast.Name):
                self._foreign[target.id] = name

    def _name(self, node: ast.AST) -> str | None:
        """Return the full name of a chain of attributes that begins with a foreign name."""
        if isinstance(node, ast.Name):
            return self._foreign.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._name(node.value)):
            return f"{owner}.{node.attr}"
        return self._logger(node) if isinstance(node, ast.Call) else None

    def _logger(self, node: ast.Call) -> str | None:
        """Return `logger NAME` for the logger of others that a call returns."""
        if self._name(node.func) != "logging.getLogger":
            return None
        if not node.args:
            return "root logger"
        name = node.args[0]
        known = isinstance(name, ast.Constant) and not str(name.value).startswith("raylight")
        return f"logger {ast.literal_eval(name)}" if known else None

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        calls = [item.context_expr for item in node.items]
        restored = any(isinstance(call, ast.Call) and self._name(call.func) in SCOPES for call in calls)
        self._restored += restored
        self.generic_visit(node)
        self._restored -= restored

    def _target(self, node: ast.AST) -> None:
        if isinstance(node, ast.Tuple | ast.List):
            for element in node.elts:
                self._target(element)
        elif isinstance(node, ast.Subscript) and (name := self._name(node.value)):
            self.found.add(name)  # an item of a container: of os.environ, of a class's registry
        elif isinstance(node, ast.Attribute) and (name := self._name(node)):
            self.found.add(name)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._target(target)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign | ast.AnnAssign) -> None:
        self._target(node.target)
        self.generic_visit(node)

    visit_AnnAssign = visit_AugAssign

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._target(target)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if owner := self._name(node.args[0]):
                attribute = node.args[1]
                name = attribute.value if isinstance(attribute, ast.Constant) else "*"
                self.found.add(f"{owner}.{name}")
        elif name := self._name(node.func):
            owner, _, method = name.rpartition(".")
            if owner in STATE and method not in READS:
                self.found.add(owner)
            elif owner == "root logger" or owner.startswith("logger "):
                self.found |= {owner} if method in LOGGER_CHANGES else set()
            elif (
                (name in CALLS and not self._restored)
                or method == "register"
                or name.startswith("unittest.mock.")
            ):
                self.found.add(name)


def changes() -> set[tuple[str, str]]:
    """Return the changes of the package: the changed name, and the file."""
    return {
        (name, str(path.relative_to(PACKAGE)))
        for path in PACKAGE.rglob("*.py")
        for name in Changes(parsed(path)).found
    }


def documented() -> Iterator[tuple[str, str]]:
    """Yield the changed name and the file of each row of the page's tables of changes."""
    section = PAGE.read_text().split("\n## A guest on the machine\n")[1].split("\n## ")[0]
    for row in section.splitlines():
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        if len(cells) == 4 and cells[0] not in ("changed", "---"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                for file in re.findall(r"`([^`]+)`", cells[1]):
                    yield name, file


def test_all_changes_are_documented() -> None:
    found, written = changes(), set(documented())
    assert sorted(found - written) == [], "change nothing that is not raylight's, or say why on the page"
    assert sorted(written - found) == [], "no longer in the code"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import ray.data\nray.data.x = 1", {"ray.data.x"}),
        ("from torch import nn as n\nn.Linear.forward = f", {"torch.nn.Linear.forward"}),
        ("import torch\nalias = torch.nn\nalias.Linear.forward = f", {"torch.nn.Linear.forward"}),
        ("import torch\nsetattr(torch, 'float', 1)\ndelattr(torch, name)", {"torch.float", "torch.*"}),
        ("import sys\nsys.modules['x'] = y\nsys.modules.update(a)\ndel sys.modules['x']", {"sys.modules"}),
        ("import os\nos.environ.get('x')\nos.environ['y']\ndict(os.environ)", set()),
        ("import os\nos.environ |= {}\nos.environ.setdefault('x', 'y')", {"os.environ"}),
        ("import warnings\nwarnings.simplefilter('ignore')", {"warnings.simplefilter"}),
        ("import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('ignore')", set()),
        ("import logging\nlogging.getLogger('ray').setLevel(1)", {"logger ray"}),
        ("import logging\nlogging.getLogger().handlers[:] = []", {"root logger.handlers"}),
        ("import logging\nlogging.getLogger(__name__).setLevel(1)", set()),
        ("from unittest import mock\nwith mock.patch.dict(d): pass", {"unittest.mock.patch.dict"}),
        ("import torch\nlayer = torch.nn.Linear()\nlayer.weight = 1", set()),
        ("from raylight import log\nlog.x = 1", set()),
        ("from functools import partial\nimport a\n(a.b, a.c), d = x, y\na.e += 1", {"a.b", "a.c", "a.e"}),
    ],
)
def test_changes_are_found(code: str, found: set[str]) -> None:
    assert Changes(ast.parse(code)).found == found


STATE_CHANGES = """
import gc, importlib, json, logging, os, signal, sys, types, warnings
import torch, transformers, peft, ray.serve, opentelemetry.sdk.trace, openai, httpx2
import transformers.integrations.flash_attention, transformers.masking_utils, transformers.modeling_utils

FOREIGN = sys.stdlib_module_names | {"torch", "transformers", "peft", "ray", "opentelemetry"}

def state():
    values = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] not in FOREIGN or not isinstance(module, types.ModuleType):
            continue
        values[f"sys.modules {module_name}"] = module
        for name, value in list(vars(module).items()):
            values[f"{module_name}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module_name:
                for attribute, member in list(vars(value).items()):
                    values[f"{module_name}.{name}.{attribute}"] = member
    for number in signal.valid_signals():
        values[f"signal {number}"] = signal.getsignal(number)
    return values

def plain():
    return {
        "environ": dict(os.environ),
        "collector": gc.get_threshold(),
        "root logger": [repr(handler) for handler in logging.getLogger().handlers],
        "path": list(sys.path),
        "filters": [str(entry) for entry in warnings.filters],
        "threads": torch.get_num_threads(),
    }

before, plain_before = state(), plain()
for name in sys.argv[1:]:
    importlib.import_module(name)
after, plain_after = state(), plain()
changed = [name for name, value in before.items() if after.get(name) is not value]
print(json.dumps([changed, plain_before, plain_after]))
"""
CHANGED_BY_TORCH = "torch._functorch.vmap."
"""Functions that torch's compiler wraps when it is imported."""
CHANGED_BY_VERL = {"LAZY_LEGACY_OP", "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "TORCH_CUDA_ARCH_LIST"}
"""Variables that verl and tensordict set when they are imported."""
PARTS = [
    "cli",
    "engines.transformers.app",
    "learner.actor",
    "learner.local",
    "learner.policy",
    "learner.supervised",
    "trainer.cluster_fit.local_memory",
    "runner.actor",
    "serving.deploy.replica",
    "store.actor",
    "trainer",
]
"""Modules whose imports are most of the package."""


@pytest.mark.slow
def test_imports_change_nothing_but_variables() -> None:
    command = [sys.executable, "-c", STATE_CHANGES, *(f"raylight.{part}" for part in PARTS)]
    changed, before, after = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    assert [name for name in changed if not name.startswith(CHANGED_BY_TORCH)] == []
    variables = {name for name, value in after.pop("environ").items() if before["environ"].get(name) != value}
    assert {name for name in variables if not name.startswith("RAY_SERVE_")} <= CHANGED_BY_VERL
    del before["environ"]
    assert after == before
