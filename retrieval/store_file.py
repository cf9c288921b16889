"""A file of an object store for random access, which is opened anew where reading fails for the moment."""

import io
from collections.abc import Callable

import pyarrow as pa


class StoreFile(io.RawIOBase):
    """``open_file`` opens the stored file; ``ask`` does what reads of it, again and again where the store fails."""

    def __init__(self, open_file: Callable[[], pa.NativeFile], ask: Callable[[Callable[[], bytes]], bytes]) -> None:
        self._open_file, self._ask = open_file, ask
        self._file: pa.NativeFile | None = open_file()
        self._bytes: int = self._file.size()
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
        if self._file is None:
            self._file = self._open_file()
        try:
            self._file.seek(self._at)
            return bytes(self._file.read(size))
        except OSError:
            self._file = None  # its connection may be what fails
            raise

    def close(self) -> None:
        """Nothing can be read any more."""
        if self._file is not None:
            self._file.close()
        super().close()
