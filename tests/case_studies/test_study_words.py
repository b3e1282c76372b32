"""Units, unit results and results: what they accept, what they refuse, and how they are found."""

import numpy as np
import pytest

from interp.case_studies.study import Figure, Results, Unit, UnitResult


def test_params_become_plain_json_so_that_equal_params_are_one_unit():
    unit = Unit("a", {"sizes": (2, 3), "rate": np.float64(0.5), "flag": np.bool_(True)})
    assert unit.params == {"sizes": [2, 3], "rate": 0.5, "flag": True}
    assert type(unit.params["rate"]) is float
    assert unit.params["flag"] is True


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"x": float("nan")}, r"params\['x'\]: got nan, expected a finite number"),
        ({"x": {1, 2}}, r"params\['x'\]: got set, expected JSON"),
        ({"x": [0, object()]}, r"params\['x'\]\[1\]: got object"),
        ({"x": {3: "x"}}, r"params\['x'\]: key 3 is int, expected str"),
    ],
)
def test_params_that_cannot_be_hashed_faithfully_are_refused_by_place(params, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Unit("a", params)


@pytest.mark.parametrize("name", ["", " ", "two\nlines"])
def test_a_unit_has_a_name_of_one_line(name):
    with pytest.raises(ValueError, match="expected one line of text"):
        Unit(name, {})


def test_a_unit_costs_something():
    with pytest.raises(ValueError, match="cost: got 0, expected more than 0"):
        Unit("a", {}, cost=0)


def test_numbers_may_be_nan_and_infinite_since_a_diverged_training_is_a_result():
    numbers = UnitResult({"loss": np.float32("nan"), "worst": float("inf")}).numbers
    assert np.isnan(numbers["loss"])
    assert numbers["worst"] == float("inf")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.array(["a"])}, r"arrays\['x'\]: got dtype <U1, expected one of bool, float16"),
        ({"x": np.array([1j])}, "got dtype complex128"),
        ({"__metadata__": np.zeros(1)}, "other than '__metadata__'"),
    ],
)
def test_arrays_that_a_unit_file_cannot_hold_are_refused(arrays, message):
    with pytest.raises(TypeError, match=message):
        UnitResult({}, arrays)


def test_arrays_keep_type_shape_and_values_whatever_their_layout():
    fortran = np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3))
    kept = UnitResult({}, {"x": fortran, "scalar": np.array(2.5)}).arrays
    assert kept["x"].dtype == np.dtype("<i4")
    assert kept["x"].flags.c_contiguous
    np.testing.assert_array_equal(kept["x"], fortran)
    assert kept["scalar"].shape == ()


def test_selected_results_come_in_numeric_order():
    results = Results({f"e/seed={s}": UnitResult({"s": s}) for s in (10, 9, 2)} | {"f": None})
    assert results.names("e/") == ["e/seed=2", "e/seed=9", "e/seed=10"]
    assert [result.numbers["s"] for result in results.select("e/")] == [2, 9, 10]
    assert results.column("e/", "s").tolist() == [2.0, 9.0, 10.0]
    assert results.select("g") == []


def test_a_unit_that_is_not_there_is_named_beside_those_that_are():
    results = Results({"e/seed=2": UnitResult({"s": 2})}, config="the config")
    assert results.config == "the config"
    with pytest.raises(KeyError, match=r"'e/seed=3': no such unit.*has e/seed=2"):
        results["e/seed=3"]
    with pytest.raises(KeyError, match=r"'g/': no unit begins so"):
        results.column("g/", "s")


def test_a_figure_has_a_name_that_can_be_a_file():
    with pytest.raises(ValueError, match="it becomes a file name"):
        Figure("../x", "t", "c", "a", lambda results: None)
