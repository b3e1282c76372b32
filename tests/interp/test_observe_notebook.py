"""The notebook's cells name what exists; running them needs the real model and a minute."""

import ast
import importlib
import os
from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "observe_smollm2.ipynb"


@pytest.fixture(scope="module")
def code():
    cells = nbformat.read(NOTEBOOK, 4).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    return [source.replace("%matplotlib inline", "") for source in sources]


def test_every_cell_is_python_and_every_imported_name_exists(code):
    for source in code:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                missing = [a.name for a in node.names if not hasattr(module, a.name)]
                assert not missing, f"{node.module} has no {missing}"


def test_the_last_cell_is_the_ten_lines_that_another_project_needs(code):
    lines = [line for line in code[-1].splitlines() if line.strip()]
    assert len(lines) <= 10
    assert sum("interp" in line for line in lines) == 2


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.skipif(
    os.environ.get("INTERP_RUN_NOTEBOOKS") is None,
    reason="takes a minute and the 135M model: set INTERP_RUN_NOTEBOOKS to run the notebook",
)
def test_the_notebook_runs_from_top_to_bottom():
    import nbclient

    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=1200, resources=resources).execute()
