"""Our stages as a model of MTEB 2: its corpora and queries become artifacts, our indexes answer.

    search = RaytrieverSearch("runs/mteb", embed={"encoder": {"model": "sentence-transformers/all-MiniLM-L6-v2"}})
    mteb.evaluate(search, mteb.get_tasks(["NFCorpus"]))

Prompts are the encoder's own, as ``mteb_encoder`` says.
"""

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.formats.dataset_rows import DatasetRows, given_id, stored_id
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import validate, without_inputs
from raytriever.stages.ray_session import RaySession
from raytriever.stages.stage import Stage, run_stage
from retrieval.collections.collection import TextPart
from retrieval.encoders.contextual.folder import is_contextual
from retrieval.encoders.pretrained import locate_named
from retrieval.encoders.specification import EncoderSettings
from retrieval.indexes.top_k import Ranking
from retrieval.jobs.context import Context
from retrieval.jobs.embed import Embed
from retrieval.jobs.index import Index
from retrieval.jobs.search import Search
from retrieval.jobs.store_rows import StoreRows, StoreRowsConfig
from retrieval.mteb_encoder import (
    described_model,
    import_mteb,
    load_described,
    model_meta,
    refuse_precision,
    result_name,
)
from retrieval.rankings import StoredRun
from retrieval.rerank import rerank
from retrieval.vectors import StoredVectors

if TYPE_CHECKING:
    from datasets import Dataset
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models import ModelMeta

Scores = dict[str, dict[str, float]]

_VECTORS: dict[str, Any] = {"index": {"kind": "vectors"}}
# what MTEB's task settles
_SETTLED = {
    "embed": ("collection", "parts", "context", "output"),
    "context": ("collection", "encoder", "output"),
    "index": ("output",),
    "index.index": ("vectors", "collection"),
    "search": ("index", "collection", "queries", "vectors", "split", "top_k", "output"),
}


