import os
import re

import pytest
import torch
import transformers

import interp
from interp.loading import LoadedModel, load
from interp.model_zoo import zoo_names
from interp.models.checkpoints import save_checkpoint

TEXT = "abcab dcba"


@pytest.fixture(autouse=True)
def empty_places(tmp_path, monkeypatch):
    """No model of the machine's own is seen, and no test can reach a hub."""
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("INTERP_MODELS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tiny_llama(**changes):
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0, **{letter: 1 + i for i, letter in enumerate("abcdefg")}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@pytest.fixture
def folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_transformers_folder_gives_its_model_in_evaluation_mode_and_its_tokenizer(folder):
    loaded = load(folder)
    assert isinstance(loaded, LoadedModel)
    assert isinstance(loaded.model, transformers.LlamaForCausalLM)
    assert not loaded.model.training
    assert loaded.tokenizer("abc").input_ids == [1, 2, 3]
    assert loaded.source == str(folder)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded.model(tokens).logits, tiny_llama()(tokens).logits)


def test_the_public_name_is_the_function_whichever_module_was_imported_first(folder):
    assert callable(interp.load)
    assert interp.load(str(folder)).model.config.vocab_size == 31


def test_dtype_is_float32_unless_asked_otherwise(folder):
    tiny_llama().to(torch.bfloat16).save_pretrained(folder)
    assert load(folder).model.dtype == torch.float32
    assert load(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    assert load(folder, dtype=torch.float64).model.dtype == torch.float64
    with pytest.raises(ValueError, match="dtype must be one of float32.*got 'half'"):
        load(folder, dtype="half")
    with pytest.raises(ValueError, match="floating-point"):
        load(folder, dtype=torch.int64)


def test_loading_leaves_the_global_random_state_alone(folder):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    load(folder)
    assert torch.equal(before, torch.get_rng_state())


def test_a_masked_model_is_loaded_as_what_it_was_saved_as(tmp_path):
    config = transformers.BertConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    loaded = load(tmp_path / "bert")
    assert isinstance(loaded.model, transformers.BertForMaskedLM)
    assert loaded.tokenizer is None


def test_a_folder_with_pickled_weights_only_is_refused_by_name(folder):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(folder / "sprung"),))

    (folder / "model.safetensors").unlink()
    torch.save({"weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled weights only \(pytorch_model.bin\)"):
        load(folder)
    assert not (folder / "sprung").exists()


def test_weights_that_do_not_fill_the_model_are_refused_instead_of_left_random(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 are missing.*layers.1.mlp.up_proj.weight"):
        load(folder)


def test_a_folder_without_weights_a_foreign_folder_and_an_adapter_each_say_what_they_are(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"no config.json \(it has a.txt\)"):
        load(tmp_path / "notes")
    (tmp_path / "bare").mkdir()
    tiny_llama().config.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="holds no weights"):
        load(tmp_path / "bare")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="peft adapter.*PeftModel.from_pretrained"):
        load(tmp_path / "lora")


def test_an_architecture_that_transformers_does_not_have_is_named_and_no_shipped_code_runs(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("LlamaForCausalLM", "OwnForCausalLM"))
    with pytest.raises(ValueError, match="is a OwnForCausalLM, which transformers"):
        load(folder)


def test_a_single_file_must_be_gguf(tmp_path):
    file = tmp_path / "model.pt"
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="must be a GGUF file.*Pickled weights are never read"):
        load(file)
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        load(tmp_path / "nothing.gguf")


