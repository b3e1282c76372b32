"""Studies are found by name or by path, listed without torch, and read anew when they change."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from interp.case_studies import registry
from interp.case_studies.registry import find_study, list_studies
from interp.case_studies.run import run
from interp.case_studies.study import StudyError
from interp.errors import UsageError


def test_every_folder_with_config_and_claims_is_a_study_and_no_other():
    for study in list_studies():
        assert (study.folder / "study.py").is_file()
        assert study.package == f"interp.case_studies.{study.name}"
        assert set(study.scales) >= {"smoke", "quick", "paper"}
        assert study.info.name == study.name
        assert study.claims


def test_listing_and_describing_studies_imports_no_torch(tmp_path):
    code = (
        "import sys; from interp.case_studies.catalogue import describe_studies, describe_study\n"
        "for said in describe_studies(): describe_study(said['name'])\n"
        "heavy = {'torch', 'transformers', 'transformer_lens', 'matplotlib', 'pandas', 'scipy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("as_text", [True, False])
def test_a_study_anywhere_is_found_by_its_path(toy, as_text):
    study = find_study(str(toy) if as_text else toy)
    assert (study.name, study.folder) == ("toy", toy.resolve())
    assert study.info.title == "Uniform draws"
    assert [claim.id for claim in study.claims] == ["half", "size"]
    assert [figure.name for figure in study.figures] == ["means"]
    assert len(study.units(study.scales["quick"])) == 5
    assert str(toy.parent) not in sys.path


def test_a_relative_path_will_do(toy, monkeypatch):
    monkeypatch.chdir(toy.parent)
    assert find_study("./toy").folder == toy.resolve()
    assert find_study("toy").folder == toy.resolve()
    monkeypatch.chdir(toy)
    assert find_study(".").name == "toy"


def test_a_study_may_import_its_own_files_by_its_folders_name(toy):
    (toy / "part.py").write_text("TWO = 2\n")
    text = (toy / "study.py").read_text()
    (toy / "study.py").write_text(f"from toy.part import TWO\n{text}")
    assert find_study(toy).load("study").TWO == 2


def test_a_file_that_changed_is_read_again(toy):
    assert find_study(toy).info.title == "Uniform draws"
    text = (toy / "config.py").read_text()
    (toy / "config.py").write_text(text.replace("Uniform draws", "Other draws"))
    assert find_study(toy).info.title == "Other draws"


def test_two_studies_of_one_name_in_two_places_do_not_mix(toy, tmp_path):
    other = tmp_path / "other" / "toy"
    other.mkdir(parents=True)
    for path in toy.glob("*.py"):
        (other / path.name).write_text(path.read_text().replace("Uniform", "Second"))
    assert find_study(toy).info.title == "Uniform draws"
    assert find_study(other).info.title == "Second draws"
    assert find_study(toy).info.title == "Uniform draws"


def test_a_study_without_figures_has_none(toy):
    (toy / "figures.py").unlink()
    assert find_study(toy).figures == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("dyck_myopa", "unknown study 'dyck_myopa'"),
        ("./nowhere", "is no folder; a study is a folder with config.py"),
    ],
)
def test_a_study_that_is_not_there_is_refused(reference, message):
    with pytest.raises(UsageError, match=message):
        find_study(reference)


def test_the_nearest_name_is_suggested(monkeypatch, toy):
    known = [registry.Study("dyck_myopia", toy, "toy")]
    monkeypatch.setattr(registry, "list_studies", lambda: known)
    with pytest.raises(UsageError, match="did you mean 'dyck_myopia'.*such as ./my_study"):
        find_study("dick_myopia")


def test_a_folder_that_is_no_study_is_told_what_it_lacks(toy):
    (toy / "claims.py").unlink()
    with pytest.raises(UsageError, match=r"has no claims\.py"):
        find_study(toy)


def test_a_folder_that_python_cannot_import_by_name_is_refused(toy):
    renamed = toy.rename(toy.parent / "my-toy")
    with pytest.raises(UsageError, match="rename it with letters, digits and '_'"):
        find_study(renamed)


def test_a_folder_named_like_an_installed_package_is_refused(toy):
    renamed = toy.rename(toy.parent / "json")
    with pytest.raises(UsageError, match="the name 'json' is taken by"):
        _ = find_study(renamed).info


def test_a_syntax_error_is_told_with_file_and_line(toy):
    (toy / "claims.py").write_text("CLAIMS = [\n\nx y\n]")
    with pytest.raises(UsageError, match=r"claims\.py, line 3: .*the study cannot be read"):
        _ = find_study(toy).claims


def test_a_name_that_is_missing_or_of_the_wrong_kind_is_told_with_its_file(toy):
    (toy / "claims.py").write_text("CLAIMS = 3")
    with pytest.raises(UsageError, match=r"claims\.py: CLAIMS is int, expected Sequence"):
        _ = find_study(toy).claims
    (toy / "study.py").write_text("")
    with pytest.raises(UsageError, match=r"study\.py: units is NoneType, expected Callable"):
        _ = find_study(toy).units


def test_a_study_that_calls_itself_otherwise_is_refused(toy):
    renamed = toy.rename(toy.parent / "other_toy")
    with pytest.raises((UsageError, StudyError), match="STUDY.name is 'toy'"):
        _ = find_study(renamed).info


def test_the_study_that_the_readme_teaches_runs_and_reproduces_its_claim(tmp_path):
    readme = Path(registry.__file__).resolve().with_name("README.md").read_text()
    folder = tmp_path / "my_study"
    folder.mkdir()
    for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        if part := re.match(r"# (\w+)\.py: ", block):
            (folder / f"{part[1]}.py").write_text(block)
    assert sorted(path.stem for path in folder.iterdir()) == sorted(registry.PARTS)
    outcome = run(folder, out=tmp_path / "run", workers=1)
    assert [judgement.verdict for judgement in outcome.run.judgements] == ["reproduced"]
    assert outcome.figure_errors == {}
