"""The notebook of the Dyck study: its cells name what exists, and it runs from top to bottom."""

import ast
import importlib
import os
from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "case_studies" / "dyck_myopia" / "notebook.ipynb"


@pytest.fixture(scope="module")
def cells():
    return nbformat.read(NOTEBOOK, 4).cells


def test_every_name_that_a_cell_imports_exists(cells):
    for cell in cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(cell.source.replace("%matplotlib inline", ""))):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{node.module} has no {missing}"


def test_it_is_committed_without_outputs_and_at_the_smallest_scale(cells):
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert any('SCALE = "smoke"' in cell.source for cell in code)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("INTERP_RUN_NOTEBOOKS") is None,
    reason="takes half a minute: set INTERP_RUN_NOTEBOOKS to run the notebook",
)
def test_the_notebook_runs_from_top_to_bottom():
    import nbclient

    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
