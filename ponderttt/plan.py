"""What a run will take, before anything runs: chunks, operations, time, disk and memory.

Pure arithmetic on the params, the backbones' shapes and the machine's speeds. What is not
arithmetic (starting Python and Ray, loading weights, tables) was timed once on two cores.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ponderttt.cores import Split
from ponderttt.layers import config_for
from ponderttt.params import Params
from ponderttt.shapes import Shape
from ponderttt.speed import Speeds, score_flops, train_flops
from ponderttt.ttt import LayerConfig

MB, GB = 1e6, 1e9

# Share of real tokens in a chunk where the tails of documents are kept: measured, 0.84 to 0.95.
FILL = 0.92

# Seconds of a stage beside its arithmetic, for each billion parameters that it loads, and for
# each row that it makes.
STARTS = {
    "corpus": 45.0,
    "backbone": 12.0,
    "chunks": 6.0,
    "hidden": 15.0,
    "ttt": 15.0,
    "scores": 15.0,
    "cost": 8.0,
    "gate": 2.0,
    "metrics": 5.0,
    "report": 3.0,
}
LOADS = {"backbone": 100.0, "hidden": 20.0, "ttt": 20.0, "scores": 20.0, "cost": 20.0}
ROWS = {"chunks": 1.1e-3, "gate": 3e-5, "metrics": 2e-4}
FETCHED = 350.0  # files of The Stack v2 per second, as its users see

# Bytes, seen in real runs.
CORPUS_PACKAGES = 17 * MB
CORPUS_FILE = 2_000  # of one source file, compressed
CHUNK_TOKEN = 2.0  # of one token id, compressed
ROW = 900  # of one row of scores; tables in small files are mostly headers
PIECE = 16  # of one token of `tokens`: its text and three losses
GATE_ROW = 330  # of one chunk under all policies
METRICS = 2 * MB  # tables and page of a scale and seed
TOKENIZER = 10 * MB

RUNTIME = 0.7 * GB  # memory of Python with torch, transformers and Ray
BODY_COPIES = 24  # rows of the model's width that live at once per token, of each kind of work
SCORE_COPIES = 60
TRAIN_COPIES = 120


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A card: its peaks in dense bfloat16 and in float32 products, and its memory."""

    name: str
    tflops: float
    tflops_float32: float
    memory_gb: int


GPUS = (
    Gpu(name="L4", tflops=121, tflops_float32=30.3, memory_gb=24),
    Gpu(name="RTX 4090", tflops=165, tflops_float32=82.6, memory_gb=24),
    Gpu(name="RTX A6000", tflops=155, tflops_float32=38.7, memory_gb=48),
    Gpu(name="A100", tflops=312, tflops_float32=19.5, memory_gb=80),
    Gpu(name="H100", tflops=989, tflops_float32=66.9, memory_gb=80),
)
# Share of a peak that is assumed to be reached: of bfloat16's by the body and by the layer, whose
# inner loop is small products; of float32's by the head.
UTILISATION = {"body": 0.35, "score": 0.03, "train": 0.03}
UTILISATION_FLOAT32 = {"head": 0.7, "learn": 0.7}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage's work: operations of each kind, and seconds beside them."""

    name: str
    flops: dict[str, float] = field(default_factory=dict)
    start: float = 0.0

    def seconds(self, speeds: Mapping[str, float]) -> float:
        """How long it takes at these operations per second."""
        return self.start + sum(count / speeds[kind] for kind, count in self.flops.items())


