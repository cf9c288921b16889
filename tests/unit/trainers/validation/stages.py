"""The stages that measure an exported encoder, in this process: what validation's numbers are compared with."""

from pathlib import Path
from typing import Any

from raytriever.artifacts.artifact import Artifact
from retrieval.encoders.specification import EncoderSettings
from retrieval.jobs.embed import Embed, EmbedConfig
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from retrieval.jobs.index import Index, IndexConfig, LexicalIndexSettings, VectorIndexSettings
from retrieval.jobs.rerank import Rerank, RerankConfig
from retrieval.jobs.search import Search, SearchConfig
from tests.unit.small_run import make


def embedded(collection: str, encoder: EncoderSettings, folder: Path, **settings: Any) -> str:
    stage = Embed(EmbedConfig(collection=collection, encoder=encoder, output=str(folder / "vectors"), **settings))
    stage.load()
    return make(stage)


def indexed(vectors: str, folder: Path, **settings: Any) -> str:
    index = VectorIndexSettings(vectors=vectors, **settings)
    return make(Index(IndexConfig(index=index, output=str(folder / "index"))))


def searched(collection: str, vectors: str, folder: Path, split: str, index: str | None = None, **settings: Any) -> str:
    """In ``index``, by default in one of ``vectors`` that is made."""
    index = index or indexed(vectors, folder, shards=2)
    given = {"collection": collection, "vectors": vectors, "split": split, "output": str(folder / "search")}
    return make(Search(SearchConfig(index=index, **given, **settings)))


def searched_by_words(collection: str, folder: Path, split: str, top_k: int) -> str:
    index = make(Index(IndexConfig(index=LexicalIndexSettings(collection=collection), output=str(folder / "bm25"))))
    config = SearchConfig(
        index=index, collection=collection, split=split, top_k=top_k, output=str(folder / "bm25-search")
    )
    return make(Search(config))


def reranked(collection: str, run: str, vectors: str, folder: Path, **settings: Any) -> str:
    config = RerankConfig(run=run, vectors=vectors, collection=collection, output=str(folder / "reranked"), **settings)
    return make(Rerank(config))


def evaluated(collection: str, run: str, folder: Path, split: str, measures: list[str], **settings: Any):
    given = {"collection": collection, "runs": {"it": run}, "split": split, "measures": measures}
    config = EvaluateConfig(**given, output=str(folder / "evaluation"), **settings)
    return Artifact(make(Evaluate(config))).read_json("metrics.json")["means"]["it"]
