"""All kinds of sources, and several of them as one collection with a domain each."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from pipelines.formats.beir import BeirFolder
from pipelines.formats.columns import ColumnFiles
from pipelines.formats.dpr import Dpr
from pipelines.formats.flag_embedding import FlagEmbedding
from pipelines.formats.hub import HubDataset
from pipelines.formats.ms_marco import MsMarco
from pipelines.formats.mteb import MtebFolder
from pipelines.formats.nomic import Nomic
from pipelines.formats.python_functions import PythonFunctions
from pipelines.formats.source_tree import SourceTree
from pipelines.formats.stack_exchange import StackExchange
from pipelines.formats.tevatron import Tevatron
from pipelines.formats.trec import TrecFiles
from pipelines.formats.tripclick import TripClick
from raytriever.settings.configuration import Settings
from retrieval.collections.collection import Source

SingleSource = (
    PythonFunctions
    | BeirFolder
    | MtebFolder
    | ColumnFiles
    | HubDataset
    | MsMarco
    | TrecFiles
    | TripClick
    | Dpr
    | Tevatron
    | FlagEmbedding
    | Nomic
    | SourceTree
    | StackExchange
)

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # no slash: it ends the name in an id


class JoinedSources(Settings):
    """Settings: sources by name, each of any other kind.

    Ids of documents and queries begin with the source's name and a slash. The domain is the source's own where it gives
    one, else its name.
    """

    kind: Literal["sources"] = "sources"
    sources: dict[Name, Annotated[SingleSource, Field(discriminator="kind")]] = Field(min_length=1)

    def open(self) -> "JoinedSource":
        """The collection. Raises ``UserError`` where a source can't be opened."""
        return JoinedSource({name: settings.open() for name, settings in self.sources.items()})


AnySource = Annotated[SingleSource | JoinedSources, Field(discriminator="kind")]


class JoinedSource:
    """Several collections as one ``collection.Source``, by their names; splits of the same name are one."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self._sources = dict(sorted(sources.items()))

    @property
    def counts(self) -> dict[str, int]:
        """Those of all sources, as ``name/count``."""
        return self._named(lambda source: source.counts)

    @property
    def dropped(self) -> dict[str, int]:
        """Those of all sources, as ``name/reason``."""
        return self._named(lambda source: source.dropped)

    @property
    def facts(self) -> dict[str, Any]:
        """Those of all sources, as ``name/fact``."""
        return self._named(lambda source: source.facts)

    def documents(self) -> Iterator[pa.RecordBatch]:
        """The documents of one source after the other."""
        for name, source in self._sources.items():
            for batch in source.documents():
                yield _with_domain(_with_prefix(batch, name, "id"), name)

    def queries(self) -> Iterator[pa.RecordBatch]:
        """The queries of one source after the other."""
        for name, source in self._sources.items():
            for batch in source.queries():
                yield _with_domain(_with_prefix(batch, name, "id"), name)

    def judgments(self) -> Iterator[pa.RecordBatch]:
        """The judgments of one source after the other."""
        for name, source in self._sources.items():
            for batch in source.judgments():
                yield _with_prefix(batch, name, "query_id", "document_id")

    def fingerprint(self) -> dict[str, Any]:
        """That of each source."""
        return {name: source.fingerprint() for name, source in self._sources.items()}

    def _named(self, of_source: Callable[[Source], dict[str, Any]]) -> dict[str, Any]:
        return {
            f"{name}/{key}": value for name, source in self._sources.items() for key, value in of_source(source).items()
        }


def _with_prefix(batch: pa.RecordBatch, name: str, *columns: str) -> pa.RecordBatch:
    for column in columns:
        ids = pc.binary_join_element_wise(f"{name}/", batch[column], "")
        batch = batch.set_column(batch.schema.get_field_index(column), batch.schema.field(column), ids)
    return batch


def _with_domain(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    domains = pc.if_else(pc.equal(batch["domain"], ""), name, batch["domain"])
    return batch.set_column(batch.schema.get_field_index("domain"), batch.schema.field("domain"), domains)
