"""What each stage of a recipe takes on some GPUs: time by what bounds it, memory, disk.

How much a stage reads is known of what is stored already, else by published numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipelines.batches import BATCHES, BatchReader
from pipelines.pairs.pairs import PAIRS
from raytriever.artifacts.artifact import Artifact, is_artifact
from raytriever.errors import UserError
from raytriever.prefetching import TOKENIZING_THREADS
from raytriever.settings.configuration import input_paths
from raytriever.stages.cost import BYTES_OF_A_WORD, Cost, Size
from raytriever.stages.stage import Stage, Stages, made_by
from retrieval.collections.collection import COLLECTION, StoredCollection, TextPart
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.language_model import load_language_model
from retrieval.encoders.modules import read_modules
from retrieval.encoders.pretrained import BYTES_OF_A_TOKEN
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import load_towers
from retrieval.jobs.embed import MOST_SHARDS, ON_GPU
from trainers.engine.gradient_cache import CHUNK_TOKENS_ON_GPU
from trainers.engine.order import Order
from trainers.estimate.counting import Counting, attention_of_gpus
from trainers.estimate.machines import Machines, seconds_by_cause
from trainers.estimate.made_up import Shape, outlined_objective
from trainers.estimate.outlines import make_fake, outline, text_of, without_weights
from trainers.estimate.step import StepCost, step_cost
from trainers.jobs.train_checks import check_slices
from trainers.rehearsal.collections import named_splits, single_sources
from trainers.rehearsal.models import published
from trainers.run_settings import RunSettings

TOKENIZE = 1 / 495e3
"""Seconds of a thread for a token."""
_LAUNCH = 14e-6  # seconds of the host for each kernel
_START_UP = 5.0  # seconds of new workers on GPUs
_NUMBER = 4  # bytes on disk of a float32
_LENGTHS = (32, 128, 512)  # tokens of texts that embedding is counted with
_ROWS = 64  # of the made-up batches that an encoder to embed with is built for
_DOCUMENT_BYTES, _QUERY_BYTES = 600, 100  # where nothing is known
_OF_MODELS = ("model", "tokenizer")  # ends of keys of inputs that have no texts

Stored = Literal["own", "other", "unseen"]
"""An artifact where a stage will write: what it would make; one of other settings or inputs, which says nothing; a
collection that counts, whatever it was made of, because its source is not at hand."""


@dataclass(frozen=True)
class Estimate:
    """Of a stage: what it makes, its seconds by cause (none: not known), bytes of a GPU at the peak (0: none).

    ``step``, ``steps``: of training.
    """

    stage: Stage[Any]
    made: Size
    causes: Mapping[str, float] = field(default_factory=dict)
    peak: float = 0
    step: StepCost | None = None
    steps: int = 0

    @property
    def seconds(self) -> float:
        """Of all causes."""
        return sum(self.causes.values())

    @property
    def bound(self) -> str:
        """The cause of the most seconds."""
        return max(self.causes, key=lambda cause: self.causes[cause], default="")


class Estimating:
    """The stages of a recipe, estimated one after another on some GPUs: ``found``, by name."""

    def __init__(self, stages: Stages, machines: Machines) -> None:
        self._stages, self._machines = stages, machines
        self.found: dict[str, Estimate] = {}
        self.stored: dict[str, Stored] = {}
        """By folder."""
        self._encoders: dict[str, EncoderCost] = {}

    def add(self, name: str) -> None:
        """The next one. Raises ``UserError`` for what can't be trained so, or known."""
        stage = self._stages[name]
        if is_artifact(stage.config.output):
            self.stored[stage.config.output] = self._stored(stage)
        ways = {"train": self._training, "embed": self._embedding, "score": self._scoring}
        try:
            read = self._read(stage)
            if self._is_static(stage):
                self.found[name] = Estimate(stage, replace(read, disk=0))
            else:
                self.found[name] = ways.get(stage.command, self._on_cores)(stage, read)
        except UserError as error:
            error.args = (f"{name}: {error}",)
            raise

    def _read(self, stage: Stage[Any]) -> Size:
        if stage.command == "collect":
            return self._own_size(stage, published_size(stage.config))
        inputs = input_paths(stage.config).items()
        return joined([self._size_at(path) for key, path in inputs if not key.endswith(_OF_MODELS)])

    def _stored(self, stage: Stage[Any]) -> Stored:
        """What its artifact is; 'own' only if its inputs count too. A source is read, no model is."""
        makers = [made_by(self._stages, path) for path in input_paths(stage.config).values()]
        if any(maker is not None and not self._counts(maker.config.output) for maker in makers):
            return "other"
        artifact, is_source = Artifact(stage.config.output), stage.command == "collect"
        try:
            is_own = artifact.config == stage.resolved() and (
                not is_source or artifact.manifest["inputs"] == stage.input_fingerprints()
            )
        except UserError:  # the source is not at hand
            if not is_source:
                return "own"
            return "other" if published_size(stage.config).documents else "unseen"
        return "own" if is_own else "other"

    def _counts(self, folder: str) -> bool:
        return self.stored.get(folder, "other") != "other"

    def _own_size(self, stage: Stage[Any], size: Size) -> Size:
        """``size``, put right by what is stored of the stage."""
        return stored_size(stage.config.output, size) if self._counts(stage.config.output) else size

    def _size_at(self, path: str) -> Size:
        maker = made_by(self._stages, path)
        known = [each.made for each in self.found.values() if each.stage is maker]
        return known[0] if known else stored_size(path, Size())

    def _is_static(self, stage: Stage[Any]) -> bool:
        """Whether its encoder is a table of vectors, which takes as long as texts are read: that isn't estimated."""
        encoder = getattr(stage.config, "encoder", None)
        if not isinstance(encoder, EncoderSettings):
            return False
        maker = made_by(self._stages, encoder.model)
        if encoder.static:
            return True
        if maker is not None:
            return self._is_static(maker)
        return Path(encoder.model).is_dir() and read_modules(Path(encoder.model)).is_static

    def _on_cores(self, stage: Stage[Any], read: Size) -> Estimate:
        cost = stage.cost(read)
        made = self._own_size(stage, cost.made)
        return Estimate(stage, made, seconds_by_cause(cost, read.disk, self._machines))

    def _training(self, stage: Stage[Any], _: Size) -> Estimate:
        config, machines = on_gpus(stage, self._machines), self._machines
        read, training = self._size_at(config.batches), config.training
        shape = shape_of(read, config)
        batches = [read.batches] * min(training.epochs, read.epochs) if read.batches else []
        order = Order(batches, training.batches_per_step, 0, machines.count, max_steps=training.max_steps)
        steps = order.total_steps or training.max_steps or 0
        accepted, per_step = config.objective.accepts_slices, training.batches_per_step
        check_slices(config.fewest_workers, machines.count, per_step, shape.rows, config.batches, accepted=accepted)
        cost = step_cost(config, shape, machines.count)
        made = replace(read, disk=_NUMBER * (cost.parameters + 3 * cost.trained * config.checkpoints_kept))
        bounds = seconds_of(cost, config, machines)
        slowest = max(bounds, key=lambda cause: bounds[cause])
        of_step = {slowest: bounds[slowest], "exchange of gradients": machines.exchange(cost.sent)}
        causes = {cause: steps * seconds for cause, seconds in of_step.items() if steps}
        return Estimate(stage, made, causes, cost.peak, cost, steps)

    def _embedding(self, stage: Stage[Any], read: Size) -> Estimate:
        config, share = stage.config, stage.config.resources.gpus_per_worker
        tokens = next(few for few in _LENGTHS if few >= min(_LENGTHS[-1], read.document_bytes / BYTES_OF_A_TOKEN))
        key = f"{config.encoder.model_dump_json()} {tokens}"
        if key not in self._encoders:
            maker = made_by(self._stages, config.encoder.model)
            self._encoders[key] = encoder_cost(config.encoder, maker, self._machines, tokens)
        encoder = self._encoders[key]
        queries = sum(map(read.queries, config.splits or [None]))
        sides = {"documents": (read.documents, read.document_bytes), "queries": (queries, read.query_bytes)}
        texts = [sides[part] for part in config.parts if config.run is None]
        disk = sum(count for count, _ in texts) * (2 * encoder.dimension + 20)
        made = replace(read, dimension=encoder.dimension, disk=disk)
        workers = max(1, round(1 / share)) if share else 1
        return Estimate(stage, made, embedding_causes(texts, encoder, self._machines, workers), encoder.peak)

    def _scoring(self, stage: Stage[Any], read: Size) -> Estimate:
        """Each of a batch's n chunks is read once, and behind each of them all n."""
        settings, chunks, machines = stage.config.language_model, read.rows, self._machines
        tokens = min(settings.max_length, round(read.document_bytes / BYTES_OF_A_TOKEN))
        made = replace(read, disk=_NUMBER * read.epochs * read.pairs * chunks)
        if not chunks or not tokens:
            return Estimate(stage, made)
        with without_weights("meta"):
            model, _ = load_language_model(outline(settings.model, settings.revision).path)
        texts = torch.ones(chunks, tokens, dtype=torch.int64)
        counting, peak = count_forward(model, input_ids=texts, use_cache=False)
        of_batch = {
            "arithmetic": counting.flops * (chunks + 1) / machines.operations(),
            "launches": 2 * chunks * counting.launches * _LAUNCH,
        }
        bound = max(of_batch, key=lambda cause: of_batch[cause])
        batches = read.epochs * read.batches / machines.count
        return Estimate(stage, made, {bound: batches * of_batch[bound]} if batches else {}, peak)


