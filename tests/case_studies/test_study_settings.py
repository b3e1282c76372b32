"""Scales, seeds and --set give exactly the config that was asked for, or one clear line."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

from interp.case_studies.settings import (
    change_config,
    config_as_json,
    config_from_json,
    configure,
    parse_assignments,
)
from interp.case_studies.study import StudyInfo
from interp.errors import UsageError


@dataclass(frozen=True)
class Training:
    rate: float = 0.5
    epochs: int = 3


@dataclass(frozen=True)
class Config:
    n_seeds: int = 3
    rate: float = 0.5
    name: str = "x"
    is_causal: bool = True
    kind: Literal["a", "b"] = "a"
    lengths: tuple[int, ...] = (28, 400)
    pair: tuple[int, str] = (1, "x")
    limit: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    training: Training = Training()
    device: str = "cpu"

    def __post_init__(self):
        if self.rate <= 0:
            raise ValueError(f"rate: got {self.rate}, expected more than 0")

    def with_seeds(self, n):
        return replace(self, n_seeds=n)


SCALES = {"smoke": Config(n_seeds=1), "quick": Config()}
INFO = StudyInfo("s", "t", "p", "s", {}, devices=("cpu", "cuda"))


def asked(**options):
    return configure(INFO, SCALES, **{"scale": "quick", **options})


def test_without_wishes_a_scale_holds_as_it_is():
    assert asked() is SCALES["quick"]


def test_seeds_and_values_and_device_change_what_was_asked_and_nothing_else():
    config = asked(seeds=7, overrides={"rate": 1}, device="cuda")
    assert config == Config(n_seeds=7, rate=1.0, device="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "quik"}, "unknown scale 'quik' of study s: did you mean 'quick'.*smoke, quick"),
        ({"seeds": 0}, "seeds: got 0, expected a whole number of at least 1"),
        ({"seeds": True}, "seeds: got True"),
        ({"overrides": {"rates": 1}}, "unknown --set key 'rates'.*did you mean 'rate'"),
        ({"overrides": {"rate": -1}}, r"config refused \(rate=-1.0\): rate: got -1"),
        ({"device": "tpu"}, "device: study s cannot use 'tpu'; it can use cpu, cuda"),
        ({"dtype": "float64"}, "dtype: study s cannot use 'float64'; it fixes its own"),
    ],
)
def test_what_a_study_does_not_know_is_refused_in_one_line(options, message):
    with pytest.raises(UsageError, match=message) as error:
        asked(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("n_seeds", 4, 4),
        ("rate", 2, 2.0),
        ("name", "y", "y"),
        ("is_causal", False, False),
        ("kind", "b", "b"),
        ("lengths", [1, 2, 3], (1, 2, 3)),
        ("pair", [2, "y"], (2, "y")),
        ("limit", None, None),
        ("limit", 5, 5),
        ("weights", {"a": 1}, {"a": 1.0}),
        ("training", {"epochs": 9}, Training(epochs=9)),
    ],
)
def test_a_value_becomes_its_fields_type(name, value, expected):
    found = getattr(change_config(Config(), {name: value}), name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("n_seeds", 4.0, r"--set n_seeds: got 4.0 \(float\), expected int"),
        ("n_seeds", True, "expected int"),
        ("n_seeds", "4", "expected int"),
        ("rate", "fast", "expected float"),
        ("rate", True, "expected float"),
        ("name", 3, "expected str"),
        ("is_causal", 1, "expected bool"),
        ("kind", "c", "expected Literal"),
        ("lengths", 3, "expected tuple"),
        ("lengths", [1, "x"], r'--set lengths: got "x" \(str\), expected int'),
        ("pair", [1], "expected tuple"),
        ("limit", "x", "expected int | None"),
        ("weights", {"a": "x"}, r"--set weights.a: got \"x\""),
        ("training", {"epoch": 1}, "has no field 'epoch'"),
    ],
)
def test_a_value_of_another_type_is_refused(name, value, said):
    with pytest.raises(UsageError, match=said):
        change_config(Config(), {name: value})


def test_assignments_are_json_and_the_rest_is_text():
    given = ["a=1", "b=0.5", "c=[1, 2]", "d=true", "e=null", "f=plain text", 'g="3"', "h=a=b", "i="]
    assert parse_assignments(given) == {
        "a": 1,
        "b": 0.5,
        "c": [1, 2],
        "d": True,
        "e": None,
        "f": "plain text",
        "g": "3",
        "h": "a=b",
        "i": "",
    }
    assert parse_assignments(["x=NaN"]) == {"x": "NaN"}


@pytest.mark.parametrize("text", ["rate", "=3", " =3"])
def test_an_assignment_without_name_or_value_is_refused(text):
    with pytest.raises(UsageError, match=r"expected key=value, such as epochs=3"):
        parse_assignments([text])


def test_a_config_comes_back_from_json_as_it_went():
    config = Config(lengths=(3,), weights={"a": 0.5}, training=Training(0.1, 7), limit=2)
    assert config_from_json(Config, config_as_json(config)) == config


def test_the_config_of_another_version_of_a_study_is_told_as_such():
    with pytest.raises(UsageError, match="has no field 'gone' any more"):
        config_from_json(Config, {"gone": 1})
