"""The bounded Dyck language against a stack in plain Python and against enumeration."""

import dataclasses
from itertools import islice

import pytest
import torch

from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_vocabulary import END, MASK, PAD, START

LANGUAGES = [DyckLanguage(1, 1), DyckLanguage(2, 4), DyckLanguage(3, 5, 0.7), DyckLanguage(11, 2)]


def slow_reading(language: DyckLanguage, tokens: list[int]) -> list[tuple[int, int, int, int]]:
    """(depth after, pair's depth, stack top, partner) of every token, with an explicit stack."""
    stack: list[int] = []
    partner = [-1] * len(tokens)
    reading = []
    for position, token in enumerate(tokens):
        pair_depth = 0
        if token in language.open_tokens:
            stack.append(position)
            pair_depth = len(stack)
        elif token in language.close_tokens:
            pair_depth = len(stack)
            opened = stack.pop()
            assert token == tokens[opened] + language.n_types
            partner[position], partner[opened] = opened, position
        reading.append((len(stack), pair_depth, stack[-1] if stack else -1))
    return [(*row, partner[position]) for position, row in enumerate(reading)]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("mode", ["prefix", "complete"])
def test_depth_stack_top_and_partners_agree_with_an_explicit_stack(
    language: DyckLanguage, mode: str
) -> None:
    tokens = language.sample(29, 38, mode=mode, seed=1)
    expected = torch.tensor([slow_reading(language, row) for row in tokens.tolist()])
    assert torch.equal(language.depth(tokens), expected[..., 0])
    assert torch.equal(language.bracket_depth(tokens), expected[..., 1])
    assert torch.equal(language.stack_top(tokens), expected[..., 2])
    assert torch.equal(language.matching_bracket(tokens), expected[..., 3])
    assert int(language.depth(tokens).max()) <= language.max_depth


def test_one_sequence_without_a_batch_axis_is_read_the_same_way() -> None:
    language = DyckLanguage(2, 4)
    tokens = language.encode("^[(())[")
    assert language.depth(tokens).tolist() == [0, 1, 2, 3, 2, 1, 2]
    assert language.bracket_depth(tokens).tolist() == [0, 1, 2, 3, 3, 2, 2]
    assert language.stack_top(tokens).tolist() == [-1, 1, 2, 3, 2, 1, 6]
    assert language.matching_bracket(tokens).tolist() == [-1, -1, 5, 4, 3, 2, -1]
    assert language.closing_bracket(tokens).tolist() == [-1, 6, 7, 7, 7, 6, 6]


def test_prefix_rows_are_start_and_exactly_as_many_brackets_as_asked() -> None:
    language = DyckLanguage(2, 4)
    tokens = language.sample(113, 28, seed=0)
    assert tokens.shape == (113, 29)
    assert tokens.dtype == torch.long
    assert (tokens[:, 0] == START).all()
    assert (tokens[:, 1:] >= 4).all()


def test_complete_rows_are_well_nested_with_end_and_padding() -> None:
    language = DyckLanguage(2, 4)
    tokens = language.sample(211, (3, 29), mode="complete", seed=0)
    assert tokens.shape == (211, 30)
    assert language.is_well_nested(tokens).all()
    n_brackets = (tokens >= 4).sum(1)
    assert int(n_brackets.min()) >= 3
    assert len(n_brackets.unique()) > 5
    assert ((tokens == END).sum(1) == 1).all()
    assert (tokens.gather(1, n_brackets[:, None] + 1) == END).all()
    assert ((tokens == PAD).sum(1) == 28 - n_brackets).all()


def test_a_bracket_opens_as_often_as_p_open_says_and_types_are_uniform() -> None:
    # spec, section 7: P(open | 0 < d < 4) = .5 +- .01; 5 standard deviations are below .006 here
    language = DyckLanguage(2, 4)
    tokens = language.sample(3572 * 3, 28, seed=0)
    before, after = tokens[:, :-1], tokens[:, 1:]
    depth = language.depth(before)
    is_free = (depth > 0) & (depth < 4)
    opens = language.is_open(after)
    assert float(opens[is_free].float().mean()) == pytest.approx(0.5, abs=0.01)
    assert opens[depth == 0].all()
    assert not opens[depth == 4].any()
    share_of_type_0 = (after[opens] == language.open_tokens[0]).float().mean()
    assert float(share_of_type_0) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("mode", ["prefix", "complete"])