def test_a_gguf_file_becomes_an_ordinary_model_that_can_be_saved(tmp_path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf")
    assert loaded.model.dtype == torch.float32
    tokens = loaded.tokenizer(TEXT, return_tensors="pt").input_ids
    assert tokens.shape[1] == 8  # ten characters, and each "ab" is one token
    loaded.model.save_pretrained(tmp_path / "saved")
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(again.tokenizer(TEXT, return_tensors="pt").input_ids, tokens)
    assert torch.equal(again.model(tokens).logits, loaded.model(tokens).logits)


def test_a_folder_with_one_gguf_is_it_and_with_two_asks_which(tmp_path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    assert load(tmp_path).model.config.num_hidden_layers == 1
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="several GGUF files: name one of other.gguf, tiny.gguf"):
        load(tmp_path)


def test_a_name_is_looked_for_in_the_users_folder_before_the_cache(folder, monkeypatch):
    cached = interp.model_cache.cache_folder() / "models" / "tiny-name"
    cached.parent.mkdir(parents=True)
    folder.rename(cached)
    assert load("tiny-name").source == str(cached)
    mine = cached.parent.parent / "mine"
    (mine / "tiny-name").mkdir(parents=True)
    tiny_llama(tie_word_embeddings=True).save_pretrained(mine / "tiny-name")
    monkeypatch.setenv("INTERP_MODELS", str(mine))
    assert load("tiny-name").source == str(mine / "tiny-name")
    monkeypatch.setenv("INTERP_MODELS", str(mine / "absent"))
    with pytest.raises(ValueError, match="INTERP_MODELS is .* which is no folder"):
        load("tiny-name")


def test_a_name_that_is_nowhere_says_what_to_do_and_downloads_nothing(monkeypatch):
    sentence = r"nothing is downloaded without being asked: interp.load\('a/b', allow_download=True"
    with pytest.raises(FileNotFoundError, match=sentence):
        load("a/b")
    with pytest.raises(FileNotFoundError, match=re.escape("`interp fetch smollm2-135m`")):
        load("smollm2-135m")
    with pytest.raises(FileNotFoundError, match="did you mean 'smollm2-135m'"):
        load("smollm2-125m")
    with pytest.raises(FileNotFoundError, match="no file or folder ./runs/none"):
        load("./runs/none")


def test_the_hub_is_asked_only_when_allowed(folder, monkeypatch):
    asked = []

    def from_hub(name, *, allow_download, **settings):
        asked.append((name, allow_download, settings["revision"]))
        return tiny_llama(), None

    monkeypatch.setattr("interp.hugging_face.load_from_hub", from_hub)
    loaded = load("smollm2-135m", allow_download=True, revision="main")
    assert asked == [("HuggingFaceTB/SmolLM2-135M-Instruct", True, "main")]
    assert loaded.source == "hub: HuggingFaceTB/SmolLM2-135M-Instruct"
    with pytest.raises(ValueError, match="revision is for hub models"):
        load(folder, revision="main")


@pytest.mark.parametrize("name", zoo_names())
def test_a_zoo_name_gives_a_model_of_known_make_with_its_language(name):
    loaded = load(name, dtype="float64")
    assert loaded.source == "zoo"
    assert not loaded.model.training
    assert loaded.model.cfg.dtype == torch.float64
    tokens = loaded.tokenizer.encode("^[()]")[None]
    logits = loaded.model(tokens)
    assert logits.shape == (1, 5, loaded.tokenizer.d_vocab)


def test_the_zoos_recognisers_know_which_bracket_must_close():
    for name in ("dyck-uniform", "dyck-random"):
        loaded = load(name, dtype="float64")
        closes = list(loaded.tokenizer.close_tokens)
        logits = loaded.model(loaded.tokenizer.encode("^[(())([")[None])[0, -1, closes]
        best = torch.tensor([closes[int(logits.argmax())]])
        assert loaded.tokenizer.decode(best) == "]"


def test_a_dtype_too_coarse_for_a_recogniser_is_refused():
    with pytest.raises(ValueError, match="float16"):
        load("dyck-random", dtype="float16")


def test_a_checkpoint_of_ours_is_loaded_as_it_was_saved(tmp_path):
    model = load("E1").model
    save_checkpoint(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    tokens = torch.tensor([[2, 4, 5, 7]])
    assert torch.equal(loaded.model(tokens), model(tokens))
    assert loaded.tokenizer is None
    assert load(tmp_path / "saved", dtype="float64").model.cfg.dtype == torch.float64
