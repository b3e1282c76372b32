"""Activations on disk: what is written is what ran, in the order that is told, kill or no kill."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from interp.activation_recording import draw_order, record_activations
from interp.activation_store import INDEX, ActivationStore, kind_of
from interp.models.config import TransformerConfig
from interp.models.transformer import Transformer

D_MODEL = 12


def build(seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=D_MODEL,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=8,
        vocab_size=31,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def examples():
    generator = torch.Generator().manual_seed(1)
    lengths = [7, 3, 5, 11, 2, 5, 3, 7, 2, 11, 5]
    return [torch.randint(3, 31, (n,), generator=generator).tolist() for n in lengths]


def states_of(model, example):
    """The residual stream after every block, [layer, pos, d_model], of one example alone."""
    kept = []
    handles = [
        block.register_forward_hook(lambda m, args, out: kept.append(out.detach()))
        for block in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([example]))
    for handle in handles:
        handle.remove()
    return torch.cat(kept)


RECORD = {"points": ["model.layers.*"], "batch_size": 2, "shard_examples": 3}


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_is_the_state_it_says_it_is(model, examples, tmp_path, shuffle):
    store = record_activations(model, examples, folder=tmp_path, shuffle=shuffle, seed=5, **RECORD)
    assert store.n_rows == sum(map(len, examples))
    assert store.kinds == {"model.layers.*": [0, 1, 2]}
    stacked = store.stack("model.layers.*")
    assert stacked.shape == (3, store.n_rows, D_MODEL)
    states = [states_of(model, example) for example in examples]
    for row, (example, position) in enumerate(
        zip(store.examples.tolist(), store.positions.tolist(), strict=True)
    ):
        expected = states[example][:, position]
        torch.testing.assert_close(stacked[:, row], expected, atol=1e-5, rtol=1e-5)


def test_the_order_on_disk_is_the_order_that_is_told_and_comes_from_the_seed(
    model, examples, tmp_path
):
    folders = [tmp_path / name for name in ("five", "again", "six")]
    stores = [
        record_activations(model, examples, folder=f, shuffle=True, seed=seed, **RECORD)
        for f, seed in zip(folders, (5, 5, 6), strict=True)
    ]
    assert stores[0].order.tolist() == draw_order(len(examples), 5)
    assert stores[0].order.tolist() != list(range(len(examples)))  # it was shuffled
    assert stores[0].order.tolist() == stores[1].order.tolist() != stores[2].order.tolist()
    shards = sorted(folders[0].glob("*.safetensors"))
    on_disk = torch.cat([load_file(shard)["example"] for shard in shards])
    assert torch.equal(on_disk, stores[0].examples)
    for shard in shards:  # the bytes too: nothing else is in the files
        assert shard.read_bytes() == (folders[1] / shard.name).read_bytes()
    said = json.loads((folders[0] / INDEX).read_text())["recording"]
    assert (said["seed"], said["dtype"], said["n_examples"]) == (5, "float32", len(examples))


@pytest.mark.parametrize("positions", ["last", "mean", [0, -1]])
def test_positions_choose_rows(model, examples, tmp_path, positions):
    store = record_activations(model, examples, folder=tmp_path, positions=positions, **RECORD)
    rows = store.read("model.layers.2")
    states = [states_of(model, example)[2] for example in examples]
    if positions == "last":
        expected = torch.stack([s[-1] for s in states])
        assert store.positions.tolist() == [len(e) - 1 for e in examples]
    elif positions == "mean":
        expected = torch.stack([s.mean(0) for s in states])
        assert set(store.positions.tolist()) == {-1}
    else:
        expected = torch.cat([s[[0, -1]] for s in states])
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)


def test_rows_are_read_in_the_order_asked_for(model, examples, tmp_path):
    store = record_activations(model, examples, folder=tmp_path, **RECORD)
    whole = store.read("model.layers.1")
    wanted = [40, 3, 3, 17, 0, store.n_rows - 1]
    assert torch.equal(store.read("model.layers.1", wanted), whole[wanted])
    assert torch.equal(store.read("model.layers.1", slice(5, 20, 3)), whole[5:20:3])
    blocks = list(store.batches("model.layers.1", n_rows=7))
    assert [len(block) for block in blocks[:-1]] == [7] * (len(blocks) - 1)
    assert torch.equal(torch.cat(blocks), whole)
    with pytest.raises(ValueError, match="rows: name 0 to 61, expected 0 to 60"):
        store.read("model.layers.1", [0, store.n_rows])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_recorded_type_is_kept(model, examples, tmp_path, dtype):
    store = record_activations(model, examples, folder=tmp_path, dtype=dtype, **RECORD)
    rows = store.read("model.layers.0")
    assert rows.dtype == getattr(torch, dtype)
    exact = states_of(model, examples[0])[0]
    torch.testing.assert_close(rows[:7].float(), exact, atol=2e-2, rtol=2e-2)


def test_inputs_of_modules_and_hook_points_of_the_zoo_are_points_too(examples, tmp_path):
    config = TransformerConfig(n_layers=2, d_model=8, n_heads=2, d_head=4, d_vocab=31, n_ctx=16)
    zoo = Transformer(config)
    points = ["blocks.*.hook_resid_post", "blocks.1.attn:in"]
    store = record_activations(zoo, examples, points=points, folder=tmp_path)
    assert store.kinds == {"blocks.*.hook_resid_post": [0, 1], "blocks.*.attn:in": [1]}
    _, cache = zoo.run_with_cache(torch.tensor([examples[0]]))
    for name, key in (
        ("blocks.0.hook_resid_post", "blocks.0.hook_resid_post"),
        ("blocks.1.attn:in", "blocks.1.ln1.hook_normalized"),
    ):
        torch.testing.assert_close(store.read(name)[:7], cache[key][0], atol=1e-5, rtol=1e-5)


def test_memory_holds_one_shard_at_a_time(model, examples, tmp_path, monkeypatch):
    import interp.activation_recording as recording

    sizes = []
    write = recording._write_shard

    def spy(folder, index, tensors, first, last):
        sizes.append(last - first)
        write(folder, index, tensors, first, last)

    monkeypatch.setattr(recording, "_write_shard", spy)
    record_activations(model, examples, folder=tmp_path, **RECORD)
    assert sizes == [3, 3, 3, 2]


def test_hooks_and_mode_of_the_model_are_as_before_also_after_an_error(examples, tmp_path):
    model = build().train()

    def n_hooks():
        return sum(len(m._forward_hooks) for m in model.modules())

    record_activations(model, examples, folder=tmp_path / "a", **RECORD)
    assert (n_hooks(), model.training) == (0, True)
    handle = model.lm_head.register_forward_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        record_activations(model, examples, folder=tmp_path / "b", **RECORD)
    handle.remove()
    assert n_hooks() == 0


def _interrupt(*args, **kwargs):
    raise KeyboardInterrupt


PROGRAM = """
import json, sys, time
import interp.activation_recording as recording
from test_activation_store import RECORD, build
examples = json.loads(sys.argv[2])
write = recording._write_shard
def slowly(folder, index, tensors, first, last):
    write(folder, index, tensors, first, last)
    print(last, flush=True)
    time.sleep(30)
