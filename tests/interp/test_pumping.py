import numpy as np
import pytest
import torch

from interp.models.dyck_language import DyckLanguage
from interp.pumping import MAX_STRINGS, pumped_strings, pumping_curve

LANGUAGE = DyckLanguage(2, 4)


class _Forgetful(torch.nn.Module):
    """Answers rightly until `patience` brackets have been read, then always with the first type."""

    def __init__(self, language, patience):
        super().__init__()
        self.language, self.patience = language, patience

    def forward(self, tokens):
        close = self.language.closing_bracket(tokens).clamp(min=0)
        position = torch.arange(tokens.shape[1])
        close = torch.where(position > self.patience, self.language.close_tokens.start, close)
        return torch.nn.functional.one_hot(close, self.language.d_vocab).float()


@pytest.mark.parametrize("language", [LANGUAGE, DyckLanguage(3, 3)])
def test_strings_are_every_prefix_and_pair_and_need_the_same_close_after_each_pair(language):
    for depth in range(1, language.max_depth):
        strings = pumped_strings(language, depth=depth, n_pairs=5)
        assert strings.tokens.shape == (language.n_types ** (depth + 1), 1 + depth + 10)
        assert len(torch.unique(strings.tokens, dim=0)) == len(strings.tokens)
        wanted = language.closing_bracket(strings.tokens)
        for n in range(6):
            assert torch.equal(wanted[:, depth + 2 * n], strings.answers)
        assert (language.depth(strings.tokens)[:, depth::2] == depth).all()


def test_many_prefixes_are_drawn_with_a_seed():
    wide = DyckLanguage(8, 10)
    drawn = pumped_strings(wide, depth=9, n_pairs=2, seed=3)
    assert len(drawn.tokens) == MAX_STRINGS
    assert torch.equal(drawn.tokens, pumped_strings(wide, depth=9, n_pairs=2, seed=3).tokens)
    assert not torch.equal(drawn.tokens, pumped_strings(wide, depth=9, n_pairs=2, seed=4).tokens)


def test_a_model_that_knows_never_flips_and_one_that_forgets_flips_for_the_other_type():
    knowing = pumping_curve(_Forgetful(LANGUAGE, 10**6), LANGUAGE, n_pairs=[0, 1, 7, 40])
    assert not knowing.flip_rates.any()
    assert not knowing.error_rates.any()
    forgetful = pumping_curve(_Forgetful(LANGUAGE, 10), LANGUAGE, n_pairs=[0, 1, 7, 40])
    assert forgetful.flip_rates == pytest.approx([0, 0, 0.5, 0.5])
    assert forgetful.error_rates == pytest.approx([0, 0, 0.5, 0.5])


def test_a_model_that_never_changes_its_mind_may_still_be_wrong():
    stubborn = pumping_curve(_Forgetful(LANGUAGE, -1), LANGUAGE, n_pairs=[0, 3])
    assert not stubborn.flip_rates.any()
    assert stubborn.error_rates == pytest.approx([0.5, 0.5])


def test_rates_come_in_the_order_asked_for():
    curve = pumping_curve(_Forgetful(LANGUAGE, 10), LANGUAGE, n_pairs=[40, 0])
    assert curve.n_pairs == (40, 0)
    assert np.array_equal(curve.flip_rates, [0.5, 0])


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: pumped_strings(LANGUAGE, depth=4, n_pairs=1), "depth: got 4, expected 1 to 3"),
        (lambda: pumped_strings(LANGUAGE, depth=1, n_pairs=-1), "n_pairs"),
        (lambda: pumping_curve(_Forgetful(LANGUAGE, 1), LANGUAGE, n_pairs=[]), "n_pairs"),
        (
            lambda: pumping_curve(_Forgetful(LANGUAGE, 1), DyckLanguage(2, 1), n_pairs=[1]),
            "max_depth 1",
        ),
    ],
)
def test_refusals_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
