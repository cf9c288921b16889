"""Pushes a trained model to the Hugging Face hub: the artifact's own files and nothing of its checkpoints or logs."""

from typing import Annotated

import typer
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]  # of its HTTP library

from raytriever.artifacts.artifact import MANIFEST, Artifact
from raytriever.errors import UserError

_MODEL = "model"


def push_to_hub(model: str, repo_id: str, *, private: bool = False) -> str:
    """Uploads the model artifact at ``model`` (path or URI) in one commit; returns the repository's address.

    The repository ``org/name`` is made where it is absent, private if ``private``; an existing one keeps its
    visibility and its other files. The token is that of HF_TOKEN or of the stored login and is never shown. Raises
    ``UserError`` for a folder that holds no trained model or a damaged one, and where the hub can't be reached or
    refuses: the name, the login, what is sent.
    """
    artifact = Artifact(model, _MODEL)
    artifact.verify()
    api = HfApi(library_name="raytriever")
    try:
        address = api.create_repo(repo_id, private=private or None, exist_ok=True)
        sent = [CommitOperationAdd(name, artifact.path(name)) for name in artifact.names()]
        sent.append(CommitOperationAdd(MANIFEST, artifact.folder.read_bytes(MANIFEST)))
        api.create_commit(repo_id, sent, commit_message=f"Model {artifact.fingerprint[:12]}")
    except (TransportError, HFValidationError, OSError) as error:  # with status and words of the hub, without headers
        raise UserError(
            f"{model} was not pushed to '{repo_id}': {' '.join(str(error).split())[:600]} The name is org/name, and the"
            " login needs the right to write to org (`hf auth login`, or HF_TOKEN). Push again when that is so, or when"
            " the hub is in reach: what has arrived is not sent twice."
        ) from error
    return str(address)


def push(
    model: Annotated[str, typer.Argument(help="A model artifact.")],
    repo_id: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository on the Hugging Face hub.")],
    private: Annotated[bool, typer.Option("--private", help="Makes a new repository private.")] = False,
) -> None:
    """Pushes a trained model to the Hugging Face hub, with the token of HF_TOKEN or of `hf auth login`."""
    typer.echo(push_to_hub(model, repo_id, private=private))
