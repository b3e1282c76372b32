"""Each metric on arrays whose value is known, and against a plain loop."""

import math

import numpy as np
import pytest
import torch

from interp.massive_activations import (
    Wave,
    activation_outliers,
    massive_activations,
    mean_max_activation,
    norm_waves,
    secondary_sinks,
)
from interp.sinks import (
    attention_entropy,
    effective_distance,
    first_token_attention,
    gate_scores,
    gated_sink_contribution,
    over_mixing,
    position_importance,
    query_self_similarity,
    received_mass,
    row_normalized,
    sink_rate,
    value_drain,
)

T = 64
HARMONIC = sum(1 / n for n in range(1, T + 1))


def uniform(n=T):
    causal = torch.ones(n, n, dtype=torch.float64).tril()
    return causal / causal.sum(-1, keepdim=True)


def one_hot(n=T, key=0):
    """Every query looks at one key, or at itself before that key."""
    pattern = torch.zeros(n, n, dtype=torch.float64)
    for query in range(n):
        pattern[query, min(key, query)] = 1
    return pattern


def random_pattern(*heads, n=T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(*heads, n, n, generator=generator, dtype=torch.float64) * 2
    return scores.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)


def test_uniform_attention_gives_the_first_key_its_harmonic_share_and_is_no_sink():
    importance = position_importance(uniform())
    assert importance[0] == pytest.approx(HARMONIC / T, rel=1e-12)
    assert importance[0] == pytest.approx(0.0741, abs=5e-5)
    heads = importance[0].expand(2, 3, 5)  # [batch, layer, head]
    assert sink_rate(heads).tolist() == [0, 0, 0]


def test_attention_on_the_first_key_alone_is_a_sink_in_every_head():
    importance = position_importance(one_hot())
    assert importance[0] == 1
    assert sink_rate(importance[0].expand(2, 3), epsilon=0.8) == 1
    assert sink_rate(importance[1].expand(2, 3)) == 0


def test_a_sink_may_be_at_any_key_and_only_queries_that_see_it_count():
    importance = position_importance(one_hot(key=7))
    assert importance[7] == 1
    assert importance[8:].max() == 0


def test_the_threshold_falls_per_sample_which_is_not_thresholding_the_mean():
    importance = torch.tensor([[0.9], [0.1]])  # two samples of one head
    assert sink_rate(importance, epsilon=0.3) == 0.5
    assert importance.mean() > 0.3  # mean-then-threshold would say 100%
    importance = torch.tensor([[0.35], [0.1]])
    assert sink_rate(importance, epsilon=0.3) == 0.5
    assert importance.mean() < 0.3  # ... and here 0%


def test_sink_rate_keeps_layers_apart_and_refuses_what_is_no_share():
    importance = torch.tensor([[[0.9, 0.9], [0.9, 0.0]], [[0.9, 0.0], [0.0, 0.0]]])
    assert sink_rate(importance).tolist() == [0.75, 0.25]
    with pytest.raises(ValueError, match=r"epsilon is a share of attention in \[0, 1\], got 30"):
        sink_rate(importance, epsilon=30)
    with pytest.raises(ValueError, match="importance is empty"):
        sink_rate(importance[:0])


def test_f_attn_with_and_without_the_query_that_can_only_see_itself():
    pattern = uniform()
    with_first = first_token_attention(pattern[..., 0], include_first_query=True)
    without = first_token_attention(pattern[..., 0])
    assert with_first == pytest.approx(HARMONIC / T)
    assert without == pytest.approx((HARMONIC - 1) / (T - 1))
    with pytest.raises(ValueError, match="without query 0 none is left"):
        first_token_attention(torch.ones(3, 1))


def test_rows_that_are_not_normalised_are_so_first_and_empty_rows_stay_empty():
    pattern = random_pattern(3, n=7)
    scale = torch.arange(7.0)[:, None]  # row 0 becomes empty
    normalized = row_normalized(pattern * scale)
    torch.testing.assert_close(normalized[:, 1:], pattern[:, 1:])
    assert normalized[:, 0].abs().max() == 0
    small = pattern * 0.1  # a head that pays everything little: only its rows tell the sink
    raw, rows = (position_importance(p)[..., 0] for p in (small, row_normalized(small)))
    torch.testing.assert_close(rows, raw * 10)


