"""Is an architecture served? Its observed statistics against those of its own eager attention.

The reference runs the model's own eager attention and keeps what that function was given: queries,
keys, the additive mask, scaling, softcap, bias and sinks. Weights and statistics follow from these
in float64 by the definition, and the weights must also be those that eager attention returned.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from interp.kernels.edits import Edit
from interp.observation import Observation
from interp.observe_forwards import ForwardPass
from interp.observe_sites import AttentionSite, find_sites
from interp.observing import observe

STATISTICS = ("lse", "entropy", "max", "first_mass", "received")
STATISTIC_TOLERANCE = 2e-5
LOGIT_TOLERANCE = 5e-4
# Padding that moves eager's own output further than this is no matter of attention alone.
PADDING_TOLERANCE = 1e-4
N_TOKENS = 13
N_SHORT = 8


class EagerError(RuntimeError):
    """The model does not run with its own eager attention, so there is nothing to compare with."""


@dataclass(frozen=True, eq=False)
class EagerCall:
    """One call of a model's own eager attention: weights and lse in float64, sink's weight."""

    weights: Tensor  # [batch, head, query_pos, key_pos]
    lse: Tensor  # [batch, head, query_pos]
    sink_mass: Tensor | None  # [batch, head, query_pos]
    distance: float  # of the returned weights from these

    def statistic(self, name: str, first_key: Tensor, is_query: Tensor) -> Tensor:
        """By its definition; ``first_key`` [batch], ``is_query`` [batch, query_pos]."""
        weights = self.weights
        if name == "lse":
            return self.lse
        if name == "max":
            return weights.amax(-1)
        if name == "first_mass":
            index = first_key[:, None, None, None].expand(*weights.shape[:3], 1)
            return weights.gather(-1, index)[..., 0]
        if name == "received":
            return (weights * is_query[:, None, :, None]).sum(-2)
        assert name == "entropy"
        entropy = torch.special.entr(weights).sum(-1)
        return entropy if self.sink_mass is None else entropy + torch.special.entr(self.sink_mass)


def eager_call(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    returned: Tensor,
    *,
    scaling: float | None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> EagerCall:
    """Attention by its definition, from what the eager function was given."""
    q, k = query.double(), key.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias.double()
    if mask is not None:
        scores = scores + mask.double()
    plain = scores.softmax(-1)
    sink_mass = None
    if sinks is not None:
        n_keys = scores.shape[-1]
        slot = sinks.double() if sinks.ndim == 4 else sinks.double().reshape(1, -1, 1, 1)
        slot = slot.expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, slot], -1)
        both = scores.softmax(-1)
        plain_distance = (plain - returned.double()).abs().max()
        weights, sink_mass = both[..., :n_keys], both[..., n_keys]
        # some models scale the output by the sink afterwards and return weights without it
        distance = min(plain_distance, (weights - returned.double()).abs().max())
    else:
        weights, distance = plain, (plain - returned.double()).abs().max()
    return EagerCall(weights, scores.logsumexp(-1), sink_mass, float(distance))


@contextmanager
def recorded_eager_calls(
    model: PreTrainedModel, sites: Mapping[nn.Module, AttentionSite]
) -> Iterator[list[tuple[nn.Module, EagerCall]]]:
    """Keep what the eager functions of a model's modelling files are given inside the block."""
    calls: list[tuple[nn.Module, EagerCall]] = []

    def recorder(original: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)

        def record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output, weights = original(module, *args, **kwargs)
            given = {**dict(zip(names[1:], args, strict=False)), **kwargs}
            suffix = "" if "query" in given else "_states"
            call = eager_call(
                given[f"query{suffix}"],
                given[f"key{suffix}"],
                given.get("attention_mask"),
                weights,
                scaling=given.get("scaling"),
                softcap=given.get("softcap"),
                position_bias=given.get("position_bias"),
                sinks=given.get("s_aux", given.get("sinks")),
            )
            calls.append((module, call))
            return output, weights

        return record

    files = {sys.modules[type(module).__module__] for module in sites}
    replaced = [
        (file, name, value)
        for file in files
        for name, value in vars(file).items()
        if name.endswith("eager_attention_forward") and callable(value)
    ]
    try:
        for file, name, value in replaced:
            setattr(file, name, recorder(value))
        with _implementation(model, "eager"):
            yield calls
    finally:
        for file, name, value in replaced:
            setattr(file, name, value)


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """One of transformers' own attention functions inside the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@dataclass(frozen=True, eq=False)
class Texts:
    """A batch of token ids and its 2-D mask."""

    tokens: Tensor
    mask: Tensor | None = None

    @property
    def is_real(self) -> Tensor:
        """bool [batch, pos]."""
        return torch.ones_like(self.tokens).bool() if self.mask is None else self.mask.bool()

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        known = inspect.signature(model.forward).parameters
        given: dict[str, Any] = {"input_ids": self.tokens}
        if "use_cache" in known:
            given["use_cache"] = False
        if self.mask is not None:
            given["attention_mask"] = self.mask
            if "position_ids" in known:
                given["position_ids"] = (self.mask.cumsum(-1) - 1).clamp_min(0)
        if model.config.is_encoder_decoder:
            given["decoder_input_ids"] = torch.arange(5, 5 + N_SHORT).expand(len(self.tokens), -1)
        return given


def make_texts(d_vocab: int, *, seed: int = 0) -> dict[str, Texts]:
    """Two texts of one length; a long and a short one, padded on either side; the short alone."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, d_vocab, (2, N_TOKENS), generator=generator)
    left, right = torch.ones_like(tokens), torch.ones_like(tokens)
    left[1, : N_TOKENS - N_SHORT] = 0
    right[1, N_SHORT:] = 0
    short = tokens[1, :N_SHORT]
    padding = torch.zeros(N_TOKENS - N_SHORT, dtype=tokens.dtype)
    return {
        "plain": Texts(tokens),
        "left": Texts(torch.stack([tokens[0], torch.cat([padding, short])]), left),
        "right": Texts(torch.stack([tokens[0], torch.cat([short, padding])]), right),
        "alone": Texts(short[None], torch.ones_like(short)[None]),
    }


