import json
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from interp.models.config import TransformerConfig


def test_a_config_cannot_be_changed(config_for):
    with pytest.raises(FrozenInstanceError):
        config_for("classic").d_model = 7


@pytest.mark.parametrize("name", ["minimal", "standard", "modern", "classic", "encoder"])
def test_json_gives_back_an_equal_config(config_for, name):
    config = config_for(name, seed=5, dtype=torch.bfloat16)
    assert TransformerConfig.from_json(config.to_json()) == config
    assert TransformerConfig.from_json(config.to_json()).dtype is torch.bfloat16


def test_unknown_keys_are_refused_by_name_with_the_nearest_known_one(config_for):
    record = json.loads(config_for("classic").to_json())
    record["n_head"] = record.pop("n_heads")
    with pytest.raises(ValueError, match=r"unknown config key 'n_head'; did you mean n_heads"):
        TransformerConfig.from_json(json.dumps(record))


def test_missing_keys_are_named(config_for):
    record = json.loads(config_for("classic").to_json())
    del record["eps"], record["seed"]
    with pytest.raises(ValueError, match="lacks eps, seed"):
        TransformerConfig.from_json(json.dumps(record))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "JSON list, expected an object"),
    ],
)
def test_text_that_is_no_config_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig.from_json(text)


def test_an_unknown_dtype_in_json_is_refused(config_for):
    text = config_for("classic").to_json().replace("float64", "float63")
    with pytest.raises(ValueError, match="dtype='float63' is unknown: expected one of float64"):
        TransformerConfig.from_json(text)


def construct(**values: object) -> TransformerConfig:
    """A config as it is made outside pytest, where annotations do not refuse wrong types first."""
    config = object.__new__(TransformerConfig)
    for name, value in values.items():
        object.__setattr__(config, name, value)
    config.__post_init__()
    return config


BAD_FIELDS = [
    ({"n_layers": 0}, r"n_layers=0: expected an integer that is at least 1"),
    ({"n_heads": 2.0}, r"n_heads=2.0: expected an integer"),
    ({"d_mlp": 0}, r"d_mlp=0: expected an integer"),
    ({"n_ctx": True}, r"n_ctx=True: expected an integer"),
    ({"n_key_value_heads": 3}, r"n_key_value_heads=3 does not divide n_heads=2"),
    ({"act_fn": "tanh"}, r"act_fn='tanh' is unknown: expected one of 'gelu_new', 'gelu', 'relu'"),
    ({"attention_dir": "left"}, r"attention_dir='left' is unknown: .*'causal', 'bidirectional'"),
    ({"attention_norm": "BN"}, r"attention_norm='BN' is unknown: expected one of 'LN', 'RMS', No"),
    ({"embedding": "onehot"}, r"embedding='onehot' is unknown: expected one of 'learned', 'one_h"),
    ({"positional_embedding_type": "alibi"}, r"positional_embedding_type='alibi' is unknown"),
    ({"dtype": torch.int64}, r"dtype=torch.int64 is unknown"),
    ({"seed": -1}, r"seed=-1: expected an integer that is at least 0"),
    ({"seed": None}, r"seed=None: expected an integer"),
    ({"eps": 0.0}, r"eps=0.0: expected a positive, finite number"),
    ({"eps": float("nan")}, r"eps=nan: expected a positive, finite number"),
    ({"attn_scale": -1.0}, r"attn_scale=-1.0: expected a positive, finite number"),
    ({"initializer_range": "big"}, r"initializer_range='big': expected a positive, finite"),
    ({"attention_residual": 1}, r"attention_residual=1: expected True or False"),
    ({"output_projection": False}, r"needs n_heads \* d_head == d_model.*got 2 \* 11 and d_model="),
    ({"d_mlp": None, "gated_mlp": True}, r"gated_mlp=True without an MLP: give d_mlp"),
    ({"positional_embedding_type": "rotary"}, r"rotary .* d_head=11 must be even"),
    ({"positional_embedding_type": "sinusoidal"}, r"sinusoidal .* d_model=23 must be even"),
    ({"max_depth": 4}, r"max_depth=4 has no meaning for embedding='learned': leave it None, or"),
    ({"tie_embeddings": True, "embedding": "one_hot"}, r"tie_embeddings=True needs embedding='le"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_FIELDS)
def test_a_bad_field_is_named_with_what_came_and_what_was_expected(config_for, changes, message):
    config = config_for("classic", tie_embeddings=False)
    replace(config)  # the config that the change spoils is a good one
    with pytest.raises(ValueError, match=message):
        construct(**{**vars(config), **changes})


@pytest.mark.parametrize(
    ("embedding", "positions", "needed"),
    [
        ("one_hot", "none", 8),
        ("one_hot", "linear", 9),
        ("dyck_joint", "none", 4 + 4 * 5),
        ("dyck_joint", "linear", 4 + 4 * 5 + 1),
        ("dyck_separate", "none", 8 + 5),
        ("dyck_angle", "none", 8 + 2),
    ],
)
def test_d_model_too_small_for_the_one_hots_is_refused(config_for, embedding, positions, needed):
    changes = {
        "embedding": embedding,
        "positional_embedding_type": positions,
        "d_vocab": 8,
        "max_depth": None if embedding == "one_hot" else 4,
    }
    assert config_for("standard", **changes, d_model=needed).d_model == needed
    message = (
        rf"d_model={needed - 1} is too small for embedding='{embedding}'.*use d_model >= {needed}"
    )
    with pytest.raises(ValueError, match=message):
        config_for("standard", **changes, d_model=needed - 1)


def test_depth_embeddings_need_a_depth_and_the_vocabulary_of_brackets(config_for):
    with pytest.raises(ValueError, match=r"embedding='dyck_joint' writes each token's depth: give"):
        config_for("minimal", max_depth=None)
    for d_vocab in (5, 9):
        with pytest.raises(ValueError, match=rf"d_vocab={d_vocab}, expected 6, 8, 10"):
            config_for("minimal", d_vocab=d_vocab)


def test_heads_that_are_not_given_follow_the_query_heads(config_for):
    assert config_for("classic").kv_heads == 2
    assert config_for("classic", n_heads=3).kv_heads == 3
    assert config_for("modern").kv_heads == 2


def test_scores_are_divided_by_the_root_of_d_head_unless_said_otherwise(config_for):
    assert config_for("classic").score_scale == pytest.approx(11**0.5)
    assert config_for("classic", attn_scale=3.0).score_scale == 3.0


def test_what_transformer_lens_reads_follows_from_the_fields(config_for):
    assert config_for("minimal").attn_only
    assert not config_for("standard").attn_only
    assert config_for("standard").normalization_type is None
    assert config_for("minimal").normalization_type == "LN"
    assert config_for("modern").final_rms
    assert not config_for("classic").final_rms
