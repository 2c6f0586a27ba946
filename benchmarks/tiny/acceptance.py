"""Greedy speculative decoding replayed on a known answer."""

import numpy as np


def accepted_drafts(ids: np.ndarray, drafts: np.ndarray, start: int, stop: int) -> list[int]:
    """Drafts accepted in each verify window while the answer ids[start:stop] is generated.

    drafts [steps, time]: row t holds the drafts of tokens t + 2, t + 3, ... made when the target has run up
    to t. ids[start] comes from the prefill; each window verifies the drafts after the newest token and adds
    one token of the target's. Windows that reach past the answer's end are left out.
    """
    steps = len(drafts)
    accepted = []
    newest = start
    while newest + steps < stop:
        right = drafts[:, newest - 1] == ids[newest + 1 : newest + 1 + steps]
        count = steps if right.all() else int(right.argmin())
        accepted.append(count)
        newest += count + 1
    return accepted