@dataclass(frozen=True, eq=False)
class Comparison:
    """Observed against eager on one batch: largest differences, and what was observed."""

    statistics: dict[str, float]
    logits: float
    eager: float  # of the weights that eager returned from the definition
    follows: str  # whose logits these are: "eager", or "sdpa" where the two differ
    changed: list[str]
    seen: Observation
    eager_output: Tensor


def compare(
    model: PreTrainedModel, texts: Texts, sites: Mapping[nn.Module, AttentionSite]
) -> Comparison:
    """Run a batch through eager attention and through an observation."""
    arguments = texts.arguments(model)
    try:
        with torch.no_grad(), recorded_eager_calls(model, sites) as calls:
            expected = first_output(model(**arguments))
    except Exception as failure:
        raise EagerError(f"eager attention fails: {type(failure).__name__}: {failure}") from failure
    before = snapshot(model)
    with torch.no_grad(), observe(model, statistics=STATISTICS, reduce="none") as seen:
        output = first_output(model(**arguments))
    after = snapshot(model)
    logits, follows = _difference(output, expected, texts), "eager"
    if logits > LOGIT_TOLERANCE and model._supports_sdpa:
        # In rows of padding only, eager is uniform and torch's attention zero, as ours is; models
        # that mix positions outside attention carry this on to real tokens.
        with torch.no_grad(), _implementation(model, "sdpa"):
            by_sdpa = _difference(output, first_output(model(**arguments)), texts)
        if by_sdpa < logits:
            logits, follows = by_sdpa, "sdpa"
    errors = dict.fromkeys(STATISTICS, 0.0)
    numbering = ForwardPass(is_continued=False)
    for module, call in calls:
        site = sites[module]
        layer = numbering.number_layer(module, site)
        for name in STATISTICS:
            error = _statistic_error(name, call, seen, site.stack, layer, texts)
            errors[name] = max(errors[name], error)
    return Comparison(
        statistics=errors,
        logits=logits,
        eager=max((call.distance for _, call in calls), default=0.0),
        follows=follows,
        changed=[name for name in before if before[name] != after[name]],
        seen=seen,
        eager_output=expected,
    )


