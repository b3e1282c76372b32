"""Keys tell units apart by all that their numbers depend on; result hashes tell results apart."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

import interp
from interp.case_studies import keys
from interp.case_studies.study import StudyError, Unit, UnitResult

PACKAGES = {"python": "3.11", "torch": "2.13.0"}


def key_of(*units, name="a", study="s", source="x", packages=PACKAGES):
    return keys.unit_keys(study, units, source=source, packages=packages)[name]


def test_a_key_depends_on_study_params_needs_source_and_versions(tmp_path):
    data = tmp_path / "data.csv"
    data.write_text("1,2")
    plain = key_of(Unit("a", {"seed": 1}))
    needed = [Unit("n", {"n": 1}), Unit("a", {"seed": 1}, needs=("n",))]
    others = [
        key_of(Unit("a", {"seed": 2})),
        key_of(Unit("a", {"seed": 1.0})),
        key_of(Unit("a", {"seed": 1}), study="t"),
        key_of(Unit("a", {"seed": 1}), source="y"),
        key_of(Unit("a", {"seed": 1}), packages={**PACKAGES, "torch": "2.14.0"}),
        key_of(*needed),
        key_of(Unit("n", {"n": 2}), needed[1]),
        key_of(Unit("a", {"seed": 1}, data={"d": data})),
    ]
    data.write_text("1,3")
    others.append(key_of(Unit("a", {"seed": 1}, data={"d": data})))
    assert len({plain, *others}) == 1 + len(others)


def test_a_key_does_not_depend_on_names_order_cost_or_the_place_of_data(tmp_path):
    (tmp_path / "other").mkdir()
    here, there = tmp_path / "d", tmp_path / "other" / "e"
    for path in (here, there):
        path.write_text("same")
    first = key_of(Unit("a", {"x": 1, "y": 2}, data={"d": here}))
    second = key_of(Unit("b", {"y": 2, "x": 1}, data={"d": there}, cost=9), name="b")
    assert first == second


def test_two_units_that_only_their_names_tell_apart_are_refused():
    with pytest.raises(StudyError, match=r"'a' and 'b' have the same params.*say all that differs"):
        key_of(Unit("a", {"x": 1}), Unit("b", {"x": 1}))


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([Unit("a", {"x": 1}), Unit("a", {"x": 2})], "two units are named 'a'"),
        ([Unit("a", {}, needs=("z",))], "'a' needs 'z', which is no unit of it"),
        ([Unit("a", {}, needs=("b",)), Unit("b", {}, needs=("a",))], "in a circle: 'a', 'b'"),
        ([Unit("a", {}, needs=("a",))], "in a circle: 'a'"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(units, message):
    with pytest.raises(StudyError, match=message):
        key_of(*units)


def test_stages_follow_needs_and_start_with_the_costly():
    units = [
        Unit("last", {}, needs=("middle",)),
        Unit("cheap", {}),
        Unit("middle", {}, needs=("cheap", "dear")),
        Unit("dear", {}, cost=5),
    ]
    stages = [[unit.name for unit in stage] for stage in keys.stages("s", units)]
    assert stages == [["dear", "cheap"], ["middle"], ["last"]]


def test_data_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(StudyError, match=r"unit 'a', data 'd': cannot read .*No such file"):
        key_of(Unit("a", {}, data={"d": tmp_path / "missing"}))


def test_a_result_hash_sees_every_number_name_type_shape_and_byte():
    results = [
        UnitResult({"x": 1}),
        UnitResult({"x": 1.0}),
        UnitResult({"y": 1}),
        UnitResult({"x": float("nan")}),
        UnitResult({}, {"x": np.zeros(6)}),
        UnitResult({}, {"y": np.zeros(6)}),
        UnitResult({}, {"x": np.zeros((2, 3))}),
        UnitResult({}, {"x": np.zeros(6, dtype=np.int64)}),
        UnitResult({}, {"x": np.array([0, 0, 0, 0, 0, -0.0])}),
        UnitResult({}, {"x": np.zeros((0, 3))}),
    ]
    hashes = [keys.result_hash(result) for result in results]
    assert len(set(hashes)) == len(hashes)
    assert hashes[0] == keys.result_hash(UnitResult({"x": 1}))


def test_a_result_hash_can_be_had_by_hand_so_that_archives_can_be_checked_without_us():
    result = UnitResult({"b": [1, None], "a": 0.1}, {"x": np.arange(3, dtype=np.float32)})
    by_hand = hashlib.sha256(
        b'{"a":0.1,"b":[1,null]}'
        b'\n["x","float32",[3]]\n'
        b"\x00\x00\x00\x00\x00\x00\x80\x3f\x00\x00\x00\x40"
    )
    assert keys.result_hash(result) == by_hand.hexdigest()


def test_the_source_that_counts_is_the_studys_own_but_not_what_surrounds_it(tmp_path):
    for name in ("study", "config", "claims", "figures"):
        (tmp_path / f"{name}.py").write_text("1")
    (tmp_path / "README.md").write_text("1")
    before = keys.source_hash(tmp_path)
    for name in ("config.py", "claims.py", "measures.py", "figures.py", "README.md"):
        (tmp_path / name).write_text("2")
    assert keys.source_hash(tmp_path) == before
    (tmp_path / "part.py").write_text("1")
    with_part = keys.source_hash(tmp_path)
    (tmp_path / "study.py").write_text("2")
    assert len({before, with_part, keys.source_hash(tmp_path)}) == 3


def test_the_toolkit_counts_but_for_what_only_shows_and_joins(monkeypatch):
    fed = []
    monkeypatch.setattr(keys, "_add_tree", lambda digest, label, root, **k: fed.append((label, k)))
    keys.toolkit_hash()
    assert [label for label, _ in fed] == ["kernels", "models", "probes", "interp"]
    left_out = fed[-1][1]["leave_out"]
    assert {"cli.py", "workflows.py", "benchmarks", "case_studies", "kernels"} <= left_out
    assert not {"bootstrap.py", "balance.py"} & left_out


def test_versions_name_what_computes_and_what_is_missing(monkeypatch):
    monkeypatch.setattr(keys, "PACKAGES", ("numpy", "surely-not-installed"))
    found = keys.versions()
    assert found["numpy"] == np.__version__
    assert found["surely-not-installed"] == "not installed"
    assert found["python"].startswith("3.")


def test_everything_that_is_left_out_of_the_toolkit_exists():
    house = Path(interp.__file__).parent
    assert {name for name in keys._FRONT if not (house / name).exists()} == set()