class RaytrieverSearch:
    """A retriever as MTEB's ``SearchProtocol`` wants it: collect, embed, index and search, each an artifact.

    ``embed``, ``index``, ``search``, ``context``: what stands under these jobs in a recipe, less what MTEB's task
    settles; without ``embed`` where ``index`` is of kind lexical. A contextual encoder's context is fitted to each
    corpus, with titles where ``embed`` has them. ``folder``: holds ``<task>/<subset>/<split>/`` with ``documents``,
    ``document_vectors``, ``index``, ``queries``, ``query_vectors`` and ``run``; what is there and was made in the same
    way is reused, another is replaced. ``name``: under which MTEB files the results, ``organization/model``.
    ``session``: a Ray of the caller's; None: one is started when needed, and stays for as long as the process.

    Raises ``UserError`` for settings that are none, or don't go together.
    """

    def __init__(
        self,
        folder: str,
        *,
        embed: Mapping[str, Any] | None = None,
        index: Mapping[str, Any] = _VECTORS,
        search: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
        name: str | None = None,
        session: RaySession | None = None,
    ) -> None:
        import_mteb()
        self._folder = folder.rstrip("/")
        given = {"embed": embed, "index": index, "search": search, "context": context}
        self._settings = {job: dict(settings or {}) for job, settings in given.items()}
        self._session = session or RaySession()
        self._name = name
        self._indexed = ""
        for job, settings in (*self._settings.items(), ("index.index", index.get("index") or {})):
            settled = [key for key in _SETTLED[job] if key in settings]
            if settled:
                raise UserError(f"{job}: '{settled[0]}' follows from MTEB's task; leave it out.")
        self._lexical = self._index("").config.index.kind == "lexical"
        if self._lexical and embed is not None:
            raise UserError("An index of kind lexical takes texts: leave 'embed' out.")
        if not self._lexical:
            self._embed("", "documents")
        if context is not None:
            self._check_context()
        self._search("", 1)

    @cached_property
    def mteb_model_meta(self) -> "ModelMeta":
        """What MTEB wants to know: the encoder as it is embedded with, and the index, all settings included."""
        index = without_inputs(self._index("").config.index)
        if self._lexical:
            return described_model(
                self._name or "raytriever/bm25",
                f"bm25s-{version('bm25s')}",
                index,
                n_parameters=0,
                model_type=["sparse"],
                use_instructions=False,
            )
        embed, search = self._embed("", "documents").config, self._search("", 1).config
        experiment = {"with_title": embed.with_title, "index": index, "search_parameters": search.search_parameters}
        if self._reads_context:
            experiment["context"] = self._settings["context"]
        if embed.without_context is not None:
            experiment["without_context"] = embed.without_context
        name = self._name or result_name(embed.encoder.model)
        return model_meta(load_described(embed.encoder), name, experiment)

    def index(
        self,
        corpus: "Dataset",
        *,
        task_metadata: "TaskMetadata",
        hf_split: str,
        hf_subset: str,
        encode_kwargs: Mapping[str, Any],
        num_proc: int | None = None,  # noqa: ARG002
        **further: Any,  # noqa: ARG002
    ) -> None:
        """Stores and embeds the corpus; the index waits for ``search``, as re-ranking needs none."""
        refuse_precision(encode_kwargs)
        place = self._place(task_metadata, hf_split, hf_subset)
        self._store(corpus, "documents", place)
        if not self._lexical:
            if self._reads_context:
                self._run(self._context(place))
            self._run(self._embed(place, "documents"))
        self._indexed = place

    def search(
        self,
        queries: "Dataset",
        *,
        task_metadata: "TaskMetadata",
        hf_split: str,
        hf_subset: str,
        top_k: int,
        encode_kwargs: Mapping[str, Any],
        top_ranked: Mapping[str, list[str]] | None = None,
        num_proc: int | None = None,  # noqa: ARG002
        **further: Any,  # noqa: ARG002
    ) -> Scores:
        """The ``top_k`` best documents of each query and their scores; of ``top_ranked``, where these are given."""
        refuse_precision(encode_kwargs)
        place = self._place(task_metadata, hf_split, hf_subset)
        if place != self._indexed:
            raise UserError(f"index() was last called for {self._indexed or 'nothing'}; call it for {place} first.")
        self._store(_query_texts(queries, task_metadata), "queries", place)
        if not self._lexical:
            self._run(self._embed(place, "queries"))
        if top_ranked is not None:
            return self._rank_anew(place, top_ranked, top_k)
        self._run(self._index(place))
        run = StoredRun(self._run(self._search(place, top_k)).uri)
        return scores_by_id(run.ranking(), run.query_ids(), run.document_ids())

    def _place(self, task: "TaskMetadata", split: str, subset: str) -> str:
        return "/".join([self._folder, *(quote(part, safe="") for part in (task.name, subset, split))])

    def _store(self, dataset: "Dataset", part: TextPart, place: str) -> None:
        output = f"{place}/{part}"
        self._run(StoreRows(StoreRowsConfig(output=output), DatasetRows(dataset, part, f"The {part} of {place}")))

    def _embed(self, place: str, part: TextPart) -> Stage[Any]:
        output = f"{place}/{'document' if part == 'documents' else 'query'}_vectors"
        context = {"context": f"{place}/context"} if place and self._reads_context else {}
        return self._stage(Embed, {"collection": f"{place}/{part}", "parts": (part,), "output": output, **context})

    def _context(self, place: str) -> Stage[Any]:
        encoder = self._settings["embed"].get("encoder")
        settled = {"collection": f"{place}/documents", "encoder": encoder, "output": f"{place}/context"}
        as_embedded = {"with_title": self._embed("", "documents").config.with_title}
        return self._stage(Context, as_embedded | self._settings["context"] | settled)

    def _check_context(self) -> None:
        if self._lexical:
            raise UserError("An index of kind lexical takes texts, and BM25 reads no context: leave 'context' out.")
        if not self._reads_context:
            embed = self._embed("", "documents").config
            why = f"encoder {embed.encoder.model} reads none"
            if embed.without_context is not None:
                why = f"embed.without_context is {embed.without_context!r}"
            raise UserError(f"'context' says how a context is fitted, but {why}: leave 'context' out.")
        self._context("")

    @cached_property
    def _reads_context(self) -> bool:
        settings = self._settings["embed"]
        if settings.get("without_context") is not None or "encoder" not in settings:
            return False
        encoder = validate(EncoderSettings, settings["encoder"], "RaytrieverSearch, embed.encoder")
        return is_contextual(locate_named(encoder).path)

    def _index(self, place: str) -> Stage[Any]:
        given = self._settings["index"].get("index")
        if not isinstance(given, Mapping):
            raise UserError(f"index.index is {given!r}; give a mapping, {{'kind': 'vectors', 'factory': 'Flat'}} say.")
        lexical = given.get("kind") == "lexical"
        source = {"collection": f"{place}/documents"} if lexical else {"vectors": f"{place}/document_vectors"}
        return self._stage(Index, {"index": {**given, **source}, "output": f"{place}/index"})

    def _search(self, place: str, top_k: int) -> Stage[Any]:
        settled = {"index": f"{place}/index", "collection": f"{place}/documents", "queries": f"{place}/queries"}
        vectors = None if self._lexical else f"{place}/query_vectors"
        of_task = {"vectors": vectors, "split": None, "top_k": top_k, "output": f"{place}/run"}
        return self._stage(Search, settled | of_task)

    def _stage(self, kind: type[Stage[Any]], settled: Mapping[str, Any]) -> Stage[Any]:
        settings = {**self._settings[kind.command], **settled}
        return kind(validate(kind.config_class, settings, f"RaytrieverSearch, {kind.command}"))

    def _run(self, stage: Stage[Any]) -> Artifact:
        label = stage.config.output.removeprefix(f"{self._folder}/")
        return run_stage(stage, self._session, replace=True, label=label)

    def _rank_anew(self, place: str, top_ranked: Mapping[str, list[str]], top_k: int) -> Scores:
        if self._lexical:
            raise UserError("BM25 ranks whole corpora; for a re-ranking task, give 'embed' and an index of vectors.")
        stored, asked = StoredVectors(f"{place}/document_vectors"), StoredVectors(f"{place}/query_vectors")
        stored.contract.require_queries(asked.contract, stored.uri, asked.uri)
        documents, queries = stored.part("documents"), asked.part("queries")
        query_ids, document_ids = queries.ids().to_pylist(), documents.ids()
        rows = candidate_rows([top_ranked.get(given_id(query), []) for query in query_ids], document_ids, place)
        candidates = Ranking(rows, np.zeros(rows.shape, dtype=np.float32))
        ranked = rerank(candidates, queries.range(0, len(queries)), documents.gather, min(top_k, rows.shape[1]))
        return scores_by_id(ranked, query_ids, document_ids)


