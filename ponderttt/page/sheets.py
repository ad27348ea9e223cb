"""The report's tables: which numbers stand in which column, and the paper's beside them."""

from dataclasses import dataclass

from ponderttt.page.cells import Kind
from ponderttt.signals import PAPER


@dataclass(frozen=True)
class Column:
    """A metric of a policy or signal; `{ours}`, `{signal}` and `{r}` stand for this run's."""

    head: str
    metric: str
    kind: Kind
    policy: str | None = None
    signal: str | None = None
    reference: bool = True  # whether the number depends on the reference
    variant: str = "plain"
    field: str = "value"


@dataclass(frozen=True)
class Sheet:
    """A table of the report; one line per run, reference and entry of `over`."""

    name: str
    title: str
    text: str  # `{units}` stands for what the bootstrap draws
    columns: tuple[Column, ...]
    references: bool = True
    over: str = ""  # "", "rate" or "signal"
    paper: str = ""  # the paper's table, as it is called there


@dataclass(frozen=True)
class Run:
    """What the templates of the columns stand for."""

    ours: str
    signal: str
    reference: str
    cluster: str
    language: str  # the headline's
    scales: tuple[str, ...]
    seeds: tuple[int, ...]

    @property
    def units(self) -> str:
        """What the bootstrap draws, in the plural."""
        return {"document": "documents", "repo": "repositories"}[self.cluster]


LOSSES = (
    Column("reference", "loss", "loss", policy="arm_{r}", reference=False),
    Column("random", "loss", "loss", policy="random"),
    Column("gate", "loss", "loss", policy="{ours}"),
    Column("oracle", "loss", "loss", policy="oracle_{r}"),
    Column("all UPDATE", "loss", "loss", policy="arm_update", reference=False),
)
SHARES = (
    Column("recovery %", "recovery", "percent", policy="{ours}"),
    Column("capture %", "capture", "percent", policy="{ours}"),
    Column("capture at own rate %", "capture_matched", "percent", policy="{ours}"),
    Column("rate %", "rate", "percent", policy="{ours}", reference=False),
    Column("rate after calibration %", "rate_after", "percent", policy="{ours}", reference=False),
    Column("nominal cost", "cost_nominal", "times", policy="{ours}", reference=False),
)
DELTA = (
    Column("Pearson r", "pearson", "r", signal="delta"),
    Column("Spearman", "spearman", "r", signal="delta"),
    Column("top share loss", "loss", "loss", policy="topk_delta"),
    Column("top share capture %", "capture", "percent", policy="topk_delta"),
    Column("top share accuracy %", "accuracy", "percent", policy="topk_delta"),
    Column("top share overlap %", "overlap", "percent", policy="topk_delta"),
    Column("threshold loss", "loss", "loss", policy="fixed_delta"),
    Column("threshold capture at own rate %", "capture_matched", "percent", policy="fixed_delta"),
    Column("threshold accuracy %", "accuracy", "percent", policy="fixed_delta"),
    Column("threshold rate %", "rate", "percent", policy="fixed_delta", reference=False),
)


SEED_METRICS: tuple[tuple[str, Kind], ...] = (
    ("loss", "loss"),
    ("recovery", "percent"),
    ("capture", "percent"),
)
ENTROPY_METRICS: tuple[tuple[str, str, Kind], ...] = (
    ("updated", "entropy_update", "loss"),
    ("skipped", "entropy_skip", "loss"),
    ("difference", "entropy_gap", "loss"),
    ("r", "entropy_pearson", "r"),
)


def variant_columns(variant: str) -> tuple[Column, ...]:
    """Losses of arms and gate on plain and on other input."""
    arms = (("reference", "arm_{r}", False), ("all UPDATE", "arm_update", False))
    return tuple(
        Column(f"{words} {which}", "loss", "loss", policy, None, depends, which)
        for words, policy, depends in (*arms, ("gate", "{ours}", True))
        for which in ("plain", variant)
    )


