"""A study's config from and to text: scales, ``--set key=value``, and back from ``run.json``."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from interp.case_studies.study import JSON, StudyInfo, as_plain
from interp.errors import UsageError, unknown


def configure(
    info: StudyInfo,
    scales: Mapping[str, Any],
    *,
    scale: str,
    seeds: int | None = None,
    overrides: Mapping[str, JSON] | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> Any:
    """The config of a study at a scale, with other seeds, other values, another device.

    Raises ``UsageError`` for anything that the study does not know, with the nearest name it does.
    """
    if scale not in scales:
        raise UsageError(unknown("scale", scale, scales, of=f"study {info.name}"))
    config = scales[scale]
    if seeds is not None:
        if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
            raise UsageError(f"seeds: got {seeds!r}, expected a whole number of at least 1")
        config = _accepted(lambda: config.with_seeds(seeds), f"seeds={seeds}")
    changes = dict(overrides or {})
    for option, asked, offered in (
        ("device", device, info.devices),
        ("dtype", dtype, info.dtypes),
    ):
        if asked is None:
            continue
        if asked not in offered:
            can = f"it can use {', '.join(offered)}" if offered else "it fixes its own"
            raise UsageError(
                f"{option}: study {info.name} cannot use {asked!r}; {can}, so leave "
                f"--{option} out{' or choose one of these' if len(offered) > 1 else ''}"
            )
        if option in {field.name for field in dataclasses.fields(config)}:
            changes.setdefault(option, asked)
    return change_config(config, changes)


def change_config(config: Any, changes: Mapping[str, JSON]) -> Any:
    """``config`` with some fields changed; each value is checked against its field's type."""
    hints = typing.get_type_hints(type(config))
    names = [field.name for field in dataclasses.fields(config)]
    values = {}
    for name, value in changes.items():
        if name not in names:
            raise UsageError(unknown("--set key", name, names, of="this study's config"))
        values[name] = _typed(value, hints[name], f"--set {name}")
    if not values:
        return config
    said = ", ".join(f"{name}={json.dumps(value, default=str)}" for name, value in values.items())
    return _accepted(lambda: dataclasses.replace(config, **values), said)


def parse_assignments(assignments: Iterable[str]) -> dict[str, JSON]:
    """``["lr=0.1", "name=x"]`` as a dict: values are JSON, and what is no JSON is a string."""
    found: dict[str, JSON] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set: got {assignment!r}, expected key=value, such as epochs=3")
        try:
            found[name.strip()] = json.loads(text, parse_constant=_no_constant)
        except ValueError:
            found[name.strip()] = text
    return found


def config_as_json(config: Any) -> dict[str, JSON]:
    """Every field of a config dataclass as plain JSON."""
    return as_plain(dataclasses.asdict(config), "config", nan=False)


def config_from_json(kind: type, values: Mapping[str, JSON]) -> Any:
    """The config that ``config_as_json`` wrote; raises ``UsageError`` if it does not fit."""
    hints = typing.get_type_hints(kind)
    strange = [name for name in values if name not in hints]
    if strange:
        raise UsageError(
            f"config: {kind.__name__} has no field {strange[0]!r} any more, so the run was made by "
            "another version of the study; run the study again"
        )
    typed = {name: _typed(value, hints[name], f"config {name}") for name, value in values.items()}
    return _accepted(lambda: kind(**typed), "the stored config")


def _accepted(make: Any, said: str) -> Any:
    """The config that ``make`` makes; its own refusal becomes a message to the user."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise UsageError(f"config refused ({said}): {error}") from error


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _typed(value: JSON, hint: Any, where: str) -> Any:
    """``value`` as the annotated type, or ``UsageError``: no guessing but int to float."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        for part in parts:
            try:
                return _typed(value, part, where)
            except UsageError:
                continue
        raise _mistyped(value, hint, where)
    if hint is type(None) or hint is None:
        if value is None:
            return None
    elif origin is Literal:
        if value in parts:
            return value
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif hint in (int, str, bool):
        if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
            return value
    elif origin is tuple or origin is list:
        if isinstance(value, (list, tuple)):
            return _typed_sequence(list(value), hint, where)
    elif origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if isinstance(value, Mapping):
            return {name: _typed(item, parts[1], f"{where}.{name}") for name, item in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return config_from_json(hint, value)
    raise _mistyped(value, hint, where)


def _typed_sequence(items: list[JSON], hint: Any, where: str) -> Any:
    parts = get_args(hint)
    if get_origin(hint) is list:
        return [_typed(item, parts[0], where) for item in items]
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(_typed(item, parts[0], where) for item in items)
    if len(parts) != len(items):
        raise _mistyped(items, hint, where)
    return tuple(_typed(item, part, where) for item, part in zip(items, parts, strict=True))


def _mistyped(value: JSON, hint: Any, where: str) -> UsageError:
    expected = getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint)
    return UsageError(
        f"{where}: got {json.dumps(value, default=str)} ({type(value).__name__}), expected "
        f"{expected.replace('typing.', '')}"
    )