@dataclass(frozen=True, kw_only=True)
class ScalePlan:
    """What one scale takes with all its seeds."""

    name: str
    shape: Shape
    stages: tuple[Stage, ...]
    disk: dict[str, float]
    memory: dict[str, float]  # per worker, of each stage that loads the backbone
    gpu_memory: float  # of the largest of them


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run takes."""

    chunks: dict[str, int]  # per set, of one scale
    scored: int  # chunks scored, of one scale and seed
    tokens: int  # real ones in all chunks, of one scale
    split: Split
    common: tuple[Stage, ...]
    common_disk: dict[str, float]
    scales: tuple[ScalePlan, ...]
    unknown: tuple[str, ...]  # scales whose sizes cannot be known yet

    @property
    def stages(self) -> list[Stage]:
        """All of them, scale by scale."""
        return [*self.common, *(stage for scale in self.scales for stage in scale.stages)]

    @property
    def disk(self) -> float:
        """Bytes of all artifacts."""
        own = sum(sum(scale.disk.values()) for scale in self.scales)
        return own + sum(self.common_disk.values())

    def seconds(self, speeds: Mapping[str, float]) -> float:
        """The whole run, stage after stage."""
        return sum(stage.seconds(speeds) for stage in self.stages)


def gpu_speeds(gpu: Gpu) -> Speeds:
    """Operations per second of each kind on one card."""
    speeds = {kind: gpu.tflops * 1e12 * share for kind, share in UTILISATION.items()}
    exact = {k: gpu.tflops_float32 * 1e12 * share for k, share in UTILISATION_FLOAT32.items()}
    return speeds | exact


def make(params: Params, shapes: Mapping[str, Shape | None], split: Split) -> Plan:
    """Plan the run that `params` ask for."""
    chunks = set_sizes(params)
    seeds, known = len(params.run.seeds), {n: shape for n, shape in shapes.items() if shape}
    rows = scored_chunks(params) * seeds * len(known)
    return Plan(
        chunks=chunks,
        scored=scored_chunks(params),
        tokens=round(sum(chunks.values()) * real_tokens(params)),
        split=split,
        common=_common_stages(params, rows),
        common_disk={
            "corpus": corpus_bytes(params),
            "gate": rows * GATE_ROW,
            "metrics": METRICS * seeds * len(known),
        },
        scales=tuple(_scale_plan(params, n, shape, split) for n, shape in known.items()),
        unknown=tuple(name for name, shape in shapes.items() if not shape),
    )


def set_sizes(params: Params) -> dict[str, int]:
    """Chunks of each set, if the corpus has as many."""
    sets = {"train": params.size.train_chunks}
    sets |= dict.fromkeys(params.run.languages, params.size.test_chunks)
    shuffled = [name for name in params.chunks.shuffled if name in params.run.languages]
    return sets | {f"{name}-shuffled": params.size.test_chunks for name in shuffled}


def scored_chunks(params: Params) -> int:
    """Rows of the score tables of one scale and seed."""
    sets = {
        "plain": params.run.languages,
        "shuffled": params.chunks.shuffled,
        "strict": params.scores.strict,
    }
    wanted = [set(sets[variant]) & set(params.run.languages) for variant in params.scores.variants]
    return params.size.test_chunks * sum(map(len, wanted))


def real_tokens(params: Params) -> float:
    """Tokens of the average chunk that are not padding."""
    return params.chunks.length * (FILL if params.chunks.pack == "document" else 1.0)


def corpus_files(params: Params) -> int:
    """Files to fetch one by one."""
    if params.corpus.source != "stack_v2":
        return 0
    others = len(set(params.run.languages) - {params.corpus.train_language})
    return params.corpus.stack.train_files + others * params.corpus.stack.test_files


def corpus_bytes(params: Params) -> float:
    """Size of the corpus; that of a folder of one's own is not known."""
    if params.corpus.source == "stack_v2":
        return corpus_files(params) * CORPUS_FILE
    return CORPUS_PACKAGES if params.corpus.source == "packages" else 0.0


def _common_stages(params: Params, rows: int) -> tuple[Stage, ...]:
    """Those that run once for all scales, on `rows` scored chunks in all."""
    more = {"corpus": corpus_files(params) / FETCHED}
    more |= {name: rows * ROWS[name] for name in ("gate", "metrics")}
    return tuple(
        Stage(name=name, start=STARTS[name] + more.get(name, 0.0))
        for name in ("corpus", "gate", "metrics", "report")
    )


