"""What each stage of a recipe takes on some GPUs: time by what bounds it, memory, disk."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from raytriever.errors import UserError
from raytriever.prefetching import TOKENIZING_THREADS
from raytriever.reports.progress import format_seconds
from raytriever.settings.configuration import input_paths
from raytriever.stages.stage import Stage, Stages, made_by
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.modules import read_modules
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import load_towers
from retrieval.jobs.embed import ON_GPU
from trainers.engine.gradient_cache import CHUNK_TOKENS_ON_GPU
from trainers.engine.order import can_share
from trainers.estimate.costs import (
    CANDIDATE,
    LAWS,
    Calibration,
    Embedding,
    Size,
    embedding_stage,
    seconds_by_cause,
    training_stage,
)
from trainers.estimate.costs import Stage as Costs
from trainers.estimate.counting import Counting, attention_of_gpus
from trainers.estimate.machines import Gpu, Machines, find_gpu, known_gpu
from trainers.estimate.made_up import Shape, outlined_objective
from trainers.estimate.outlines import make_fake, outline, published, text_of, without_weights
from trainers.estimate.sizes import size_of
from trainers.estimate.step import StepCost, step_cost
from trainers.jobs.train_checks import check_slices, check_workers
from trainers.objectives.revela.language_model import load_language_model
from trainers.run_settings import RunSettings

_ANY = "a100"  # of which memory alone is said
_LAUNCH = 6e-6  # seconds of the host for each kernel
_WORDS_INDEX = 0.75  # bytes on disk of BM25's index over those of its texts
_NUMBER, _RESULT, _ID = 4, 52, 20  # bytes on disk: of a float32, a line of a ranking, an id
_LENGTHS = (32, 128, 512)  # tokens of texts that embedding is counted with
_MEASURED = Calibration()
_BYTES = _MEASURED.bytes_per_token
_NEEDED = (
    dict.fromkeys(("index", "search"), ("documents", "dimension"))
    | dict.fromkeys(("cluster", "pack"), ("pairs", "dimension"))
    | dict.fromkeys(("random pack", "filter", "group", "mix"), ("pairs",))
    | {"mine": ("documents", "results"), "fuse": ("results",), "rerank": ("results", "dimension")}
)  # to have a time; of other stages: documents
_DOCUMENT_BYTES, _QUERY_BYTES, _DIMENSION, _ROWS = 600, 100, 384, 64  # where nothing is known
_OF_MODELS = ("model", "tokenizer")  # ends of keys of inputs that have no texts


@dataclass(frozen=True)
class Estimate:
    """Of a stage. ``seconds``: None where no law is known; ``bound``: what takes most of them. ``peak``: bytes of a
    GPU, 0: none; ``disk``: of its artifact; ``step``, ``steps``: of training."""

    stage: Stage[Any]
    size: Size
    seconds: float | None = None
    bound: str = ""
    peak: float = 0
    disk: float = 0
    step: StepCost | None = None
    steps: float = 0


class Estimating:
    """The stages of a recipe, estimated one after another on some GPUs: ``found``, by name."""

    def __init__(self, stages: Stages, gpu: Gpu) -> None:
        self._stages, self._gpu, self._machines = stages, gpu, gpu.machines()
        self.found: dict[str, Estimate] = {}
        self._encoders: dict[str, Embedding] = {}

    def add(self, name: str) -> None:
        """The next one. Raises ``UserError`` for what can't be trained so, or known."""
        stage = self._stages[name]
        paths = {key: path for key, path in input_paths(stage.config).items() if not key.endswith(_OF_MODELS)}
        makers = [made_by(self._stages, path) for path in paths.values()]
        size = size_of(stage, [each.size for each in self.found.values() if each.stage in makers])
        ways = {"train": self._training, "embed": self._embedding, "score": self._scoring}
        try:
            way = self._other if self._is_static(stage) else ways.get(stage.command, self._other)
            self.found[name] = way(stage, size)
        except UserError as error:
            error.args = (f"{name}: {error}",)
            raise

    def _is_static(self, stage: Stage[Any]) -> bool:
        """Whether its encoder is a table of vectors: it needs no GPU, and takes as long as texts are read."""
        encoder = getattr(stage.config, "encoder", None)
        if not isinstance(encoder, EncoderSettings):
            return False
        maker = made_by(self._stages, encoder.model)
        if encoder.static:
            return True
        if maker is not None:
            return self._is_static(maker)
        return Path(encoder.model).is_dir() and read_modules(Path(encoder.model)).is_static

    def _training(self, stage: Stage[Any], size: Size) -> Estimate:
        config, gpus = on_gpus(stage.config, self._gpu), self._gpu.count
        maker = made_by(self._stages, config.batches)
        size = next((each.size for each in self.found.values() if each.stage is maker), size)
        shape, training = shape_of(size, config), config.training
        check_workers(config.fewest_workers, gpus, training.batches_per_step)
        check_slices(config.fewest_workers, gpus, training.batches_per_step, shape.rows, config.batches)
        if 0 < size.batches < training.batches_per_step:
            most = max(few for few in range(1, int(size.batches) + 1) if can_share(few, gpus))
            raise UserError(
                f"A step of the {gpus} GPUs takes {training.batches_per_step} batches (training.batches_per_step), and"
                f" an epoch of {config.batches} has {size.batches:.0f}: set training.batches_per_step to {most}, or"
                " pack smaller batches or more data."
            )
        cost = step_cost(config, shape, gpus)
        steps = size.batches // training.batches_per_step * min(training.epochs, size.epochs)
        steps = min(filter(None, [steps, training.max_steps]), default=0)
        link = self._gpu.link * 1e9 if self._machines.nodes == 1 else self._machines.network / self._machines.gpus
        read = training.epochs * size.pairs * size.row_bytes * _MEASURED.stored
        computing = seconds_of(cost, config, self._gpu)
        computing["tokenizing"] = cost.tokens * _MEASURED.tokenize / TOKENIZING_THREADS
        costs = training_stage(gpus, steps, computing, cost.sent / link, read)
        disk = _NUMBER * (cost.parameters + 3 * cost.trained * config.checkpoints_kept)
        time = self._timed(costs if steps else None)
        return Estimate(stage, size, *time, cost.peak, disk, cost, steps)

    def _embedding(self, stage: Stage[Any], size: Size) -> Estimate:
        config, share = stage.config, stage.config.resources.gpus_per_worker
        encoder = self._encoder(config.encoder, size)
        texts: list[tuple[int, float]] = []
        if config.run is None:
            texts += [(int(size.documents), size.document_bytes)] * ("documents" in config.parts)
            texts += [(int(size.queries()), size.query_bytes)] * ("queries" in config.parts)
        texts = [each for each in texts if all(each)]
        encoder = replace(encoder, per_gpu=max(1, round(1 / share)) if share else 1)
        time = self._timed(embedding_stage("embed", texts, encoder, _MEASURED, self._machines) if texts else None)
        disk = sum(count for count, _ in texts) * (2 * encoder.dimension + _ID)
        return Estimate(stage, replace(size, dimension=encoder.dimension), *time, encoder.peak, disk)

    def _scoring(self, stage: Stage[Any], size: Size) -> Estimate:
        """Each of a batch's n chunks is read once, and behind each of them all n."""
        settings, chunks = stage.config.language_model, size.rows
        tokens = min(settings.max_length, round(size.document_bytes / _BYTES))
        if not chunks or not tokens:
            return Estimate(stage, size)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with without_weights("meta"):
            model, _ = load_language_model(outline(settings.model, settings.revision).path)
        make_fake(model, fake)
        texts = torch.ones(chunks, tokens, dtype=torch.int64)
        counting, peak = count_forward(model, fake, input_ids=texts, use_cache=False)
        arithmetic = counting.flops * (chunks + 1) / self._machines.operations
        launches = 2 * chunks * counting.launches * _LAUNCH
        seconds = max(arithmetic, launches) * size.epochs * size.batches / self._gpu.count
        bound = "arithmetic" if arithmetic > launches else "launches"
        return Estimate(stage, size, seconds, bound, peak, _NUMBER * size.epochs * size.pairs * chunks)

    def _encoder(self, settings: Any, size: Size) -> Embedding:
        """Counted once for each encoder and length of texts."""
        tokens = next(few for few in _LENGTHS if few >= min(_LENGTHS[-1], size.document_bytes / _BYTES))
        key = f"{settings.model_dump_json()} {tokens}"
        if key not in self._encoders:
            maker, operations = made_by(self._stages, settings.model), self._machines.operations
            self._encoders[key] = embedding_cost(settings, maker, tokens, operations)
        return self._encoders[key]

    def _other(self, stage: Stage[Any], size: Size) -> Estimate:
        name, config = stage.command, stage.config
        if (name == "index" and config.index.kind == "lexical") or (name == "search" and config.vectors is None):
            name = f"words {name}"
        elif name == "pack" and config.clusters is None:
            name = "random pack"
        law = LAWS.get(name) if all(getattr(size, each) for each in _NEEDED.get(name, ("documents",))) else None
        time = self._timed(law(_known(stage, size), _MEASURED, self._machines) if law else None)
        return Estimate(stage, size, *time, disk=_disk(stage, size))

    def _timed(self, costs: Costs | None) -> tuple[float | None, str]:
        if costs is None:
            return None, ""
        causes = seconds_by_cause(costs, _MEASURED, self._machines)
        return sum(causes.values()), max(causes, key=lambda cause: causes[cause])


