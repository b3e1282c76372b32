import pytest
import torch

from interp.models.config import TransformerConfig
from interp.models.transformer import Transformer
from interp.pattern_replacement import (
    replace_pattern,
    replaced_patterns,
    run_with_replaced_patterns,
)

SIZES = {"n_layers": 2, "d_model": 12, "n_heads": 3, "d_head": 5, "d_vocab": 11, "n_ctx": 40}


def _model(seed=0, **changes):
    return Transformer(
        TransformerConfig(**{**SIZES, "initializer_range": 0.7, "seed": seed, **changes})
    )


def _tokens(n=7, length=13, seed=3):
    return torch.randint(11, (n, length), generator=torch.Generator().manual_seed(seed))


def _causal_pattern(seed=5, sink=0.0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(7, 13, 13, generator=generator, dtype=torch.float64)
    mask = torch.ones(13, 13, dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) * (1 - sink), mask[None]


def _replace(replacement, pattern, allowed, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return replace_pattern(pattern, replacement, allowed=allowed, generator=generator)


@pytest.mark.parametrize("replacement", ["uniform", "shuffled", "simplex"])
@pytest.mark.parametrize("sink", [0.0, 0.3])
def test_mask_and_row_sums_stay(replacement, sink):
    pattern, allowed = _causal_pattern(sink=sink)
    new = _replace(replacement, pattern, allowed)
    assert (new >= 0).all()
    assert not new.masked_fill(allowed, 0).any()
    assert torch.allclose(new.sum(-1), pattern.sum(-1))
    assert (new[:, -1] - pattern[:, -1]).abs().amax(-1).min() > 1e-3


def test_a_row_that_attends_to_nothing_goes_on_doing_so():
    pattern, allowed = _causal_pattern()
    allowed = allowed.expand(7, -1, -1).clone()
    allowed[2, :, :4] = False  # left padding
    pattern = pattern.masked_fill(~allowed, 0)
    for replacement in ("uniform", "shuffled", "simplex"):
        new = _replace(replacement, pattern, allowed)
        assert new.isfinite().all()
        assert not new[2, :4].any()


def test_uniform_spreads_evenly_over_allowed_keys():
    pattern, allowed = _causal_pattern()
    new = _replace("uniform", pattern, allowed)
    for query in range(13):
        assert torch.allclose(new[:, query, : query + 1], torch.tensor(1 / (query + 1)).double())


def test_shuffled_rows_hold_the_same_weights_in_another_order():
    pattern, allowed = _causal_pattern()
    new = _replace("shuffled", pattern, allowed)
    assert torch.equal(new.sort(-1).values, pattern.sort(-1).values)
    # every place is reached: the first key of the last row gets each of its weights about equally
    firsts = torch.stack(
        [_replace("shuffled", pattern, allowed, seed=s)[0, 12, 0] for s in range(500)]
    )
    counts = torch.tensor([(firsts == weight).sum() for weight in pattern[0, 12]])
    assert counts.sum() == 500
    assert counts.min() > 500 / 13 / 2.5


def test_simplex_rows_have_dirichlet_moments():
    pattern, allowed = _causal_pattern()
    rows = torch.stack([_replace("simplex", pattern, allowed, seed=s)[:, 6] for s in range(300)])
    weights = rows[..., :7].flatten(0, 1)
    assert torch.allclose(weights.mean(0), torch.tensor(1 / 7).double(), atol=0.01)
    expected = (1 / 7) * (6 / 7) / 8
    assert torch.allclose(weights.var(0), torch.tensor(expected).double(), rtol=0.15)


def test_only_the_chosen_heads_change():
    model, tokens = _model(), _tokens()
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)]
    _, own = model.run_with_cache(tokens, names_filter=names)
    seen = {}

    def watch(pattern, hook):
        seen[hook.name] = pattern.clone()

    def flip(head, pattern):
        return pattern.flip(0)

    watchers = [(name, watch) for name in names]
    with replaced_patterns(model, [(1, 2)], flip), model.hooks(fwd_hooks=watchers):
        model(tokens)
    assert torch.equal(seen[names[0]], own[names[0]])
    assert torch.equal(seen[names[1]][:, :2], own[names[1]][:, :2])
    assert torch.equal(seen[names[1]][:, 2], own[names[1]][:, 2].flip(0))


def test_a_donor_that_is_the_model_itself_changes_nothing_and_another_one_does():
    model, twin, other, tokens = _model(), _model(), _model(seed=1), _tokens()
    heads = [(0, 0), (1, 1)]
    plain = model(tokens)
    own = run_with_replaced_patterns(model, tokens, heads=heads, replacement="donor", donor=twin)
    foreign = run_with_replaced_patterns(
        model, tokens, heads=heads, replacement="donor", donor=other, batch_size=3
    )
    assert torch.allclose(own, plain, atol=1e-5)
    assert (foreign - plain).abs().max() > 0.05


def test_uniform_replacement_equals_a_model_without_query_weights():
    model, tokens = _model(), _tokens()
    flat = _model()
    with torch.no_grad():
        for name in ("W_Q", "b_Q"):
            getattr(flat.blocks[1].attn, name).zero_()
    heads = [(1, head) for head in range(3)]
    replaced = run_with_replaced_patterns(model, tokens, heads=heads, replacement="uniform")
    assert torch.allclose(replaced, flat(tokens), atol=1e-5)


def test_no_hook_stays_behind_even_when_the_replacement_fails():
    model, tokens = _model(), _tokens()
    plain = model(tokens)
    with pytest.raises(ValueError, match="heads: got head 3"):
        run_with_replaced_patterns(model, tokens, heads=[(0, 3)], replacement="uniform")
    assert not any(point.is_wanted for point in model.hook_dict.values())
    assert torch.equal(model(tokens), plain)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"heads": [], "replacement": "uniform"}, "heads: got none"),
        ({"heads": [(2, 0)], "replacement": "uniform"}, "heads: got layer 2"),
        ({"heads": [(0, 0)], "replacement": "donor"}, "donor: got none"),
        ({"heads": [(0, 0)], "replacement": "uniform", "donor": _model()}, "donor: got one"),
    ],
)
def test_refusals_name_the_argument(arguments, named):
    with pytest.raises(ValueError, match=named):
        run_with_replaced_patterns(_model(), _tokens(), **arguments)


def test_a_mask_that_is_not_the_models_is_refused():
    bidirectional = _model(attention_dir="bidirectional")
    with pytest.raises(ValueError, match="allowed: the pattern has a weight"):
        run_with_replaced_patterns(bidirectional, _tokens(), heads=[(0, 0)], replacement="shuffled")
    everything = torch.ones(13, 13, dtype=torch.bool)
    run_with_replaced_patterns(
        bidirectional, _tokens(), heads=[(0, 0)], replacement="shuffled", allowed=everything
    )
