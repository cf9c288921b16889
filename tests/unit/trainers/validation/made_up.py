"""A small collection with splits, and an objective around a real encoder, for the tests of validation."""

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.errors import UserError
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from tests.unit.small_run import make
from trainers.objective import Comparisons, Objective, Outcome

WORDS = ["import", "return", "class", "yield", "lambda", "with", "open", "file", "the", "an", "of", "index", "value"]
DOCUMENTS, QUERIES = 90, 12


def random_words(generator: np.random.Generator, most: int = 30) -> str:
    return " ".join(generator.choice(WORDS, size=generator.integers(1, most)))


def write_source(folder: Path, seed: int = 0, documents: int = DOCUMENTS, **splits: Mapping[str, Mapping[str, int]]):
    """A BEIR folder; by default half of the queries are judged by dev: two positives each, one judged 0."""
    generator = np.random.default_rng(seed)
    texts = [random_words(generator) for _ in range(documents)]
    texts[7] = texts[3]  # one text in two documents
    queries = [random_words(generator, 6) for _ in range(QUERIES)]
    if not splits:
        half = QUERIES // 2
        judged = [
            {f"q{q}": {f"d{d}": int(n < 2) for n, d in enumerate(generator.choice(documents, 3, replace=False))}}
            for q in range(QUERIES)
        ]
        splits = {
            "dev": {q: g for each in judged[:half] for q, g in each.items()},
            "train": {q: g for each in judged[half:] for q, g in each.items()},
        }
    (folder / "qrels").mkdir(parents=True)
    for name, values in (("corpus", texts), ("queries", queries)):
        records = [{"_id": f"{name[0].replace('c', 'd')}{n}", "text": text} for n, text in enumerate(values)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for split, qrels in splits.items():
        lines = [f"{q}\t{d}\t{grade}\n" for q, grades in qrels.items() for d, grade in grades.items()]
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return folder


def collect(source: Path, output: Path) -> str:
    """The collection artifact of a BEIR folder."""
    return make(Collect(CollectConfig(source=BeirFolder(path=str(source)), output=str(output))))


def make_collection(folder: Path, **settings: Any) -> str:
    return collect(write_source(folder / "source", **settings), folder / "collection")


def encoder_settings(model: Path | str, **changes: Any) -> EncoderSettings:
    values = {"pooling": "mean", "query_prompt": "query: ", "normalize": True, "dtype": "float32"}
    return EncoderSettings(model=str(model), **(values | changes))


def spread(model: Path, folder: Path) -> Path:
    """The model with weights eight times as large, so that texts are far from one another, not nearly equal."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    larger = {name: value * 8 if value.ndim == 2 else value for name, value in weights.items()}
    save_file(larger, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(settings: EncoderSettings) -> TextEncoder:
    located = locate_model(settings.model)
    return load_encoder(settings, located.path, located.fingerprint)


class PairObjective(Objective[dict[str, Any]]):
    """Cross entropy over the batch's documents, a metric, and draws from every generator.

    ``encoded``: the token ids of all texts that went through the encoder. ``refused`` names the first query of
    a batch that can't be collated.
    """

    columns = ("query", "document")

    def __init__(self, encoder: TextEncoder, refused: str | None = None) -> None:
        super().__init__()
        self.text_encoder = encoder
        self.refused = refused
        self.frozen = torch.nn.Dropout(0.5).eval()  # stays in evaluation mode in training, too
        self.encoded: list[tuple[int, ...]] = []
        self.draws: list[float] = []
        encoder.transformer.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: torch.nn.Module, _: tuple[Any, ...], features: dict[str, Tensor]) -> None:
        assert not module.training
        ids, mask = features["input_ids"], features["attention_mask"]
        read = torch.ones_like(ids) if mask is None else mask.view(ids.shape)
        self.encoded += [tuple(row[: int(n)].tolist()) for row, n in zip(ids, read.sum(dim=1), strict=True)]

    def collate(self, rows: pa.Table) -> dict[str, Any]:
        queries: Sequence[str] = rows["query"].to_pylist()
        if queries[0] == self.refused:
            raise UserError("Row 0 is refused.")
        return {
            "query": self.text_encoder.tokenize(queries, "query"),
            "document": self.text_encoder.tokenize(rows["document"].to_pylist(), "document"),
        }

    def forward(self, batch: dict[str, Any]) -> Outcome:
        assert self.batch_group is None
        queries, documents = self.text_encoder(batch["query"]), self.text_encoder(batch["document"])
        self.draws.append(float(torch.rand(())) + float(np.random.random()) + random.random())
        scores: Tensor = queries @ documents.T
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
        rank = 1 + (scores > scores.diagonal()[:, None]).sum(dim=1)
        return Outcome(loss, {"positive_rank": rank.float().mean(), "draw": torch.tensor(self.draws[-1])}, len(scores))

    def comparisons(self, rows: pa.Table) -> Comparisons:
        raise NotImplementedError

    def encoder(self, role: str) -> Any:  # noqa: ARG002
        return self.text_encoder

    def export(self, folder: Path) -> None:
        raise NotImplementedError


def seed_generators() -> None:
    """Those of torch, NumPy and Python, which an evaluation may not use up."""
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)


def draw_from_generators() -> list[list[float]]:
    """The next numbers of each."""
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]]


class MadeUpBatches:
    """Stored batches of pairs, made up on reading."""

    uri, fingerprint = "made/up", "f" * 64

    def __init__(self, count: int = 5, size: int = 4) -> None:
        self.count, self.size = count, size

    def number_of_batches(self, epoch: int) -> int:
        return self.count if epoch == 0 else 0

    def read(self, epoch: int, index: int) -> pa.Table:
        generator = np.random.default_rng([epoch, index])
        return pa.table({name: [random_words(generator) for _ in range(self.size)] for name in ("query", "document")})

    def stored_bytes(self, epoch: int, index: int) -> int:
        return self.read(epoch, index).nbytes