def estimate_of_run(stage: Stage[Any], gpus: str) -> str:
    """A line on the training on stored batches that ``stage`` is. ``gpus``: their kind; of an unknown one no time."""
    known = known_gpu(gpus)
    estimating = Estimating({stage.command: stage}, find_gpu(known or _ANY, stage.config.resources.workers or 1))
    estimating.add(stage.command)
    found = estimating.found[stage.command]
    if found.step is None:
        return "a static encoder's training is not estimated: a step takes milliseconds"
    cost, gib = found.step, 2**30
    text = (
        f"each GPU holds {cost.peak / gib:.1f} GiB at most: weights {cost.weights / gib:.1f}, gradients"
        f" {cost.gradients / gib:.1f}, optimizer states {cost.optimizer / gib:.1f}, else activations"
    )
    if known and found.seconds is not None:
        each = (found.seconds - _MEASURED.start_up) / found.steps
        text += f"; on {known.upper()}s {format_seconds(found.seconds)}, {each:.2g} s a step, bound by {found.bound}"
    return f"{text}; counted and modelled, as by raytriever estimate"


def _disk(stage: Stage[Any], size: Size) -> float:
    """Bytes of an artifact without a GPU's part."""
    texts = size.documents * size.document_bytes
    match stage.command:
        case "collect" | "chunk":
            return (texts + size.queries() * size.query_bytes) * _MEASURED.stored
        case "filter" | "group":
            return size.epochs * size.pairs * size.row_bytes * _MEASURED.stored
        case "lists" | "mine":
            return size.queries("train") * size.candidates * CANDIDATE
        case "index":
            return _NUMBER * size.documents * size.dimension or texts * _WORDS_INDEX
        case "search" | "rerank" | "fuse":
            return size.results * _RESULT
        case "pairs" | "cluster" | "pack":
            return size.pairs * _ID * (size.epochs if stage.command == "pack" else 1)
    return 0


