"""What a tracer reads at a point whose tensor was not computed: a message, not a value.

nnsight adds no hooks, so a layer cannot see that a trace will ask for its pattern. Without this the
trace would fail with a remark on the order of execution, which is not what is wrong.
"""

from typing import Any, NoReturn


class Unserved:
    """Stands where a tensor was expected; every use of it raises RuntimeError and says why."""

    def __init__(self, name: str) -> None:
        self._name = name

    def refuse(self, what_happened: str) -> NoReturn:
        """Raise, naming the point and what to do."""
        short_name = self._name.rsplit(".", 1)[-1]
        raise RuntimeError(
            f"{self._name} {what_happened}, but it was not computed in this run: a layer computes "
            f"it only when asked. Open the trace inside `with model.materialize({short_name!r}):`"
        )

    def save(self) -> NoReturn:
        self.refuse("was saved")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(f"was asked for .{name}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        values = (*args, *(kwargs or {}).values())
        flat = [item for v in values for item in (v if isinstance(v, list | tuple) else (v,))]
        next(value for value in flat if isinstance(value, cls)).refuse("was used")


def _refusing(method: str) -> Any:
    def refuse(self: Unserved, *arguments: Any) -> NoReturn:
        self.refuse(f"was used ({method})")

    return refuse


for _method in (
    *("getitem", "setitem", "len", "iter", "bool", "float", "int", "eq", "ne", "lt", "le", "gt"),
    *("ge", "neg", "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul"),
    *("truediv", "rtruediv", "itruediv", "matmul", "rmatmul", "pow", "rpow"),
):
    setattr(Unserved, f"__{_method}__", _refusing(f"__{_method}__"))
Unserved.__hash__ = object.__hash__  # type: ignore[method-assign]
