"""How a folder's URI is opened: its file system, its options, and the URIs that are refused.

An S3 server's address, region and keys come from the environment (``AWS_ENDPOINT_URL``, ``AWS_REGION``,
``AWS_ACCESS_KEY_ID``, …). The libraries repeat a request that a store fails to serve. Amazon's gives up after 3 s
without an answer, which a busy store may take, and after three requests. Google's gives up after a quarter of an hour.
Here both repeat for about two minutes if the store answers with errors, and for five if it is silent.
"""

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pyarrow import fs

from raytriever.errors import UserError

HUB_MIRROR = "RAYTRIEVER_HUB_MIRROR"
"""Names a folder in place of the Hugging Face hub: for machines without a network, and for rehearsals."""
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 30.0  # without a byte
_ATTEMPTS = 12  # of a request, 25 ms after the first and each time twice as long: 100 s together
_GOOGLE_ATTEMPTS = timedelta(seconds=120)
_GOOGLE = re.compile(r"gc?s://")
_HUB = re.compile(r"hf://datasets/([^@]+)@[0-9a-f]{40}(/.*)?")
_PUBLIC = re.compile(r"gc?s://anonymous@[^@]*")  # how pyarrow spells access without a login


def refuse_keys(uri: str) -> None:
    """Raises ``UserError``, which doesn't show it, for a URI with an ``@``, because keys usually stand before it.

    Called before anything else parses or shows a URI: a key may hold any character, also a slash or a question mark.
    """
    scheme, found, rest = uri.partition("://")
    if found and "@" in rest and scheme != "hf" and not _PUBLIC.fullmatch(uri):  # the hub's names end in @revision
        raise UserError(
            f"{scheme}://…@… holds keys or another '@', which are not allowed because logs and manifests show a"
            " folder's name. Give keys in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, …) and choose"
            " names without an '@'."
        )


def open_object_store(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URI and the path in it. In the names of an S3 or Google store all but ``?`` is literal.

    Raises ``UserError`` where it can't be understood, and ``OSError`` where the store, asked for the bucket's region,
    fails or refuses.
    """
    if "?" in uri:
        raise UserError(
            f"{uri} has options, which are not allowed because file names are appended to a folder's URI. Give"
            " them in the environment (AWS_REGION, AWS_ENDPOINT_URL, …). Names can't have a '?'."
        )
    path = re.sub("(?<=.)/+", "/", uri.partition("://")[2]).rstrip("/")
    try:
        if uri.startswith("s3://"):
            return _open_s3(_bucket(path)), path
        if _GOOGLE.match(uri):
            is_public = bool(_PUBLIC.match(uri))
            path = path.removeprefix("anonymous@")
            _bucket(path)
            return fs.GcsFileSystem(anonymous=is_public, retry_time_limit=_GOOGLE_ATTEMPTS), path
        if uri.startswith("hf://"):
            return _open_hub(uri)
        if "#" in uri:
            raise ValueError("its '#' would cut off what follows")
        filesystem, path = fs.FileSystem.from_uri(uri)
        if not path:
            raise ValueError("it names no bucket")
    except (pa.ArrowNotImplementedError, ValueError) as error:
        raise UserError(
            f"{uri} can't be opened as a folder: {error}. Use a local path, s3://bucket/prefix or gs://bucket/prefix."
        ) from error
    return filesystem, path.rstrip("/")


def _bucket(path: str) -> str:
    bucket = path.split("/")[0]
    if not bucket:
        raise ValueError("it names no bucket")
    return bucket


def _open_hub(uri: str) -> tuple[fs.FileSystem, str]:
    """A data set of the hub at one commit, or its mirror."""
    found = _HUB.fullmatch(uri)
    if not found:
        raise UserError(
            f"{uri} is no data set of the hub at a commit. Write hf://datasets/<owner>/<name>@<commit>. The commit"
            " has 40 hexadecimal digits; the data set's page 'Files and versions' and"
            " huggingface_hub.HfApi().dataset_info(name).sha show it. A branch or a tag is not allowed because it"
            " can move."
        )
    mirror = mirrored("datasets", found[1])
    return (fs.LocalFileSystem(), f"{mirror}{found[2] or ''}") if mirror else fs.FileSystem.from_uri(uri)


def _open_s3(bucket: str) -> fs.S3FileSystem:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None  # None: Amazon's
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region and not endpoint:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        region=region,
        endpoint_override=endpoint,
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_ANSWER_SECONDS,
        retry_strategy=fs.AwsDefaultS3RetryStrategy(max_attempts=_ATTEMPTS),
        allow_delayed_open=True,  # a small file in one request instead of three
    )


def mirrored(part: Literal["models", "datasets"], name: str) -> Path | None:
    """The folder ``<mirror>/<part>/<owner>/<name>``; None where ``RAYTRIEVER_HUB_MIRROR`` names no mirror.

    A mirror has one revision of each repository. Raises ``UserError`` where it lacks this one.
    """
    mirror = os.environ.get(HUB_MIRROR)
    if not mirror:
        return None
    folder = Path(mirror).expanduser().absolute() / part / name
    if not folder.is_dir():
        raise UserError(
            f"{HUB_MIRROR} is {mirror}, so files of the hub are read only from there, and {folder} is not a"
            f" folder. Put the files of {name} there, correct the name, or unset {HUB_MIRROR}."
        )
    return folder