def _difference(ours: Tensor, theirs: Tensor, texts: Texts) -> float:
    """Largest difference of two outputs at real tokens."""
    difference = (ours - theirs).abs()
    if difference.shape[:2] == texts.is_real.shape:
        difference = difference[texts.is_real]
    return float(difference.max())


def _statistic_error(
    name: str, call: EagerCall, seen: Observation, stack: str, layer: int, texts: Texts
) -> float:
    """Largest difference of one statistic in one layer, over real tokens."""
    is_query, is_key = (_real_ones(texts, n) for n in call.weights.shape[2:])
    first_key = is_key.int().argmax(1)
    expected = call.statistic(name, first_key, is_query)
    observed = seen.layer_tensor(name, layer, stack=stack)
    kept = is_key if name == "received" else is_query
    largest = 0.0
    for sample in range(len(texts.tokens)):
        ours = observed[sample, :, : int(kept[sample].sum())]
        largest = max(largest, _distance(name, ours, expected[sample][:, kept[sample]]))
    return largest


def _distance(name: str, ours: Tensor, theirs: Tensor) -> float:
    """Largest difference; of lse, which is as exact as the scores are large, relative above 1."""
    difference = (ours - theirs).abs()
    if name == "lse":
        difference = difference / theirs.abs().clamp_min(1.0)
    return float(difference.max())


def _real_ones(texts: Texts, n: int) -> Tensor:
    """bool [batch, n]: which of n queries or keys are real tokens.

    A decoder has fewer, none of them padding; keys behind the tokens' own are compressed ones.
    """
    n_tokens = texts.tokens.shape[1]
    if n < n_tokens:
        return torch.ones(len(texts.tokens), n, dtype=torch.bool)
    return torch.nn.functional.pad(texts.is_real, (0, n - n_tokens))


def padding_error(padded: Comparison, alone: Comparison, *, side: str) -> float | None:
    """Largest difference of the short text's statistics, padded in a batch and alone.

    None where padding changes eager's own output: then the architecture is not indifferent to it.
    """
    n_outputs = alone.eager_output.shape[1]  # the short text's tokens, or the decoder's
    n_padded = padded.eager_output.shape[1] - n_outputs
    at = slice(n_padded, None) if side == "left" else slice(None, n_outputs)
    gap = (padded.eager_output[1, at] - alone.eager_output[0]).abs().max()
    if float(gap) > PADDING_TOLERANCE:
        return None
    largest = 0.0
    for stack, layers in alone.seen.stacks.items():
        for layer in layers:
            for name in STATISTICS:
                ours = padded.seen.layer_tensor(name, layer, stack=stack)[1]
                theirs = alone.seen.layer_tensor(name, layer, stack=stack)[0]
                largest = max(largest, _distance(name, ours[:, : theirs.shape[1]], theirs))
    return largest


@dataclass(frozen=True)
class Generation:
    """Greedy decoding with a cache: does it give eager's tokens, and the uncached statistics.

    trouble: what eager attention itself raised, if it cannot generate in this configuration.
    """

    is_alike: bool
    cache_error: float | None = None
    trouble: str | None = None


def generate(model: PreTrainedModel, tokens: Tensor, *, n_new: int = 4) -> Generation | None:
    """None for a model that does not generate."""
    if not model.can_generate():
        return None
    options = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False}
    names = STATISTICS[:4]
    try:
        with torch.no_grad(), _implementation(model, "eager"):
            expected = model.generate(tokens, **options)
    except Exception as failure:
        return Generation(is_alike=False, trouble=f"{type(failure).__name__}: {failure}")
    with torch.no_grad(), observe(model, statistics=names, reduce="none") as cached:
        observed = model.generate(tokens, **options)
    is_alike = bool(expected.shape == observed.shape and (expected == observed).all())
    if model.config.is_encoder_decoder:
        return Generation(is_alike)
    with torch.no_grad(), observe(model, statistics=names, reduce="none") as whole:
        model(observed[:, :-1])
    error = 0.0
    for stack, layers in whole.stacks.items():
        for layer in layers:
            for name in names:
                ours = cached.layer_tensor(name, layer, stack=stack)
                theirs = whole.layer_tensor(name, layer, stack=stack)
                error = max(error, _distance(name, ours, theirs))
    return Generation(is_alike, error)


