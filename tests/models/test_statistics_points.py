"""Read-outs of the pattern: served without it, the same with it, differentiable, not editable."""

import pytest
import torch

from interp.models import attention as attention_module
from interp.models.transformer import Transformer

STATISTICS = ["hook_lse", "hook_entropy", "hook_first_mass", "hook_received"]


@pytest.fixture
def model(config_for, build_model) -> Transformer:
    return build_model(config_for("modern"))


@pytest.fixture
def tokens(model, tokens_for):
    return tokens_for(model.cfg)


@pytest.fixture
def no_square(monkeypatch):
    """Turns the making of any [query_pos, key_pos] tensor by the eager path into an error."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the eager path was taken")

    monkeypatch.setattr("interp.models.attention.masked_scores", refuse)


def by_definition(
    scores: torch.Tensor, pattern: torch.Tensor, first: list[int]
) -> dict[str, torch.Tensor]:
    """Statistics of one layer from scores and pattern [batch, head, query, key], entry by entry."""
    entropy = torch.zeros(pattern.shape[:3], dtype=torch.float64)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in pattern.shape)).tolist():
        if pattern[b, h, i, j] > 0:
            entropy[b, h, i] -= pattern[b, h, i, j] * pattern[b, h, i, j].log()
    return {
        "hook_lse": scores.exp().sum(-1).log(),
        "hook_entropy": entropy,
        "hook_first_mass": torch.stack([pattern[b, :, :, j] for b, j in enumerate(first)]),
        "hook_received": sum(pattern[:, :, i] for i in range(pattern.shape[2])),
    }


@pytest.mark.parametrize("path", ["fused", "eager"])
@pytest.mark.parametrize("n_pads", [0, 2])
@pytest.mark.parametrize("name", ["minimal", "modern", "encoder"])
def test_statistics_are_those_of_the_pattern(family, tokens_for, name, n_pads, path, request):
    model = family[name]
    tokens = tokens_for(model.cfg)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, :n_pads] = False
    points = [f"blocks.0.attn.{point}" for point in STATISTICS]
    square = ["blocks.0.attn.hook_attn_scores", "blocks.0.attn.hook_pattern"]
    options = {"attention_mask": mask if n_pads else None}
    _, cache = model.run_with_cache(tokens, names_filter=square, **options)
    expected = by_definition(cache[square[0]], cache[square[1]], [0, n_pads, 0])
    if path == "fused":
        request.getfixturevalue("no_square")
    names = points + (square if path == "eager" else [])
    _, found = model.run_with_cache(tokens, names_filter=names, **options)
    for point in STATISTICS:
        torch.testing.assert_close(found[f"blocks.0.attn.{point}"], expected[point], msg=point)


def test_a_statistic_alone_is_served_without_the_others(model, tokens, no_square):
    for point in STATISTICS:
        _, cache = model.run_with_cache(tokens, names_filter=f"blocks.1.attn.{point}")
        assert list(cache.keys()) == [f"blocks.1.attn.{point}"]


def test_looking_at_a_statistic_changes_no_logit(tiny, tokens_for):
    tokens = tokens_for(tiny.cfg)
    names = [name for name in tiny.hook_dict if name.endswith(tuple(STATISTICS))]
    logits, cache = tiny.run_with_cache(tokens, names_filter=names)
    assert len(cache) == 4 * tiny.cfg.n_layers
    torch.testing.assert_close(logits, tiny(tokens), rtol=1e-10, atol=1e-10)


def test_an_edited_pattern_is_told_as_edited(model, tokens):
    def look_at_the_first_key(pattern, hook):
        edited = torch.zeros_like(pattern)
        edited[..., 0] = 1.0
        return edited

    prefix = "blocks.0.attn."
    with model.hooks([(f"{prefix}hook_pattern", look_at_the_first_key)]):
        _, cache = model.run_with_cache(tokens, names_filter=[prefix + s for s in STATISTICS])
    assert (cache[f"{prefix}hook_first_mass"] == 1).all()
    assert (cache[f"{prefix}hook_entropy"] == 0).all()
    assert (cache[f"{prefix}hook_received"][..., 0] == 7).all()


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_the_gradient_of_a_statistic_reaches_queries_and_keys(model, tokens, statistic, is_eager):
    prefix = "blocks.1.attn."
    generator = torch.Generator().manual_seed(3)
    taken: dict[str, torch.Tensor] = {}

    def loss_of(edits: list) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        look = [(prefix + "hook_pattern", lambda value, hook: None)] if is_eager else []
        look.append((prefix + statistic, lambda value, hook: kept.append(value)))
        with model.hooks(edits + look):
            model(tokens)
        weight = torch.randn(kept[0].shape, generator=generator.manual_seed(3), dtype=torch.float64)
        return (kept[0] * weight).sum()

    for point in ("hook_rot_q", "hook_rot_k"):

        def keep(value, hook, point=point):
            value.retain_grad()
            taken[point] = value

        loss_of([(prefix + point, keep)]).backward()
        gradient = taken[point].grad
        assert gradient.norm() > 1e-6, point
        direction = torch.randn(
            gradient.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
        )
        step = 1e-5
        with torch.no_grad():
            moved = [
                loss_of([(prefix + point, lambda v, hook, s=s, d=direction: v + s * d)])
                for s in (step, -step)
            ]
        along = (gradient * direction).sum()
        # central differences err by O(step^2)
        torch.testing.assert_close((moved[0] - moved[1]) / (2 * step), along, rtol=1e-6, atol=1e-7)
    if statistic == "hook_lse":  # a loss on every statistic trains queries: a step lowers it
        before = loss_of([])
        weight = model.blocks[1].attn.W_Q
        (slope,) = torch.autograd.grad(before, weight)
        with torch.no_grad():
            weight -= 1e-4 * slope / slope.norm()
        assert loss_of([]) < before


@pytest.mark.parametrize("edit", ["returned", "in place", "cut"])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_editing_a_read_out_is_refused(model, tokens, statistic, edit):
    def hook(value: torch.Tensor, hook: object) -> torch.Tensor | None:
        if edit == "returned":
            return value * 0.5
        if edit == "cut":
            return value[:1]
        value.mul_(0.5)
        return None

    name = f"blocks.1.attn.{statistic}"
    message = rf"{name} is a read-out: .*Edit hook_q, hook_k, hook_attn_scores or hook_pattern"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model.run_with_hooks(tokens, fwd_hooks=[(name, hook)])
    assert model.n_listeners == 0


def test_a_hook_that_returns_a_read_out_unchanged_is_no_edit(model, tokens):
    names = [f"blocks.1.attn.{statistic}" for statistic in STATISTICS]
    hooks = [(name, lambda value, hook: value) for name in names]
    with model.hooks(hooks, hooks):
        torch.testing.assert_close(model(tokens), model(tokens))


def test_nnsight_reads_a_statistic_when_it_is_asked_for(model, tokens):
    import beartype  # noqa: F401  (before nnsight)
    import nnsight

    traced = nnsight.NNsight(model)
    name = "blocks.0.attn.hook_entropy"
    _, cache = model.run_with_cache(tokens, names_filter=name)
    with model.materialize("hook_entropy"), traced.trace(tokens):
        entropy = traced.blocks[0].attn.hook_entropy.output.save()
    torch.testing.assert_close(entropy, cache[name])
    with pytest.raises(RuntimeError, match=r"materialize\('hook_entropy'\)"), traced.trace(tokens):
        traced.blocks[0].attn.hook_entropy.output.save()
    with (
        pytest.raises(ValueError, match="is a read-out"),
        model.materialize("hook_entropy"),
        traced.trace(tokens),
    ):
        traced.blocks[0].attn.hook_entropy.output = torch.zeros(3, 4, 7)


def test_a_compiled_model_serves_a_statistic_that_is_asked_for_later(model, tokens, no_square):
    name = "blocks.1.attn.hook_entropy"
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=name)
        compiled = torch.compile(model, backend="eager")
        logits = compiled(tokens)
        values = []
        with model.hooks([(name, lambda value, hook: values.append(value))]):
            torch.testing.assert_close(compiled(tokens), logits)
    torch.testing.assert_close(values, [cache[name]])


@pytest.mark.parametrize("n_positions", [7, 131])
@pytest.mark.parametrize("is_padded", [False, True])
def test_the_kernel_runs_where_it_is_faster_and_gives_the_same_result(
    config_for, monkeypatch, n_positions, is_padded
):
    model = Transformer(config_for("modern", dtype=torch.float32, n_ctx=131))
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(13, (3, n_positions), generator=generator)
    mask = torch.ones(3, n_positions, dtype=torch.bool)
    mask[2, :3] = not is_padded
    options = {"attention_mask": mask} if is_padded else {}
    expected = Transformer(config_for("modern", n_ctx=131))(tokens, **options)  # in float64
    calls = []

    def spy(*arguments, **named):
        calls.append(named["statistics"])
        return original(*arguments, **named)

    original = attention_module.attention
    monkeypatch.setattr(attention_module, "attention", spy)
    logits = model(tokens, **options)
    assert calls == [(), ()] * (n_positions > 7 or is_padded)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)
    logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_half_precision_tells_its_statistics_in_single(config_for, tokens):
    model = Transformer(config_for("modern", dtype=torch.bfloat16))
    prefix = "blocks.0.attn."
    names = [prefix + statistic for statistic in STATISTICS]
    _, fused = model.run_with_cache(tokens, names_filter=names)
    _, eager = model.run_with_cache(tokens, names_filter=[*names, prefix + "hook_pattern"])
    for name in names:
        assert fused[name].dtype == eager[name].dtype == torch.float32
        # bfloat16 keeps eight bits: a pattern rounded to them is off by up to 2^-8 of each entry
        torch.testing.assert_close(fused[name], eager[name], rtol=2**-6, atol=2**-6)
