"""`interp.observe`: look into the attention of a model while it runs, at its own speed."""

import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from interp.kernels.edits import Edit
from interp.observation import Observation
from interp.observe_attention import AttentionObserver
from interp.observe_forwards import ForwardTracker
from interp.observe_points import PointsObserver, point_layers, point_sites
from interp.observe_request import Heads, KeySet, Patterns, check_against_model, read_request
from interp.observe_sites import find_sites, model_name, unserved_attention
from interp.observe_switch import is_switched, switched_attention

_entering = threading.Lock()


@contextmanager
def observe(
    model: Any,
    *,
    statistics: Sequence[str] = ("entropy", "first_mass"),
    layers: Sequence[int] | None = None,
    heads: Heads | None = None,
    stacks: Sequence[str] | None = None,
    key_sets: Mapping[str, KeySet] | None = None,
    edit: Edit | Mapping[int, Edit] | None = None,
    reduce: str = "all",
    patterns: Patterns | None = None,
    from_query: int = 0,
    extrapolate: bool = False,
    backend: str = "auto",
) -> Iterator[Observation]:
    """Observe a transformers model's attention: per-head numbers over all texts it reads inside.

    ::

        with interp.observe(model, statistics=("entropy", "first_mass")) as seen:
            for batch in batches:
                model(**batch)
        seen.table()

    Nothing of the size of a pattern is built: statistics are computed with the output and reduced
    at once. Texts may be padded on either side, packed, or generated with a cache; positions count
    from a text's first real token, and padding enters no mean.

    statistics
        Per query, in nats where they are logarithms: ``lse`` (log-sum-exp of the scores),
        ``entropy`` (a learned sink counts as a key), ``max`` (largest weight), ``first_mass``
        (weight on the first token), ``mass`` (weight on each of ``key_sets``), ``sink_mass``
        (weight of a learned sink). Per key: ``received`` (weight summed over queries).
    layers, heads, stacks
        What to observe; all by default. ``heads`` is a list for every layer or ``{layer: heads}``;
        ``stacks`` chooses among "encoder", "decoder", "cross", ... of models with several.
    key_sets
        ``{name: positions}``, or a function from the tokens [batch, pos] to bool [batch, pos].
    edit
        An `interp.kernels.edits.Edit` for every observed layer, or ``{layer: Edit}``. It acts
        inside attention, so the model's output changes accordingly.
    reduce
        "all" (mean over all queries), "sample" (per text), "position" (per position, mean over
        texts), "none" (every value).
    patterns
        ``[(layer, head), ...]`` or ``{(layer, head): rows}``: exact rows, kept for every text.
    from_query
        Queries before this position enter no mean over queries (1 leaves out the first token's
        query, which can only look at itself).
    extrapolate
        Let texts run past the positions a rotary model was made for.
    backend
        Of `interp.kernels.attention.attention`.

    Yields an `interp.observation.Observation`. On leaving, however that happens, the model's
    attention, hooks and config are as they were; weights, mode and random state are never touched.

    Raises TypeError or ValueError, naming the argument, for a model that cannot be observed and for
    layers, heads or statistics that it does not have. A second observation of a model inside the
    first is refused.
    """
    request = read_request(
        statistics=statistics,
        layers=layers,
        heads=heads,
        stacks=stacks,
        key_sets=key_sets,
        edit=edit,
        reduce=reduce,
        patterns=patterns,
        from_query=from_query,
        extrapolate=extrapolate,
        backend=backend,
    )
    model = _unwrapped(model)
    _check_model(model)
    if point_layers(model):
        check_against_model(request, point_sites(model), model=type(model).__name__)
        observation = Observation(request, model=type(model).__name__, unserved=[])
        with PointsObserver(model, request, observation).attached():
            yield observation
        return
    sites = find_sites(model)
    unserved = unserved_attention(model, sites)
    if not sites:
        raise ValueError(_why_no_site(model, unserved))
    name = model_name(model)
    check_against_model(request, sites, model=name)
    if unserved:
        warnings.warn(
            f"{name}: {len(unserved)} attention modules do not go through transformers' interface "
            f"and are not observed ({unserved[0]}, ...): see Observation.unserved",
            stacklevel=4,
        )
    observation = Observation(request, model=name, unserved=unserved)
    tracker = ForwardTracker(model, extrapolate=extrapolate)
    observer = AttentionObserver(sites, request, tracker, observation)
    with ExitStack() as stack:
        with _entering:
            if is_switched(model):
                raise ValueError(
                    f"model: {name} is being observed already; ask one observe(...) for "
                    "everything, or leave the first block before the second"
                )
            stack.enter_context(switched_attention(model, observer.attend, observer.make_mask))
        stack.enter_context(tracker.attached())
        yield observation


def _unwrapped(model: Any) -> Any:
    """The model that an nnsight object wraps, which a trace then runs."""
    is_nnsight = any(c.__module__.split(".")[0] == "nnsight" for c in type(model).__mro__)
    return model._module if is_nnsight else model


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a transformers model")
    if isinstance(model, nn.DataParallel):
        raise ValueError("model: DataParallel runs copies of a model; observe model.module instead")
    for module in model.modules():
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None
        if is_compiled or type(module).__name__ == "OptimizedModule":
            raise ValueError(
                f"model: {model_name(model)} is compiled, and a compiled graph keeps the attention "
                "it was traced with; observe the model before torch.compile (its original is "
                "model._orig_mod)"
            )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"model: weights of {model_name(model)} are on the meta device, without values; load "
            "them first (nnsight: dispatch=True)"
        )


def _why_no_site(model: nn.Module, unserved: list[str]) -> str:
    name = model_name(model)
    is_pretrained = any(isinstance(m, PreTrainedModel) for m in model.modules())
    if not is_pretrained:
        return f"model: {name} is no transformers model, and has no hook points of ours to observe"
    if unserved:
        return (
            f"model: {name} does not call attention through transformers' AttentionInterface; load "
            "it with attn_implementation='eager' and use output_attentions=True"
        )
    return f"model: {name} has no attention layers that could be observed"
