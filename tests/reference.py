"""ToMe for SD as slow loops, written from arXiv 2210.09461, section 3, and arXiv 2303.17604, section 4."""

from __future__ import annotations

import math


def destinations(height: int, width: int, sx: int, sy: int) -> list[int]:
    """Without randomness: the top left token of every whole cell."""
    return [
        y * width + x for y in range(0, height - height % sy, sy) for x in range(0, width - width % sx, sx)
    ]


def groups(features: list[list[float]], dst: list[int], r: int) -> dict[int, list[int]]:
    """For each token that stays, the tokens that it stands for, itself first."""

    def cosine(i: int, j: int) -> float:
        a, b = features[i], features[j]
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    edges = []
    for i in range(len(features)):
        if i not in dst:
            nearest = max(dst, key=lambda j: cosine(i, j))
            edges.append((cosine(i, nearest), i, nearest))
    edges.sort(reverse=True)
    result = {i: [i] for i in range(len(features))}
    for _, source, destination in edges[:r]:
        del result[source]
        result[destination].append(source)
    return result


def merge_then_unmerge(values: list[list[float]], groups: dict[int, list[int]]) -> list[list[float]]:
    """Each token replaced by the mean of its group."""
    result = [list(row) for row in values]
    for members in groups.values():
        mean = [sum(values[i][c] for i in members) / len(members) for c in range(len(values[0]))]
        for i in members:
            result[i] = mean
    return result
