"""Hooks that must do what they say, or refuse: what went wrong elsewhere, as scenarios."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from interp.models.activation_cache import TransformerCache
from interp.models.transformer import Transformer


@pytest.fixture
def model(config_for, build_model) -> Transformer:
    return build_model(config_for("modern"))


@pytest.fixture
def tokens(model, tokens_for):
    return tokens_for(model.cfg)


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    taken = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return taken


# Names.


@pytest.mark.parametrize("wrap", [str, lambda name: [name], lambda name: {name}, lambda n: (n,)])
def test_a_names_filter_may_be_a_name_or_any_collection_of_names(model, tokens, wrap):
    name = "blocks.1.attn.hook_pattern"
    _, cache = model.run_with_cache(tokens, names_filter=wrap(name))
    assert isinstance(cache, TransformerCache)
    assert list(cache.keys()) == [name]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("blocks.1.attn.hook_patern", r"no hook point .*near it: blocks.1.attn.hook_pattern"),
        (["hook_embed", "hook_q"], r"'hook_q' is no hook point .*near it: blocks.0.attn.hook_q, b"),
        (
            {"blocks.2.hook_resid_pre"},
            r"'blocks.2.hook_resid_pre' is no hook point.*blocks.1.hook_",
        ),
        ("blocks.0.attn", r"'blocks.0.attn' is no hook point"),
        ([], r"no hook point is left; this model has hook_embed"),
        (lambda name: name.endswith("hook_pos_embed"), r"no hook point is left"),
    ],
)
def test_a_name_that_is_no_point_is_refused_with_the_nearest_ones(model, tokens, names, message):
    with pytest.raises(ValueError, match=message):
        model.run_with_cache(tokens, names_filter=names)
    with pytest.raises(ValueError, match=message):
        model.add_caching_hooks(names)


@pytest.mark.parametrize("direction", ["fwd_hooks", "bwd_hooks"])
@pytest.mark.parametrize("name", ["hook_z", lambda name: False])
def test_a_hook_on_an_unknown_name_is_refused_before_any_is_attached(
    model, tokens, direction, name
):
    good = ("hook_embed", lambda value, hook: value)
    with pytest.raises(ValueError, match="no hook point"):
        model.run_with_hooks(tokens, **{direction: [good, (name, good[1])]})
    assert not model.hook_dict["hook_embed"].is_wanted
    with pytest.raises(ValueError, match="no hook point"):
        model.add_hook(name, good[1])


def test_a_misspelt_keyword_is_a_type_error(model, tokens):
    with pytest.raises(TypeError, match="names_filer"):
        model.run_with_cache(tokens, names_filer="hook_embed")
    with pytest.raises(TypeError, match="atention_mask"):
        model.run_with_hooks(tokens, atention_mask=torch.ones(3, 7))


# Slices, devices, batch axis.


def test_a_position_slice_cuts_every_point_along_its_own_position_axis(model, tokens):
    _, whole = model.run_with_cache(tokens)
    for pos_slice, index in [(slice(2, 5), slice(2, 5)), (3, slice(3, 4)), ([0, 6], [0, 6])]:
        _, cut = model.run_with_cache(tokens, pos_slice=pos_slice)
        for row in model.point_table():
            axes = row.shape.split()
            axis = next(axes.index(w) for w in ("pos", "query_pos", "key_pos") if w in axes)
            expected = whole[row.name].movedim(axis, 0)[index].movedim(0, axis)
            assert torch.equal(cut[row.name], expected), row.name


def test_the_batch_axis_goes_only_where_there_is_one_sequence(model, tokens):
    _, cache = model.run_with_cache(tokens[:1], remove_batch_dim=True, pos_slice=slice(1, 4))
    assert cache["blocks.0.attn.hook_pattern"].shape == (4, 3, 7)
    assert cache["hook_embed"].shape == (3, 23)
    assert not cache.has_batch_dim
    with pytest.raises(
        ValueError, match="remove_batch_dim=True needs one sequence, got a batch of"
    ):
        model.run_with_cache(tokens, remove_batch_dim=True)


def test_one_forward_fires_each_point_once_and_the_cache_keeps_that_value(model, tokens):
    counts: dict[str, int] = {}

    def count(value, hook):
        counts[hook.name] = counts.get(hook.name, 0) + 1

    with model.hooks([(lambda name: True, count)]):
        model.run_with_cache(tokens)
    assert counts == dict.fromkeys(model.hook_dict, 1)


# Gradients.


def test_incl_bwd_gives_every_point_its_gradient_and_a_slice_cuts_it_too(model, tokens):
    _, cache = model.run_with_cache(tokens, return_type="loss", incl_bwd=True, pos_slice=(1, 3))
    causal = [row.name for row in model.point_table() if row.role == "causal"]
    assert set(cache.keys()) == {*model.hook_dict, *(f"{name}_grad" for name in causal)}
    for name in causal:
        assert cache[f"{name}_grad"].shape == cache[name].shape, name
        assert cache[f"{name}_grad"].any(), name


def test_incl_bwd_without_a_scalar_is_refused(model, tokens):
    with pytest.raises(ValueError, match="incl_bwd=True needs a scalar .* return_type='loss'"):
        model.run_with_cache(tokens, incl_bwd=True)


def test_frozen_weights_do_not_hide_the_gradients_of_activations(model, tokens):
    _, trainable = model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    model.zero_grad()
    model.requires_grad_(False)
    _, frozen = model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    compared = [key for key in trainable.keys() if key.endswith("_grad")]  # noqa: SIM118
    assert len(compared) > 30
    for key in compared:
        torch.testing.assert_close(frozen[key], trainable[key])


def test_a_backward_hook_that_returns_its_gradient_unchanged_changes_nothing(model, tokens):
    model(tokens, return_type="loss").backward()
    expected = gradients(model)
    for name in model.hook_dict:
        with model.hooks(bwd_hooks=[(name, lambda gradient, hook: gradient)]):
            model(tokens, return_type="loss").backward()
        found = gradients(model)
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-9, atol=1e-12)


def test_a_backward_hook_that_returns_another_gradient_changes_what_came_before(model, tokens):
    with model.hooks(bwd_hooks=[("blocks.1.hook_resid_pre", lambda gradient, hook: 0 * gradient)]):
        model(tokens, return_type="loss").backward()
    found = gradients(model)
    assert not found["blocks.0.attn.W_Q"].any()
    assert found["blocks.1.attn.W_Q"].any()


# Edits in place.


def zero_in_place(value, hook):
    value[:, 2] = 0.0


def test_an_edit_in_place_reaches_the_output(model, tokens):
    with torch.no_grad():
        logits = model(tokens)
        edited = model.run_with_hooks(
            tokens, fwd_hooks=[("blocks.1.hook_resid_pre", zero_in_place)]
        )
        returned = model.run_with_hooks(
            tokens,
            fwd_hooks=[
                (
                    "blocks.1.hook_resid_pre",
                    lambda value, hook: value.index_fill(1, torch.tensor(2), 0.0),
                )
            ],
        )
    assert not torch.allclose(edited, logits)
    torch.testing.assert_close(edited, returned)


def test_an_edit_in_place_does_not_reach_back_into_what_was_cached_before_it(model, tokens):
    with torch.no_grad():
        _, clean = model.run_with_cache(tokens)
        with model.hooks([("blocks.1.hook_resid_pre", zero_in_place)]):
            _, cache = model.run_with_cache(tokens)
    # one tensor is both: the stream after block 0, and the stream before block 1
    assert torch.equal(cache["blocks.0.hook_resid_post"], clean["blocks.0.hook_resid_post"])
    assert not cache["blocks.1.hook_resid_pre"][:, 2].any()


# Hooks leave.


def test_hooks_leave_when_the_block_fails(model, tokens):
    def fail(value, hook):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_pattern", fail)])
    assert not any(point.is_wanted for point in model.hook_dict.values())
    assert model.n_listeners == 0
    assert model.blocks[0].n_listeners == 0


def test_hooks_are_counted_by_the_modules_around_them_however_they_come_and_go(model):
    point = model.hook_dict["blocks.1.attn.hook_z"]
    handle = point.register_forward_hook(lambda module, inputs, output: None)
    model.add_hook("blocks.1.attn.hook_z", lambda value, hook: None)
    model.add_hook("blocks.1.attn.hook_z", lambda value, hook: None, dir="bwd")
    around = [model, model.blocks[1], model.blocks[1].attn]
    elsewhere = [model.blocks[0], model.blocks[1].mlp]
    assert [module.n_listeners for module in around + elsewhere] == [3, 3, 3, 0, 0]
    handle.remove()
    handle.remove()
    assert [module.n_listeners for module in around] == [2, 2, 2]
    model.reset_hooks()
    assert [module.n_listeners for module in around] == [0, 0, 0]
    with point.register_forward_hook(lambda module, inputs, output: None):
        assert model.n_listeners == 1
    assert model.n_listeners == 0


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_plain_torch_hook_of_any_kind_materialises_its_point(model, tokens, register):
    fired = []
    point = model.hook_dict["blocks.1.attn.hook_pattern"]
    handle = getattr(point, register)(lambda *arguments: fired.append(arguments) and None)
    model(tokens, return_type="loss").backward()
    assert len(fired) == 1
    handle.remove()
    model(tokens, return_type="loss").backward()
    assert len(fired) == 1
    assert model.n_listeners == 0


def test_a_hook_that_holds_a_cache_is_not_printed_with_it(model, tokens):
    _, cache = model.run_with_cache(tokens)
    hook = partial(lambda value, hook, cache: None, cache=dict(cache.items()))
    model.add_hook("blocks.0.attn.hook_z", hook)
    (torch_hook,) = model.hook_dict["blocks.0.attn.hook_z"]._forward_hooks.values()
    assert len(torch_hook.__name__) < 200
    (handle,) = model.list_hooks()["blocks.0.attn.hook_z"]
    assert handle.user_hook is hook


def test_caching_hooks_that_are_added_stay_until_they_are_reset(model, tokens):
    cache = model.add_caching_hooks(["blocks.0.attn.hook_z"], incl_bwd=True)
    model(tokens, return_type="loss").backward()
    assert set(cache) == {"blocks.0.attn.hook_z", "blocks.0.attn.hook_z_grad"}
    model.reset_hooks()
    assert model.n_listeners == 0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_has_points_and_listeners_of_its_own(model, tokens, duplicate):
    twin = duplicate(model)
    assert torch.equal(twin(tokens), model(tokens))
    name = "blocks.1.attn.hook_entropy"
    with twin.hooks([(name, lambda value, hook: None)]):
        assert (twin.n_listeners, twin.blocks[1].attn.n_listeners, model.n_listeners) == (1, 1, 0)
    _, theirs = twin.run_with_cache(tokens, names_filter=name)
    _, ours = model.run_with_cache(tokens, names_filter=name)
    assert torch.equal(theirs[name], ours[name])


# Activation checkpointing: the backward pass runs the forward pass again.


# (the whole model, re-entrant, is refused by torch: token ids have no gradient)
@pytest.mark.parametrize(
    ("part", "use_reentrant"), [("block", False), ("block", True), ("model", False)]
)
def test_a_hook_under_checkpointing_is_refused_rather_than_forgotten(
    model, tokens, part, use_reentrant
):
    def ablate(value, hook):
        return value * 0.0

    x = model.embed(tokens).detach().requires_grad_()
    run, argument = (model.blocks[0], x) if part == "block" else (model, tokens)
    with (
        pytest.raises(RuntimeError, match=r"hook_z has a hook and runs inside torch.utils.checkp"),
        model.hooks([("blocks.0.attn.hook_z", ablate)]),
    ):
        checkpoint(run, argument, use_reentrant=use_reentrant)


def test_a_hook_that_comes_between_the_two_passes_is_refused_too(model, tokens):
    x = model.embed(tokens).detach().requires_grad_()
    out = checkpoint(model.blocks[0], x, use_reentrant=False)
    model.add_hook("blocks.0.attn.hook_z", lambda value, hook: value * 0.0)
    with pytest.raises(RuntimeError, match="gradient would be silently wrong"):
        out.sum().backward()


def test_checkpointing_without_hooks_gives_the_gradient_of_the_plain_run(model, tokens):
    x = model.embed(tokens).detach()
    model.blocks[0](x).square().sum().backward()
    expected = gradients(model)
    checkpoint(model.blocks[0], x, use_reentrant=False).square().sum().backward()
    found = gradients(model)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


# Compilation. The "eager" backend traces and guards as the others do, without generating code.


def compiled_whole(model: Transformer):
    return torch.compile(model, backend="eager")


def compiled_in_place(model: Transformer):
    model.compile(backend="eager")
    return model


def compiled_by_part(model: Transformer, part: str):
    for block in model.blocks:
        module = block if part == "block" else getattr(block, part)
        module.compile(backend="eager")
    return model


FORMS = {
    "whole": compiled_whole,
    "in place": compiled_in_place,
    "blocks": partial(compiled_by_part, part="block"),
    "attention": partial(compiled_by_part, part="attn"),
    "mlps": partial(compiled_by_part, part="mlp"),
    "norms": partial(compiled_by_part, part="ln2"),
}
HOOKED = {
    "mlps": "blocks.1.mlp.hook_post",
    "norms": "blocks.1.ln2.hook_scale",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_hook_that_comes_after_compilation_fires_and_leaves(model, tokens, form):
    with torch.no_grad():
        plain = model(tokens)
        compiled = FORMS[form](model)
        torch.testing.assert_close(compiled(tokens), plain)
        name = HOOKED.get(form, "blocks.1.attn.hook_pattern")

        def ablate(value, hook):
            return value * 0.5

        expected = model.run_with_hooks(tokens, fwd_hooks=[(name, ablate)])
        assert not torch.allclose(expected, plain)
        for _ in range(2):  # as often as hooks come and go
            with model.hooks([(name, ablate)]):
                torch.testing.assert_close(compiled(tokens), expected)
            torch.testing.assert_close(compiled(tokens), plain)
            values = []
            handle = model.hook_dict[name].register_forward_hook(
                lambda module, inputs, output, to=values: to.append(output)
            )
            compiled(tokens)
            handle.remove()
            assert len(values) == 1


def test_a_compiled_model_without_hooks_is_one_graph(model, tokens):
    import torch._dynamo  # where torch keeps what it has compiled
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens))
    assert counter.frame_count == 1


def test_hooks_in_any_number_come_and_go_without_compiling_again(model, tokens):
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    names = list(model.hook_dict)
    with torch.no_grad():
        expected = compiled(tokens)
        for n_hooks in range(1, 20):  # torch gives up on a frame that it has compiled eight times
            fired = []
            hooks = [(name, lambda v, hook, to=fired: to.append(hook)) for name in names[:n_hooks]]
            with model.hooks(hooks):
                torch.testing.assert_close(compiled(tokens), expected)
            assert len(fired) == n_hooks
            torch.testing.assert_close(compiled(tokens), expected)
    assert counter.frame_count == 1