def test_the_closing_distribution_is_what_strings_do_next(mode: str) -> None:
    """Frequencies of the next token, over all places with the same prediction, within 5 sigma."""
    language = DyckLanguage(3, 3, 0.3)
    # a range so wide that conditioning on it changes nothing that could be measured
    length = 60 if mode == "prefix" else (1, 400)
    tokens = language.sample(1201, length, mode=mode, seed=7)
    read, following = tokens[:, :-1], tokens[:, 1:]
    if mode == "complete":
        # the empty string is left out by the range, which shows after START alone
        read, following = read[:, 1:], following[:, 1:]
        head = tokens[:, :1].expand(-1, 1)
        assert torch.equal(language.closing_distribution(head, mode="complete")[0, 0, END], half())
        predicted = language.closing_distribution(tokens[:, :-1], mode="complete")[:, 1:]
    else:
        predicted = language.closing_distribution(read)
    torch.testing.assert_close(predicted.sum(-1), torch.ones(predicted.shape[:-1]).double())
    actual = torch.nn.functional.one_hot(following, language.d_vocab).double()
    # one group for every distribution that was predicted anywhere
    predicted, actual = predicted.flatten(0, 1), actual.flatten(0, 1)
    label = predicted @ torch.arange(1.0, 1 + language.d_vocab).double() ** 0.5
    labels, group = label.unique(return_inverse=True)
    n_rows = torch.bincount(group).double()[:, None]
    rows = torch.zeros(len(labels), language.d_vocab).double()
    rows[group] = predicted
    frequency = torch.zeros_like(rows).index_add_(0, group, actual) / n_rows
    sigma = (rows * (1 - rows) / n_rows).sqrt()
    assert len(rows) > 2 * language.n_types
    assert ((frequency - rows).abs() <= 5 * sigma + 1e-12).all()


def half() -> torch.Tensor:
    return torch.tensor(0.5, dtype=torch.float64)


def test_the_closing_distribution_after_the_end_is_padding() -> None:
    language = DyckLanguage(2, 4)
    after = language.closing_distribution(language.encode("^[]$_"), mode="complete")[-2:]
    assert torch.equal(after[:, PAD], torch.ones(2, dtype=torch.float64))
    assert torch.equal(after.sum(-1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["prefix", "complete"])
def test_the_same_seed_draws_the_same_bits_and_leaves_global_randomness_alone(mode: str) -> None:
    language = DyckLanguage(2, 4)
    before = torch.random.get_rng_state()
    first = language.sample(31, 28, mode=mode, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, language.sample(31, 28, mode=mode, seed=5))
    assert not torch.equal(first, language.sample(31, 28, mode=mode, seed=6))


def test_a_stream_repeats_itself_in_batches_that_differ() -> None:
    language = DyckLanguage(2, 4)
    batches = list(language.stream(23, 28, seed=3, batch_size=10))
    assert [len(batch) for batch in batches] == [10, 10, 3]
    again = list(islice(language.stream(None, 28, seed=3, batch_size=10), 5))
    assert len(again) == 5
    assert torch.equal(batches[1], again[1])
    assert not torch.equal(again[0], again[1])
    other = next(language.stream(None, 28, seed=4, batch_size=10))
    assert not torch.equal(batches[0], other)


@pytest.mark.parametrize(
    ("text", "is_complete"),
    [
        ("", True),
        ("[(())]", True),
        ("^[]()$", True),
        ("^[]$__", True),
        ("[(])", False),
        ("[", False),
        ("]", False),
        ("[]]", False),
        ("][", False),
        ("[[[[]]]]", False),
        ("[?]", False),
        ("[^]", False),
        ("[$]", False),
        ("[]_$", False),
        ("[]$[]", False),
        ("[]$$", False),
        ("[_]", False),
    ],
)
def test_well_nested_means_a_whole_string_of_the_language(text: str, is_complete: bool) -> None:
    language = DyckLanguage(2, 3)
    assert bool(language.is_well_nested(language.encode(text))) is is_complete


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]]", r"token 6 at index \[2\] closes a bracket where none is open"),
        ("[[[[", r"token 4 at index \[3\] opens more than max_depth=3"),
        ("[(])", r"token 6 at index \[2\] closes a bracket of another type"),
    ],
)
def test_tokens_that_begin_no_string_are_refused_with_their_place(
    text: str, complaint: str
) -> None:
    language = DyckLanguage(2, 3)
    tokens = language.encode(text)
    for reading in (language.stack_top, language.matching_bracket, language.closing_distribution):
        with pytest.raises(ValueError, match=complaint):
            reading(tokens)


