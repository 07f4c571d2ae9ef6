"""Imports point down: a layer may import only from the layers below it and from its own."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minirl"
LAYERS = [
    {
        "train",
        "evaluate",
        "export",
        "check_logprobs",
        "agreement",
        "view",
        "steps",
        "progress",
        "run",
        "launch",
        "scoring",
        "tail",
    }
    | {"inputs", "checks", "credit", "curriculum", "records", "selftest"}
    | {"replay"},
    {"rollout", "trainer", "testing", "journal"},
    {"agent_loop", "tools", "rewards", "algorithms", "data", "chat", "hints"} | {"openai"},
    {
        "types",
        "config",
        "registry",
        "metrics",
        "tracking",
        "distributed",
        "waits",
        "entries",
        "ranks",
    }
    | {"tracing", "mlflow_writer", "jsonl"}
    | {"display", "plots", "validation"},
]
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
STRANGERS = {"rollout", "trainer"}
"""Of one layer, and still they never import each other: they meet in train.py."""

FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def own_module(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(source: str) -> set[str]:
    """Dotted names of everything that is imported, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def minirl_modules(names: set[str]) -> set[str]:
    parts = [name.split(".") for name in names if name.startswith("minirl.")]
    return {p[1] for p in parts if p[1] in RANK or (PACKAGE / p[1]).is_dir()}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = own_module(path)
    assert here in RANK, f"{here}: new module; name its layer in LAYERS"
    for there in minirl_modules(imports(path.read_text())) - {here}:
        assert RANK[there] >= RANK[here], f"{here} may not import {there}, which is above it"
        assert {here, there} != STRANGERS, f"{here} may not import {there}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_rollout_imports_vllm(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path.read_text())}
    assert "vllm" not in roots or own_module(path) == "rollout"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from minirl.tools.base import BaseTool", {"tools"}),
        ("import minirl.train", {"train"}),
        ("from minirl import config, __version__", {"config"}),
        ("def f():\n    from minirl.rollout import x", {"rollout"}),
        ("import torch", set()),
    ],
)
def test_every_form_of_import_is_seen(source: str, expected: set[str]) -> None:
    assert minirl_modules(imports(source)) == expected
