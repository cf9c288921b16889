"""All formats of sources: a new one is a file beside this one, and a line in ``SingleSource``."""

from typing import Annotated, Literal

from pydantic import Field

from pipelines.formats.beir import BeirFolder
from pipelines.formats.columns import ColumnFiles
from pipelines.formats.dpr import Dpr
from pipelines.formats.mteb import MtebFolder
from pipelines.formats.python_functions import PythonFunctions
from pipelines.formats.source_tree import Files, SourceTree
from pipelines.formats.tevatron import Tevatron
from pipelines.formats.trec import TrecFiles
from raytriever.settings.configuration import Settings

SingleSource = PythonFunctions | BeirFolder | MtebFolder | ColumnFiles | TrecFiles | Dpr | Tevatron | SourceTree | Files

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # no slash: it ends the name in an id


class JoinedSources(Settings):
    """Settings: sources by name, each of any other kind.

    Ids of documents and queries begin with the source's name and a slash. The domain is the source's own where it gives
    one, else its name.
    """

    kind: Literal["sources"] = "sources"
    """The format."""
    sources: dict[Name, Annotated[SingleSource, Field(discriminator="kind")]] = Field(min_length=1)
    """Each source by its name."""


AnySource = Annotated[SingleSource | JoinedSources, Field(discriminator="kind")]
