"""Every published point of every family: what can be seen has the promised shape, and matters."""

from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch
from torch import Tensor

from interp.models.hook_table import PointRow
from interp.models.transformer import Transformer

N_BATCH, N_POS = 3, 7
EFFECT = 1e-3  # a causal point moves the logits by at least this share of their norm

PINNED = """\
hook_embed
blocks.0.hook_resid_pre
blocks.0.ln1.hook_scale
blocks.0.ln1.hook_normalized
blocks.0.attn.hook_q
blocks.0.attn.hook_k
blocks.0.attn.hook_v
blocks.0.attn.hook_rot_q
blocks.0.attn.hook_rot_k
blocks.0.attn.hook_attn_scores
blocks.0.attn.hook_pattern
blocks.0.attn.hook_lse
blocks.0.attn.hook_entropy
blocks.0.attn.hook_first_mass
blocks.0.attn.hook_received
blocks.0.attn.hook_z
blocks.0.attn.hook_result
blocks.0.hook_attn_out
blocks.0.hook_resid_mid
blocks.0.ln2.hook_scale
blocks.0.ln2.hook_normalized
blocks.0.mlp.hook_pre
blocks.0.mlp.hook_pre_linear
blocks.0.mlp.hook_post
blocks.0.hook_mlp_out
blocks.0.hook_resid_post
blocks.1.hook_resid_pre
blocks.1.ln1.hook_scale
blocks.1.ln1.hook_normalized
blocks.1.attn.hook_q
blocks.1.attn.hook_k
blocks.1.attn.hook_v
blocks.1.attn.hook_rot_q
blocks.1.attn.hook_rot_k
blocks.1.attn.hook_attn_scores
blocks.1.attn.hook_pattern
blocks.1.attn.hook_lse
blocks.1.attn.hook_entropy
blocks.1.attn.hook_first_mass
blocks.1.attn.hook_received
blocks.1.attn.hook_z
blocks.1.attn.hook_result
blocks.1.hook_attn_out
blocks.1.hook_resid_mid
blocks.1.ln2.hook_scale
blocks.1.ln2.hook_normalized
blocks.1.mlp.hook_pre
blocks.1.mlp.hook_pre_linear
blocks.1.mlp.hook_post
blocks.1.hook_mlp_out
blocks.1.hook_resid_post
ln_final.hook_scale
ln_final.hook_normalized
"""


def sizes(model: Transformer) -> dict[str, int]:
    c = model.cfg
    return {
        "batch": N_BATCH,
        "pos": N_POS,
        "query_pos": N_POS,
        "key_pos": N_POS,
        "d_model": c.d_model,
        "d_head": c.d_head,
        "d_mlp": c.d_mlp or 0,
        "head_index": c.n_heads,
        "key_value_head": c.kv_heads,
        "1": 1,
    }


def causal_rows(model: Transformer) -> list[PointRow]:
    return [row for row in model.point_table() if row.role == "causal"]


