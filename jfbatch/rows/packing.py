"""Input streams as plain UTF-8 bytes: gzip and zstandard by their first bytes, UTF-16/32 by their mark.

Each layer is a raw stream that decodes a bounded piece at a time and says when its file breaks off.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from typing import Any, BinaryIO, cast

import zstandard

_PIECE = 1 << 16
# A zstandard block of a few bytes can stand for 128 KiB: small pieces keep the unpacked size bounded.
_ZSTANDARD_PIECE = 1 << 12
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTANDARD_MAGIC = b"\x28\xb5\x2f\xfd"
# UTF-32 first: its little-endian mark starts with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class TruncatedInput(Exception):
    """A packed or encoded stream ends too early or is damaged; what came before was given."""


def open_unpacked(stream: BinaryIO) -> BinaryIO:
    """A buffered stream of UTF-8 bytes, without byte order mark, from a file as it lies on disk."""
    head, stream = _peek(stream)
    if head.startswith(_GZIP_MAGIC):
        head, stream = _peek(_buffered(_Gunzip(stream)))
    elif head.startswith(_ZSTANDARD_MAGIC):
        head, stream = _peek(_buffered(_Unzstandard(stream)))
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return _buffered(_Transcode(stream, encoding))
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return stream


def _buffered(raw: io.RawIOBase) -> BinaryIO:
    return io.BufferedReader(raw, 1 << 17)


def _peek(stream: BinaryIO) -> tuple[bytes, BinaryIO]:
    """The first four bytes, and a stream that still starts with them (pipes cannot seek back)."""
    head = stream.read(4)
    return head, _buffered(_Prefixed(head, stream))


class _Raw(io.RawIOBase):
    """A raw stream over pieces; subclasses give `_next_piece`, b"" at the end."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._pending:
            self._pending = memoryview(self._next_piece())
        taken = min(len(buffer), len(self._pending))
        buffer[:taken] = self._pending[:taken]
        self._pending = self._pending[taken:]
        return taken

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

    def _next_piece(self) -> bytes:
        raise NotImplementedError


class _Prefixed(_Raw):
    def __init__(self, prefix: bytes, source: BinaryIO) -> None:
        super().__init__(source)
        self._pending = memoryview(prefix)

    def _next_piece(self) -> bytes:
        read = getattr(self._source, "read1", self._source.read)
        return cast(bytes, read(_PIECE))


class _Gunzip(_Raw):
    def __init__(self, source: BinaryIO) -> None:
        super().__init__(source)
        self._unpacked = gzip.GzipFile(fileobj=source, mode="rb")

    def _next_piece(self) -> bytes:
        try:
            return self._unpacked.read1(_PIECE)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TruncatedInput(f"gzip: {error}") from None


class _Unzstandard(_Raw):
    def __init__(self, source: BinaryIO) -> None:
        super().__init__(source)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._decompressor.decompressobj()
        self._within_frame = False
        self._unused = b""

    def _next_piece(self) -> bytes:
        while True:
            packed = self._unused or self._source.read(_ZSTANDARD_PIECE)
            self._unused = b""
            if not packed:
                if self._within_frame:
                    raise TruncatedInput("zstandard: the file ended before the end of its last frame")
                return b""
            try:
                piece = self._frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise TruncatedInput(f"zstandard: {error}") from None
            self._within_frame = not self._frame.eof
            if self._frame.eof:
                self._unused = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
            if piece:
                return piece


class _Transcode(_Raw):
    """UTF-16 or UTF-32 with its mark, as UTF-8. Lone surrogates pass, to be refused in their own line."""

    def __init__(self, source: BinaryIO, encoding: str) -> None:
        super().__init__(source)
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
        self._ended = False

    def _next_piece(self) -> bytes:
        while not self._ended:
            encoded = self._source.read(_PIECE)
            self._ended = not encoded
            try:
                text = self._decoder.decode(encoded, final=self._ended)
            except UnicodeDecodeError as error:
                raise TruncatedInput(f"{self._encoding}: {error.reason}") from None
            if text:
                return text.encode("utf-8", "surrogatepass")
        return b""
