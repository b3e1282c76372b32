"""What the training benchmark compares must be the same training."""

import pytest
import torch

from interp.benchmarks import train as benchmark
from interp.benchmarks.bare_dyck import bare_twin, train_bare
from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import dyck_preset
from interp.models.dyck_training import DyckTrainingConfig, loss_targets, train_dyck
from interp.models.transformer import Transformer


@pytest.mark.parametrize("name", ["E1", "E5"])
def test_the_bare_loop_and_ours_train_the_same_model(name: str) -> None:
    language = DyckLanguage(2, 4)
    tokens = language.sample(70, 28, seed=0)
    training = DyckTrainingConfig(n_epochs=2, batch_size=20, learning_rate=3e-3, seed=5)
    ours = Transformer(dyck_preset(name)[0]).double()
    bare = bare_twin(ours).double()
    torch.testing.assert_close(bare(tokens), ours(tokens))

    losses = train_bare(bare, tokens[:, :-1], loss_targets(tokens, language), training)
    history = train_dyck(ours, tokens, language, training)
    torch.testing.assert_close(torch.stack(losses), history.loss, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(bare(tokens), ours(tokens), rtol=1e-4, atol=1e-6)
    assert float(history.loss[-1]) < float(history.loss[0])


def test_the_bare_twin_has_no_hook_points() -> None:
    ours = Transformer(dyck_preset("E5")[0])
    bare = bare_twin(ours)
    names = {type(module).__name__ for module in bare.modules()}
    assert "Point" not in names
    assert sum(p.numel() for p in bare.parameters()) == sum(p.numel() for p in ours.parameters())


def test_every_row_has_times_and_a_speed_relative_to_the_baseline() -> None:
    threads = torch.get_num_threads()
    result = benchmark.run(rounds=1, n_steps=1, n_processes=1)
    assert torch.get_num_threads() == threads
    assert result.name == "train"
    assert len(result.rows) == 2
    for column in ("ms", "baseline_ms", "speed_ratio"):
        assert all(float(cell) > 0 for cell in result.column(column))  # type: ignore[arg-type]
    own, base, ratio = (result.column(name)[0] for name in ("ms", "baseline_ms", "speed_ratio"))
    assert float(base) / float(own) == pytest.approx(float(ratio))  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_processes_are_compared_with_one_by_two_clocks() -> None:
    result = benchmark.run(rounds=1, n_steps=1, n_processes=2)
    names = [str(name) for name in result.column("measurement")]
    assert names[2:] == [
        "E1, 2 processes against one, wall clock",
        "E1, 2 processes against one, processor time",
    ]
    # by processor time, what others do on the machine matters little: two do more than one
    assert float(result.column("speed_ratio")[3]) > 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"n_steps": 0}, "n_steps: got 0"),
        ({"n_processes": 0}, "n_processes: got 0"),
        ({"rounds": 0}, "rounds: got 0"),
        ({"device": "tpu"}, "device: got 'tpu'"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        benchmark.run(**arguments)
