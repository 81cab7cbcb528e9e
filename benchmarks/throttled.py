"""A read-only view of a directory that answers as a busy shared file system: late, and not often.

It speaks the kernel's FUSE protocol itself (include/uapi/linux/fuse.h), so it needs no library, but
root, or a user and mount namespace of one's own. What is read is cached by the kernel as an NFS
client does: contents, names and attributes stay, every open asks the server.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOKUP, FORGET, GETATTR, READLINK, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 5, 14, 15, 17, 18
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, IOCTL = 25, 26, 27, 28, 29, 36, 39
BATCH_FORGET = 42
SILENT = (FORGET, BATCH_FORGET, INTERRUPT)
FREE = (*SILENT, INIT, RELEASE, RELEASEDIR, FLUSH, STATFS, IOCTL)
"""Requests that cost nothing: a client of NFS sends them later, or not at all."""
ASYNC_READ, PARALLEL_DIROPS, MAX_PAGES, CACHE_SYMLINKS = 1, 1 << 18, 1 << 22, 1 << 23
KEEP_CACHE, CACHE_DIR = 1 << 1, 1 << 3
HEADER, ATTRIBUTES = struct.Struct("<IIQQIIIHH"), struct.Struct("<6Q10I")
CACHED_S = 3600
MOST_BYTES = 2**20
_libc = ctypes.CDLL(None, use_errno=True)


class Throttled:
    """The server of one mount: what it was asked, and when it may answer."""

    def __init__(self, source: Path, requests_per_s: float, mb_per_s: float, late_ms: float):
        self.asked: collections.Counter[int] = collections.Counter()
        self.bytes = 0
        self._s_per_request, self._late_s = 1 / requests_per_s, late_ms / 1000
        self._s_per_byte = 1 / (mb_per_s * 1e6)
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._paths = {1: str(source)}
        self._nodes = {str(source): 1}

    @property
    def requests(self) -> int:
        """Those that cost a file system something."""
        return sum(count for kind, count in self.asked.items() if kind not in FREE)

    def serve(self, device: int) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                request = os.read(device, 2 * MOST_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):  # of a request that was given up
                    continue
                return
            _, kind, unique, node, *_ = HEADER.unpack_from(request)
            body = request[HEADER.size :]
            try:
                code, data = 0, self._answer(kind, node, body)
            except OSError as error:
                code, data = -(error.errno or errno.EIO), b""
            self._wait(kind, len(data))
            if kind not in SILENT:
                with suppress(OSError):
                    os.write(device, struct.pack("<IiQ", 16 + len(data), code, unique) + data)

    def _wait(self, kind: int, size: int) -> None:
        with self._lock:
            self.asked[kind] += 1
            if kind in FREE:
                return
            cost = self._s_per_request
            if kind == READ:
                self.bytes += size
                cost = max(cost, size * self._s_per_byte)
            self._free_at = max(time.monotonic(), self._free_at) + cost
            until = self._free_at + self._late_s
        time.sleep(max(0.0, until - time.monotonic()))

    def _answer(self, kind: int, node: int, body: bytes) -> bytes:
        if kind == INIT:
            flags = ASYNC_READ | PARALLEL_DIROPS | MAX_PAGES | CACHE_SYMLINKS
            pages = MOST_BYTES // os.sysconf("SC_PAGE_SIZE")
            numbers = (7, 31, MOST_BYTES, flags, 64, 48, 4096, 1, pages, 0)
            return struct.pack("<IIIIHHIIHH", *numbers) + bytes(32)
        if kind in SILENT or kind in (FLUSH, RELEASEDIR):
            return b""
        path = self._paths[node]
        if kind == LOOKUP:
            child = f"{path}/{os.fsdecode(body.rstrip(bytes(1)))}"
            try:
                status = os.lstat(child)
            except FileNotFoundError:  # that there is none is cached, too
                return struct.pack("<QQQQII", 0, 0, CACHED_S, 0, 0, 0) + bytes(88)
            times = struct.pack("<QQQQII", self._number(child), 0, CACHED_S, CACHED_S, 0, 0)
            return times + attributes(status)
        if kind == GETATTR:
            return struct.pack("<QII", CACHED_S, 0, 0) + attributes(os.lstat(path))
        if kind == READLINK:
            return os.fsencode(Path(path).readlink())
        if kind == OPEN:
            return struct.pack("<QII", os.open(path, os.O_RDONLY), KEEP_CACHE, 0)
        if kind == OPENDIR:
            return struct.pack("<QII", 0, KEEP_CACHE | CACHE_DIR, 0)
        if kind == RELEASE:
            os.close(struct.unpack_from("<Q", body)[0])
            return b""
        if kind == READ:
            file, offset, size = struct.unpack_from("<QQI", body)
            return os.pread(file, size, offset)
        if kind == READDIR:
            _, offset, size = struct.unpack_from("<QQI", body)
            return listing(path, offset, size)
        raise OSError(errno.ENOSYS, "not needed here")

    def _number(self, path: str) -> int:
        with self._lock:
            if path not in self._nodes:
                self._nodes[path] = len(self._nodes) + 1
                self._paths[self._nodes[path]] = path
            return self._nodes[path]


def attributes(status: os.stat_result) -> bytes:
    """Return struct fuse_attr."""
    times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
    return ATTRIBUTES.pack(
        status.st_ino, status.st_size, status.st_blocks, *(ns // 10**9 for ns in times),
        *(ns % 10**9 for ns in times), status.st_mode, status.st_nlink, status.st_uid,
        status.st_gid, 0, 4096, 0,
    )  # fmt: skip


def listing(path: str, offset: int, size: int) -> bytes:
    """Return entries of a directory from one on, as many as fit."""
    with os.scandir(path) as entries:
        names = [*entries]
    data = b""
    for number, entry in enumerate(names[offset:], offset + 1):
        word, kind = os.fsencode(entry.name), stat.S_IFREG
        if entry.is_symlink() or entry.is_dir():
            kind = stat.S_IFLNK if entry.is_symlink() else stat.S_IFDIR
        one = struct.pack("<QQII", entry.inode(), number, len(word), kind >> 12) + word
        one += bytes(-len(one) % 8)
        if len(data) + len(one) > size:
            break
        data += one
    return data


@contextmanager
def mounted(
    source: Path, place: Path, *, requests_per_s: float, mb_per_s: float, late_ms: float
) -> Iterator[Throttled]:
    """Show a directory at another place, throttled, with nothing in the kernel's cache."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    if _libc.mount(b"throttled", os.fsencode(place), b"fuse", 1, options.encode()):  # MS_RDONLY
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(place))
    server = Throttled(source, requests_per_s, mb_per_s, late_ms)
    threads = [
        threading.Thread(target=server.serve, args=(device,), daemon=True) for _ in range(64)
    ]
    for thread in threads:
        thread.start()
    readahead = Path(f"/sys/class/bdi/0:{os.minor(place.stat().st_dev)}/read_ahead_kb")
    with suppress(OSError):  # a client of NFS asks for as much; only root may set it
        readahead.write_text(str(MOST_BYTES // 1024))
    try:
        yield server
    finally:
        _libc.umount2(os.fsencode(place), 2)  # MNT_DETACH
        os.close(device)
