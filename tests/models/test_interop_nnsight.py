"""nnsight reads, edits and differentiates our points through a trace, without adding hooks."""

import beartype  # noqa: F401  (before nnsight, which mounts `.save` on `object`)
import pytest
import torch

from interp.models.transformer import Transformer

POINTS = ["hook_z", "hook_pattern"]


@pytest.fixture
def model(config_for, build_model) -> Transformer:
    return build_model(config_for("modern"))


@pytest.fixture
def tokens(model, tokens_for):
    return tokens_for(model.cfg)


@pytest.fixture
def traced(model):
    import nnsight

    return nnsight.NNsight(model)


def test_no_submodule_has_a_name_that_nnsight_needs_for_itself(family):
    import nnsight

    taken = set(dir(nnsight.Envoy))
    for model in family.values():
        names = {part for name, _ in model.named_modules() for part in name.split(".")}
        assert not names & taken


@pytest.mark.parametrize("point", POINTS)
def test_a_trace_reads_what_a_hook_reads(model, traced, tokens, point):
    _, cache = model.run_with_cache(tokens)
    with model.materialize("hook_pattern"), traced.trace(tokens):
        first = getattr(traced.blocks[0].attn, point).output.save()
        second = getattr(traced.blocks[1].attn, point).output.save()
        logits = traced.output.save()
    torch.testing.assert_close(first, cache[f"blocks.0.attn.{point}"])
    torch.testing.assert_close(second, cache[f"blocks.1.attn.{point}"])
    torch.testing.assert_close(logits, model(tokens))


@pytest.mark.parametrize("point", POINTS)
def test_an_edit_in_a_trace_does_what_the_same_hook_does(model, traced, tokens, point):
    name = f"blocks.0.attn.{point}"
    expected = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda value, hook: 0.5 * value)])
    assert not torch.allclose(expected, model(tokens))
    with model.materialize("hook_pattern"), traced.trace(tokens):
        attn = traced.blocks[0].attn
        if point == "hook_z":
            attn.hook_z.output = attn.hook_z.output * 0.5
        else:
            attn.hook_pattern.output = attn.hook_pattern.output * 0.5
        logits = traced.output.save()
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("point", POINTS)
def test_a_trace_differentiates_with_respect_to_a_point(model, traced, tokens, point):
    values = {}
    name = f"blocks.0.attn.{point}"
    with model.hooks(bwd_hooks=[(name, lambda gradient, hook: values.update(g=gradient))]):
        model(tokens).square().sum().backward()
    with model.materialize("hook_pattern"), traced.trace(tokens):
        value = getattr(traced.blocks[0].attn, point).output
        loss = traced.output.square().sum()
        with loss.backward():
            gradient = value.grad.save()
    torch.testing.assert_close(gradient, values["g"])


def test_every_point_can_be_read_in_the_order_of_the_table(model, traced, tokens):
    _, cache = model.run_with_cache(tokens)
    names = [row.name for row in model.point_table()]
    with model.materialize(*names), traced.trace(tokens):
        values = {}
        for name in names:
            values[name] = traced.get(name).output
        values.save()
    assert list(values) == names
    for name in names:
        torch.testing.assert_close(values[name], cache[name])


@pytest.mark.parametrize("point", ["hook_pattern", "hook_attn_scores", "hook_result"])
def test_a_trace_that_reads_an_unserved_point_is_told_what_to_do(traced, tokens, point):
    advice = rf"blocks.1.attn.{point} was saved, but .*with model.materialize\('{point}'\)"
    with pytest.raises(RuntimeError, match=advice), traced.trace(tokens):
        getattr(traced.blocks[1].attn, point).output.save()
    with pytest.raises(RuntimeError, match=r"materialize"), traced.trace(tokens):
        (getattr(traced.blocks[1].attn, point).output * 2).save()
    with pytest.raises(RuntimeError, match=r"materialize"), traced.trace(tokens):
        torch.relu(getattr(traced.blocks[1].attn, point).output).save()


def test_a_trace_that_assigns_to_an_unserved_point_is_told_what_to_do(traced, tokens):
    with (
        pytest.raises(RuntimeError, match=r"hook_pattern was assigned to, but .*materialize"),
        traced.trace(tokens),
    ):
        traced.blocks[1].attn.hook_pattern.output = torch.zeros(3, 4, 7, 7)
    with (
        pytest.raises(RuntimeError, match=r"ln1.hook_scale was assigned to, but .*materialize"),
        traced.trace(tokens),
    ):
        traced.blocks[1].ln1.hook_scale.output = torch.ones(3, 7, 1)


def test_a_wrapped_model_still_answers_to_hooks_and_runs_alone(model, traced, tokens):
    with traced.trace(tokens):
        traced.blocks[0].attn.hook_z.output = traced.blocks[0].attn.hook_z.output * 0.0
        edited = traced.output.save()
    _, cache = model.run_with_cache(tokens)
    assert cache["blocks.0.attn.hook_z"].any()
    assert not torch.allclose(edited, model(tokens))
