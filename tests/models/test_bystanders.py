"""What importing, building and using our models leaves alone."""

import subprocess
import sys

# In a process of its own, since the point is what the import does: a Hugging Face model answers
# before and after, and the functions that its attention goes through stay the same objects.
SCRIPT = """
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2 import modeling_gpt2

config = transformers.GPT2Config(
    n_layer=2, n_head=2, n_embd=22, vocab_size=13, n_positions=19, attn_implementation="sdpa"
)
torch.manual_seed(0)
bystander = transformers.GPT2LMHeadModel(config).eval()
tokens = torch.arange(7)[None]

def state():
    functions = {name: ALL_ATTENTION_FUNCTIONS[name] for name in sorted(ALL_ATTENTION_FUNCTIONS)}
    attention = modeling_gpt2.GPT2Attention
    return {
        "functions": functions,
        "eager": modeling_gpt2.eager_attention_forward,
        "forward": attention.forward,
        "sdpa": torch.nn.functional.scaled_dot_product_attention,
        "softmax": torch.softmax,
        "call": torch.nn.Module.__call__,
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state().tolist(),
        "implementation": bystander.config._attn_implementation,
    }

with torch.no_grad():
    logits = bystander(tokens).logits
before = state()

import tempfile
from interp.models.checkpoints import load_checkpoint, save_checkpoint
from interp.models.config import TransformerConfig
from interp.models.transformer import Transformer

model = Transformer(
    TransformerConfig(n_layers=2, d_model=22, n_heads=2, d_head=11, d_vocab=13, n_ctx=19)
)
model(tokens, return_type="loss").backward()
model.run_with_cache(tokens)
with model.materialize("hook_pattern"):
    model(tokens)
with tempfile.TemporaryDirectory() as folder:
    load_checkpoint(save_checkpoint(model, folder))

after = state()
assert after == before, [key for key in before if before[key] != after[key]]
with torch.no_grad():
    assert torch.equal(bystander(tokens).logits, logits)
print("unchanged")
"""


def test_a_bystander_model_and_the_global_state_are_the_same_after_ours_has_run():
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.stdout.strip() == "unchanged", finished.stderr