def gib(number: float) -> str:
    """Bytes, for the user."""
    return f"{number / 2**30:.1f} GiB"


def on_gpus(training_stage: Any, machines: Machines) -> Any:
    """A training's settings on such GPUs, ``bf16`` resolved. Raises ``UserError`` where it is on and they lack it."""
    config = training_stage.asked
    bf16 = bool(machines.peak) if config.training.bf16 == "auto" else config.training.bf16
    if bf16 and not machines.peak:
        raise UserError(
            f"training.bf16 is on, and a {machines.name} has no bfloat16 instructions. Set training.bf16=false."
        )
    training = config.training.model_copy(update={"bf16": bf16})
    resources = config.resources.model_copy(update={"workers": machines.count, "gpus_per_worker": 1})
    objective = config.objective
    if objective.chunk_size is None and objective.chunk_tokens is None:  # the default of GPUs
        objective = objective.model_copy(update={"chunk_tokens": CHUNK_TOKENS_ON_GPU})
    return config.model_copy(update={"training": training, "resources": resources, "objective": objective})


def seconds_of(cost: StepCost, config: Any, machines: Machines) -> dict[str, float]:
    """Of a step, by what happens at once: arithmetic on the GPU, launches by the host, tokenizing by its threads."""
    return {
        "arithmetic": cost.flops / machines.operations(bf16=config.training.bf16),
        "launches": cost.launches * _LAUNCH,
        "tokenizing": cost.tokens * TOKENIZE / TOKENIZING_THREADS,
    }


