"""``raytriever verify``: reads every byte of stored artifacts and compares it with their manifests."""

from typing import Annotated

import typer

from raytriever.artifacts.artifact import MANIFEST, Artifact
from raytriever.artifacts.storage import Folder
from raytriever.command_line import echo
from raytriever.errors import UserError
from raytriever.reports.table import Table


def verify(
    folder: Annotated[str, typer.Argument(help="Folder or URI of an artifact, or of a run.")],
) -> None:
    """Compares every file of the artifacts in a folder with its manifest's hash; exits with 1 where any differs."""
    rows, whole = [], True
    names = [name for name in Folder(folder).files() if name.split("/")[-1] == MANIFEST]
    if not names:
        raise UserError(f"{folder} holds no artifact (no {MANIFEST} in it or below). Is the path right?")
    for name in names:
        uri = f"{folder.rstrip('/')}/{name}".removesuffix(f"/{MANIFEST}")
        try:
            artifact = Artifact(uri)
            artifact.verify()
        except UserError as error:
            whole = False
            rows.append(["FAIL", uri, str(error)])
        else:
            size = f"{len(artifact.names()):,} files, {artifact.bytes / 1e6:,.1f} MB"
            rows.append(["ok", uri, f"{artifact.kind}, {size}"])
    echo("\n".join(Table((), rows, text_columns=3).lines()))
    raise typer.Exit(0 if whole else 1)