def test_entropy_received_mass_and_distance_equal_plain_loops():
    pattern = random_pattern(2, n=11)
    for head in range(2):
        for query in range(11):
            weights = [float(w) for w in pattern[head, query] if w > 0]
            expected = -sum(w * math.log(w) for w in weights)
            assert float(attention_entropy(pattern)[head, query]) == pytest.approx(expected)
        distance = sum(float(pattern[head, i, j]) * (i - j) for i in range(11) for j in range(11))
        assert float(effective_distance(pattern)[head]) == pytest.approx(distance / 11)
    assert attention_entropy(uniform())[-1] == pytest.approx(math.log(T))
    torch.testing.assert_close(received_mass(pattern), pattern.sum(1))
    assert effective_distance(one_hot(5)) == 2  # (0 + 1 + 2 + 3 + 4) / 5


def test_importance_is_the_received_mass_over_the_queries_that_see_the_key():
    pattern = random_pattern(2, 3, n=13)
    n_seeing = torch.arange(13, 0, -1)
    torch.testing.assert_close(position_importance(pattern), received_mass(pattern) / n_seeing)


def test_a_pattern_that_is_not_square_is_refused():
    for measure in (position_importance, effective_distance):
        with pytest.raises(ValueError, match="must be square, got 3 queries and 5 keys"):
            measure(torch.ones(3, 5))


def test_value_drain_compares_the_sinks_value_with_the_mean_of_the_others():
    values = torch.zeros(2, 4, 3)
    values[0, :, 0] = torch.tensor([0.5, 1.0, 2.0, 3.0])
    values[1, :, 1] = torch.tensor([6.0, 2.0, 2.0, 2.0])
    assert value_drain(values).tolist() == [0.25, 3.0]
    assert value_drain(values, position=1)[0] == pytest.approx(1 / (5.5 / 3))
    with pytest.raises(ValueError, match="one position only"):
        value_drain(values[:, :1])


def test_gate_scores_give_the_mean_the_share_that_is_shut_and_the_split_at_triggers():
    gate = torch.tensor([[[0.9, 0.7], [0.05, 0.15]]])  # [batch 1, pos 2, head 2]
    scores = gate_scores(gate)
    assert float(scores.mean) == pytest.approx(0.45)
    assert float(scores.share_below) == 0.25
    assert scores.at_triggers is None
    scores = gate_scores(gate, triggers=torch.tensor([[True, False]]))
    assert float(scores.at_triggers) == pytest.approx(0.8)
    assert float(scores.elsewhere) == pytest.approx(0.1)
    assert float(gate_scores(gate, below=0.5).share_below) == 0.5


def test_a_closed_gate_ends_the_sinks_contribution_while_attention_stays():
    first_mass = torch.full((2, 3, 5), 0.9)
    first_value = torch.tensor([3.0, 4.0]).expand(2, 3, 2)
    assert gated_sink_contribution(first_mass, first_value).flatten()[0] == pytest.approx(4.5)
    gate = torch.tensor([1.0, 0.5, 0.0]).expand(2, 5, 3)[..., None]
    found = gated_sink_contribution(first_mass, first_value, gate)
    torch.testing.assert_close(found, torch.tensor([4.5, 2.25, 0.0]).expand(2, 3))


def test_an_elementwise_gate_with_equal_entries_is_a_headwise_one():
    generator = torch.Generator().manual_seed(0)
    first_mass = torch.rand(2, 3, 5, generator=generator)
    first_value = torch.randn(2, 3, 7, generator=generator)
    gate = torch.rand(2, 5, 3, 1, generator=generator)
    headwise = gated_sink_contribution(first_mass, first_value, gate)
    elementwise = gated_sink_contribution(first_mass, first_value, gate.expand(-1, -1, -1, 7))
    torch.testing.assert_close(headwise, elementwise)
    by_hand = (first_mass * gate[..., 0].transpose(1, 2)).mean(-1) * first_value.norm(dim=-1)
    torch.testing.assert_close(headwise, by_hand)


def test_over_mixing_is_zero_when_all_tokens_agree_and_the_frobenius_distance_otherwise():
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]).expand(2, 3, 2)
    assert over_mixing(torch.ones(3, 5)) == 0
    torch.testing.assert_close(over_mixing(values), torch.full((2,), 2.0))
    torch.testing.assert_close(over_mixing(values + 7), over_mixing(values))


def test_query_self_similarity_is_the_mean_cosine_of_different_positions():
    queries = torch.randn(3, 11, 5, generator=torch.Generator().manual_seed(0)).double()
    cosine = torch.nn.functional.cosine_similarity(queries[:, :, None], queries[:, None], dim=-1)
    expected = (cosine.sum((1, 2)) - 11) / 110
    torch.testing.assert_close(query_self_similarity(queries), expected)
    same = queries[:, :1].expand(3, 4, 5) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    torch.testing.assert_close(query_self_similarity(same), torch.ones(3).double())


