import re

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from interp.figures import (
    curves_by_layer,
    heatmap,
    layer_head_grid,
    norm_profile,
    pool_matrix,
    profile_by_layer,
)
from interp.observation_page import PageFigure, observation_figures, write_observation_page
from interp.observing import observe


@pytest.fixture(scope="module")
def tiny():
    config = transformers.LlamaConfig(
        vocab_size=53,
        hidden_size=22,
        intermediate_size=34,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=10,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def observed(tiny):
    tokens = torch.randint(53, (4, 17), generator=torch.Generator().manual_seed(0))
    with (
        torch.no_grad(),
        observe(tiny, reduce="sample", patterns=[(1, 0)]) as seen,
    ):
        tiny(tokens)
    return seen


def image(figure):
    return np.ma.filled(figure.axes[0].images[0].get_array(), np.nan)


def test_a_small_matrix_is_drawn_cell_by_cell():
    matrix = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    figure = heatmap(matrix, title="rows")
    np.testing.assert_allclose(image(figure), matrix.numpy())
    assert figure.axes[0].get_title() == "rows"


def test_a_large_matrix_is_pooled_so_that_a_single_sink_stays_visible_and_the_figure_says_so():
    matrix = np.zeros((1009, 2003))
    matrix[700, 1234] = 1
    figure = heatmap(matrix, max_cells=100)
    pooled = image(figure)
    assert max(pooled.shape) <= 100
    assert pooled.max() == 1
    assert pooled[700 // 11, 1234 // 21] == 1
    assert "largest of 11 x 21" in figure.axes[0].get_title()
    assert figure.axes[0].get_xlim() == (-0.5, 2002.5)  # axes keep the full numbers


def test_pooling_takes_the_largest_of_each_tile_and_keeps_missing_tiles_missing():
    matrix = np.arange(35.0).reshape(5, 7)
    pooled, tile = pool_matrix(matrix, 3)
    assert tile == (2, 3)
    np.testing.assert_array_equal(pooled, [[9, 12, 13], [23, 26, 27], [30, 33, 34]])
    matrix[:2, :3] = np.nan
    matrix[3, 5] = np.nan
    pooled, _ = pool_matrix(matrix, 3)
    assert np.isnan(pooled[0, 0])
    assert pooled[1, 1] == 25


def test_layers_and_heads_keep_their_numbers_on_the_axes():
    figure = layer_head_grid(torch.rand(3, 5), layers=[2, 5, 11])
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["2", "5", "11"]
    with pytest.raises(ValueError, match="layers has 2 numbers for 3 rows"):
        layer_head_grid(torch.rand(3, 5), layers=[0, 1])


def test_a_profile_shows_every_head_and_the_mean_of_each_layer():
    values = torch.tensor([[0.0, 1.0], [0.5, 0.7]])
    dots, mean = profile_by_layer(values, label="F").axes[0].lines
    np.testing.assert_allclose(dots.get_ydata(), [0, 1, 0.5, 0.7], rtol=1e-6)
    np.testing.assert_allclose(mean.get_ydata(), [0.5, 0.6], rtol=1e-6)


def test_curves_are_named_in_the_legend():
    figure = curves_by_layer({"first": torch.rand(4), "others": np.ones(4)}, log=True)
    words = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert words == ["first", "others"]
    assert figure.axes[0].get_yscale() == "log"


def test_a_norm_profile_is_logarithmic_with_the_first_layer_at_the_bottom():
    norms = torch.tensor([[1.0, 2.0, 3.0], [1e4, 2.0, 0.0]])
    figure = norm_profile(norms, tokens=["The", " $5", "\n"])
    axes = figure.axes[0]
    assert axes.images[0].norm.vmax == 1e4
    assert axes.get_ylim() == (-0.5, 1.5)
    labels = [tick.get_text() for tick in axes.get_xticklabels()]
    assert labels == ["The", "\N{OPEN BOX}\\$5", "\\n"]
    with pytest.raises(ValueError, match="tokens has 1 words for 3 positions"):
        norm_profile(norms, tokens=["The"])


def test_what_cannot_be_drawn_says_why():
    with pytest.raises(ValueError, match=r"values is empty: its shape is \(0, 3\)"):
        heatmap(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="no positive number"):
        heatmap(torch.zeros(2, 3), log=True)
    with pytest.raises(ValueError, match="max_cells must be at least 1"):
        heatmap(torch.zeros(2, 3), max_cells=0)


def test_an_observation_becomes_figures_of_every_statistic_and_of_chosen_patterns(observed):
    figures = observation_figures(observed, patterns=[(1, 0)])
    titles = [figure.title for figure in figures]
    assert titles == [
        "Entropy of attention (nats), by layer and head",
        "Entropy of attention (nats), through the layers",
        "Attention on the first token, by layer and head",
        "Attention on the first token, through the layers",
        "Pattern of layer 1, head 0",
    ]
    expected = observed.tensor("first_mass").mean(0)
    np.testing.assert_allclose(image(figures[2].figure), expected.numpy(), rtol=1e-6)
    assert image(figures[4].figure).shape == (17, 17)
    assert all(figure.alt and figure.caption for figure in figures)


def test_the_page_is_one_file_that_needs_nothing_beside_it(observed, tmp_path):
    path = write_observation_page(
        tmp_path / "deep" / "page.html",
        observation_figures(observed),
        title="A <tiny> model",
        facts={"model": "tiny", "texts": "4"},
        tables={"All numbers": observed.table()},
        max_rows=7,
    )
    page = path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
    assert "A &lt;tiny&gt; model" in page
    assert page.count("data:image/svg+xml;base64,") == 4
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert "<script" not in page
    assert f"The first 7 of {len(observed.table())} rows." in page
    assert page.count("<tr>") == 1 + 7
    assert all(f'alt="{figure.alt}"' in page for figure in observation_figures(observed))


def test_a_page_that_fails_leaves_the_old_one(observed, tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")

    def failing(*args, **settings):
        raise RuntimeError("on purpose")

    figure = heatmap(torch.rand(2, 3))
    monkeypatch.setattr(figure, "savefig", failing)
    page_figure = PageFigure(figure, "t", "c", "a")
    with pytest.raises(RuntimeError, match="on purpose"):
        write_observation_page(path, [page_figure], title="t", facts={})
    assert path.read_text() == "old"
    write_observation_page(path, [], title="t", facts={}, tables={"e": pd.DataFrame({"a": []})})
    assert "<h1>t</h1>" in path.read_text()
