import numpy as np
import pytest
import torch

from interp.models.config import TransformerConfig
from interp.models.dyck_language import DyckLanguage
from interp.models.transformer import Transformer
from interp.stack_top import model_stack_top_shares, stack_top_share

LANGUAGE = DyckLanguage(3, 5)


def _tops(tokens):
    """Position of the innermost open bracket after each token, by a stack; -1 without."""
    tops = np.full(tokens.shape, -1)
    for row, string in enumerate(tokens.tolist()):
        stack = []
        for pos, token in enumerate(string):
            if token in LANGUAGE.open_tokens:
                stack.append(pos)
            elif token in LANGUAGE.close_tokens:
                stack.pop()
            tops[row, pos] = stack[-1] if stack else -1
    return tops


def test_a_head_on_the_stack_top_scores_one_and_one_beside_it_nothing():
    tokens = LANGUAGE.sample(13, 19, seed=3)
    tops = torch.tensor(_tops(tokens)).clamp(min=0)
    on_top = torch.nn.functional.one_hot(tops, 20).float()
    beside = torch.nn.functional.one_hot((tops + 1) % 20, 20).float()
    shares = stack_top_share(torch.stack([on_top, beside], dim=1), tokens, LANGUAGE)
    assert shares == pytest.approx([1, 0])


def test_the_share_is_over_queries_with_an_open_bracket():
    tokens = LANGUAGE.sample(17, 23, seed=5)
    pattern = torch.rand(17, 2, 24, 24, generator=torch.Generator().manual_seed(7))
    tops, counted = _tops(tokens), 0
    hits = np.zeros(2)
    for row, query in zip(*np.nonzero(tops >= 0), strict=True):
        counted += 1
        hits += pattern[row, :, query].argmax(-1).numpy() == tops[row, query]
    assert stack_top_share(pattern, tokens, LANGUAGE) == pytest.approx(hits / counted)


def test_keys_that_tie_share_the_first_place():
    tokens = LANGUAGE.encode("^[[[")[None]
    pattern = torch.full((1, 1, 4, 4), 0.25)
    # queries 1, 2, 3 have an open bracket; the top is one of four equal keys each time
    assert stack_top_share(pattern, tokens, LANGUAGE) == pytest.approx([0.25])


def test_every_head_of_a_model_gets_its_share():
    config = TransformerConfig(
        n_layers=2, d_model=11, n_heads=3, d_head=5, d_vocab=LANGUAGE.d_vocab, n_ctx=50
    )
    model, tokens = Transformer(config), LANGUAGE.sample(7, 19, seed=2)
    shares = model_stack_top_shares(model, tokens, LANGUAGE)
    assert shares.shape == (2, 3)
    _, cache = model.run_with_cache(tokens)
    expected = stack_top_share(cache["blocks.1.attn.hook_pattern"], tokens, LANGUAGE)
    assert shares[1] == pytest.approx(expected)


def test_strings_without_an_open_bracket_are_refused():
    with pytest.raises(ValueError, match="no position has an open bracket"):
        stack_top_share(torch.ones(1, 1, 1, 1), torch.tensor([[2]]), LANGUAGE)