def test_numpy_arrays_give_the_same_numbers():
    pattern = random_pattern(2, 3, n=7)
    for measure in (attention_entropy, received_mass, effective_distance, position_importance):
        assert torch.equal(measure(pattern.numpy()), measure(pattern))
    hidden = torch.randn(1, 2, 5, 7, generator=torch.Generator().manual_seed(0))
    assert activation_outliers(hidden.numpy()).equals(activation_outliers(hidden))


# -- massive activations ------------------------------------------------------------------------


def plain_hidden(value=0.0, size=0.1, shape=(2, 3, 5, 7)):
    """Entries of one size and alternating sign, and one large entry at a known place."""
    sign = 1 - 2 * (torch.arange(math.prod(shape)) % 2)
    hidden = (size * sign).double().reshape(shape)
    if value:
        hidden[1, 2, 3, 4] = value
    return hidden


def test_a_planted_massive_activation_is_found_at_its_place():
    found = massive_activations(plain_hidden(-150.0))
    assert len(found) == 1
    row = found.iloc[0]
    place = (row["sample"], row.layer, row.position, row.dimension)
    assert place == (1, 2, 3, 4)
    assert row.value == -150
    assert row.ratio == pytest.approx(1500)


def test_both_of_suns_bounds_are_needed():
    assert massive_activations(plain_hidden(101.0, size=0.2)).empty  # 505 x the median
    assert len(massive_activations(plain_hidden(101.0, size=0.1))) == 1
    assert massive_activations(plain_hidden(99.0, size=0.01)).empty  # 9,900 x, but small
    assert massive_activations(plain_hidden(100.0, size=0.1)).empty  # more than 100
    loose = massive_activations(plain_hidden(99.0, size=0.01), min_size=50)
    assert len(loose) == 1


def test_outliers_report_ratio_and_kurtosis_for_models_too_small_for_suns_bounds():
    table = activation_outliers(plain_hidden(20.0))
    assert list(table[["sample", "layer"]].itertuples(index=False, name=None)) == [
        (sample, layer) for sample in range(2) for layer in range(3)
    ]
    planted = table.iloc[-1]
    assert (planted.position, planted.dimension) == (3, 4)
    assert planted.max_size == 20
    assert planted["median"] == pytest.approx(0.1)
    assert planted.ratio == pytest.approx(200)
    assert planted["kurtosis"] > 30
    assert (table["kurtosis"][:-1] < 1.01).all()  # two values of one size: the least there is


def test_kurtosis_of_a_gaussian_is_three():
    hidden = torch.randn(1, 1, 100, 1000, generator=torch.Generator().manual_seed(0))
    assert activation_outliers(hidden)["kurtosis"][0] == pytest.approx(3, abs=0.05)


def test_m_act_is_the_mean_over_layers_of_the_largest_size():
    hidden = plain_hidden(-30.1)
    torch.testing.assert_close(
        mean_max_activation(hidden), torch.tensor([0.1, (0.1 + 0.1 + 30.1) / 3]).double()
    )


def test_waves_are_the_runs_of_layers_in_which_the_first_norm_towers():
    norms = np.ones((8, 5))
    norms[2:4, 0] = 10
    norms[6:, 0] = 7
    norms[3, 4] = 50  # one other large token does not hide the wave
    assert norm_waves(norms) == [Wave(2, 3), Wave(6, 7)]
    assert norm_waves(norms, min_ratio=8) == [Wave(2, 3)]
    assert norm_waves(np.ones((8, 5))) == []


def test_secondary_sinks_are_found_with_their_lifetime_within_the_wave_only():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 6, 101, generator=generator)
    direction = hidden[:, :, 0]
    hidden[0, 2:6, 3] = -2 * direction[0, 2:6]  # against counts as along
    hidden[1, 1:3, 4] = direction[1, 1:3]  # its first layer lies before the wave
    hidden[1, 5:9, 4] = 0.1 * direction[1, 5:9]  # comes back, and outlives the wave
    found = secondary_sinks(hidden, Wave(2, 7))
    assert list(found.itertuples(index=False, name=None)) == [
        (0, 3, 2, 4),
        (1, 4, 2, 1),
        (1, 4, 5, 3),
    ]
    assert secondary_sinks(hidden, Wave(8, 8)).position.tolist() == [4]
    with pytest.raises(ValueError, match="not within the 9 layers there are"):
        secondary_sinks(hidden, Wave(2, 9))