def _scale_plan(params: Params, name: str, shape: Shape, split: Split) -> ScalePlan:
    layer = config_for(params.ttt, {"heads": shape.heads, "width": shape.width})
    memory = worker_memory(params, shape, layer, split, bytes_per_weight=4)
    on_gpu = worker_memory(params, shape, layer, split, bytes_per_weight=2)
    exact_head = shape.vocabulary * shape.width * 4.0  # see `backbone.load`
    return ScalePlan(
        name=name,
        shape=shape,
        stages=_scale_stages(params, shape, layer),
        disk=scale_disk(params, shape, layer),
        memory={stage: RUNTIME + size for stage, size in memory.items()},
        gpu_memory=max(on_gpu.values()) + exact_head,
    )


def _scale_stages(params: Params, shape: Shape, layer: LayerConfig) -> tuple[Stage, ...]:
    seeds, length = len(params.run.seeds), params.chunks.length
    chunks, scored = sum(set_sizes(params).values()), scored_chunks(params) * seeds
    trained = params.size.steps * params.size.batch * seeds
    head = real_tokens(params) * shape.head_flops
    drawn = min(params.ttt.positions or length, length) * shape.head_flops
    flops: dict[str, dict[str, float]] = {
        "backbone": {},
        "chunks": {},
        "hidden": {"body": chunks * shape.body_flops(length), "head": chunks * head},
        # Backward through the head costs as much again, as its weights take no gradient.
        "ttt": {"train": trained * train_flops(layer, length), "learn": trained * 2 * drawn},
        # The base arm's logits are made again, for the distance between the arms.
        "scores": {"score": scored * score_flops(layer, length), "head": scored * 3 * head},
        "cost": {"body": seeds * 7 * shape.body_flops(length), "head": seeds * 6 * head},
    }
    often = {"ttt": seeds, "scores": seeds, "cost": seeds}
    rows = {"chunks": chunks * ROWS["chunks"]}
    return tuple(
        Stage(
            name=name,
            flops=work,
            start=often.get(name, 1) * start_seconds(name, shape) + rows.get(name, 0.0),
        )
        for name, work in flops.items()
    )


def start_seconds(stage: str, shape: Shape) -> float:
    """Seconds of a stage beside its arithmetic."""
    return STARTS[stage] + LOADS.get(stage, 0.0) * shape.parameters / 1e9


def scale_disk(params: Params, shape: Shape, layer: LayerConfig) -> dict[str, float]:
    """Bytes of each artifact of one scale."""
    seeds, length = len(params.run.seeds), params.chunks.length
    chunks, width = sum(set_sizes(params).values()), 4 if params.hidden.dtype == "float32" else 2
    scored, sets = scored_chunks(params), scored_chunks(params) // params.size.test_chunks
    shown = sets * min(params.scores.token_chunks, params.size.test_chunks)
    return {
        "backbone": shape.parameters * 4 + TOKENIZER,
        "chunks": chunks * length * CHUNK_TOKEN,
        "hidden": float(chunks * length * shape.width * width),
        "ttt": seeds * layer_parameters(layer) * 4.0,
        "scores": seeds * scored * float(ROW),
        "tokens": seeds * shown * real_tokens(params) * PIECE,
    }


def layer_parameters(layer: LayerConfig) -> int:
    """Trained numbers of a TTT layer: four projections, fast weights, vectors."""
    d, e, heads = layer.width, layer.head_width, layer.heads
    vectors = 4 * d + 2 * (layer.conv_width + 1) * d + heads * (d + 1) + 2 * d + d
    return 4 * d * d + d * e + vectors + layer.mini_batch


def worker_memory(
    params: Params, shape: Shape, layer: LayerConfig, split: Split, bytes_per_weight: int
) -> dict[str, float]:
    """Bytes that one worker needs in each stage that loads the backbone."""
    weights = shape.parameters * bytes_per_weight + params.hidden.max_logits_mb * 2**20
    row = params.chunks.length * shape.width * 4.0
    ranks = max(1, split.workers)
    trained = -(-params.size.batch // ranks) * row * TRAIN_COPIES + layer_parameters(layer) * 16
    return {
        "hidden": weights + params.hidden.batch * row * BODY_COPIES,
        "ttt": weights + trained,
        "scores": weights + params.scores.batch * row * SCORE_COPIES,
    }
