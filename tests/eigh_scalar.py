"""`find_blocks` and `sweep` of `eigh` for a single matrix, as one would write them: what tests compare the lanes with.

Implicit QL with Wilkinson's shift: Bowdler, Martin, Reinsch and Wilkinson, "The QR and QL algorithms for symmetric
matrices", Numerische Mathematik 11 (1968), procedure tql2; the reflections before it are their tred2. In lanes, every
matrix of a group takes the steps of all, and a `select` keeps what belongs to another's block as it was.
"""

from __future__ import annotations

from math import copysign, hypot


def find_block(diagonal: list[float], beside: list[float], tolerance: float) -> tuple[int, int, float] | None:
    """The first block that is not diagonal, from its start to its end, and how a sweep begins, or None."""
    couplings = range(len(diagonal) - 1)
    first = next((i for i in couplings if abs(beside[i]) > tolerance), None)
    if first is None:
        return None
    end = next((i for i in couplings[first + 1 :] if abs(beside[i]) <= tolerance), len(diagonal) - 1)
    g = (diagonal[first + 1] - diagonal[first]) / (2 * beside[first])
    shift = diagonal[first] - beside[first] / (g + copysign(hypot(g, 1), g))  # of the upper corner, the closer to it
    return first, end, diagonal[end] - shift


def sweep_block(diagonal: list[float], beside: list[float], first: int, end: int, g: float) -> None:
    """One step in place, from the end of the block up: each turn moves the bulge `f` that the one before has made."""
    sine = cosine = 1.0
    q = diagonal[end]
    for i in range(end - 1, first - 1, -1):
        f, b = sine * beside[i], cosine * beside[i]
        length = hypot(f, g)
        if i + 1 < end:
            beside[i + 1] = length
        sine, cosine = (f / length, g / length) if length else (0.0, 1.0)
        r = (diagonal[i] - q) * sine + 2 * cosine * b
        diagonal[i + 1] = q + sine * r
        g, q = cosine * r - b, diagonal[i] - sine * r
        diagonal[i], beside[i] = q, g