def candidate_rows(lists: list[list[str]], document_ids: pa.StringArray, where: str) -> NDArray[np.int64]:
    """Row numbers (queries, longest list) of the listed documents, -1 behind the end of a list.

    ``lists``: ids as MTEB has them; ``document_ids``: as they are stored. Raises ``UserError`` naming a
    document that is not there.
    """
    lengths = np.array([len(ids) for ids in lists])
    listed = pa.array(map(stored_id, chain.from_iterable(lists)), document_ids.type)
    found = pc.index_in(listed, value_set=document_ids)
    if found.null_count:
        unknown = given_id(listed[found.is_null().index(True).as_py()].as_py())
        raise UserError(f"{where}: the candidates name document {unknown!r}, which the corpus doesn't hold.")
    rows = np.full((len(lists), max(1, lengths.max(initial=0))), -1, dtype=np.int64)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = found.to_numpy(zero_copy_only=False)
    return rows


def scores_by_id(ranking: Ranking, query_ids: list[str], document_ids: pa.StringArray) -> Scores:
    """Query id to document id to score, best first; a query without a result has an empty mapping.

    Ids are given as they are stored, and returned as MTEB has them.
    """
    scores: Scores = {}
    for query, rows, found in zip(query_ids, ranking.rows, ranking.scores, strict=True):
        kept = rows >= 0
        documents = map(given_id, document_ids.take(pa.array(rows[kept])).to_pylist())
        scores[given_id(query)] = dict(zip(documents, found[kept].tolist(), strict=True))
    return scores


def _query_texts(queries: "Dataset", task_metadata: "TaskMetadata") -> "Dataset":
    """Ids and texts as MTEB gives them to its models: an instruction behind its query, a conversation in one text."""
    from datasets import Dataset
    from mteb._create_dataloaders import create_dataloader  # by which MTEB's own search reads them; no public name
    from mteb.types import PromptType

    batches = create_dataloader(queries, task_metadata=task_metadata, prompt_type=PromptType.query)
    return Dataset.from_dict({"id": queries["id"], "text": [text for batch in batches for text in batch["text"]]})