def test_the_probe_string_of_the_released_language_is_the_papers() -> None:
    language = DyckLanguage(2, 4)
    probe = language.probe_tokens()
    assert probe.tolist() == [4] * 4 + [6] * 4 + [5] * 4 + [7] * 4
    assert language.decode(probe) == "[[[[]]]](((())))"


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_probe_string_visits_every_type_at_every_depth(language: DyckLanguage) -> None:
    probe = language.probe_tokens()
    assert bool(language.is_well_nested(probe))
    opens = language.is_open(probe)
    types, depths = language.bracket_type(probe)[opens], language.depth(probe)[opens]
    seen = set(zip(types.tolist(), depths.tolist(), strict=True))
    assert len(seen) == language.n_types * language.max_depth == int(opens.sum())


@pytest.mark.parametrize("language", LANGUAGES)
def test_one_more_pair_can_be_put_in_at_every_type_and_depth(language: DyckLanguage) -> None:
    probe = language.probe_tokens().tolist()
    for bracket_type in range(language.n_types):
        for depth in range(language.max_depth):
            longer = language.probe_with_pair(bracket_type, depth)
            assert bool(language.is_well_nested(longer))
            index = 2 * language.max_depth * bracket_type + depth
            assert longer.tolist()[:index] + longer.tolist()[index + 2 :] == probe
            pair = longer[index : index + 2]
            assert language.bracket_type(pair).tolist() == [bracket_type] * 2
            assert int(language.depth(longer)[index]) == depth + 1
    with pytest.raises(ValueError, match="depth must lie in"):
        language.probe_with_pair(0, language.max_depth)
    with pytest.raises(ValueError, match="bracket_type must lie in"):
        language.probe_with_pair(language.n_types, 0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((0, 4), "n_types must be at least 1, got 0"),
        ((2, 0), "max_depth must be at least 1, got 0"),
        ((2, 4, 0.0), "p_open must lie strictly between 0 and 1, got 0.0"),
        ((2, 4, 1.0), "p_open must lie strictly between 0 and 1, got 1.0"),
        ((2, 4, float("nan")), "p_open must lie strictly between 0 and 1, got nan"),
    ],
)
def test_a_language_that_cannot_be_is_refused(
    arguments: tuple[int, int, float], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        DyckLanguage(*arguments)


def test_a_language_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DyckLanguage(2, 4).max_depth = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("length", "mode", "complaint"),
    [
        (0, "prefix", "length must be at least 1, got 0"),
        ((2, 4), "prefix", "one number of brackets in prefix mode"),
        (0, "complete", "length must be at least 1, got 0"),
        (1, "complete", "even number of at least 2"),
        (7, "complete", "even number of at least 2"),
        ((5, 5), "complete", "even number of at least 2"),
        ((8, 6), "complete", "even number of at least 2"),
        (28, "whole", "mode must be one of"),
    ],
)
def test_lengths_and_modes_that_no_string_has_are_refused(
    length: int | tuple[int, int], mode: str, complaint: str
) -> None:
    language = DyckLanguage(2, 4)
    for draw in (language.sample, language.stream):
        with pytest.raises(ValueError, match=complaint):
            draw(3, length, mode=mode, seed=0)


@pytest.mark.parametrize(("n_sequences", "seed"), [(0, 0), (3, -1)])
def test_no_sequences_and_negative_seeds_are_refused(n_sequences: int, seed: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        DyckLanguage(2, 4).sample(n_sequences, 28, seed=seed)
    with pytest.raises(ValueError, match="must be at least"):
        DyckLanguage(2, 4).stream(n_sequences, 28, seed=seed)


def test_mask_leaves_the_depth_as_it_is() -> None:
    language = DyckLanguage(2, 4)
    assert language.depth(torch.tensor([4, MASK, 6])).tolist() == [1, 1, 0]
    assert language.matching_bracket(torch.tensor([4, MASK, 6])).tolist() == [2, -1, 0]
