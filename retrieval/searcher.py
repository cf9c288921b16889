"""Questions to a finished run: its best index, the encoder behind it and its documents, in this process, without Ray.

from raytriever import Searcher

for passages in Searcher("runs/quickstart").search(["make a folder"], k=3):
    print(*passages, sep="\\n")
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from raytriever.artifacts.artifact import MANIFEST, Artifact, require_same_origin
from raytriever.artifacts.storage import Folder
from raytriever.command_line import echo
from raytriever.errors import UserError, require_strings
from raytriever.reports.log import log
from raytriever.reports.table import shortened
from retrieval.collections.collection import COLLECTION, StoredCollection
from retrieval.encoders.pretrained import PACKAGED_MODELS, installed_model, locate_model, locate_named
from retrieval.encoders.specification import EncoderContract, EncoderSettings
from retrieval.jobs.fuse import FuseConfig
from retrieval.jobs.index import INDEX

if TYPE_CHECKING:
    from retrieval.indexes.top_k import Ranking

Search = Callable[[Sequence[str], int], "list[Ranking]"]  # the best of each shard
_DEPTH: int = FuseConfig.model_fields["depth"].default


@dataclass(frozen=True)
class Passage:
    """A document that was found, and its score: the index's, of fused ones the sum of reciprocal ranks."""

    id: str
    score: float
    title: str
    text: str


class Searcher:
    """Searches the indexes of a run. What it opens stays open, shards as memory maps. Threads may share it.

    ``run``: a folder or URI with the artifacts of a recipe. ``indexes``: names of its stages. Several are fused by
    reciprocal rank (Cormack et al. 2009). By default it is an index of vectors by a model of the run, else of other
    vectors, else of words; of several of a kind an exact one (Flat), then the last by name. An index is searched with
    the ``search_parameters`` of the run's own search of it; ``self.indexes`` has the names. ``encoder``: the model
    behind the vectors, if it is neither in the run nor in an installed package. Raises ``UserError`` where something
    isn't found.
    """

    def __init__(self, run: str | Path, indexes: Sequence[str] = (), encoder: str | Path | None = None) -> None:
        folder, end = Folder(run), f"/{MANIFEST}"
        stages = [name.removesuffix(end) for name in folder.files() if name.endswith(end)]
        found = {name: Artifact(folder.describe(name)) for name in stages}
        self._by_fingerprint = {artifact.fingerprint: artifact for artifact in found.values()}
        self._encoder = None if encoder is None else str(encoder)
        known = {name: artifact for name, artifact in found.items() if artifact.kind == INDEX}
        if not known:
            raise UserError(
                f"There is no index below {run}. Run its recipe to the end, or name the folder of a run with an index."
            )
        indexes = require_strings("indexes", indexes)
        for name in indexes:
            if name not in known:
                raise UserError(f"{run} has no index {name!r}. Those there: {', '.join(sorted(known))}.")
        names = indexes or [max(known, key=lambda name: (self._rank(known[name]), name))]
        collection = self._by_fingerprint.get(require_same_origin(COLLECTION, *(known[name] for name in names)))
        if collection is None:
            raise UserError(
                f"The collection behind {known[names[0]].uri} is not in {run}, so no text can be shown. If its"
                " documents were made again, run the recipe to its end."
            )
        self._documents = StoredCollection(collection.uri).rows_of("documents")
        self._reading = threading.Lock()  # threads that read one parquet file at once crash
        self.indexes = tuple(names)
        self._searches = [self._open(known[name]) for name in names]

    def search(self, questions: Sequence[str], k: int = 10) -> list[list[Passage]]:
        """The ``k`` best passages of each question, the best first.

        Raises ``UserError`` where the questions are no list of strings, or one of them is blank.
        """
        from retrieval.indexes.top_k import merge_rankings, reciprocal_rank_fusion

        # half of a character, as a cut emoji leaves it, is no text of any tokenizer
        questions = [text.encode("utf-8", "replace").decode() for text in require_strings("questions", questions)]
        for place, question in enumerate(questions):
            if not question.strip():
                raise UserError(f"questions[{place}] is {question!r:.60}. Ask with one word at least.")
        if not isinstance(k, int | np.integer) or k < 1:
            raise UserError(f"k is {k!r:.60}. It must be a whole number above 0.")
        k = min(int(k), len(self._documents))  # FAISS takes no number of NumPy's
        fused = len(self._searches) > 1
        depth = max(k, _DEPTH) if fused else k
        rankings = [merge_rankings(search(questions, depth), depth) for search in self._searches]
        ranking = reciprocal_rank_fusion(rankings, depth=depth) if fused else rankings[0]
        return [
            list(self._passages(rows[rows >= 0], scores))
            for rows, scores in zip(ranking.rows[:, :k], ranking.scores[:, :k], strict=True)
        ]

    def _passages(self, rows: Any, scores: Any) -> Iterator[Passage]:
        with self._reading:
            table = self._documents.take(rows, ["id", "title", "text"])
        for row, score in zip(table.to_pylist(), scores.tolist(), strict=False):
            yield Passage(score=score, **row)

    def _rank(self, index: Artifact) -> tuple[bool, bool, bool, bool]:
        """Whether an encoder made the vectors behind it, the run has that, it is of words, it is exact."""
        vectors = self._made_of(index, "index.vectors")
        made = bool(vectors and "encoder.model" in vectors.manifest["inputs"])
        own = bool(vectors and self._made_of(vectors, "encoder.model"))
        return made, own, not vectors, index.config["index"].get("factory") == "Flat"

    def _made_of(self, artifact: Artifact, name: str) -> Artifact | None:
        return self._by_fingerprint.get(artifact.manifest["inputs"].get(name, ""))

    def _search_parameters(self, index: Artifact) -> str:
        """Those of the run's search of this index, of the last one by name; empty where it has none."""
        searches = [
            found
            for found in self._by_fingerprint.values()
            if found.manifest["inputs"].get("index") == index.fingerprint
        ]
        return str(max(searches, key=lambda search: search.uri).config["search_parameters"]) if searches else ""

    def _open(self, index: Artifact) -> Search:
        if index.config["index"]["kind"] == "lexical":
            return _search_words(index)
        vectors = self._made_of(index, "index.vectors")
        if vectors is None:
            raise UserError(f"The vectors behind {index.uri} are not in its run, so the question's encoder is unknown.")
        if "encoder" not in vectors.config:
            raise UserError(
                f"{vectors.uri} was imported, so no encoder reads questions for it. If the run has an index of words,"
                " ask that one: indexes=… in Python, --index in the command."
            )
        own = self._made_of(vectors, "encoder.model")
        name = self._encoder or (own.uri if own else _packaged(vectors.manifest["inputs"]["encoder.model"]))
        if name is None:
            raise UserError(
                f"Neither the run nor a package holds the encoder behind {vectors.uri}. Name its folder or hub name:"
                " encoder=… in Python, --encoder in the command."
            )
        # a kernel of GPUs is not needed for a question
        encoder = EncoderSettings.model_validate({**vectors.config["encoder"], "model": name, "attention": "auto"})
        return _search_vectors(index, encoder, self._search_parameters(index))


