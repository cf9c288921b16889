"""Files of a collection for tests: on the local disk or in an object store, plain or compressed."""

import gzip
from collections.abc import Mapping

import pyarrow as pa
from pyarrow import fs

_PACK = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True)}


def write_files(uri: str, files: Mapping[str, str | bytes], ending: str = "") -> str:
    """Writes each file below ``uri``, compressed and renamed by ``ending``; returns ``uri``."""
    filesystem, root = fs.FileSystem.from_uri(uri)
    for name, text in files.items():
        data = text if isinstance(text, bytes) else text.encode()
        key = f"{root}/{name}{ending}"
        if isinstance(filesystem, fs.LocalFileSystem):
            filesystem.create_dir(key.rpartition("/")[0])
        with filesystem.open_output_stream(key, compression=None) as stream:
            stream.write(_PACK[ending](data))
    return uri
