"""Held-out splits: one stable hash of a template instance decides which side it belongs to."""

import zlib

HELD_OUT_SHARE = 0.1


def held_out(kind: str, *instance: object) -> bool:
    """True for the tenth of all instances that training never sees.

    kind: the template's name; instance: the values filled into it. Depends on nothing else, so that any
    process, seed or Python version splits alike.
    """
    text = "\x1f".join([kind, *map(str, instance)])
    return zlib.crc32(text.encode()) % 1000 < 1000 * HELD_OUT_SHARE
