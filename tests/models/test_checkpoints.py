import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from interp.models.checkpoints import CONFIG_FILE, WEIGHTS_FILE, load_checkpoint, save_checkpoint


@pytest.fixture
def saved(config_for, build_model, tmp_path):
    """A model and the folder that it was saved to."""
    model = build_model(config_for("classic"))
    return model, save_checkpoint(model, tmp_path / "deep" / "folder")


def test_a_loaded_model_is_the_saved_one(tiny, tokens_for, tmp_path):
    folder = save_checkpoint(tiny, tmp_path)
    loaded = load_checkpoint(folder)
    assert loaded.cfg == tiny.cfg
    for name, weight in tiny.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    tokens = tokens_for(tiny.cfg)
    assert torch.equal(loaded(tokens), tiny(tokens))


def test_a_loaded_model_trains_on(saved, tokens_for):
    model, folder = saved
    loaded = load_checkpoint(folder)
    for each in (model, loaded):
        each(tokens_for(each.cfg), return_type="loss").backward()
    for (name, mine), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_saving_leaves_two_files_and_nothing_else(saved):
    _, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


def test_saving_again_replaces_a_checkpoint_of_another_config(saved, config_for, build_model):
    _, folder = saved
    other = build_model(config_for("modern"))
    save_checkpoint(other, folder)
    assert load_checkpoint(folder).cfg == other.cfg


@pytest.mark.parametrize("kept", [0, 7, 1000, -1])
def test_truncated_weights_are_refused(saved, kept):
    _, folder = saved
    path = folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:kept])
    size = path.stat().st_size
    with pytest.raises(
        ValueError, match=rf"weights.safetensors \({size} bytes\) is truncated or no"
    ):
        load_checkpoint(folder)


def test_a_truncated_config_is_refused(saved):
    _, folder = saved
    path = folder / CONFIG_FILE
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match=r"config.json: the config is not JSON"):
        load_checkpoint(folder)


def test_unknown_config_keys_are_refused_by_name(saved):
    _, folder = saved
    path = folder / CONFIG_FILE
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "dropout": 0.1}))
    with pytest.raises(ValueError, match=r"config.json: unknown config key 'dropout'.*Known keys"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(saved, name):
    _, folder = saved
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name):
        load_checkpoint(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is no checkpoint: .* there is no such folder"):
        load_checkpoint(tmp_path / "nowhere")


def test_weights_of_another_config_are_refused(saved, config_for, build_model, tmp_path):
    _, folder = saved
    other = save_checkpoint(build_model(config_for("classic", seed=9)), tmp_path / "other")
    (other / WEIGHTS_FILE).replace(folder / WEIGHTS_FILE)
    with pytest.raises(
        ValueError, match="belongs to another config than the config.json beside it"
    ):
        load_checkpoint(folder)


def test_a_checkpoint_of_another_config_than_expected_is_refused_with_the_differences(
    saved, config_for
):
    _, folder = saved
    assert load_checkpoint(folder, config=config_for("classic")).cfg == config_for("classic")
    expected = config_for("classic", seed=3, d_mlp=19)
    with pytest.raises(
        ValueError, match="another config: d_mlp=17, expected 19; seed=0, expected 3"
    ):
        load_checkpoint(folder, config=expected)


def test_tensors_that_do_not_fit_the_config_are_named(saved):
    _, folder = saved
    path = folder / WEIGHTS_FILE
    metadata = {"config": (folder / CONFIG_FILE).read_text()}
    weights = load_file(path)
    table = weights.pop("embed.W_E")
    save_file({**weights, "embed.W_X": table}, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"missing \['embed.W_E'\], unknown \['embed.W_X'\]"):
        load_checkpoint(folder)
    save_file({**weights, "embed.W_E": table[:5].clone()}, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"W_E is torch.float64 \(5, 23\), expected .* \(13, 23\)"):
        load_checkpoint(folder)
    save_file({**weights, "embed.W_E": table.float()}, path, metadata=metadata)
    with pytest.raises(
        ValueError, match=r"W_E is torch.float32 \(13, 23\), expected torch.float64"
    ):
        load_checkpoint(folder)
    save_file({**weights, "embed.W_E": table}, path)
    with pytest.raises(
        ValueError, match="was not written by save_checkpoint: it carries no config"
    ):
        load_checkpoint(folder)


def test_a_failure_while_saving_leaves_the_old_checkpoint_and_no_debris(saved, monkeypatch):
    model, folder = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(weights, path, metadata):
        path.write_bytes(b"half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr("interp.models.checkpoints.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


KILLED_WHILE_SAVING = """
import os, signal, sys
import interp.models.checkpoints as checkpoints
from dataclasses import replace
from interp.models.transformer import Transformer

model = checkpoints.load_checkpoint(sys.argv[1])
other = Transformer(replace(model.cfg, seed=1))
replaced = []
original = checkpoints.Path.replace

def replace_then_die(path, target):
    original(path, target)
    replaced.append(target)
    if len(replaced) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

checkpoints.Path.replace = replace_then_die
checkpoints.save_checkpoint(other, sys.argv[1])
"""


def test_a_process_killed_between_the_two_files_leaves_nothing_that_loads_wrongly(saved):
    model, folder = saved
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(folder), "1"]
    assert subprocess.run(command, check=False).returncode == -9
    with pytest.raises(ValueError, match="config.json"):
        load_checkpoint(folder)
    save_checkpoint(model, folder)
    assert load_checkpoint(folder).cfg == model.cfg
