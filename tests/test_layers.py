"""Who may import whom: the table of the architecture, and the shape every file keeps."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {  # file -> our modules it may import
    "kernels": set(),
    "sample": {"kernels"},
    "grammar": set(),
    "scheduler": set(),
    "kv_cache": {"kernels"},
    "paged": {"kernels", "kv_cache"},
    "model": {"kernels", "kv_cache"},
    "speculative": {"kernels", "kv_cache", "model", "sample"},
    "generate": {"grammar", "kv_cache", "model", "paged", "sample", "scheduler", "speculative"},
}
THEIRS = {  # file -> packages it may import
    "kernels": {"torch", "triton"},
    "sample": {"torch"},
    "grammar": {"numpy"},
    "scheduler": set(),
    "kv_cache": {"torch"},
    "paged": {"torch"},
    "model": {"torch", "numpy", "safetensors", "huggingface_hub", "gguf"},
    "speculative": {"torch", "safetensors"},
    "generate": {"torch", "tiktoken", "regex", "jinja2", "tokenizers"},
}
DRIVES = {"paged": {"scheduler"}}  # test of a file -> what else it takes to drive that file
PARTS = ("The idea", "The data", "Invariants", "Units", "Article", "Try", "Imports")
FILES = sorted(ROOT.glob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of every import, in function bodies too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names.add(node.module.split(".")[0])
            assert all(alias.name != "*" for alias in node.names), "star import"
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_only_what_the_table_allows(path):
    assert path.stem in OURS, f"{path.name} is not one of {sorted(OURS)}"
    names = imported(ast.parse(path.read_text()))
    foreign = {name for name in names if name not in sys.stdlib_module_names}
    allowed = OURS[path.stem] | THEIRS[path.stem]
    assert foreign <= allowed, f"{path.name} imports {sorted(foreign - allowed)}"


def test_no_edge_leads_back():
    for name, imports in OURS.items():
        seen, todo = set(), set(imports)
        while todo:
            seen |= todo
            todo = set().union(*(OURS[other] for other in todo)) - seen
        assert name not in seen, f"{name} imports itself through {sorted(seen)}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/test_*.py")), ids=lambda p: p.stem)
def test_a_test_imports_its_file_what_that_is_made_of_and_nothing_else(path):
    names = imported(ast.parse(path.read_text())) & set(OURS)
    subject = path.stem.removeprefix("test_")
    if subject in OURS:
        allowed = OURS[subject] | {subject, "kv_cache", "model"} | DRIVES.get(subject, set())
        assert names <= allowed, f"{path.name} imports {sorted(names - allowed)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_opens_with_its_seven_paragraphs(path):
    doc = ast.get_docstring(ast.parse(path.read_text()), clean=False)
    places = [re.search(rf"^{part}s? ", doc, re.MULTILINE) for part in PARTS]
    assert all(places), f"{path.name} lacks {[p for p, m in zip(PARTS, places) if not m]}"
    starts = [match.start() for match in places]
    assert starts == sorted(starts), f"{path.name}: paragraphs out of order"
    invariants = doc[starts[2] : starts[3]]
    assert re.search(r"^Invariants +1\. ", invariants), f"{path.name}: invariants are numbered"


def test_the_top_level_holds_nothing_but_the_agreed_files():
    assert {path.stem for path in FILES} <= set(OURS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_global_state_is_an_argument(path):
    tree = ast.parse(path.read_text())
    found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert not found, f"{path.name}: global in lines {found}"
    bare = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and not n.type]
    assert not bare, f"{path.name}: bare except in lines {bare}"
