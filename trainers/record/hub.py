"""Pushes a trained model to the Hugging Face hub: the artifact's own files and nothing of its checkpoints or logs."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import huggingface_hub
import typer
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]  # of its HTTP library
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from raytriever.artifacts.artifact import MANIFEST, Artifact
from raytriever.errors import UserError

_MODEL = "model"


def push_to_hub(model: str, repo_id: str, *, private: bool = False) -> str:
    """Uploads the model artifact at ``model`` (path or URI) in one commit; returns the repository's address.

    The repository ``org/name`` is made where it is absent, private if ``private``; an existing one keeps its
    visibility and its other files. The token is that of HF_TOKEN or of the stored login and is never shown. Raises
    ``UserError`` for a folder that holds no trained model or a damaged one, a name that the hub doesn't allow, without
    a login, offline, and where the hub refuses.
    """
    artifact = Artifact(model, _MODEL)
    artifact.verify()
    _check_name(repo_id)
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it and push again.")
    if huggingface_hub.get_token() is None:
        raise UserError(
            "Pushing needs a login with the right to write: log in with `hf auth login`, or set HF_TOKEN to a token"
            " from https://huggingface.co/settings/tokens."
        )
    api = HfApi(library_name="raytriever")
    try:
        address = api.create_repo(repo_id, private=private or None, exist_ok=True)
        with _local_copy(artifact) as folder:
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                allow_patterns=[*artifact.names(), MANIFEST],
                commit_message=f"Model {artifact.fingerprint[:12]}",
            )
    except HfHubHTTPError as error:
        raise UserError(_refused(repo_id, error)) from error
    except (TransportError, ConnectionError, TimeoutError) as error:
        raise UserError(
            f"{constants.ENDPOINT} can't be reached ({type(error).__name__}), so {model} was not pushed. Push again"
            " when the network is back: what has arrived is not sent twice."
        ) from error
    return str(address)


def _check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
        if repo_id.count("/") != 1:
            raise ValueError("it names no organisation or user")
    except (HFValidationError, ValueError) as error:
        raise UserError(
            f"'{repo_id}' can't be the name of a repository: {error}. Give org/name, such as my-name/my-encoder:"
            " letters, digits, '-', '_' and '.', 96 characters at most."
        ) from error


def _refused(repo_id: str, error: HfHubHTTPError) -> str:
    """The hub's answer in its own words, with what to do; requests and their headers are not in it."""
    status = error.response.status_code
    said = " ".join((error.server_message or error.response.reason_phrase or "").split())[:300]
    remedy = {
        401: "Log in again (hf auth login), or set HF_TOKEN to a token that is valid.",
        403: f"Use a token with the right to write to {repo_id.split('/')[0]}, or another organisation.",
        404: f"Does {repo_id.split('/')[0]} exist, and may this login see it?",
    }.get(status, "Try again later, or under another name.")
    return f"The hub refused the push to {repo_id} (status {status}{': ' + said if said else ''}). {remedy}"


@contextmanager
def _local_copy(artifact: Artifact) -> Iterator[Path]:
    """The artifact's folder; of one in an object store, a copy of its files that is gone afterwards."""
    if artifact.folder.is_local:
        yield artifact.folder.local_path(MANIFEST, artifact.fingerprint).parent
        return
    with tempfile.TemporaryDirectory(prefix="raytriever-push-") as temporary:
        folder = Path(temporary)
        for name in artifact.names():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(artifact.path(name), folder / name)
        (folder / MANIFEST).write_bytes(artifact.folder.read_bytes(MANIFEST))
        yield folder


def push(
    model: Annotated[str, typer.Argument(help="A model artifact.")],
    repo_id: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository on the Hugging Face hub.")],
    private: Annotated[bool, typer.Option("--private", help="Makes a new repository private.")] = False,
) -> None:
    """Pushes a trained model to the Hugging Face hub, with the token of HF_TOKEN or of `hf auth login`."""
    typer.echo(push_to_hub(model, repo_id, private=private))
