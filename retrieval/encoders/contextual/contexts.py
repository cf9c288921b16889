"""The context of a contextual encoder, fitted once to a corpus and kept with everything that is embedded in it.

It is three files of an artifact: the documents that it is made of, their vectors from the encoder's first stage, and
what it belongs to. They are copied into vectors and indexes, so that queries can later be embedded in the same context
as the documents.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raytriever.artifacts.artifact import Artifact, ShardWriter
from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean
from retrieval.collections.collection import StoredCollection, text_columns, texts_of

CONTEXT = "context"
_DESCRIPTION, _VECTORS, _DOCUMENTS = "context/context.json", "context/vectors.npy", "context/documents.parquet"


@dataclass(frozen=True)
class ContextDescription:
    """The origin of a context: fingerprints of encoder and collection, how its documents were read, and its own."""

    model: str
    collection: str
    documents: int  # how many were read
    seed: int  # the seed of the draw
    with_title: bool
    fingerprint: str  # of model and vectors

    def require(
        self, model: str, where: str, collection: StoredCollection | None = None, with_title: bool | None = None
    ) -> None:
        """Raises ``UserError`` where the context is of another encoder or collection, or was read otherwise.

        ``where`` names the context's artifact in messages. ``collection`` is the one embedded in it. None: any.
        ``with_title`` says whether that is read with titles. None: it has no titles. Training reads both alike.
        """
        if self.model != model:
            raise UserError(
                f"The context in {where} was made by another encoder ({self.model[:12]}) than the one that is to"
                f" read it ({model[:12]}). Fit one with this encoder (raytriever context)."
            )
        if collection is not None and self.collection != collection.fingerprint:
            raise UserError(
                f"The context in {where} was fitted to another collection ({self.collection[:12]}) than"
                f" {collection.uri} ({collection.fingerprint[:12]}), or to an earlier version of it. Fit one to"
                " this collection (raytriever context), or set foreign_context to true."
            )
        if with_title is not None and self.with_title != with_title:
            raise UserError(
                f"The context in {where} was fitted with with_title {str(self.with_title).lower()}, but the"
                f" documents are to be embedded with with_title {str(with_title).lower()}. Give context and embed"
                " the same with_title."
            )


def rows_of_domains(collection: StoredCollection, domains: Sequence[str]) -> NDArray[np.int64]:
    """Rows of the documents of these domains, ascending; one column is in memory.

    Raises ``UserError`` with the domains that there are where one of them has no document ('' stands for none).
    """
    column = collection.rows_of("documents").read(["domain"])["domain"]
    there = sorted(pc.unique(column).to_pylist())
    for name in domains:
        if name not in there:
            raise UserError(
                f"domains names {name!r}, but {collection.uri} has no document of this"
                f" domain.{did_you_mean(name, there)}"
            )
    return np.flatnonzero(pc.is_in(column, value_set=pa.array(domains, pa.string())).to_numpy())


def draw_documents(
    collection: StoredCollection,
    count: int,
    seed: int,
    *,
    with_title: bool = True,
    domains: Sequence[str] | None = None,
) -> tuple[NDArray[np.int64], list[str]]:
    """Rows and texts of ``count`` documents, drawn without replacement, none of them empty.

    ``domains``: only documents of these. Fewer where there are fewer, or where more than half of those drawn (twice
    ``count``) are empty. A function of the collection, ``count``, ``seed`` and ``domains``. Raises ``UserError`` where
    all that were drawn are empty, and for a domain without documents.
    """
    from retrieval.encoders.contextual.context_reader import drawn_rows

    if domains is None:
        drawn = drawn_rows(collection.count("documents"), count, seed)
    else:
        rows = rows_of_domains(collection, domains)
        drawn = rows[drawn_rows(len(rows), count, seed)]
    table = collection.rows_of("documents").take(drawn, text_columns("documents"))
    texts = texts_of(table, "documents", with_title=with_title)
    kept = [(row, text) for row, text in zip(drawn.tolist(), texts, strict=True) if text.strip()][:count]
    if not kept:
        raise UserError(
            f"The {len(drawn)} documents drawn from {collection.uri} are empty and give an encoder no context."
            " Choose another seed, or collect without empty documents."
        )
    return np.array([row for row, _ in kept]), [text for _, text in kept]


@dataclass(frozen=True)
class CorpusContext:
    """A context in memory: ``vectors`` float32 (documents * k, width), ``documents`` a table of ``id`` and ``row``."""

    description: ContextDescription
    vectors: NDArray[np.float32]
    documents: pa.Table

    @classmethod
    def of(cls, uri: str) -> Self:
        """The one in an artifact of any kind. Raises ``UserError`` where it holds none."""
        artifact = Artifact(uri)
        if not artifact.names(_DESCRIPTION):
            raise UserError(
                f"{uri} holds no context. Fit one to the corpus (raytriever context), or name vectors or an index that"
                " were made with one."
            )
        description = ContextDescription(**artifact.read_json(_DESCRIPTION))
        vectors = np.load(artifact.path(_VECTORS), allow_pickle=False)
        return cls(description, vectors, pq.read_table(artifact.path(_DOCUMENTS)))

    def write(self, writer: ShardWriter) -> None:
        """Adds the three files to a shard."""
        writer.add_json(_DESCRIPTION, asdict(self.description))
        writer.add_array(_VECTORS, self.vectors)
        writer.add_table(_DOCUMENTS, self.documents)


def set_context(encoder: object, context: CorpusContext | None, without: str | None) -> None:
    """Sets the context of a contextual encoder: the corpus' own ``context``, or 'null' or 'none' instead."""
    import torch

    from retrieval.encoders.contextual.encoder import ContextualEncoder

    if not isinstance(encoder, ContextualEncoder):
        return
    if context is None:
        encoder.use_context("null" if without == "null" else None)
    else:
        encoder.use_context(torch.from_numpy(context.vectors), context.description.fingerprint)


def copy_context(artifact: Artifact, writer: ShardWriter) -> None:
    """Adds the three files of ``artifact``, where it has them, to a shard."""
    for name in artifact.names("context/"):
        writer.add_bytes(name, artifact.path(name).read_bytes())