def shape_of(size: Size, config: RunSettings) -> Shape:
    """Of the batches that are trained on, with texts as assumed where nothing is known of them."""
    if not size.rows:
        raise UserError(
            f"The size of the batches in {config.batches} is unknown, because no stage of the recipe makes them and"
            " they don't exist. Make them first, or estimate the recipe that makes them."
        )
    query_bytes, document_bytes = size.query_bytes or _QUERY_BYTES, size.document_bytes or _DOCUMENT_BYTES
    negatives = max(size.negatives, int(config.objective.needs_hard_negatives))
    lengths = query_bytes / BYTES_OF_A_TOKEN, document_bytes / BYTES_OF_A_TOKEN
    return Shape(size.rows, *lengths, negatives, size.candidates)


@dataclass(frozen=True)
class EncoderCost:
    """An encoder on a GPU: seconds that it computes a token, numbers of a vector, bytes at the peak."""

    of_token: float
    dimension: int
    peak: float = 0


def embedding_causes(
    texts: Sequence[tuple[int, float]], encoder: EncoderCost, machines: Machines, workers: int = 1
) -> dict[str, float]:
    """Seconds by cause. ``texts``: how many, bytes of one; ``workers``: of a GPU.

    Two threads tokenize for a worker while it computes, where it has as many cores.
    """
    slots, size = machines.count * workers, sum(count * each for count, each in texts)
    computing, tokenizing = encoder.of_token * workers, TOKENIZE / min(TOKENIZING_THREADS, machines.slots / slots)
    files = sum(min(MOST_SHARDS, ceil(count / ON_GPU["texts_per_shard"])) for count, _ in texts)
    made = Size(disk=size + 2 * encoder.dimension * sum(count for count, _ in texts))  # each node reads its share
    cost = Cost(made, max(computing, tokenizing) * size / BYTES_OF_A_TOKEN, files, alone=_START_UP)
    return seconds_by_cause(cost, 0, machines, slots, "GPUs" if computing >= tokenizing else "tokenizing")


