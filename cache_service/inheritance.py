"""Segments of a cache service that was killed, taken over by the one that comes after it at the same address.

A segment is inherited when its owner is dead (the owner's lock can be had), it was made for this address, and it is
whole. Whether executors still map it does not matter: those that do go on. Not here: making segments (arena), what is
made of their content (service).
"""

import fcntl
import logging
import os
from typing import Any

from cache_service.arena import NAME_PREFIX, Arena, lock_as_owner, read_header
from cache_service.geometry import (
    ArenaDescription,
    ArenaLayout,
    KvGeometry,
    LayerGeometry,
    LayerLayout,
    TensorLayout,
    lay_out,
)
from octavo.errors import OctavoError

log = logging.getLogger(__name__)

LAYER_PARTS = ("k", "v", "k_scale", "v_scale")


def inherit(directory: str, owner: str) -> list[Arena]:
    """Own the segments that the last cache service of this name left, at most one of each device; empty: none."""
    if not owner:
        return []
    found = [arena for entry in os.scandir(directory) if (arena := _take(entry, owner)) is not None]
    newest: dict[str, Arena] = {}
    for arena in sorted(found, key=_journal_number):
        replaced = newest.get(arena.description.arena_id)
        if replaced is not None:
            replaced.leave()
        newest[arena.description.arena_id] = arena
    return list(newest.values())


def _journal_number(arena: Arena) -> int:
    entry = arena.journal.read()
    return entry.number if entry else 0


def _take(entry: "os.DirEntry[str]", owner: str) -> Arena | None:
    try:
        if not entry.name.startswith(NAME_PREFIX) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            return None
        descriptor = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it went, or it is not ours
        return None
    try:
        header = read_header(descriptor)
        if header["owner"] != owner:
            raise ValueError("it was made for another address")
        lock_as_owner(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        description = _description_of(header, entry.path)
        status = os.fstat(descriptor)
        if status.st_nlink == 0 or status.st_size != description.size_bytes:
            raise ValueError("it is gone, or not as long as it says")
        arena = Arena(descriptor, description)
    except (OSError, OctavoError, ValueError, KeyError, TypeError) as why:
        log.debug("%s is not inherited: %r", entry.path, why)
        os.close(descriptor)
        return None
    if arena.journal.read() is None:
        log.warning("%s has no whole journal: nobody knows who may write into it, so it is not taken over", entry.path)
        arena.leave()
        return None
    return arena


def _description_of(header: dict[str, Any], path: str) -> ArenaDescription:
    """Raises KeyError, TypeError, ValueError where the header is of another kind."""
    about = header["geometry"]
    layers = tuple(LayerGeometry(**layer) for layer in about["layers"])
    geometry = KvGeometry(about["block_size"], about["dtype"], layers)
    found = header["layout"]
    layout = ArenaLayout(found["data_offset"], found["block_bytes"], tuple(map(_layer_layout_of, found["layers"])))
    if layout != lay_out(geometry):
        raise ValueError("its layout is not that of this version")
    return ArenaDescription(
        header["arena_id"],
        header["model_fingerprint"],
        geometry,
        header["num_blocks"],
        layout,
        path,
        header["size_bytes"],
    )


def _layer_layout_of(found: dict[str, Any]) -> LayerLayout:
    k, v, k_scale, v_scale = (TensorLayout(**where) if where else None for where in map(found.get, LAYER_PARTS))
    if k is None or v is None:
        raise ValueError("a layer without K or V")
    return LayerLayout(k, v, k_scale, v_scale)
