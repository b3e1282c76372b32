"""Unit files are whole and checked, or they are an error that names them."""

import errno
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from interp import files
from interp.case_studies.store import CorruptUnit, Store, StoredResults
from interp.case_studies.study import UnitResult

KEY = "0123456789abcdef" * 4
RESULT = UnitResult(
    {"loss": float("nan"), "acc": 0.1, "name": "é\n", "curve": [1, 2.5]},
    {
        "x": np.arange(15, dtype=np.float32).reshape(3, 5),
        "none": np.zeros((0, 7), dtype=np.int8),
        "scalar": np.array(3, dtype=np.uint16),
        "flags": np.array([True, False]),
    },
)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    store.folder.mkdir()
    return store


def put(store, result=RESULT, key=KEY):
    with store.begin(key) as file:
        return store.finish(key, file, result, unit="u", seconds=1.25)


def test_what_is_read_is_what_was_written_bit_for_bit(store):
    written = put(store)
    stored = store.read(KEY)
    assert stored.result_hash == written
    assert (stored.unit, stored.seconds) == ("u", 1.25)
    assert np.isnan(stored.result.numbers["loss"])
    assert stored.result.numbers["name"] == "é\n"
    for name, array in RESULT.arrays.items():
        found = stored.result.arrays[name]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        assert found.flags.writeable  # torch.from_numpy warns about others


def test_a_result_without_arrays_or_numbers_is_a_file_too(store):
    put(store, UnitResult())
    assert store.read(KEY).result.arrays == {}


def test_only_the_finished_file_is_left(store):
    put(store)
    assert os.listdir(store.folder) == [f"{KEY}.safetensors"]


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "empty":
        content = b""
    elif kind == "truncated":
        content = content[:-1]
    elif kind == "half a header":
        content = content[:40]
    elif kind == "one bit of an array":
        content[-1] ^= 1
    elif kind == "one digit of a number":
        at = content.index(b'\\"acc\\":0.1') + len(b'\\"acc\\":0.')
        content[at : at + 1] = b"2"
    elif kind == "a pickle":
        content = pickle.dumps({"numbers": 1})
    elif kind == "text":
        content = b"this is no unit file, but it is longer than eight bytes"
    path.write_bytes(bytes(content))


DAMAGES = [
    "empty",
    "truncated",
    "half a header",
    "one bit of an array",
    "one digit of a number",
    "a pickle",
    "text",
]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_named_with_what_to_do(store, kind):
    put(store)
    damage(store.path(KEY), kind)
    with pytest.raises(CorruptUnit, match="is damaged: .*Delete it and run the same command") as e:
        store.read(KEY)
    assert str(store.path(KEY)) in str(e.value)


def test_another_programs_safetensors_file_is_not_taken_for_a_unit(store):
    save_file({"x": np.zeros(2, dtype=np.float32)}, store.path(KEY))
    with pytest.raises(CorruptUnit, match="header was not written by interp"):
        store.read(KEY)


def test_a_unit_file_under_another_key_is_found_out(store):
    put(store)
    other = "f" * 64
    os.rename(store.path(KEY), store.path(other))
    with pytest.raises(CorruptUnit, match="renamed or copied"):
        store.read(other)


def test_a_finished_file_that_appeared_meanwhile_is_kept(store):
    with store.begin(KEY) as slow:
        with store.begin(KEY, shared=True) as fast:
            first = store.finish(KEY, fast, RESULT, unit="u", seconds=1)
        second = store.finish(KEY, slow, UnitResult({"other": 1}), unit="u", seconds=9)
    assert second == first
    assert store.read(KEY).seconds == 1
    assert os.listdir(store.folder) == [f"{KEY}.safetensors"]


def test_a_unit_that_somebody_is_writing_cannot_be_begun_and_its_file_is_no_leftover(store):
    with store.begin(KEY):
        with pytest.raises(BlockingIOError):
            store.begin(KEY)
        assert store.remove_leftovers() == 0
        assert os.listdir(store.folder) == [f"{KEY}.partial"]
    assert os.listdir(store.folder) == []


def test_the_partial_file_of_a_killed_writer_is_removed_and_that_of_a_living_one_is_not(store):
    code = (
        "import sys, time; from pathlib import Path; from interp.files import PartialFile\n"
        "file = PartialFile(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    )
    path = store.folder / "x.partial"
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline() == "open\n"
    assert store.remove_leftovers() == 0
    writer.kill()
    writer.communicate()
    assert store.remove_leftovers() == 1
    assert os.listdir(store.folder) == []


def test_a_disk_that_fills_up_while_writing_leaves_nothing(store, monkeypatch):
    def full(descriptor, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        put(store)
    assert os.listdir(store.folder) == []


def test_writing_a_file_at_once_keeps_the_old_one_when_it_fails(tmp_path, monkeypatch):
    target = tmp_path / "report.md"
    files.write_atomically(target, "old")

    def full(descriptor):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="quota"):
        files.write_atomically(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.md"]


def test_a_file_system_without_locks_is_no_obstacle(store, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    (store.folder / "old.partial").touch()
    put(store)
    assert store.remove_leftovers() == 0  # nobody can tell whether it is one
    assert store.read(KEY).unit == "u"


def test_many_writers_of_one_unit_leave_one_whole_file(store):
    code = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from interp.case_studies.store import Store; from interp.case_studies.study import *\n"
        "store, key = Store(Path(sys.argv[1])), sys.argv[2]\n"
        "for i in range(30):\n"
        "    store.path(key).unlink(missing_ok=True)\n"
        "    with store.begin(key, shared=True) as file:\n"
        "        store.finish(key, file, UnitResult({}, {'x': np.full(5000, 7.0)}), unit='u', "
        "seconds=1)\n"
        "    store.remove_leftovers()\n"
    )
    argv = [sys.executable, "-c", code, str(store.folder.parent), KEY]
    writers = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        # a unit file may vanish under the hands of a reader here, since each writer deletes it
        assert writer.returncode == 0 or "cannot read unit file" in errors, errors
    put(store)
    assert os.listdir(store.folder) == [f"{KEY}.safetensors"]


def test_results_are_read_when_asked_for_and_memory_stays_bounded(store, monkeypatch):
    monkeypatch.setattr("interp.case_studies.store.CACHE_BYTES", 20_000)
    keys = {f"u{i}": f"{i:064x}" for i in range(9)}
    for i, key in enumerate(keys.values()):
        put(store, UnitResult({"i": i}, {"x": np.zeros(500)}), key)
    results = StoredResults(store, keys)
    assert [results[name].numbers["i"] for name in results] == list(range(9))
    assert len(results._kept) == 2
    assert results["u8"] is results["u8"]
