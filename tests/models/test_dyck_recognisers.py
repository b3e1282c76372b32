"""Transformers built by hand must be right at every position, or say that they cannot be."""

import pytest
import torch

from interp.models import dyck_recognisers
from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import dyck_preset
from interp.models.dyck_recognisers import random_pair_tied_recogniser, uniform_recogniser
from interp.models.dyck_vocabulary import START
from interp.models.transformer import Transformer

# deep strings are rare at p_open = 1/2: these visit every depth
DEEP = 0.7


@torch.no_grad()
def closing_accuracy(
    model: Transformer, tokens: torch.Tensor, language: DyckLanguage
) -> tuple[float, float]:
    """(argmax, threshold 0.8) over positions with an open bracket, by an explicit stack."""
    closes = model(tokens)[..., language.close_tokens.start : language.close_tokens.stop]
    best, share = closes.argmax(-1).tolist(), closes.softmax(-1).tolist()
    right = confident = total = 0
    for row, string in enumerate(tokens.tolist()):
        stack: list[int] = []
        for position, token in enumerate(string):
            if token in language.open_tokens:
                stack.append(token - language.open_tokens.start)
            elif token in language.close_tokens:
                stack.pop()
            if stack:
                total += 1
                right += best[row][position] == stack[-1]
                confident += share[row][position][stack[-1]] > 0.8
    return right / total, confident / total


def mountains(language: DyckLanguage, n_peaks: int) -> torch.Tensor:
    """START, then n_peaks times up to the depth limit over random types, and down again."""
    generator = torch.Generator().manual_seed(0)
    tokens = [START]
    for _ in range(n_peaks):
        types = torch.randint(language.n_types, (language.max_depth,), generator=generator).tolist()
        tokens += [language.open_tokens[t] for t in types]
        tokens += [language.close_tokens[t] for t in reversed(types)]
    return torch.tensor([tokens])


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (5, 3), (8, 10)])
@pytest.mark.parametrize(("length", "n_strings"), [(28, 40), (400, 3), (4000, 1)])
@pytest.mark.parametrize("beta", [2.0, 4.0])
def test_uniform_attention_recognises_every_length(
    shape: tuple[int, int], length: int, n_strings: int, beta: float
) -> None:
    language = DyckLanguage(*shape, p_open=DEEP)
    model = uniform_recogniser(language, length=length, beta=beta)
    tokens = language.sample(n_strings, length, seed=length)
    argmax, threshold = closing_accuracy(model, tokens, language)
    assert argmax == 1.0
    if beta >= 3:
        assert threshold == 1.0


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (5, 3)])
@pytest.mark.parametrize("seed", range(20))
def test_random_pair_tied_attention_recognises_every_draw(
    shape: tuple[int, int], seed: int
) -> None:
    language = DyckLanguage(*shape, p_open=DEEP)
    model = random_pair_tied_recogniser(language, length=400, seed=seed)
    tokens = language.sample(2, 400, seed=seed)
    assert closing_accuracy(model, tokens, language) == (1.0, 1.0)


def test_random_attention_is_right_on_long_strings_too() -> None:
    language = DyckLanguage(2, 4)
    model = random_pair_tied_recogniser(language, length=4000, seed=0)
    assert closing_accuracy(model, language.sample(1, 4000, seed=0), language) == (1.0, 1.0)


def test_uniform_attention_is_uniform_and_random_attention_is_not() -> None:
    language = DyckLanguage(2, 4)
    probe = torch.cat([torch.tensor([2]), language.probe_tokens()])[None]
    name = "blocks.0.attn.hook_pattern"

    def pattern(model: Transformer) -> torch.Tensor:
        return model.run_with_cache(probe, names_filter=name)[1][name][0, 0]

    causal = torch.ones(17, 17, dtype=torch.float64).tril()
    uniform = pattern(uniform_recogniser(language, length=28))
    torch.testing.assert_close(uniform, causal / causal.sum(-1, keepdim=True))
    draws = [
        pattern(random_pair_tied_recogniser(language, length=28, seed=seed)) for seed in (0, 1)
    ]
    # two patterns drawn at random differ as much as an acceptance line of the study asks for
    assert float((draws[0] - draws[1]).square().sum()) > 2