def saved_columns(variant: str) -> tuple[Column, ...]:
    """The share of the reference's loss that the gate saves on plain and on other input."""
    return tuple(
        Column(f"gate saves %, {which}", "improvement", "percent", "{ours}", variant=which)
        for which in ("plain", variant)
    )


def compared_columns(head: str, metric: str, kind: Kind) -> tuple[Column, ...]:
    """A metric of each signal, its difference to the paper's signal, and p after Holm."""
    gap = f"{metric}_minus_{PAPER}"
    return (
        Column(head, metric, kind, signal="{signal}"),
        Column(f"minus {PAPER}", gap, kind, signal="{signal}"),
        Column("p, Holm", gap, "p", signal="{signal}", field="p_holm"),
    )


SHEETS = (
    Sheet(
        name="main",
        title="Main results",
        text="Held-out chunks of the language trained on. Losses in nats per token.",
        columns=(*LOSSES, *SHARES),
        paper="Scalability on Python",
    ),
    Sheet(
        name="ood",
        title="Other languages",
        text="The same on languages that the layer was not trained on.",
        columns=(*LOSSES, *SHARES),
        paper="OOD Performance",
    ),
    Sheet(
        name="correlation",
        title="Correlation of signal and advantage",
        text="Over chunks. A gate can only be as good as its signal follows the advantage.",
        columns=(
            Column("Pearson r", "pearson", "r", signal="{signal}"),
            Column("Spearman", "spearman", "r", signal="{signal}"),
            Column("recovery %", "recovery", "percent", policy="{ours}"),
            Column("capture %", "capture", "percent", policy="{ours}"),
        ),
        paper="Correlation between Reconstruction Loss and Oracle Advantage",
    ),
    Sheet(
        name="accuracy",
        title="Agreement with the oracle",
        text="Share of chunks decided as the oracle does; overlap: share of the oracle's updates "
        "that the gate makes too. Both move with the rate, so blind decisions at the gate's own "
        "rate stand beside, and the gate is ahead only by what it has over them. McNemar compares "
        "its right decisions with those of a Random that updates as often: the median p over "
        "Random's draws, by chunks and with whole {units} as units.",
        columns=(
            Column("random %", "accuracy", "percent", policy="random"),
            Column("gate %", "accuracy", "percent", policy="{ours}"),
            Column("gate's rate %", "rate", "percent", policy="{ours}", reference=False),
            Column("blind at that rate %", "accuracy_blind", "percent", policy="{ours}"),
            Column("gate ahead by %", "mcnemar", "percent", policy="{ours}"),
            Column("gate overlap %", "overlap", "percent", policy="{ours}"),
            Column("blind overlap %", "overlap_blind", "percent", policy="{ours}"),
            Column("McNemar p", "mcnemar", "p", policy="{ours}", field="p"),
            Column("p, clustered", "mcnemar_clustered", "p", policy="{ours}", field="p"),
        ),
        paper="Oracle Decision Accuracy",
    ),
    Sheet(
        name="random_vs_gate",
        title="Random against the gate",
        text="Random is the exact mean over all choices of that many chunks. The difference is at "
        "the gate's own rate and paired: positive where the gate is better.",
        columns=(
            Column("random", "loss", "loss", policy="random"),
            Column("sd of its draws", "loss_sd_of_draws", "gap", policy="random"),
            Column("gate", "loss", "loss", policy="{ours}"),
            Column("below random, nats", "below_random", "gap", policy="{ours}"),
            Column("random saves %", "improvement", "percent", policy="random"),
            Column("gate saves %", "improvement", "percent", policy="{ours}"),
            Column("oracle saves %", "improvement", "percent", policy="oracle_{r}"),
        ),
        paper="Random Skip vs Reconstruction Gating",
    ),
    Sheet(
        name="dense",
        title="UPDATE on every chunk",
        text="The three arms in full, and what UPDATE everywhere saves of the reference's loss.",
        columns=(
            *(
                Column(f"{arm} loss", "loss", "loss", policy=f"arm_{arm}", reference=False)
                for arm in ("base", "skip", "update")
            ),
            *(
                Column(f"{arm} PPL", "ppl", "ppl", policy=f"arm_{arm}", reference=False)
                for arm in ("base", "skip", "update")
            ),
            Column("UPDATE saves %", "improvement", "percent", policy="always"),
            Column("gate saves %", "improvement", "percent", policy="{ours}"),
        ),
        paper="Dense TTT (UPDATE_1)",
    ),
    Sheet(
        name="shuffled",
        title="Shuffled input",
        text="Tokens permuted inside each chunk. What UPDATE wins should vanish with the order.",
        columns=(*variant_columns("shuffled"), *saved_columns("shuffled")),
        paper="Shuffled Input Sanity Check",
    ),
    Sheet(
        name="diagonal",
        title="Without the diagonal",
        text="A token's output does not see its own inner gradient (strict mask, test time only).",
        columns=(
            *variant_columns("strict"),
            Column("gate, difference", "loss_minus_plain", "gap", "{ours}", variant="strict"),
        ),
        paper="Causal Mask Diagonal Ablation",
    ),
    Sheet(
        name="delta",
        title="The delta signal",
        text="Reconstruction loss before the step minus after it. It needs the update first, so a "
        "gate on it saves no work. Threshold: set on the calibration chunks and never moved, as "
        "the paper's; it comes to a rate of its own. The moving one is in the table of signals.",
        columns=DELTA,
        paper="Gating method comparison; Online gating comparison",
    ),
    Sheet(
        name="signals",
        title="Every signal, ranked",
        text="Capture with lookahead at the exact rate, and online with the EMA gate against an "
        "oracle with as many updates; also Pearson's r. Each with its paired difference to the "
        "paper's signal and p after Holm's correction over the signals of that column; nothing "
        "corrects over columns, languages and references. Best capture first. Signals that see "
        "the update or the labels can save no work; they are here for comparison. All but "
        "recon_prefix, which decides after 64 tokens, read the whole chunk that the decision is "
        "then applied to from its first token on: a gate's loss at a token depends on later "
        "tokens of its chunk through that one bit, though no arm looks ahead.",
        columns=(
            *compared_columns("capture %", "capture_topk", "percent"),
            *compared_columns("capture online %", "capture_ema", "percent"),
            *compared_columns("Pearson r", "pearson", "r"),
            Column("Spearman", "spearman", "r", signal="{signal}"),
            Column("overlap %", "overlap_topk", "percent", signal="{signal}"),
        ),
        over="signal",
    ),
    Sheet(
        name="curve",
        title="Update rates from 10 to 90 %",
        text="The gate comes to its own rate; capture compares it with oracle and Random that "
        "update as often as it did.",
        columns=(
            Column("random", "loss", "loss", policy="random"),
            Column("gate", "loss", "loss", policy="{ours}"),
            Column("oracle", "loss", "loss", policy="oracle_{r}"),
            Column("gate's rate %", "rate", "percent", policy="{ours}", reference=False),
            Column("recovery %", "recovery_matched", "percent", policy="{ours}"),
            Column("capture %", "capture_matched", "percent", policy="{ours}"),
        ),
        over="rate",
    ),
    Sheet(
        name="seeds",
        title="Over seeds",
        text="Means over the layers trained from each seed, and their standard deviation.",
        columns=(
            *(
                Column(f"gate {m} {w}".strip(), f"{m}{s}", k, policy="{ours}")
                for m, k in SEED_METRICS
                for w, s in (("", ""), ("sd", "_sd"))
            ),
            Column("Pearson r", "pearson", "r", signal="{signal}"),
            Column("Pearson sd", "pearson_sd", "r", signal="{signal}"),
        ),
    ),
    Sheet(
        name="entropy",
        title="Entropy and decisions",
        text="Mean entropy, in nats, of the chunks that the gate updates and skips after its "
        "calibration, and its correlation with the decision.",
        columns=tuple(
            Column(f"{arm}: {head}", metric, kind, "{ours}", f"entropy_{arm}", reference=False)
            for arm in ("base", "skip")
            for head, metric, kind in ENTROPY_METRICS
        ),
        references=False,
    ),
)
