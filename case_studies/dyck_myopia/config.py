"""How much of the Dyck study is computed: numbers of models, sizes of data, lengths."""

from dataclasses import dataclass, fields, replace

from interp.case_studies.study import StudyInfo

STUDY = StudyInfo(
    name="dyck_myopia",
    title="One head tells little: bounded Dyck languages",
    paper="Wen, Li, Liu and Risteski, NeurIPS 2023, arXiv 2312.01429",
    summary=(
        "Trains equally good models of a bracket language, shows how differently they attend, and "
        "asks what one head or one matrix says about behaviour on longer strings."
    ),
    minutes={"smoke": 0.3, "quick": 5, "paper": 45},
)


@dataclass(frozen=True)
class Config:
    """Counts of models and sizes of data; the language and the training are the published ones.

    n_e1 .. n_e6: trained models of each published experiment; 0 leaves it out.
    n_frozen: trained models for each kind of frozen attention scores.
    n_recognisers: hand-built recognisers with random pair-tied attention.
    n_types, max_depth, p_open: the language.
    train_length, long_length: brackets in a string of the training and the long set.
    train_tokens, long_tokens: their sizes; strings are their ratio, rounded up.
    construction_lengths: lengths at which hand-built recognisers are evaluated.
    pumped_pairs: numbers of matched pairs inserted, ascending from 0.
    epochs_share: share in (0, 1] of the published epochs; below 1 nothing of the paper's is shown.
    n_equivalence: strings on which models with other patterns are compared.
    n_probe: training strings whose activations are probed.
    data_seed: of the strings, which all models share.
    """

    n_e1: int = 40
    n_e2: int = 40
    n_e3: int = 1
    n_e4: int = 1
    n_e5: int = 30
    n_e6: int = 30
    n_frozen: int = 10
    n_recognisers: int = 20
    n_types: int = 2
    max_depth: int = 4
    p_open: float = 0.5
    train_length: int = 28
    long_length: int = 400
    train_tokens: int = 100_000
    long_tokens: int = 10_000
    construction_lengths: tuple[int, ...] = (400, 4000)
    pumped_pairs: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
    epochs_share: float = 1.0
    n_equivalence: int = 200
    n_probe: int = 150
    data_seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("n_e") and field.name[3:].isdigit():
                _at_least(field.name, value, 0)
            elif field.type is int and field.name != "data_seed":
                _at_least(field.name, value, 1)
        _at_least("data_seed", self.data_seed, 0)
        _at_least("n_e1", self.n_e1, 1)
        _at_least("max_depth", self.max_depth, 2)
        for name in ("p_open", "epochs_share"):
            value = getattr(self, name)
            if not 0 < value <= 1 or (name == "p_open" and value == 1):
                raise ValueError(f"{name}: got {value}, expected a share above 0 and below 1")
        if not self.construction_lengths or min(self.construction_lengths) < 1:
            raise ValueError(
                f"construction_lengths: got {self.construction_lengths}, expected lengths of at "
                "least 1"
            )
        pairs = self.pumped_pairs
        if not pairs or pairs[0] != 0 or list(pairs) != sorted(set(pairs)):
            raise ValueError(f"pumped_pairs: got {pairs}, expected ascending numbers from 0")

    @property
    def n_train(self) -> int:
        """Strings of the training set."""
        return -(-self.train_tokens // self.train_length)

    @property
    def n_long(self) -> int:
        """Strings of the long set."""
        return -(-self.long_tokens // self.long_length)

    def with_seeds(self, n: int) -> "Config":
        """The study with ``n`` E1 models and every other number of models in proportion.

        A part that has models keeps at least one.
        """
        _at_least("seeds", n, 1)

        def scaled(count: int) -> int:
            return max(1, round(count * n / self.n_e1)) if count else 0

        return replace(
            self,
            n_e1=n,
            n_e2=scaled(self.n_e2),
            n_e3=scaled(self.n_e3),
            n_e4=scaled(self.n_e4),
            n_e5=scaled(self.n_e5),
            n_e6=scaled(self.n_e6),
            n_frozen=scaled(self.n_frozen),
            n_recognisers=scaled(self.n_recognisers),
        )


def _at_least(name: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: got {value!r}, expected a whole number of at least {minimum}")


SCALES = {
    "smoke": Config(
        n_e1=2,
        n_e2=1,
        n_e3=0,
        n_e4=0,
        n_e5=2,
        n_e6=0,
        n_frozen=1,
        n_recognisers=2,
        train_tokens=28_000,
        long_tokens=2_000,
        construction_lengths=(400,),
        pumped_pairs=(0, 1, 4, 16, 64),
        epochs_share=0.3,
        n_equivalence=50,
        n_probe=40,
    ),
    "quick": Config(n_e1=24, n_e2=4, n_e3=1, n_e4=1, n_e5=4, n_e6=4, n_frozen=4, n_recognisers=10),
    "paper": Config(),
}
