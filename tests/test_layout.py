"""The layout is a contract: import names, links, and layers that point one way."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import interp

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "models", "probes", "case_studies")

# folder -> what its modules may import; "interp" stands for the files of interp/ itself.
MAY_IMPORT = {
    "kernels": {"kernels"},
    "models": {"kernels", "models"},
    "interp": {"kernels", "models", "interp"},
    "probes": {"probes"},
    "case_studies": {"kernels", "models", "interp", "probes", "case_studies"},
}
LOOK_UPWARD = {"interp/__init__.py", "interp/workflows.py", "interp/cli.py"}


def sources(folder: str) -> list[Path]:
    """Python files of a folder; the links inside interp/ are not followed."""
    found = []
    for parent, directories, files in os.walk(ROOT / folder):
        directories[:] = [d for d in directories if d != "__pycache__"]
        found += [Path(parent, name) for name in files if name.endswith(".py")]
    return sorted(found)


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from interp import models` names a folder as much as `import interp.models` does
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def folder_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "interp"


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_is_linked_relatively_into_the_package(folder):
    link = ROOT / "interp" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_carry_no_init_file_so_that_their_bare_names_stay_free(folder):
    assert not [path for path in sources(folder) if path.name == "__init__.py"]


@pytest.mark.parametrize("folder", ["interp", *FOLDERS, "tests"])
def test_nothing_imports_a_folder_by_its_bare_name(folder):
    for path in sources(folder):
        bare = {name.split(".")[0] for name in imported_names(path)} & set(FOLDERS)
        assert not bare, f"{path} imports {bare}: write interp.{bare.pop()}"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_layers_point_one_way(folder):
    for path in sources(folder):
        if str(path.relative_to(ROOT)) in LOOK_UPWARD:
            continue
        ours = {name for name in imported_names(path) if name.split(".")[0] == "interp"}
        upward = {name for name in ours if folder_of(name) not in MAY_IMPORT[folder]}
        assert not upward, f"{path.relative_to(ROOT)} may not import {sorted(upward)}"


def test_the_arrow_check_sees_an_upward_import(tmp_path):
    offender = tmp_path / "offender.py"
    offender.write_text("from interp.case_studies.run import run\nfrom interp import probes\n")
    assert {folder_of(name) for name in imported_names(offender)} == {"case_studies", "probes"}


@pytest.mark.parametrize("folder", ["interp", *FOLDERS])
def test_nnsight_and_pyplot_are_never_imported_at_top_level(folder):
    for path in sources(folder):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module}", *(f"{node.module}.{a.name}" for a in node.names)}
            else:
                continue
            assert not {n for n in names if n.split(".")[0] == "nnsight"}, path
            assert "matplotlib.pyplot" not in names, path


def test_every_public_name_resolves_and_is_listed():
    for name in interp.__all__:
        assert getattr(interp, name) is not None
    assert sorted(interp.__all__) == dir(interp)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = interp.nonsense


def run_python(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_interp_is_instant_and_brings_in_nothing_heavy(tmp_path):
    code = (
        "import sys, time; start = time.process_time(); import interp; "
        "heavy = {'torch', 'transformer_lens', 'nnsight', 'transformers', 'matplotlib', 'pandas'};"
        "print(time.process_time() - start, sorted(heavy & set(sys.modules)))"
    )
    seconds, heavy = run_python(code, tmp_path).split(maxsplit=1)
    assert heavy == "[]"
    assert float(seconds) < 0.25


def test_a_checkout_does_not_pose_as_the_kernels_package_of_hugging_face():
    code = (
        "import sys; sys.path.insert(0, '.');"
        "from transformers.utils.import_utils import is_kernels_available;"
        "import importlib.util; spec = importlib.util.find_spec('kernels');"
        "print(is_kernels_available(), spec is None or spec.origin is None)"
    )
    # Where the real package is installed it must win over the folder; else it must stay absent.
    available, ours = run_python(code, ROOT).split()
    assert (available, ours) in {("False", "True"), ("True", "False")}


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_import_by_their_long_names(folder):
    for path in sources(folder):
        if "triton" in path.name or "notebook" in path.name:
            continue  # Linux only, and imported when the backend is first used
        name = ".".join(["interp", *path.relative_to(ROOT).with_suffix("").parts])
        importlib.import_module(name)
