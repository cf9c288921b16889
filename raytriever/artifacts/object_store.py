"""What a folder's URI stands for: which file system, opened how, and which URIs are refused.

An S3 server's address, region and keys come from the environment (``AWS_ENDPOINT_URL``, ``AWS_REGION``,
``AWS_ACCESS_KEY_ID``, …). The AWS library gives up a request after 3 s without an answer, which a busy store may take,
and Google's tries for a quarter of an hour before it says a word; here both have limits of our own.
"""

import io
import os
import re
from collections.abc import Callable
from datetime import timedelta

import pyarrow as pa
from pyarrow import fs

from raytriever.errors import UserError

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 30.0  # without a byte
_ATTEMPTS = 3  # of the AWS library, at growing intervals, for one request; more is the caller's matter
_GOOGLE_ATTEMPTS = timedelta(seconds=15)
_GOOGLE = re.compile(r"gc?s://")
_PUBLIC = re.compile(r"gc?s://anonymous@[^@]*")  # how pyarrow spells access without a login


def refuse_keys(uri: str) -> None:
    """Raises ``UserError``, which doesn't show it, for a URI with an ``@``: what is before it are keys, as a rule.

    Called before anything else looks at a URI or names it: a key may hold any character, a slash or a question mark.
    """
    scheme, found, rest = uri.partition("://")
    if found and "@" in rest and scheme != "hf" and not _PUBLIC.fullmatch(uri):  # the hub's names end in @revision
        raise UserError(
            f"{scheme}://…@… holds keys, or another '@', but a folder's name is shown to everybody. Give keys in the"
            " environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, …) and choose names without an '@'."
        )


def open_object_store(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URI and the path in it. In the names of an S3 or Google store all but ``?`` is literal.

    Raises ``UserError`` where it can't be understood, and ``OSError`` where the store, asked for the bucket's region,
    fails or refuses.
    """
    if "?" in uri:
        raise UserError(
            f"{uri} holds options, but names are put behind a folder's URI. Give them in the environment (AWS_REGION,"
            " AWS_ENDPOINT_URL, …); names can't have a '?'."
        )
    path = uri.partition("://")[2].rstrip("/")
    try:
        if uri.startswith("s3://"):
            return _open_s3(_bucket(path)), path
        if _GOOGLE.match(uri):
            is_public = bool(_PUBLIC.match(uri))
            path = path.removeprefix("anonymous@")
            _bucket(path)
            return fs.GcsFileSystem(anonymous=is_public, retry_time_limit=_GOOGLE_ATTEMPTS), path
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


def s3_endpoint() -> str | None:
    """The S3 server that the environment names; None: Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _open_s3(bucket: str) -> fs.S3FileSystem:
    endpoint = s3_endpoint()
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region and not endpoint:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        region=region,
        endpoint_override=endpoint,
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_ANSWER_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        allow_delayed_open=True,  # a small file in one request instead of three
    )


# A file of an object store for random access, which is opened anew where reading fails for the moment.


class StoreFile(io.RawIOBase):
    """``open_file`` opens the stored file; ``ask`` does what reads of it, again and again where the store fails."""

    def __init__(self, open_file: Callable[[], pa.NativeFile], ask: Callable[[Callable[[], bytes]], bytes]) -> None:
        self._open_file, self._ask = open_file, ask
        file = open_file()
        self._file: pa.NativeFile | None = file
        self._bytes: int = file.size()
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Changes that place."""
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._bytes}[whence] + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """So many bytes, fewer at the end; all that are left where ``size`` is negative or None."""
        left = max(self._bytes - self._at, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        found = self._ask(lambda: self._read(wanted)) if wanted else b""
        self._at += len(found)
        return found

    def _read(self, size: int) -> bytes:
        file = self._file
        if file is None:
            file = self._file = self._open_file()
        try:
            file.seek(self._at)
            return bytes(file.read(size))
        except OSError:
            self._file = None  # its connection may be what fails
            raise

    def close(self) -> None:
        """Nothing can be read any more."""
        if self._file is not None:
            self._file.close()
        super().close()
