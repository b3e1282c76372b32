"""The six published models of bounded Dyck languages, E1 to E6, as configs.

Source: the released configurations of Wen, Li, Liu and Risteski, NeurIPS 2023 (arXiv 2312.01429).
All have one causal head of the width of the residual stream, frozen one-hot embeddings, an untied
head without bias, and no normalization before attention nor before the head, but for the
one-layer models, whose logits are the head applied to the normalized output of attention.

====  ======  ====================================  =================  ====  ======
name  layers  embedding                             block              lr    epochs
====  ======  ====================================  =================  ====  ======
E1    1       bracket and depth together            attention alone    1e-2  10
E2    1       as E1, with the contrastive           attention alone    1e-2  10
              regulariser at weight 0.3
E3    1       bracket beside depth                  attention alone    1e-2  20
E4    1       bracket beside an angle for depth     attention alone    1e-2  40
E5    2       bracket                               W_O, MLP, both     3e-3  40
                                                    residuals
E6    2       bracket, and position / 6000          as E5              3e-3  40
====  ======  ====================================  =================  ====  ======
"""

from interp.models.config import Embedding, TransformerConfig
from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_training import DyckTrainingConfig

PRESETS = ("E1", "E2", "E3", "E4", "E5", "E6")
PUBLISHED_LANGUAGE = DyckLanguage(2, 4)
PUBLISHED_WIDTH = 50

_EMBEDDING: dict[str, Embedding] = {
    "E1": "dyck_joint",
    "E2": "dyck_joint",
    "E3": "dyck_separate",
    "E4": "dyck_angle",
    "E5": "one_hot",
    "E6": "one_hot",
}
_EPOCHS = {"E1": 10, "E2": 10, "E3": 20, "E4": 40, "E5": 40, "E6": 40}


def dyck_preset(
    name: str,
    *,
    language: DyckLanguage = PUBLISHED_LANGUAGE,
    seed: int = 0,
    n_ctx: int = 1024,
) -> tuple[TransformerConfig, DyckTrainingConfig]:
    """The model and the training of one published experiment, for one seed.

    ``seed`` decides the weights, the order of the training strings and the contrastive draws; the
    published runs share one training set. ``n_ctx`` bounds the length only where positions are
    embedded (E6). A language whose one-hots do not fit into the published width of 50 gets the
    width that they need. Raises ValueError for an unknown name or a bad seed.
    """
    if name not in PRESETS:
        raise ValueError(f"name={name!r} is no preset: expected one of {', '.join(PRESETS)}")
    is_minimal = name in ("E1", "E2", "E3", "E4")
    width = max(PUBLISHED_WIDTH, _width_needed(name, language))
    model = TransformerConfig(
        n_layers=1 if is_minimal else 2,
        d_model=width,
        n_heads=1,
        d_head=width,
        d_mlp=None if is_minimal else width,
        d_vocab=language.d_vocab,
        n_ctx=n_ctx,
        output_projection=not is_minimal,
        attention_norm=None,
        mlp_norm="LN",
        final_norm="LN" if is_minimal else None,
        attention_residual=not is_minimal,
        embedding=_EMBEDDING[name],
        max_depth=language.max_depth if is_minimal else None,
        positional_embedding_type="linear" if name == "E6" else "none",
        seed=seed,
    )
    training = DyckTrainingConfig(
        n_epochs=_EPOCHS[name],
        batch_size=100,
        learning_rate=1e-2 if is_minimal else 3e-3,
        schedule="cosine",
        loss_positions="close_brackets",
        contrastive_weight=0.3 if name == "E2" else 0.0,
        seed=seed,
    )
    return model, training


def _width_needed(name: str, language: DyckLanguage) -> int:
    n_depths = language.max_depth + 1
    match _EMBEDDING[name]:
        case "dyck_joint":
            return language.d_vocab + 2 * language.n_types * language.max_depth
        case "dyck_separate":
            return language.d_vocab + n_depths
        case "dyck_angle":
            return language.d_vocab + 2
        case _:
            return language.d_vocab + 1
