"""Tokens of bracket languages and their text."""

import pytest
import torch

from interp.models.dyck_vocabulary import END, MASK, PAD, START, DyckVocabulary


def test_the_released_two_type_vocabulary_is_reproduced() -> None:
    vocabulary = DyckVocabulary(2)
    assert (PAD, MASK, START, END) == (0, 1, 2, 3)
    assert list(vocabulary.open_tokens) == [4, 5]
    assert list(vocabulary.close_tokens) == [6, 7]
    assert vocabulary.d_vocab == 8


@pytest.mark.parametrize("n_types", [1, 2, 5, 11])
def test_every_token_is_special_or_open_or_close_and_knows_its_type(n_types: int) -> None:
    vocabulary = DyckVocabulary(n_types)
    tokens = torch.arange(vocabulary.d_vocab)
    is_open, is_close = vocabulary.is_open(tokens), vocabulary.is_close(tokens)
    assert is_open.nonzero().flatten().tolist() == list(vocabulary.open_tokens)
    assert is_close.nonzero().flatten().tolist() == list(vocabulary.close_tokens)
    expected = [-1] * 4 + list(range(n_types)) * 2
    assert vocabulary.bracket_type(tokens).tolist() == expected


@pytest.mark.parametrize("n_types", [1, 2, 4, 5, 13])
def test_text_of_tokens_is_read_back_as_the_same_tokens(n_types: int) -> None:
    vocabulary = DyckVocabulary(n_types)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary.d_vocab, (997,), generator=generator)
    assert torch.equal(vocabulary.encode(vocabulary.decode(tokens)), tokens)


def test_text_uses_the_glyphs_that_people_write() -> None:
    assert DyckVocabulary(2).encode("^ [(]) $_?").tolist() == [2, 4, 5, 6, 7, 3, 0, 1]
    six = DyckVocabulary(6)
    assert six.encode("0( 1( 4( 4) 1) 0)").tolist() == six.encode("[(4(4))]").tolist()
    assert six.decode(six.encode("{<5(5)>}")) == "{<5(5)>}"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("[x]", "'x' at index 1"), ("[{}]", "type 2"), ("[2(2)]", "type 2"), ("[7", "'7' at index 1")],
)
def test_text_that_is_no_bracket_of_the_language_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        DyckVocabulary(2).encode(text)


@pytest.mark.parametrize("n_types", [0, -3])
def test_a_vocabulary_without_types_is_refused(n_types: int) -> None:
    with pytest.raises(ValueError, match=f"n_types must be at least 1, got {n_types}"):
        DyckVocabulary(n_types)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.7"):
        DyckVocabulary(2).decode(torch.tensor([4, 8]))
    with pytest.raises(TypeError, match="integers"):
        DyckVocabulary(2).check_tokens(torch.tensor([4.0]))