@torch.no_grad()
def encoder_cost(
    settings: EncoderSettings, maker: Stage[Any] | None, machines: Machines, tokens: int = 128
) -> EncoderCost:
    """Of a forward pass over texts of so many tokens by the encoder of ``settings``, or what ``maker`` trains."""
    if maker is not None and isinstance(maker.config, RunSettings):
        run = maker.config.model_copy(update={"lora": None, "sharding": "replicated"})
        encoder = outlined_objective(run, Shape(_ROWS), "meta").encoder("document")
    else:
        located = outline(settings.model, settings.revision)
        own = settings.model_copy(update={"tokenizer": None})
        with without_weights("meta"):
            encoder = load_towers(own, located.path, located.fingerprint).document
    if isinstance(encoder, ContextualEncoder):
        encoder.use_context(torch.zeros(encoder.contextual_form.vectors, encoder.width), "made up")
    texts = [text_of(tokens, number) for number in range(ON_GPU["token_budget"] // tokens)]
    features = encoder.eval().tokenize(texts, "document")
    counting, peak = count_forward(encoder, features)
    seconds = max(counting.flops / machines.operations(), counting.launches * _LAUNCH)
    return EncoderCost(seconds / float(features["attention_mask"].sum()), encoder.dimension, peak)


@torch.no_grad()
def count_forward(model: nn.Module, *inputs: Any, **named: Any) -> tuple[Counting, float]:
    """What a forward pass in bfloat16 takes, and its bytes at the peak, weights being stored in 16 bits."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    make_fake(model, fake)
    counting = Counting(fake)
    for parameter in model.parameters():
        counting.hold(parameter)
    weights = counting.alive
    with counting, attention_of_gpus(), torch.autocast("cpu", torch.bfloat16):
        model.eval()(*inputs, **named)
    return counting, counting.peak - weights / 2


_OF_COLUMNS: tuple[tuple[str, str, Any], ...] = (
    ("query_bytes", "query", pc.binary_length),
    ("document_bytes", "document", pc.binary_length),
    ("negatives", "hard_negatives", pc.list_value_length),
    ("candidates", "candidate_rows", pc.list_value_length),
)


def joined(read: Sequence[Size]) -> Size:
    """What is known of all inputs; the largest where several say it."""
    names = [field.name for field in fields(Size) if field.name not in ("splits", "disk")]
    found: dict[str, Any] = {name: max(getattr(size, name) for size in [Size(), *read]) for name in names}
    splits = {split: of for size in read for split, of in size.splits.items()}
    return Size(**found, splits=splits, disk=sum(size.disk for size in read))


def published_size(config: Any) -> Size:
    """Of the sources of a collection."""
    sizes = []
    for source in single_sources(config.source):
        name = str(getattr(source, "path", "")).removeprefix("hf://datasets/").partition("@")[0]
        known = published()["collections"].get(name)
        if known is None:
            continue
        named = named_splits(source)
        splits = {split: (of[0], of[-1]) for split, of in known["splits"].items() if not named or split in named}
        lengths = known["document_words"] * BYTES_OF_A_WORD, known["query_words"] * BYTES_OF_A_WORD
        sizes.append(Size(known["documents"], *lengths, splits, domains=tuple(known.get("domains", ()))))
    together = dict[str, tuple[int, int]]()
    for size in sizes:
        for split, (asked, pairs) in size.splits.items():
            earlier = together.get(split, (0, 0))
            together[split] = earlier[0] + asked, earlier[1] + pairs
    documents, queries = sum(size.documents for size in sizes), sum(size.queries() for size in sizes)
    found = Size(
        documents,
        sum(size.documents * size.document_bytes for size in sizes) / max(1, documents),
        sum(size.queries() * size.query_bytes for size in sizes) / max(1, queries),
        together,
        domains=tuple(domain for size in sizes for domain in size.domains),
    )
    return replace(found, disk=found.texts)


def stored_size(uri: str, size: Size) -> Size:
    """``size``, put right by what is stored at ``uri``, if anything is."""
    if not is_artifact(uri):
        return size
    artifact = Artifact(uri)
    if artifact.kind == COLLECTION:
        size = _of_collection(StoredCollection(uri))
    if artifact.kind == PAIRS:
        size = replace(size, pairs=artifact.rows, domains=(artifact.rows,))
    if artifact.kind == BATCHES:
        size = _of_batches(size, BatchReader(uri))
    return replace(size, disk=artifact.bytes)


def _of_collection(collection: StoredCollection) -> Size:
    queries, judged = collection.count("queries"), dict[str, tuple[int, int]]()
    for table in collection.rows_of("judgments").tables(["split", "query_id"]):
        counts = table.group_by("split").aggregate([("query_id", "count_distinct"), ("query_id", "count")])
        for of in counts.to_pylist():  # a query's judgments stand together, or nearly
            asked, pairs = judged.get(of["split"], (0, 0))
            judged[of["split"]] = min(queries, asked + of["query_id_count_distinct"]), pairs + of["query_id_count"]
    lengths = _bytes_of_a_text(collection, "documents"), _bytes_of_a_text(collection, "queries")
    return Size(collection.count("documents"), *lengths, splits=judged or {"all": (queries, 0)})


def _bytes_of_a_text(collection: StoredCollection, part: TextPart) -> float:
    """On average, of the first rows; 0 where there are none."""
    for table in collection.rows_of(part).tables(["text"]):
        return float(pc.mean(pc.binary_length(table["text"])).as_py())
    return 0


def _of_batches(size: Size, batches: BatchReader) -> Size:
    """Texts are as long as the first batch's."""
    rows, count, table = batches.batch_size, batches.number_of_batches(0), batches.read(0, 0)
    found: dict[str, Any] = {"rows": rows, "batches": count, "epochs": batches.epochs, "pairs": count * rows}
    for name, column, length in _OF_COLUMNS:
        if column in table.column_names:
            found[name] = round(pc.mean(length(table[column])).as_py())
    return replace(size, **found)