def on_gpus(config: Any, gpu: Gpu) -> Any:
    """A training's settings on such GPUs, ``bf16`` resolved. Raises ``UserError`` where it is on and they lack it."""
    bf16 = bool(gpu.peak) if config.training.bf16 == "auto" else config.training.bf16
    if bf16 and not gpu.peak:
        raise UserError(f"training.bf16 is on, and a {gpu.name} has no bfloat16 instructions. Set it to false.")
    training = config.training.model_copy(update={"bf16": bf16})
    resources = config.resources.model_copy(update={"workers": gpu.count, "gpus_per_worker": 1})
    objective = config.objective
    if objective.chunk_size is None and objective.chunk_tokens is None:  # the default of GPUs
        objective = objective.model_copy(update={"chunk_tokens": CHUNK_TOKENS_ON_GPU})
    return config.model_copy(update={"training": training, "resources": resources, "objective": objective})


def seconds_of(cost: StepCost, config: Any, gpu: Gpu) -> dict[str, float]:
    """Of a step, by what happens at once: arithmetic on the GPU, launches by the host."""
    peak = (gpu.peak if config.training.bf16 else gpu.single) * 1e12 * Machines().share
    return {"arithmetic": cost.flops / peak, "launches": cost.launches * _LAUNCH}


def shape_of(size: Size, config: RunSettings) -> Shape:
    """Of the batches that are trained on, with texts as assumed where nothing is known of them."""
    if not size.rows:
        raise UserError(
            f"How large the batches in {config.batches} are isn't known: no stage of the recipe makes them, and they"
            " aren't there. Make them first, or estimate the recipe that does."
        )
    lengths = (size.query_bytes or _QUERY_BYTES) / _BYTES, (size.document_bytes or _DOCUMENT_BYTES) / _BYTES
    return Shape(size.rows, *lengths, max(size.negatives, int(config.objective.needs_hard_negatives)), size.candidates)


