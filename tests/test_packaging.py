"""What a user installs is what the checkout holds: wheel and sdist are built and tried."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "models", "probes", "case_studies")


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "-o", out, source, cwd=out)
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def wheel_listing(wheel: Path) -> dict[str, int]:
    """Name -> CRC of each file that is not the wheel's own metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert len(names) == len(set(names)), "a file is in the wheel twice"
        return {i.filename: i.CRC for i in archive.infolist() if ".dist-info/" not in i.filename}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("built")
    for name in ("wheel", "sdist", "unpacked", "wheel_from_sdist"):
        (base / name).mkdir()
    wheel = build("wheel", ROOT, base / "wheel")
    sdist = build("sdist", ROOT, base / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(base / "unpacked", filter="data")
    (unpacked,) = (base / "unpacked").iterdir()
    second = build("wheel", unpacked, base / "wheel_from_sdist")
    return {"wheel": wheel, "sdist": sdist, "unpacked": unpacked, "wheel_from_sdist": second}


def test_the_wheel_from_the_sdist_equals_the_wheel_from_the_checkout(built):
    assert wheel_listing(built["wheel"]) == wheel_listing(built["wheel_from_sdist"])


def test_the_wheel_holds_every_source_file_under_its_import_name(built):
    listing = wheel_listing(built["wheel"])
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"interp/{path.relative_to(ROOT).as_posix()}" in listing
    for path in (ROOT / "interp").glob("*.py"):
        assert f"interp/{path.name}" in listing
    tops = {name.split("/")[0] for name in listing}
    assert tops == {"interp"}, "a top-level package of a popular name would overwrite another's"


def test_the_sdist_holds_the_tests_and_what_they_need(built):
    for name in ("tests/conftest.py", "tests/test_layout.py", "Makefile", "constraints.txt"):
        assert (built["unpacked"] / name).is_file()


@pytest.mark.slow
def test_the_installed_wheel_lists_its_studies_outside_the_checkout(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "-c", ROOT / "constraints.txt", built["wheel"], cwd=tmp_path)
    listing = run(tmp_path / "venv" / "bin" / "interp", "list", cwd=tmp_path)
    assert "dyck_myopia" in listing
    origin = run(python, "-c", "import interp.models as m; print(list(m.__path__))", cwd=tmp_path)
    assert str(tmp_path / "venv") in origin and str(ROOT) not in origin
