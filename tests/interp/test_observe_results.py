"""What an observation keeps: reductions, key sets, patterns, tables, against eager's patterns."""

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

import interp
from interp.observe_masks import MaskRequest

N_LAYERS, N_HEADS, N_TOKENS = 2, 3, 11
STATISTICS = ("lse", "entropy", "max", "first_mass", "received")


def build() -> LlamaForCausalLM:
    config = LlamaConfig(
        num_hidden_layers=N_LAYERS,
        hidden_size=12,
        num_attention_heads=N_HEADS,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=20,
        vocab_size=31,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def texts():
    """Four texts of 5 to 11 tokens."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 31, (n,), generator=generator) for n in (11, 5, 7, 11)]


@pytest.fixture(scope="module")
def patterns(model, texts):
    """Eager's patterns of every text alone, float64 [layer, head, query_pos, key_pos]."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = [model(text[None], output_attentions=True).attentions for text in texts]
    model.set_attn_implementation("sdpa")
    return [torch.stack(layers)[:, 0].double() for layers in outputs]


def padded(texts, side):
    tokens, mask = torch.zeros(len(texts), N_TOKENS).long(), torch.zeros(len(texts), N_TOKENS)
    for row, text in enumerate(texts):
        at = slice(None, len(text)) if side == "right" else slice(N_TOKENS - len(text), None)
        tokens[row, at], mask[row, at] = text, 1
    return {"input_ids": tokens, "attention_mask": mask.long()}


def per_query(pattern, statistic):
    values = {
        "entropy": torch.special.entr(pattern).sum(-1),
        "max": pattern.amax(-1),
        "first_mass": pattern[..., 0],
    }
    return values[statistic]


def close(ours, theirs):
    torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("statistic", ["entropy", "max", "first_mass"])
@pytest.mark.parametrize("from_query", [0, 1])
def test_means_over_all_queries_of_all_texts(model, texts, patterns, side, statistic, from_query):
    with interp.observe(model, statistics=(statistic,), from_query=from_query) as seen:
        model(**padded(texts[:3], side))
        model(**padded(texts[3:], side))
    every = torch.cat([per_query(p, statistic)[..., from_query:] for p in patterns], -1)
    close(seen.tensor(statistic), every.mean(-1))
    assert set(seen.table()["n"]) == {sum(len(t) - from_query for t in texts)}


@pytest.mark.parametrize("side", ["left", "right"])
def test_means_within_each_text(model, texts, patterns, side):
    with interp.observe(model, reduce="sample", statistics=("entropy",)) as seen:
        model(**padded(texts[:3], side))
        model(**padded(texts[3:], side))
    expected = torch.stack([per_query(p, "entropy").mean(-1) for p in patterns])
    close(seen.tensor("entropy"), expected)
    table = seen.table()
    row = table[(table["sample"] == 1) & (table["layer"] == 1) & (table["head"] == 2)]
    assert row["n"].item() == 5
    assert row["value"].item() == pytest.approx(expected[1, 1, 2].item(), abs=2e-5)
    assert seen.lengths().tolist() == [11, 5, 7, 11]


@pytest.mark.parametrize("side", ["left", "right"])
def test_means_at_each_position_over_the_texts_that_have_it(model, texts, patterns, side):
    with interp.observe(model, reduce="position", statistics=("max", "received")) as seen:
        model(**padded(texts[:3], side))
        model(**padded(texts[3:], side))
    counts = torch.tensor([sum(len(t) > p for t in texts) for p in range(N_TOKENS)])
    for statistic in ("max", "received"):
        total = torch.zeros(N_LAYERS, N_HEADS, N_TOKENS, dtype=torch.float64)
        for pattern in patterns:
            values = pattern.sum(-2) if statistic == "received" else per_query(pattern, "max")
            total[..., : values.shape[-1]] += values
        close(seen.tensor(statistic), total / counts)
    table = seen.table()
    assert table[table["position"] == 6]["n"].unique().tolist() == [3]
    assert table[table["position"] == 10]["n"].unique().tolist() == [2]


@pytest.mark.parametrize("side", ["left", "right"])
def test_without_reduction_every_value_stands_at_its_position(model, texts, patterns, side):
    with interp.observe(model, reduce="none", statistics=STATISTICS) as seen:
        model(**padded(texts, side))
    for statistic in ("entropy", "max", "first_mass", "received"):
        ours = seen.tensor(statistic)
        assert ours.shape == (4, N_LAYERS, N_HEADS, N_TOKENS)
        for sample, pattern in enumerate(patterns):
            n = pattern.shape[-1]
            values = pattern.sum(-2) if statistic == "received" else per_query(pattern, statistic)
            close(ours[sample, ..., :n], values)
            assert ours[sample, ..., n:].isnan().all()
    assert len(seen.table()) == len(STATISTICS) * N_LAYERS * N_HEADS * (11 + 5 + 7 + 11)


def test_received_is_summed_within_texts_and_averaged_over_them(model, texts, patterns):
    for reduce in ("all", "sample"):
        with interp.observe(model, reduce=reduce, statistics=("received",)) as seen:
            model(**padded(texts, "right"))
        ours = seen.tensor("received")
        if reduce == "sample":
            for sample, pattern in enumerate(patterns):
                close(ours[sample, ..., : pattern.shape[-1]], pattern.sum(-2))
        else:
            close(ours[..., 0], torch.stack([p.sum(-2)[..., 0] for p in patterns]).mean(0))
            assert seen.table()["position"].dtype == "Int64"


def test_chosen_layers_and_heads_keep_their_numbers(model, texts, patterns):
    with interp.observe(model, layers=[1], heads=[2, 0], statistics=("max",)) as seen:
        model(**padded(texts, "right"))
    expected = torch.cat([per_query(p, "max") for p in patterns], -1).mean(-1)
    close(seen.tensor("max"), expected[1:, [2, 0]])
    assert seen.stacks == {"self": [1]}
    assert seen.table()[["layer", "head"]].to_numpy().tolist() == [[1, 2], [1, 0]]


def test_heads_may_differ_by_layer(model, texts):
    with interp.observe(model, heads={0: [1], 1: [0, 2]}) as seen:
        model(texts[0][None])
    pairs = seen.table()[["layer", "head"]].drop_duplicates().to_numpy().tolist()
    assert pairs == [[0, 1], [1, 0], [1, 2]]
    assert seen.tensor("entropy").shape == (2, 2)
    assert seen.tensor("entropy")[0, 1].isnan()


@pytest.mark.parametrize("side", ["left", "right"])
def test_masses_on_key_sets_by_position_and_by_token(model, texts, patterns, side):
    token = int(texts[0][4])
    sets = {"second or third": [1, 2], "token": lambda tokens: tokens == token}
    statistics = ("first_mass", "mass")
    with interp.observe(model, statistics=statistics, key_sets=sets, reduce="none") as seen:
        model(**padded(texts, side))
    ours = seen.tensor("mass")
    assert ours.shape == (4, N_LAYERS, N_HEADS, N_TOKENS, 2)
    for sample, (text, pattern) in enumerate(zip(texts, patterns, strict=True)):
        n = len(text)
        close(ours[sample, ..., :n, 0], pattern[..., 1:3].sum(-1))
        close(ours[sample, ..., :n, 1], (pattern * (text == token)).sum(-1))
    close(seen.tensor("first_mass")[0], patterns[0][..., 0])  # the shorthand stays beside them
    assert set(seen.table()["set"].dropna()) == set(sets)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_chosen_heads_are_exact(model, texts, patterns, side):
    wanted = {(0, 2): None, (1, 1): [0, 3, -1]}
    with interp.observe(model, statistics=(), patterns=wanted) as seen:
        model(**padded(texts, side))
    for sample, pattern in enumerate(patterns):
        n = pattern.shape[-1]
        whole = seen.pattern(0, 2, sample=sample)
        close(whole.weights, pattern[0, 2])
        some = seen.pattern(1, 1, sample=sample)
        assert some.rows.tolist() == [0, 3, n - 1]
        close(some.weights, pattern[1, 1][[0, 3, n - 1]])


def test_packed_texts_and_4d_masks_are_seen_as_they_are(model, texts, patterns):
    packed = torch.cat([texts[1], texts[2]])[None]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    same = torch.zeros(12, 12, dtype=torch.bool)
    same[:5, :5], same[5:, 5:] = True, True
    square = (same & torch.ones(12, 12, dtype=torch.bool).tril())[None, None]
    additive = torch.where(square, 0.0, torch.finfo(torch.float32).min)
    expected = torch.cat([per_query(patterns[1], "entropy"), per_query(patterns[2], "entropy")], -1)
    for arguments in (
        {"position_ids": positions, "use_cache": False},
        {"position_ids": positions, "attention_mask": square},
        {"position_ids": positions, "attention_mask": additive},
    ):
        with interp.observe(model, reduce="none") as seen:
            model(packed, **arguments)
        close(seen.tensor("entropy")[0], expected)


def test_a_learned_sinks_weight_is_what_rows_lack():
    config = GptOssConfig(
        num_hidden_layers=2,
        hidden_size=12,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=31,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GptOssForCausalLM(config).eval()
    tokens = torch.arange(3, 14)[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(tokens, output_attentions=True).attentions
    names = ("sink_mass", "received")
    with interp.observe(model, statistics=names, reduce="none", patterns=[(0, 1)]) as seen:
        model(tokens)
    for layer, pattern in enumerate(eager):
        close(seen.tensor("sink_mass")[0, layer], 1 - pattern[0].double().sum(-1))
    rows = seen.pattern(0, 1).weights.sum(-1)
    close(rows + seen.tensor("sink_mass")[0, 0, 1], torch.ones(11, dtype=torch.float64))


def test_long_texts_are_observed_without_any_square_tensor(model, monkeypatch):
    def forbidden(self):
        raise AssertionError("built a mask of [query_pos, key_pos]")

    monkeypatch.setattr(MaskRequest, "additive", forbidden)
    monkeypatch.setattr(MaskRequest, "allowed", forbidden)
    tokens = torch.full((2, 50), 5)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    with torch.no_grad(), interp.observe(model, statistics=STATISTICS) as seen:
        model(tokens)
        model(tokens, attention_mask=mask)
        model(tokens, position_ids=torch.arange(25).repeat(2, 2), use_cache=False)
    assert seen.n_texts == 6


def test_many_texts_take_no_more_room_than_one_unless_every_text_is_kept(model, texts):
    with interp.observe(model, statistics=("entropy",)) as seen:
        for _ in range(20):
            model(texts[0][None])
        sums = [m.sums.numel() for means in seen._means.values() for m in means.values()]
    assert sums == [N_HEADS] * N_LAYERS
    assert seen.n_texts == 20
    close(seen.tensor("entropy"), seen.tensor("entropy").double())


@pytest.mark.parametrize("has_soft_prompt", [False, True])
@pytest.mark.parametrize("n_padding", [0, 1, 2, 3, 4])
def test_left_padding_changes_nothing_with_and_without_a_soft_prompt(
    model, texts, n_padding, has_soft_prompt
):
    """The padding lies between the soft prompt and its text, as it does when prompts are tuned."""
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randn(1, 3 if has_soft_prompt else 0, 12, generator=generator)

    def observed(n):
        vectors = model.get_input_embeddings()(texts[2])[None]
        padding = torch.zeros(1, n, 12)
        mask = torch.tensor([[1] * prompt.shape[1] + [0] * n + [1] * len(texts[2])])
        with torch.no_grad(), interp.observe(model, statistics=STATISTICS, reduce="none") as seen:
            logits = model(
                inputs_embeds=torch.cat([prompt, padding, vectors], 1),
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
            ).logits
        return seen, logits[:, -len(texts[2]) :]

    (padded, logits), (alone, expected) = observed(n_padding), observed(0)
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=0)
    for statistic in STATISTICS:
        torch.testing.assert_close(
            padded.tensor(statistic), alone.tensor(statistic), atol=2e-5, rtol=0
        )