recording._write_shard = slowly
recording.record_activations(build(), examples, folder=sys.argv[1], shuffle=True, seed=5, **RECORD)
"""


def test_a_killed_recording_goes_on_where_it_was_and_ends_with_the_same_bytes(
    model, examples, tmp_path
):
    here = os.path.dirname(__file__)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "killed"), json.dumps(examples)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "3\n"
            with pytest.raises(ValueError, match="folder: another process is recording into"):
                _record(model, examples, tmp_path / "killed")
        finally:
            process.send_signal(signal.SIGKILL)
    first = next((tmp_path / "killed").glob("shard-*"))
    written = first.stat().st_mtime_ns
    with pytest.raises(ValueError, match="holds 3 of 11 examples; the same call .* goes on"):
        ActivationStore(tmp_path / "killed")
    resumed = _record(model, examples, tmp_path / "killed")
    whole = _record(model, examples, tmp_path / "whole")
    assert first.stat().st_mtime_ns == written  # what was there was not done again
    names = sorted(p.name for p in (tmp_path / "killed").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "whole").iterdir())
    for shard in (tmp_path / "whole").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "killed" / shard.name).read_bytes()
    assert torch.equal(resumed.read("model.layers.1"), whole.read("model.layers.1"))


def _record(model, examples, folder):
    return record_activations(model, examples, folder=folder, shuffle=True, seed=5, **RECORD)


def test_a_finished_recording_is_answered_from_disk(model, examples, tmp_path, monkeypatch):
    record_activations(model, examples, folder=tmp_path, **RECORD)
    monkeypatch.setattr(type(model), "forward", _interrupt)
    store = record_activations(model, examples, folder=tmp_path, **RECORD)
    assert store.n_rows == 61
    with pytest.raises(KeyboardInterrupt):  # the control: a new one would run the model
        record_activations(model, examples, folder=tmp_path / "new", **RECORD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 9, "shuffle": True}, "whose seed is None and not 9"),
        ({"dtype": "float16"}, "whose dtype is 'float32' and not 'float16'"),
        ({"positions": "last"}, "whose positions is 'all' and not 'last'"),
    ],
)
def test_another_recording_does_not_go_into_the_same_folder(
    model, examples, tmp_path, change, message
):
    record_activations(model, examples[:2], folder=tmp_path, **RECORD)
    with pytest.raises(ValueError, match=f"holds another recording, {message}"):
        record_activations(model, examples[:2], folder=tmp_path, **{**RECORD, **change})


def test_other_weights_or_examples_are_another_recording(model, examples, tmp_path):
    record_activations(model, examples[:2], folder=tmp_path, **RECORD)
    with pytest.raises(ValueError, match="holds another recording, whose model is"):
        record_activations(build(seed=1), examples[:2], folder=tmp_path, **RECORD)
    with pytest.raises(ValueError, match="holds another recording, whose inputs is"):
        record_activations(model, examples[1:3], folder=tmp_path, **RECORD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": ["model.layer.*"]}, "points: LlamaForCausalLM has no module 'model.layer.*'"),
        ({"points": ["model:out"]}, "points: 'model:out' ends in 'out', expected ':in' or nothing"),
        ({"points": ["model.layers"]}, "points: 'model.layers' did not run in the model's forward"),
        ({"positions": "first"}, "positions: got 'first', expected all, last, mean, or a list"),
        ({"positions": [5]}, "positions: name 5, but the shortest example has 3 tokens"),
        ({"dtype": "int8"}, "dtype: got 'int8', expected one of float32, bfloat16, float16"),
        ({"batch_size": 0}, "batch_size: got 0, expected at least 1"),
        ({"examples": []}, "examples: is empty, expected at least one list of tokens"),
        ({"examples": [[3], []]}, "examples: number 1 is [], expected one or more token ids"),
    ],
)
def test_what_cannot_be_recorded_is_named(model, examples, tmp_path, change, message):
    given = {"examples": examples[:3], "folder": tmp_path, **RECORD, **change}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        record_activations(model, **given)


def test_a_folder_with_other_files_is_not_written_into(model, examples, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex, ...\); choose a new"):
        record_activations(model, examples, folder=tmp_path, **RECORD)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_or_foreign_folder_says_what_is_wrong(model, examples, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no activations: it has no index.json"):
        ActivationStore(tmp_path)
    store = record_activations(model, examples, folder=tmp_path, **RECORD)
    with pytest.raises(ValueError, match="point: 'model.layers.7' was not recorded, expected amo"):
        store.read("model.layers.7")
    shard = next(tmp_path.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(ValueError, match="is missing or not the .* bytes that were written"):
        ActivationStore(tmp_path)
    (tmp_path / INDEX).write_text('{"format": "something else", "version": 1}')
    with pytest.raises(ValueError, match="is 'something else' version 1, expected"):
        ActivationStore(tmp_path)


def test_the_layer_of_a_point_is_its_first_number():
    assert kind_of("model.layers.11.mlp") == ("model.layers.*.mlp", 11)
    assert kind_of("blocks.0.hook_resid_post") == ("blocks.*.hook_resid_post", 0)
    assert kind_of("encoder.block.3.layer.1:in") == ("encoder.block.*.layer.1:in", 3)
    assert kind_of("ln_f") == ("ln_f", None)


def test_reading_maps_files_instead_of_loading_them(model, tmp_path):
    """Rows of one example are there at once however large the recording is."""
    long = [[5] * 64 for _ in range(64)]
    record_activations(model, long, folder=tmp_path, points=["model.layers.0"], batch_size=32)
    started = time.thread_time()
    rows = ActivationStore(tmp_path).read("model.layers.0", [4000])
    assert rows.shape == (1, D_MODEL)
    assert time.thread_time() - started < 1.0
