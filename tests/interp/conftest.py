"""Tiny models of known make, shared by the tests of interp/."""

import numpy as np
import pytest


@pytest.fixture(scope="session")
def write_tiny_gguf():
    """The function that writes a llama of one layer with a byte-level tokenizer as GGUF."""
    return _write_tiny_gguf


def _write_tiny_gguf(path):
    import gguf

    rng = np.random.default_rng(0)
    d_model, d_mlp, n_heads, n_key_value_heads, d_head = 32, 64, 2, 1, 16
    letters = [*"abcdefgh", "Ġ", "ab"]
    tokens = ["<unk>", "<s>", "</s>", *letters]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(d_model)
    writer.add_feed_forward_length(d_mlp)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(d_head)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * len(letters))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {
        "token_embd.weight": (len(tokens), d_model),
        "blk.0.attn_norm.weight": (d_model,),
        "blk.0.ffn_norm.weight": (d_model,),
        "output_norm.weight": (d_model,),
        "blk.0.attn_q.weight": (d_model, d_model),
        "blk.0.attn_k.weight": (n_key_value_heads * d_head, d_model),
        "blk.0.attn_v.weight": (n_key_value_heads * d_head, d_model),
        "blk.0.attn_output.weight": (d_model, d_model),
        "blk.0.ffn_gate.weight": (d_mlp, d_model),
        "blk.0.ffn_up.weight": (d_mlp, d_model),
        "blk.0.ffn_down.weight": (d_model, d_mlp),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
