"""Finds keys of an outline that only a newer version knows, which decoding skips at no cost."""

from __future__ import annotations

import msgspec

from eagle_eye.schema.frame import NO_NAME, Rank
from eagle_eye.schema.names import is_name
from eagle_eye.schema.rows import Outline, OutlineBlock


class _Keys(msgspec.Struct):
    """The keys of an outline's parts; their values stay encoded."""

    ranks: list[dict[str, msgspec.Raw]] = []
    blocks: list[dict[str, msgspec.Raw]] = []


_keys_decoder = msgspec.msgpack.Decoder(_Keys)
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def unknown_outline_keys(raw: bytes) -> tuple[str, ...]:
    """Return the keys of an accepted outline that this version does not know, each once, as ``frame.unknown_keys``."""
    try:
        parts = _keys_decoder.decode(raw)
        whole = _map_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return (NO_NAME,)
    shapes: tuple[tuple[str, type[msgspec.Struct], list[dict[str, msgspec.Raw]]], ...] = (
        ("frame", Outline, [whole]),
        ("rank", Rank, parts.ranks),
        ("block", OutlineBlock, parts.blocks),
    )
    found = {
        f"key {name}.{key}" if is_name(key) else NO_NAME
        for name, shape, items in shapes
        for item in items
        for key in item.keys() - set(shape.__struct_fields__)
    }
    return tuple(sorted(found))
