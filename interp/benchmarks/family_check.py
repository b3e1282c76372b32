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

from interp.observation import Observation
from interp.observe_sites import AttentionSite, find_sites
from interp.observing import observe

STATISTICS = ("lse", "entropy", "max", "first_mass", "received")
STATISTIC_TOLERANCE = 2e-5
LOGIT_TOLERANCE = 5e-4
# Where eager attention itself is off by more than this from float64, it cannot judge 2e-5.
REFERENCE_TOLERANCE = 1e-5
N_TOKENS = 13
N_SHORT = 8


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
        slot = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
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
) -> Iterator[dict[nn.Module, list[EagerCall]]]:
    """Keep what the eager functions of a model's modelling files are given inside the block."""
    calls: dict[nn.Module, list[EagerCall]] = {}

    def recorder(original: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)

        def record(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output, weights = original(module, *args, **kwargs)
            given = {**dict(zip(names[1:], args, strict=False)), **kwargs}
            query, key = (
                given[name] if name in given else given[f"{name}_states"]
                for name in ("query", "key")
            )
            calls.setdefault(module, []).append(
                eager_call(
                    query,
                    key,
                    given.get("attention_mask"),
                    weights,
                    scaling=given.get("scaling"),
                    softcap=given.get("softcap"),
                    position_bias=given.get("position_bias"),
                    sinks=given.get("s_aux", given.get("sinks")),
                )
            )
            return output, weights

        return record

    files = {sys.modules[type(module).__module__] for module in sites}
    replaced = [
        (file, name, value)
        for file in files
        for name, value in vars(file).items()
        if name.endswith("eager_attention_forward") and callable(value)
    ]
    before = model.config._attn_implementation
    try:
        for file, name, value in replaced:
            setattr(file, name, recorder(value))
        model.set_attn_implementation("eager")
        yield calls
    finally:
        model.set_attn_implementation(before)
        for file, name, value in replaced:
            setattr(file, name, value)


@dataclass(frozen=True, eq=False)
class Texts:
    """A batch of token ids and its 2-D mask."""

    tokens: Tensor
    mask: Tensor | None = None

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        given: dict[str, Any] = {"input_ids": self.tokens, "use_cache": False}
        if self.mask is not None:
            given["attention_mask"] = self.mask
            if "position_ids" in inspect.signature(model.forward).parameters:
                given["position_ids"] = (self.mask.cumsum(-1) - 1).clamp_min(0)
        if model.config.is_encoder_decoder:
            given["decoder_input_ids"] = self.tokens[:, :N_SHORT].flip(0)
        if "use_cache" not in inspect.signature(model.forward).parameters:
            del given["use_cache"]
        return given


def make_texts(d_vocab: int, *, seed: int = 0) -> dict[str, Texts]:
    """Two texts of one length, and a long and a short one padded on either side."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, d_vocab, (2, N_TOKENS), generator=generator)
    n_padding = N_TOKENS - N_SHORT
    left, right = torch.ones_like(tokens), torch.ones_like(tokens)
    left[1, :n_padding] = 0
    right[1, N_SHORT:] = 0
    short = tokens[1, :N_SHORT]
    padding = torch.zeros(n_padding, dtype=tokens.dtype)
    return {
        "plain": Texts(tokens),
        "left": Texts(torch.stack([tokens[0], torch.cat([padding, short])]), left),
        "right": Texts(torch.stack([tokens[0], torch.cat([short, padding])]), right),
    }


def compare(
    model: PreTrainedModel, texts: Texts, sites: Mapping[nn.Module, AttentionSite]
) -> dict[str, float]:
    """Largest differences between observed and eager: per statistic, in the logits, and of eager
    from float64."""
    arguments = texts.arguments(model)
    with torch.no_grad(), recorded_eager_calls(model, sites) as calls:
        eager_output = model(**arguments)
    with torch.no_grad(), observe(model, statistics=STATISTICS, reduce="none") as seen:
        output = model(**arguments)
    errors = dict.fromkeys((*STATISTICS, "logits", "eager"), 0.0)
    real = texts.mask.bool() if texts.mask is not None else torch.ones_like(texts.tokens).bool()
    difference = (first_output(output) - first_output(eager_output)).abs()
    if difference.shape[:2] == real.shape:
        difference = difference[real]
    errors["logits"] = float(difference.max())
    layers: dict[str, int] = {}
    for module, site in sites.items():
        for call in calls.get(module, ()):
            errors["eager"] = max(errors["eager"], call.distance)
            layer = site.layer if len(calls[module]) == 1 else layers.get(site.stack, 0)
            layers[site.stack] = layer + 1
            for name in STATISTICS:
                error = _statistic_error(name, call, seen, site.stack, layer, real)
                errors[name] = max(errors[name], error)
    return errors


def _statistic_error(
    name: str, call: EagerCall, seen: Observation, stack: str, layer: int, real: Tensor
) -> float:
    """Largest difference of one statistic in one layer, over real tokens."""
    n_queries, n_keys = call.weights.shape[2:]
    is_query, is_key = (
        real if n == real.shape[1] else torch.ones(len(real), n, dtype=torch.bool)
        for n in (n_queries, n_keys)
    )
    if n_queries != real.shape[1]:  # a decoder's queries are never padding here
        is_query = torch.ones(len(real), n_queries, dtype=torch.bool)
    first_key = is_key.int().argmax(1)
    expected = call.statistic(name, first_key, is_query)
    observed = seen.layer_tensor(name, layer, stack=stack)
    kept = is_key if name == "received" else is_query
    largest = 0.0
    for sample in range(len(real)):
        ours = observed[sample, :, : int(kept[sample].sum())]
        theirs = expected[sample][:, kept[sample]]
        largest = max(largest, float((ours - theirs).abs().max()))
    return largest


def first_output(output: Any) -> Tensor:
    """Logits, or the last hidden state of a model without a head."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    return output[0]


def generates_alike(model: PreTrainedModel, tokens: Tensor, *, n_new: int = 4) -> bool | None:
    """Whether greedy decoding with a cache gives the tokens that eager gives; None if it cannot."""
    if not model.can_generate():
        return None
    options = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False}
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        expected = model.generate(tokens, **options)
    finally:
        model.set_attn_implementation(before)
    with observe(model, statistics=("entropy",), reduce="none"):
        observed = model.generate(tokens, **options)
    return bool(expected.shape == observed.shape and (expected == observed).all())


def snapshot(model: nn.Module) -> dict[str, Any]:
    """What an observation must leave as it was."""
    return {
        "implementations": [
            m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)
        ],
        "configs": [id(getattr(m, "config", None)) for m in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "modes": [m.training for m in model.modules()],
        "random state": torch.get_rng_state().tolist(),
    }


def check_family(model: PreTrainedModel, *, d_vocab: int) -> dict[str, Any]:
    """Everything about one model, as JSON: errors by kind of batch, generation, what is served."""
    sites = find_sites(model)
    before = snapshot(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report: dict[str, Any] = {"errors": {}}
    texts = make_texts(d_vocab)
    for kind, batch in texts.items():
        report["errors"][kind] = compare(model, batch, sites)
    report["generates"] = generates_alike(model, texts["plain"].tokens)
    after = snapshot(model)
    report["changed"] = [name for name in before if before[name] != after[name]]
    state = model.state_dict()
    if any(not torch.equal(state[name], tensor) for name, tensor in weights.items()):
        report["changed"].append("weights")
    return report
