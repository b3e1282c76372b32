"""What a transformer is made of: one frozen, validated dataclass.

Names and meanings are TransformerLens' where it has them. Sizes: ``d_model`` the residual stream,
``d_head`` one head's query, key and value, ``d_mlp`` the hidden layer of the MLP.
"""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch

from interp.models.dyck_vocabulary import N_SPECIAL_TOKENS

ActFn = Literal["gelu_new", "gelu", "relu", "silu"]
AttentionDir = Literal["causal", "bidirectional"]
Embedding = Literal["learned", "one_hot", "dyck_joint", "dyck_separate", "dyck_angle"]
Normalization = Literal["LN", "RMS"]
PositionalEmbedding = Literal["standard", "sinusoidal", "rotary", "linear", "none"]

DYCK_EMBEDDINGS = ("dyck_joint", "dyck_separate", "dyck_angle")

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes, parts and seed of a :class:`interp.models.transformer.Transformer`.

    Sizes
        ``n_layers d_model n_heads d_head d_vocab n_ctx``; ``n_key_value_heads`` (None: as many as
        ``n_heads``) gives grouped heads, query head h reading key-value head
        ``h // (n_heads / n_key_value_heads)``; ``d_mlp=None`` leaves the MLP out.
    Attention
        scores are ``q k / attn_scale`` (None: ``sqrt(d_head)``); ``output_projection=False``
        drops W_O: heads lie side by side in the residual stream, so that
        ``n_heads * d_head == d_model``, and W_O reads as the identity. ``attention_biases`` gives
        b_Q, b_K, b_V, and b_O where there is an output projection.
    Normalization
        ``attention_norm``, ``mlp_norm``, ``final_norm`` are each "LN", "RMS" or None; ``mlp_norm``
        is read only where there is an MLP.
    Embeddings
        ``embedding`` is "learned", "one_hot" (frozen), or, over the Dyck vocabulary (PAD, MASK,
        START, END, k opening, k closing brackets) up to ``max_depth``: "dyck_joint" (one-hot of
        bracket and depth together), "dyck_separate" (one-hot bracket, one-hot depth),
        "dyck_angle" (one-hot bracket, depth as an angle). ``positional_embedding_type`` "linear"
        adds ``position / linear_position_divisor`` to the last dimension.
    Initialization
        weights N(0, ``initializer_range``), those that write to the residual stream divided by
        ``sqrt(2 n_layers)``; biases 0. Drawn from ``seed`` alone, on the CPU, in float64: the same
        seed gives the same model on any device and, up to rounding, in any dtype.

    Raises ValueError, naming the field, what came and what was expected.
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_head: int
    d_vocab: int
    n_ctx: int
    n_key_value_heads: int | None = None
    d_mlp: int | None = None
    act_fn: ActFn = "gelu_new"
    gated_mlp: bool = False
    attention_dir: AttentionDir = "causal"
    attn_scale: float | None = None
    output_projection: bool = True
    attention_norm: Normalization | None = "LN"
    mlp_norm: Normalization | None = "LN"
    final_norm: Normalization | None = "LN"
    eps: float = 1e-5
    attention_residual: bool = True
    mlp_residual: bool = True
    attention_biases: bool = True
    mlp_biases: bool = True
    embedding: Embedding = "learned"
    max_depth: int | None = None
    positional_embedding_type: PositionalEmbedding = "standard"
    rotary_base: float = 10000.0
    linear_position_divisor: float = 6000.0
    tie_embeddings: bool = False
    unembed_bias: bool = False
    initializer_range: float = 0.02
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_sizes()
        self._check_embedding()

    def _check_kinds(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "act_fn": get_args(ActFn),
            "attention_dir": get_args(AttentionDir),
            "embedding": get_args(Embedding),
            "positional_embedding_type": get_args(PositionalEmbedding),
            "attention_norm": (*get_args(Normalization), None),
            "mlp_norm": (*get_args(Normalization), None),
            "final_norm": (*get_args(Normalization), None),
            "dtype": tuple(_DTYPE_NAMES),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                expected = ", ".join(repr(choice) for choice in allowed)
                raise ValueError(f"{name}={value!r} is unknown: expected one of {expected}")
        for field in fields(self):
            if field.type is bool and not isinstance(getattr(self, field.name), bool):
                raise ValueError(
                    f"{field.name}={getattr(self, field.name)!r}: expected True or False"
                )

    def _check_sizes(self) -> None:
        for name in ("n_layers", "d_model", "n_heads", "d_head", "d_vocab", "n_ctx"):
            _require_positive_int(name, getattr(self, name))
        for name in ("n_key_value_heads", "d_mlp", "max_depth"):
            if getattr(self, name) is not None:
                _require_positive_int(name, getattr(self, name))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise ValueError(f"seed={self.seed!r}: expected an integer that is at least 0")
        for name in ("eps", "initializer_range", "rotary_base", "linear_position_divisor"):
            _require_positive_float(name, getattr(self, name))
        if self.attn_scale is not None:
            _require_positive_float("attn_scale", self.attn_scale)
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_key_value_heads={self.n_key_value_heads} does not divide n_heads="
                f"{self.n_heads}: each key-value head serves the same number of query heads"
            )
        if not self.output_projection and self.n_heads * self.d_head != self.d_model:
            raise ValueError(
                f"output_projection=False needs n_heads * d_head == d_model, since heads then lie "
                f"side by side in the residual stream; got {self.n_heads} * {self.d_head} and "
                f"d_model={self.d_model}: change d_head or keep the output projection"
            )
        if self.gated_mlp and self.d_mlp is None:
            raise ValueError("gated_mlp=True without an MLP: give d_mlp, or gated_mlp=False")
        if self.positional_embedding_type == "rotary" and self.d_head % 2:
            raise ValueError(
                f"rotary positions turn pairs of dimensions: d_head={self.d_head} must be even"
            )
        if self.positional_embedding_type == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"sinusoidal positions fill pairs of dimensions: d_model={self.d_model} must be "
                "even"
            )

    def _check_embedding(self) -> None:
        if self.embedding in DYCK_EMBEDDINGS:
            if self.max_depth is None:
                raise ValueError(
                    f"embedding={self.embedding!r} writes each token's depth: give max_depth, the "
                    "deepest nesting of the language"
                )
            if self.d_vocab < N_SPECIAL_TOKENS + 2 or self.d_vocab % 2:
                raise ValueError(
                    f"embedding={self.embedding!r} reads the Dyck vocabulary, 4 special tokens and "
                    f"2 brackets of each type: d_vocab={self.d_vocab}, expected 6, 8, 10, ..."
                )
        elif self.max_depth is not None:
            raise ValueError(
                f"max_depth={self.max_depth} has no meaning for embedding={self.embedding!r}: "
                f"leave it None, or choose one of {', '.join(DYCK_EMBEDDINGS)}"
            )
        needed = self.n_embedding_dimensions
        reserved = int(self.positional_embedding_type == "linear" and self.embedding != "learned")
        if needed is not None and self.d_model < needed + reserved:
            position = " and 1 for the linear position" if reserved else ""
            raise ValueError(
                f"d_model={self.d_model} is too small for embedding={self.embedding!r}: it needs "
                f"{needed} dimensions{position} (d_vocab={self.d_vocab}, max_depth="
                f"{self.max_depth}); use d_model >= {needed + reserved}"
            )
        if self.tie_embeddings and self.embedding != "learned":
            raise ValueError(
                f"tie_embeddings=True needs embedding='learned', got {self.embedding!r}: a frozen "
                "table is no head"
            )

    # What follows from the fields.

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads, grouped or not."""
        return self.n_heads if self.n_key_value_heads is None else self.n_key_value_heads

    @property
    def score_scale(self) -> float:
        """What scores are divided by: ``attn_scale``, or sqrt(d_head)."""
        return math.sqrt(self.d_head) if self.attn_scale is None else self.attn_scale

    @property
    def n_embedding_dimensions(self) -> int | None:
        """Dimensions that a frozen embedding fills; None for the learned one, which fills all."""
        depths = 0 if self.max_depth is None else self.max_depth + 1
        match self.embedding:
            case "learned":
                return None
            case "one_hot":
                return self.d_vocab
            case "dyck_joint":
                n_brackets = self.d_vocab - N_SPECIAL_TOKENS
                return N_SPECIAL_TOKENS + n_brackets * depths
            case "dyck_separate":
                return self.d_vocab + depths
            case "dyck_angle":
                return self.d_vocab + 2

    # What TransformerLens reads from a config besides the fields above.

    @property
    def attn_only(self) -> bool:
        """True without MLPs."""
        return self.d_mlp is None

    @property
    def normalization_type(self) -> Normalization | None:
        """The norm before the unembedding: the one that logit attribution divides by."""
        return self.final_norm

    @property
    def final_rms(self) -> bool:
        """True when the last norm does not centre."""
        return self.final_norm == "RMS"

    @property
    def use_attn_result(self) -> bool:
        """False: ``hook_result`` is computed when somebody looks, not by a switch."""
        return False

    @property
    def use_split_qkv_input(self) -> bool:
        """False: queries, keys and values read one normalized input."""
        return False

    @property
    def use_hook_mlp_in(self) -> bool:
        """False: the MLP's input is read at ``hook_resid_mid``."""
        return False

    @property
    def parallel_attn_mlp(self) -> bool:
        """False: the MLP reads what attention has written."""
        return False

    @property
    def default_prepend_bos(self) -> bool:
        """False: tokens are taken as they come."""
        return False

    @property
    def tokenizer_prepends_bos(self) -> bool:
        """False: tokens are taken as they come."""
        return False

    @property
    def n_devices(self) -> int:
        """1: a model lives on one device."""
        return 1

    # To JSON and back.

    def to_json(self) -> str:
        """The config as JSON with sorted keys; :meth:`from_json` gives back an equal config."""
        record = {**asdict(self), "dtype": _DTYPE_NAMES[self.dtype]}
        return json.dumps(record, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "TransformerConfig":
        """The config written by :meth:`to_json`; unknown, missing or bad keys are ValueErrors."""
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the config is not JSON: {error}") from error
        if not isinstance(record, Mapping):
            raise ValueError(f"the config is a JSON {type(record).__name__}, expected an object")
        known = [field.name for field in fields(cls)]
        for key in record:
            if key not in known:
                near = difflib.get_close_matches(key, known)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise ValueError(f"unknown config key {key!r}{hint} Known keys: {', '.join(known)}")
        missing = [key for key in known if key not in record]
        if missing:
            raise ValueError(
                f"the config lacks {', '.join(missing)}: it was not written by to_json"
            )
        name = record["dtype"]
        if name not in _DTYPES:
            raise ValueError(f"dtype={name!r} is unknown: expected one of {', '.join(_DTYPES)}")
        return cls(**{**record, "dtype": _DTYPES[name]})


def _require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: expected an integer that is at least 1")


def _require_positive_float(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ValueError(f"{name}={value!r}: expected a positive, finite number")