def edit_effect(model: PreTrainedModel, texts: Texts) -> float:
    """Largest change of the output when the first head of every observed layer gives zeros."""
    arguments = texts.arguments(model)
    outputs = []
    for edit in (Edit(), Edit(output={0: torch.zeros(1)})):
        with torch.no_grad(), observe(model, statistics=(), edit=edit):
            outputs.append(first_output(model(**arguments)))
    return float((outputs[0] - outputs[1]).abs().max())


def first_output(output: Any) -> Tensor:
    """Logits, or the last hidden state of a model without a head."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    return output[0]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """What an observation must leave as it was."""
    return {
        "implementation": [
            m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)
        ],
        "config": [id(getattr(m, "config", None)) for m in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "mode": [m.training for m in model.modules()],
        "random state": torch.get_rng_state().tolist(),
        "weights": [(name, tensor._version) for name, tensor in model.named_parameters()],
    }


@dataclass(frozen=True)
class FamilyReport:
    """The verdict on one architecture.

    status: "served", "wrong", or "silent" (it ran, and nothing was observed).
    layers: observed layers by stack. statistic_error, logit_error: the worst over all batches.
    padding: sides on which batching changes nothing, checked where eager says it should not.
    edit_effect: how far the output moves when head 0 of every layer is silenced.
    """

    status: str
    layers: dict[str, list[int]]
    statistic_error: float
    logit_error: float
    padding: list[str]
    edit_effect: float
    generates: str
    notes: list[str]


def check_family(model: PreTrainedModel, *, d_vocab: int) -> FamilyReport:
    """Everything about one model. Whatever `interp.observe` raises for it comes through."""
    sites = find_sites(model)
    with observe(model, statistics=STATISTICS):
        pass  # a model that is refused is refused here, before anything else can fail
    texts = make_texts(d_vocab)
    compared = {kind: compare(model, batch, sites) for kind, batch in texts.items()}
    sides = {
        side: padding_error(compared[side], compared["alone"], side=side)
        for side in ("left", "right")
    }
    generated = generate(model, texts["plain"].tokens)
    trouble = generated.trouble if generated is not None else None
    statistic_error = max(max(c.statistics.values()) for c in compared.values())
    logit_error = max(c.logits for c in compared.values())
    notes = [
        f"{kind}: as torch's attention; eager differs in rows of padding only"
        for kind, c in compared.items()
        if c.follows == "sdpa"
    ]
    notes += [f"changed: {c.changed}" for c in compared.values() if c.changed]
    notes += [f"eager cannot generate here: {trouble}"] if trouble else []
    seen = compared["plain"].seen
    errors = [statistic_error, *(error for error in sides.values() if error is not None)]
    if generated is not None and generated.cache_error is not None:
        errors.append(generated.cache_error)
    effect = edit_effect(model, texts["plain"])
    is_right = (
        effect > 0
        and max(errors) <= STATISTIC_TOLERANCE
        and logit_error <= LOGIT_TOLERANCE
        and not any(c.changed for c in compared.values())
        and (generated is None or generated.is_alike or trouble is not None)
    )
    return FamilyReport(
        status="silent" if not seen.stacks else "served" if is_right else "wrong",
        layers=seen.stacks,
        statistic_error=max(errors),
        logit_error=logit_error,
        padding=[side for side, error in sides.items() if error is not None],
        edit_effect=effect,
        generates="" if generated is None or trouble else "yes" if generated.is_alike else "no",
        notes=notes,
    )
