"""`raytriever export`: writes a collection, its judgments or candidates in another tool's format."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from pydantic import Field

from raytriever.retrieval.artifacts import Artifact, ShardRecord, ShardWriter
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.configuration import InputPath
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.exports import beir, dpr, flag_embedding, mteb, sentence_transformers, tevatron, trec
from raytriever.retrieval.exports.mined_negatives import MinedNegatives
from raytriever.retrieval.jobs.stage import Shard, Stage, StageConfig
from raytriever.retrieval.lineage import require_same_origin
from raytriever.retrieval.mining.candidates import StoredCandidates

EXPORT = "export"

# what holds a whole collection, and what holds the training examples of one split
_COLLECTIONS = {"beir": beir.write, "mteb": mteb.write, "trec": trec.write}
_EXAMPLES: dict[str, Callable[..., list[str]]] = {
    "dpr": dpr.write,
    "flag_embedding": flag_embedding.write,
    "sentence_transformers": sentence_transformers.write,
    "tevatron": tevatron.write,
}


class ExportConfig(StageConfig):
    """What is written, and for which tool."""

    collection: InputPath
    format: Literal["beir", "mteb", "trec", "dpr", "flag_embedding", "sentence_transformers", "tevatron"]
    split: str | None = None  # of training examples; whole collections have all splits
    candidates: InputPath | None = None  # mined ones: hard negatives in place of those that the split judges
    negatives: int | None = Field(default=None, ge=0)  # of every example of sentence_transformers; None: the fewest


class Export(Stage[ExportConfig]):
    """One pass over the collection; the folder is what the other tool reads, with our manifest beside it."""

    command = "export"
    kind = EXPORT
    config_class = ExportConfig
    unit = "files"

    def plan(self) -> list[Shard]:
        """One shard. Raises ``UserError`` where settings and format don't go together, and for an unknown split."""
        config = self.config
        if config.format in _COLLECTIONS and (config.split is not None or config.candidates is not None):
            raise UserError(
                f"format {config.format} holds the whole collection: leave out split and candidates, which belong to"
                f" formats of training examples ({', '.join(_EXAMPLES)})."
            )
        if config.negatives is not None and config.format != "sentence_transformers":
            raise UserError(
                f"format {config.format} holds as many negatives as a query has: leave 'negatives' out, which is for"
                " format sentence_transformers."
            )
        if config.format in _EXAMPLES and config.split is None:
            raise UserError(
                f"format {config.format} holds the training examples of one split: set split, to train say."
            )
        collection = StoredCollection(config.collection)
        if config.split is not None:
            collection.judgments(config.split)
        if config.candidates is not None:
            self._check_candidates(collection, StoredCandidates(config.candidates))
        return [Shard("all")]

    def _check_candidates(self, collection: StoredCollection, candidates: StoredCandidates) -> None:
        require_same_origin("collection", collection, candidates)
        if candidates.config["split"] != self.config.split:
            raise UserError(
                f"{candidates.uri} was mined for split '{candidates.config['split']}', not for '{self.config.split}'."
                " Set split to that one, or mine for this one."
            )

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:  # noqa: ARG002
        """Has the format's files written and adds them."""
        config = self.config
        collection = StoredCollection(config.collection)
        folder = writer.path("")  # files are built where the shard's files are
        if config.split is None:
            names = _COLLECTIONS[config.format](collection, folder)
        else:
            mined = MinedNegatives(StoredCandidates(config.candidates)) if config.candidates else None
            write = _EXAMPLES[config.format]
            if config.format == "sentence_transformers":
                write = partial(sentence_transformers.write, negatives=config.negatives)
            names = write(collection, config.split, folder, mined)
        for name in names:
            writer.add(name)
        return writer.commit(len(names))

    def summary(self, artifact: Artifact) -> str:
        """Files and format."""
        return f"{artifact.rows:,} files of {artifact.config['format']}"

    def results(self, artifact: Artifact) -> list[str]:  # noqa: ARG002
        """The folder."""
        return [""]