def _known(stage: Stage[Any], size: Size) -> Size:
    """What a stage without a GPU processes, as assumed where nothing is known."""
    pairs, domains = max(1, int(size.pairs or size.documents)), tuple(published()["domains"])
    return replace(
        size,
        pairs=pairs,
        domains=domains if pairs == sum(domains) else (pairs,),
        document_bytes=size.document_bytes or _DOCUMENT_BYTES,
        cluster_size=getattr(stage.config, "cluster_size", _ROWS),
        rows=size.rows or _ROWS,
        dimension=size.dimension or _DIMENSION,
        documents=int(size.documents),
        splits={"": [max(1, int(size.queries(getattr(stage.config, "split", None))))]},
    )


@torch.no_grad()
def embedding_cost(settings: Any, maker: Stage[Any] | None, tokens: int, operations: float) -> Embedding:
    """One forward pass over texts of so many tokens: by the encoder of ``settings``, or what ``maker`` trains.

    ``operations``: of the GPU, a second.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    if maker is not None and isinstance(maker.config, RunSettings):
        run = maker.config.model_copy(update={"lora": None, "sharding": "replicated"})
        encoder = outlined_objective(run, Shape(_ROWS), fake).encoder("document")
    else:
        located = outline(settings.model, settings.revision)
        own = settings.model_copy(update={"tokenizer": None})
        with without_weights("meta"):
            encoder = load_towers(own, located.path, located.fingerprint).document
        make_fake(encoder, fake)
    if isinstance(encoder, ContextualEncoder):
        with fake:
            encoder.use_context(torch.zeros(encoder.contextual_form.vectors, encoder.width), "made up")
    texts = [text_of(tokens, n) for n in range(ON_GPU["token_budget"] // tokens)]
    features = encoder.eval().tokenize(texts, "document")
    counting, peak = count_forward(encoder, fake, features)
    seconds = max(counting.flops / operations, counting.launches * _LAUNCH)
    return Embedding(seconds / float(features["attention_mask"].sum()), encoder.dimension, peak=peak)


@torch.no_grad()
def count_forward(model: nn.Module, fake: FakeTensorMode, *inputs: Any, **named: Any) -> tuple[Counting, float]:
    """What a forward pass in bfloat16 takes, and its bytes at the peak, weights being stored in 16 bits."""
    counting = Counting(fake)
    for parameter in model.parameters():
        counting.hold(parameter)
    weights = counting.alive
    with counting, attention_of_gpus(), torch.autocast("cpu", torch.bfloat16):
        model.eval()(*inputs, **named)
    return counting, counting.peak - weights / 2
