import numpy as np
import pytest
import torch

from interp.dyck_accuracy import closing_accuracy, model_closing_accuracy
from interp.models.config import TransformerConfig
from interp.models.dyck_language import DyckLanguage
from interp.models.transformer import Transformer

LANGUAGE = DyckLanguage(3, 5)


def _stack_accuracies(logits, tokens, language, threshold):
    """The definition, by a stack, one string and one position at a time."""
    n_types, hits, argmax, count = language.n_types, 0, 0, 0
    by_pos = np.zeros((3, tokens.shape[1]), dtype=int)
    for row, string in zip(logits.numpy(), tokens.tolist(), strict=True):
        stack = []
        for pos, token in enumerate(string):
            if token in language.open_tokens:
                stack.append(token - language.open_tokens.start)
            elif token in language.close_tokens:
                assert stack.pop() == token - language.close_tokens.start
            if not stack:
                continue
            odds = np.exp(row[pos, 4 + n_types : 4 + 2 * n_types])
            is_hit = odds[stack[-1]] / odds.sum() > threshold
            is_best = odds.argmax() == stack[-1]
            hits, argmax, count = hits + is_hit, argmax + is_best, count + 1
            by_pos[:, pos] += [is_hit, is_best, 1]
    return hits / count, argmax / count, by_pos


@pytest.mark.parametrize("threshold", [0.8, 0.4])
def test_accuracies_are_those_of_a_plain_stack(threshold):
    tokens = LANGUAGE.sample(17, 29, seed=3)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(17, 30, LANGUAGE.d_vocab, generator=generator, dtype=torch.float64)
    logits += 3 * LANGUAGE.closing_distribution(tokens)
    measured = closing_accuracy(logits, tokens, LANGUAGE, threshold=threshold)
    expected_threshold, expected_argmax, by_pos = _stack_accuracies(
        logits, tokens, LANGUAGE, threshold
    )
    assert measured.threshold == pytest.approx(expected_threshold)
    assert measured.argmax == pytest.approx(expected_argmax)
    assert 0.1 < measured.threshold < 0.9
    assert np.array_equal(measured.threshold_hits, by_pos[0])
    assert np.array_equal(measured.argmax_hits, by_pos[1])
    assert np.array_equal(measured.counts, by_pos[2])
    assert measured.counts[0] == 0  # START leaves nothing open


def test_the_right_answer_scores_one_and_the_wrong_one_nothing():
    tokens = LANGUAGE.sample(11, 23, seed=3)
    close = LANGUAGE.closing_bracket(tokens).clamp(min=0)
    right = 20.0 * torch.nn.functional.one_hot(close, LANGUAGE.d_vocab)
    assert closing_accuracy(right, tokens, LANGUAGE).threshold == 1
    assert closing_accuracy(right, tokens, LANGUAGE).argmax == 1
    assert closing_accuracy(-right, tokens, LANGUAGE).argmax == 0


def test_a_tie_is_no_knowledge():
    tokens = LANGUAGE.sample(7, 13, seed=1)
    nothing = torch.zeros(7, 14, LANGUAGE.d_vocab)
    assert closing_accuracy(nothing, tokens, LANGUAGE).argmax == 0


def test_only_close_brackets_are_compared():
    tokens = LANGUAGE.sample(7, 13, seed=1)
    close = LANGUAGE.closing_bracket(tokens).clamp(min=0)
    logits = 5.0 * torch.nn.functional.one_hot(close, LANGUAGE.d_vocab)
    logits[..., LANGUAGE.open_tokens.start] = 50
    assert closing_accuracy(logits, tokens, LANGUAGE).threshold == 1


def test_argmax_and_threshold_can_differ():
    tokens = LANGUAGE.sample(7, 13, seed=1)
    close = LANGUAGE.closing_bracket(tokens).clamp(min=0)
    barely = 0.5 * torch.nn.functional.one_hot(close, LANGUAGE.d_vocab)
    measured = closing_accuracy(barely, tokens, LANGUAGE)
    assert (measured.threshold, measured.argmax) == (0, 1)


def test_a_models_accuracy_does_not_depend_on_the_batch_size():
    config = TransformerConfig(
        n_layers=1, d_model=11, n_heads=1, d_head=11, d_vocab=LANGUAGE.d_vocab, n_ctx=50
    )
    model, tokens = Transformer(config), LANGUAGE.sample(19, 31, seed=2)
    whole = model_closing_accuracy(model, tokens, LANGUAGE)
    parts = model_closing_accuracy(model, tokens, LANGUAGE, batch_size=7)
    direct = closing_accuracy(model(tokens).detach(), tokens, LANGUAGE)
    assert np.array_equal(whole.threshold_hits, direct.threshold_hits)
    assert np.array_equal(parts.argmax_hits, whole.argmax_hits)
    assert np.array_equal(parts.counts, whole.counts)


def test_refusals_name_the_argument():
    tokens = LANGUAGE.sample(5, 7, seed=1)
    logits = torch.zeros(5, 8, LANGUAGE.d_vocab)
    with pytest.raises(ValueError, match="threshold: got 80"):
        closing_accuracy(logits, tokens, LANGUAGE, threshold=80.0)
    with pytest.raises(ValueError, match="no position has an open bracket"):
        closing_accuracy(logits[:, :1], tokens[:, :1], LANGUAGE)
    with pytest.raises(ValueError, match="logits: some are not finite"):
        closing_accuracy(logits + torch.nan, tokens, LANGUAGE)
    with pytest.raises(ValueError, match="batch_size: got 0"):
        model_closing_accuracy(torch.nn.Identity(), tokens, LANGUAGE, batch_size=0)