@torch.no_grad()
def test_scores_are_tied_within_each_pair_and_values_balance_it() -> None:
    language = DyckLanguage(3, 5)
    model = random_pair_tied_recogniser(language, length=28, seed=4)
    attention, embed = model.blocks[0].attn, model.embed
    scores = (
        embed.table @ attention.W_Q[0] @ attention.W_K[0].T @ embed.table.T / model.cfg.score_scale
    )
    values = embed.table @ attention.W_V[0]
    queries = [embed.row(token, d) for token in range(4, 10) for d in range(1, 6)]
    for opening, closing in zip(language.open_tokens, language.close_tokens, strict=True):
        for depth in range(1, 6):
            open_row, close_row = embed.row(opening, depth), embed.row(closing, depth)
            offset = scores[queries, open_row] - scores[queries, close_row]
            torch.testing.assert_close(offset, offset[:1].expand_as(offset))
            balance = (
                scores[queries, open_row].exp()[:, None] * values[open_row]
                + scores[queries, close_row].exp()[:, None] * values[close_row]
            )
            scale = values[open_row].abs().max() * scores[queries, open_row].exp().max()
            assert float(balance.abs().max() / scale) < 1e-14
    assert float(scores[queries][:, queries].std()) == pytest.approx(1.0, abs=0.5)


def test_recognisers_have_the_architecture_of_the_minimal_preset() -> None:
    language = DyckLanguage(2, 4)
    preset, _ = dyck_preset("E1", language=language)
    trained = {name: p.shape for name, p in Transformer(preset).named_parameters()}
    for model in (
        uniform_recogniser(language, length=28),
        random_pair_tied_recogniser(language, length=28, seed=0),
    ):
        assert {name: p.shape for name, p in model.named_parameters()} == trained
        assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_the_same_seed_draws_the_same_model_and_leaves_global_randomness_alone() -> None:
    language = DyckLanguage(2, 4)
    before = torch.random.get_rng_state()
    first, again, other = (
        random_pair_tied_recogniser(language, length=28, seed=seed).blocks[0].attn.W_Q
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("language", "length", "dtype"),
    [
        (DyckLanguage(2, 40), 400, torch.float64),
        (DyckLanguage(2, 20), 400, torch.float32),
    ],
)
def test_a_depth_that_floats_cannot_carry_is_refused_and_would_be_wrong(
    language: DyckLanguage, length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=f"max_depth={language.max_depth} at length={length}"):
        uniform_recogniser(language, length=length, dtype=dtype)
    monkeypatch.setattr(dyck_recognisers, "ERROR_PER_KEY", 0)
    model = uniform_recogniser(language, length=length, beta=3.0, dtype=dtype)
    tokens = mountains(language, n_peaks=length // (2 * language.max_depth))
    assert closing_accuracy(model, tokens, language)[0] < 1.0


@pytest.mark.parametrize(("max_depth", "length"), [(8, 400), (8, 4000), (40, 28)])
def test_random_attention_deeper_than_float64_carries_is_refused(
    max_depth: int, length: int
) -> None:
    with pytest.raises(ValueError, match=f"max_depth={max_depth} at length={length} is more than"):
        random_pair_tied_recogniser(DyckLanguage(2, max_depth), length=length, seed=0)


def test_the_deepest_language_that_is_not_refused_is_recognised() -> None:
    length = 400

    def build(max_depth: int) -> tuple[DyckLanguage, Transformer]:
        language = DyckLanguage(2, max_depth)
        return language, uniform_recogniser(language, length=length)

    language, model = build(1)
    for max_depth in range(2, 60):
        try:
            language, model = build(max_depth)
        except ValueError:
            break
    assert 10 <= language.max_depth < 59
    tokens = mountains(language, n_peaks=length // (2 * language.max_depth))
    assert closing_accuracy(model, tokens, language)[0] == 1.0


def test_arguments_that_make_no_recogniser_are_refused() -> None:
    language = DyckLanguage(2, 4)
    with pytest.raises(ValueError, match="beta=1.5: expected at least 2"):
        uniform_recogniser(language, length=28, beta=1.5)
    with pytest.raises(ValueError, match="length=0"):
        uniform_recogniser(language, length=0)
    with pytest.raises(ValueError, match="beta=2.0: expected more than 2"):
        random_pair_tied_recogniser(language, length=28, seed=0, beta=2.0)
    with pytest.raises(ValueError, match="score_sd=-1.0"):
        random_pair_tied_recogniser(language, length=28, seed=0, score_sd=-1.0)
    with pytest.raises(ValueError, match="seed=-1"):
        random_pair_tied_recogniser(language, length=28, seed=-1)
