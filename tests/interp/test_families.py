"""The walk over all architectures: what it builds, what it concludes, how it survives."""

import json

import pytest
import torch

from interp.benchmarks import families
from interp.benchmarks.families import STATUSES, check_one, run, to_markdown, walk
from interp.benchmarks.family_check import EagerCall, eager_call, make_texts
from interp.benchmarks.family_models import Family, text_families, tiny_config, tiny_model

FAMILIES = {family.model_type: family for family in text_families()}


class FakeWorker:
    """Answers at once; dies on one architecture."""

    asked: list[str] = []

    def ask(self, name):
        self.asked.append(name)
        if name == "killer":
            raise KeyboardInterrupt
        return {"architecture": name, "class": name.title(), "status": "served", "why": ""}

    def stop(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    FakeWorker.asked = []
    monkeypatch.setattr(families, "_Worker", FakeWorker)
    return FakeWorker


def test_what_is_on_disk_is_not_asked_again(fake, tmp_path):
    walk(["a", "b", "c"], tmp_path, processes=1)
    (tmp_path / "b.json").unlink()
    reports = walk(["a", "b", "c"], tmp_path, processes=1)
    assert fake.asked == ["a", "b", "c", "b"]
    assert [report["architecture"] for report in reports] == ["a", "b", "c"]


def test_what_was_found_with_other_code_is_found_anew(fake, tmp_path, monkeypatch):
    walk(["a"], tmp_path, processes=1)
    monkeypatch.setattr(families, "_transformers_version", lambda: "6.0")
    walk(["a"], tmp_path, processes=1)
    assert fake.asked == ["a", "a"]


def test_a_walk_that_is_stopped_says_so_and_keeps_what_it_had(fake, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        walk(["a", "killer", "c"], tmp_path, processes=1)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text())["status"] == "served"


def test_an_architecture_that_kills_or_hangs_its_process_is_told_and_the_next_is_served(
    monkeypatch,
):
    program = "import sys\nfor line in sys.stdin:\n    exec(line.strip()); print('{}', flush=True)"

    def start():
        return families.subprocess.Popen(
            [families.sys.executable, "-c", program],
            stdin=families.subprocess.PIPE,
            stdout=families.subprocess.PIPE,
            text=True,
        )

    monkeypatch.setattr(families, "_start_worker", start)
    monkeypatch.setattr(families, "SECONDS_TO_END", 5)
    worker = families._Worker()
    try:
        assert worker.ask("pass") == {}
        died = worker.ask("import os; os._exit(3)")
        assert (died["status"], died["why"]) == ("cannot run", "the process died")
        assert worker.ask("pass") == {}
        monkeypatch.setattr(families, "SECONDS_PER_FAMILY", 0.5)
        late = worker.ask("import time; time.sleep(60)")
        assert late["status"] == "timed out"
    finally:
        worker.stop()


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("bloom", "refused", "does not call attention through transformers' AttentionInterface"),
        ("mamba", "refused", "has no attention layers that could be observed"),
        ("gemma3", "cannot be built", "is put together from several models (text_config, visi"),
        ("inkling2_text", "refused", "has a learned sink of shape (2, 48, 13, 1), one for ever"),
    ],
)
def test_what_is_not_served_says_why(name, status, why):
    if name not in FAMILIES:
        pytest.skip(f"this transformers has no {name}; newer ones do")
    report = check_one(name)
    assert report["status"] == status
    assert why in report["why"]
    assert status in STATUSES


def test_the_table_counts_and_explains(fake, tmp_path):
    page = tmp_path / "families.md"
    result = run(only=["gpt2", "bloom"], folder=tmp_path, markdown=page)
    assert result.column("architecture") == ["bloom", "gpt2"]
    assert result.notes == ["2 served"]
    text = page.read_text()
    assert "## Served (2)" in text
    assert "| gpt2 | Gpt2 |" in text
    assert to_markdown(result) == text


def test_unknown_architectures_and_types_are_refused(tmp_path):
    with pytest.raises(ValueError, match="only: 'gpt9' is no text architecture"):
        run(only=["gpt9"], folder=tmp_path)
    with pytest.raises(ValueError, match="dtype: got 'bfloat16', expected float32"):
        run(dtype="bfloat16", folder=tmp_path)


def test_a_tiny_config_keeps_what_an_architecture_is_known_for():
    mistral = tiny_config(FAMILIES["mistral"])
    assert mistral.sliding_window < make_texts(97)["plain"].tokens.shape[1]
    assert mistral.num_key_value_heads < mistral.num_attention_heads
    assert tiny_config(FAMILIES["gemma2"]).attn_logit_softcapping is not None
    latent = tiny_config(FAMILIES["deepseek_v3"])
    assert latent.v_head_dim != latent.qk_nope_head_dim + latent.qk_rope_head_dim
    assert "full_attention" in tiny_config(FAMILIES["qwen3_next"]).layer_types


def test_a_tiny_model_comes_from_its_seed_and_has_something_to_say():
    state = torch.get_rng_state()
    one, same, other = (tiny_model(FAMILIES["llama"], seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    tokens = make_texts(97)["plain"].tokens
    with torch.no_grad():
        logits = [model(tokens).logits for model in (one, same, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    one.set_attn_implementation("eager")
    with torch.no_grad():
        pattern = one(tokens, output_attentions=True).attentions[0]
    assert pattern[0, :, -1].max() > 2 / 13  # far from the uniform 1/13


def test_the_reference_is_the_definition_of_attention():
    """With everything on, against sums written out for one row."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 3, 4, generator=generator)
    k = torch.randn(1, 1, 3, 4, generator=generator)
    bias = torch.randn(1, 2, 3, 3, generator=generator)
    sinks = torch.tensor([0.3, -0.2])
    mask = torch.full((3, 3), torch.finfo(torch.float32).min).triu(1)[None, None]
    returned = torch.zeros(1, 2, 3, 3)
    call = eager_call(
        q, k, mask, returned, scaling=0.7, softcap=2.0, position_bias=bias, sinks=sinks
    )
    assert isinstance(call, EagerCall)
    for head in range(2):
        scores = []
        for key in range(2):  # row 1 sees keys 0 and 1
            product = float((q[0, head, 1] * k[0, 0, key]).sum()) * 0.7
            scores.append(2.0 * float(torch.tanh(torch.tensor(product / 2.0))))
        powers = [
            float(torch.exp(torch.tensor(s + float(bias[0, head, 1, j]))))
            for j, s in enumerate(scores)
        ]
        slot = float(torch.exp(sinks[head]))
        total = sum(powers) + slot
        expected = torch.tensor([p / total for p in powers] + [0.0]).double()
        torch.testing.assert_close(call.weights[0, head, 1], expected, atol=1e-6, rtol=0)
        assert call.sink_mass is not None
        assert float(call.sink_mass[0, head, 1]) == pytest.approx(slot / total, abs=1e-6)
        assert float(call.lse[0, head, 1]) == pytest.approx(
            float(torch.log(torch.tensor(total))), abs=1e-6
        )


def test_families_are_named_as_transformers_names_them():
    assert FAMILIES["gpt2"] == Family("gpt2", "GPT2LMHeadModel")