def noise_for(value: Tensor) -> Tensor:
    """Seeded noise at right angles to the value, a tenth of its size; none where it is -inf."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
    finite = value.nan_to_num(neginf=0.0)
    noise = noise * value.isfinite()
    noise = noise - finite * (noise * finite).sum() / (finite * finite).sum()
    return noise * (0.1 * finite.norm() / noise.norm())


def edited_logits(model: Transformer, tokens: Tensor, name: str, step: float) -> Tensor:
    def add_noise(value: Tensor, hook: object) -> Tensor:
        return value + step * noise_for(value.detach())

    return model.run_with_hooks(tokens, fwd_hooks=[(name, add_noise)])


def test_the_ordered_list_of_names_is_pinned(family):
    model = family["modern"]
    assert [row.name for row in model.point_table()] == PINNED.splitlines()
    assert list(model.hook_dict) == PINNED.splitlines()


def test_points_fire_once_each_in_the_order_of_the_table(tiny, tokens_for):
    fired = []
    names = [row.name for row in tiny.point_table()]
    with tiny.hooks([(name, lambda value, hook: fired.append(hook.name)) for name in names]):
        tiny(tokens_for(tiny.cfg))
    assert fired == names


def test_reading_a_point_gives_the_promised_shape(tiny, tokens_for):
    tokens = tokens_for(tiny.cfg)
    for row in tiny.point_table():
        _, cache = tiny.run_with_cache(tokens, names_filter=row.name)
        promised = tuple(sizes(tiny)[word] for word in row.shape.split())
        assert cache[row.name].shape == promised, row.name
        assert list(cache.keys()) == [row.name]


def test_reading_all_points_changes_no_logit(tiny, tokens_for):
    tokens = tokens_for(tiny.cfg)
    torch.testing.assert_close(tiny.run_with_cache(tokens)[0], tiny(tokens), rtol=0, atol=1e-12)


def test_an_edit_at_any_live_point_moves_the_logits(tiny, tokens_for):
    tokens = tokens_for(tiny.cfg)
    logits = tiny(tokens)
    for row in causal_rows(tiny):
        assert row.dead is None, row.name
        moved = edited_logits(tiny, tokens, row.name, 1.0) - logits
        assert moved.norm() > EFFECT * logits.norm(), row.name


def test_the_gradient_at_any_live_point_is_the_derivative_along_an_edit(tiny, tokens_for):
    tokens = tokens_for(tiny.cfg)
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(tiny(tokens).shape, generator=generator, dtype=torch.float64)
    for row in causal_rows(tiny):
        values, gradients = [], []
        with tiny.hooks(
            [(row.name, lambda value, hook, to=values: to.append(value.detach()))],
            [(row.name, lambda value, hook, to=gradients: to.append(value.detach()))],
        ):
            (tiny(tokens) * weight).sum().backward()
        tiny.zero_grad()
        assert len(gradients) == 1, row.name
        assert gradients[0].norm() > 0, row.name
        along = (gradients[0] * noise_for(values[0])).sum()
        step = 1e-4
        with torch.no_grad():
            ahead = (edited_logits(tiny, tokens, row.name, step) * weight).sum()
            behind = (edited_logits(tiny, tokens, row.name, -step) * weight).sum()
        # central differences err by O(step^2) relative to the third derivative, and by rounding
        scale = gradients[0].norm() * noise_for(values[0]).norm()
        difference = (ahead - behind) / (2 * step) - along
        assert abs(difference) < 1e-5 * scale, row.name


DEAD = [
    # a bias-free ReLU MLP passes a scale on, and the final norm divides it out
    (
        "standard",
        {
            "act_fn": "relu",
            "mlp_biases": False,
            "mlp_residual": False,
            "mlp_norm": "RMS",
            "final_norm": "LN",
            "eps": 1e-12,
        },
        {},
        {"blocks.1.ln2.hook_scale"},
    ),
    # the same in every layer where each norm reads the stream alone
    (
        "modern",
        {
            "act_fn": "relu",
            "mlp_residual": False,
            "attention_residual": False,
            "eps": 1e-12,
            "positional_embedding_type": "none",
        },
        {},
        {"blocks.0.ln2.hook_scale", "blocks.1.ln2.hook_scale"},
    ),
    # uniform attention: no query, and therefore no key, changes a score
    ("minimal", {}, {"W_K": 0.0, "b_K": 0.0}, {"blocks.0.attn.hook_q"}),
    ("minimal", {}, {"W_Q": 0.0, "b_Q": 0.0}, {"blocks.0.attn.hook_k"}),
    (
        "modern",
        {},
        {"W_Q": 0.0},
        {f"blocks.{layer}.attn.hook_{name}" for layer in (0, 1) for name in ("k", "rot_k")},
    ),
]


@pytest.mark.parametrize(("name", "changes", "weights", "dead"), DEAD)
def test_structurally_dead_points_are_listed_with_a_reason_and_are_dead(
    config_for, build_model, tokens_for, name, changes, weights, dead
):
    model = build_model(config_for(name, **changes))
    with torch.no_grad():
        for block in model.blocks:
            for weight, value in weights.items():
                getattr(block.attn, weight).fill_(value)
    tokens = tokens_for(model.cfg)
    logits = model(tokens)
    for row in causal_rows(model):
        assert (row.dead is not None) == (row.name in dead), row.name
        if row.name.endswith(("hook_q", "hook_k", "hook_rot_q", "hook_rot_k")) and weights:
            # its own value is zero or of no consequence: noise of size 1 instead of a share of it
            edit = [(row.name, lambda value, hook: value + noise_for(torch.ones_like(value)))]
            moved = model.run_with_hooks(tokens, fwd_hooks=edit) - logits
        else:
            moved = edited_logits(model, tokens, row.name, 1.0) - logits
        is_still = moved.norm() < 1e-9 * logits.norm()
        assert is_still == (row.name in dead), (row.name, row.dead)


def test_the_table_says_which_points_need_the_eager_path(family):
    for model in family.values():
        for row in model.point_table():
            is_square = row.shape.endswith("query_pos key_pos")
            assert row.backends == (("eager",) if is_square else ("fused", "eager"))


def test_the_table_becomes_a_data_frame(family):
    rows = family["minimal"].point_table()
    frame = pd.DataFrame(rows)
    assert list(frame.columns) == list(asdict(rows[0]))
    assert frame.set_index("name").loc["blocks.0.attn.hook_pattern", "shape"] == (
        "batch head_index query_pos key_pos"
    )


# What is observed is materialised, and nothing else.


def test_square_points_exist_only_while_somebody_looks(family, tokens_for):
    model = family["classic"]
    tokens, fired = tokens_for(model.cfg), []
    attention = model.blocks[1].attn
    points = ("hook_attn_scores", "hook_pattern", "hook_result")
    originals = {name: getattr(attention, name).forward for name in points}

    def spy(name: str):
        def forward(value: object) -> object:
            fired.append((name, isinstance(value, Tensor)))
            return originals[name](value)

        return forward

    # as a tracer does: every module's forward is replaced, without a hook
    object.__setattr__(attention, "forward", attention.forward)
    for name in points:
        object.__setattr__(getattr(attention, name), "forward", spy(name))
    try:
        model(tokens)
        with model.materialize("hook_pattern"):
            model(tokens)
        with model.materialize("blocks.1.attn.hook_result"):
            model(tokens)
    finally:
        del attention.__dict__["forward"]
        for name in points:
            del getattr(attention, name).__dict__["forward"]
    # a point that is not served gets something that is no tensor
    assert fired == [
        *[("hook_attn_scores", False), ("hook_pattern", False), ("hook_result", False)],
        *[("hook_attn_scores", True), ("hook_pattern", True), ("hook_result", False)],
        *[("hook_attn_scores", False), ("hook_pattern", False), ("hook_result", True)],
    ]


def test_materialize_refuses_an_unknown_name_and_ends_with_its_block(family):
    model = family["classic"]
    with (
        pytest.raises(ValueError, match="'hook_patern' is no hook point.*hook_pattern"),
        model.materialize("hook_patern"),
    ):
        pass
    with pytest.raises(ZeroDivisionError), model.materialize("hook_pattern"):
        assert model.blocks[0].attn.hook_pattern.is_wanted
        _ = 1 / 0
    assert not model.blocks[0].attn.hook_pattern.is_wanted


def test_a_layer_that_nobody_looks_at_stays_on_the_fused_path(family, tokens_for):
    model = family["classic"]
    with model.hooks([("blocks.1.attn.hook_pattern", lambda value, hook: None)]):
        wanted = [block.attn.hook_pattern.is_wanted for block in model.blocks]
    assert wanted == [False, True, False]


def test_norms_without_a_look_at_their_scale_give_the_same_numbers(config_for, build_model):
    for kind in ("LN", "RMS"):
        config = config_for("classic", attention_norm=kind, mlp_norm=kind, final_norm=kind)
        norm = build_model(replace(config, dtype=torch.float64)).ln_final
        x = torch.randn(5, 3, 23, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        fused = norm(x)
        norm.hook_scale.n_requests += 1
        torch.testing.assert_close(norm(x), fused, rtol=1e-12, atol=1e-12)