def _packaged(fingerprint: str) -> str | None:
    """The name of the model with this fingerprint in an installed package."""
    installed = (name for name, packaged in PACKAGED_MODELS.items() if installed_model(packaged))
    return next((name for name in installed if locate_model(name).fingerprint == fingerprint), None)


def _search_words(index: Artifact) -> Search:
    from retrieval.lexical import LexicalIndex

    shards = [(LexicalIndex.load(index, shard), shard.facts["first_row"]) for shard in index.shards]
    return lambda questions, k: [shard.search(questions, k, first) for shard, first in shards]


def _search_vectors(index: Artifact, settings: EncoderSettings, search_parameters: str) -> Search:
    """Searches with the questions' encoder, which may have another precision than that of the documents."""
    import torch

    from retrieval.embedding import encode_texts
    from retrieval.encoders.contextual.contexts import CorpusContext, set_context
    from retrieval.encoders.structure import place_module
    from retrieval.encoders.towers import load_towers
    from retrieval.indexes.vector_index import read_index, search_shard, set_search_parameters

    located = locate_named(settings)
    towers = load_towers(settings, located.path, located.fingerprint).eval()
    place_module(towers, "cpu", torch.float32)
    facts = index.manifest["facts"]
    contract = EncoderContract.model_validate(facts["encoder"])
    has_context = contract.context not in (None, "none", "null")
    set_context(towers.query, CorpusContext.of(index.uri) if has_context else None, contract.context)
    contract.require_queries(towers.contract.model_copy(update={"dtype": contract.dtype}), index.uri, str(located.path))
    many = facts["vectors_per_document"]
    shards = [
        (read_index(index.path(f"shards/{shard.name}.faiss")), shard.facts["first_row"]) for shard in index.shards
    ]
    for shard, _ in shards if search_parameters else []:
        set_search_parameters(shard, search_parameters)

    def search(questions: Sequence[str], k: int) -> "list[Ranking]":
        vectors = encode_texts(towers.of("query"), questions, "query").astype(np.float16)  # as a run's are stored
        return [search_shard(shard, vectors, k, first, vectors_per_document=many) for shard, first in shards]

    return search


def ask(
    run: Annotated[str, typer.Argument(help="Folder of a finished run.")],
    question: Annotated[
        str | None, typer.Argument(help="The question. By default each line of the input is one.")
    ] = None,
    k: Annotated[int, typer.Option("--top", min=1, help="Passages.")] = 5,
    indexes: Annotated[
        list[str] | None, typer.Option("--index", help="Indexes of the run to search. Several are fused.")
    ] = None,
    encoder: Annotated[str | None, typer.Option(help="The model, if the run doesn't hold it.")] = None,
) -> None:
    """Prints the passages of a finished run that answer a question best."""
    searcher = Searcher(run, indexes or (), encoder)
    log.info(f"searched: {', '.join(searcher.indexes)}")
    for asked in _lines_of_input() if question is None else [question]:
        (passages,) = searcher.search([asked], k)
        for number, passage in enumerate(passages, 1):
            text = shortened(f"{passage.title} {passage.text}", 300)
            echo(f"{number}  {passage.score:.4f}  {passage.id}\n     {text}")
        if not passages:
            echo("Nothing was found.")
        if question is None:
            echo("")


def _lines_of_input() -> Iterator[str]:
    """Each line of the input that is not empty, until its end."""
    prompt = "question: " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line
