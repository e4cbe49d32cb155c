"""Weighted least squares of three terms that are not negative: what peaks of memory and times of chunks are fitted with."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Row = tuple[float, float, float, float]        # the three columns, and what they add up to
Terms = tuple[float, float, float]
Gram = tuple[list[list[float]], list[float]]   # 3 x 3, and the right side


def gram(rows: Sequence[Row], weights: Sequence[float]) -> Gram:
    """The weighted normal equations."""
    matrix, right = [[0.0] * 3 for _ in range(3)], [0.0] * 3
    for one, two in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)):
        matrix[one][two] = matrix[two][one] = sum(w * row[one] * row[two] for row, w in zip(rows, weights, strict=True))
    for one in range(3):
        right[one] = sum(w * row[one] * row[3] for row, w in zip(rows, weights, strict=True))
    return matrix, right


def least(equations: Gram, columns: Sequence[int]) -> Terms:
    """The terms of `columns`, the others 0. With so few all sets of those that are not 0 can be tried."""
    best, terms = 0.0, [0.0, 0.0, 0.0]
    for count in range(1, len(columns) + 1):
        for chosen in combinations(columns, count):
            found = _solve(equations, chosen)
            if found is None or min(found) < 0:
                continue
            gain = sum(value * equations[1][column] for value, column in zip(found, chosen, strict=True))
            if gain > best:                    # what it takes off the sum of squares
                best, terms = gain, [0.0, 0.0, 0.0]
                for value, column in zip(found, chosen, strict=True):
                    terms[column] = value
    return terms[0], terms[1], terms[2]


def _solve(equations: Gram, chosen: tuple[int, ...]) -> list[float] | None:
    """The normal equations of `chosen`; None where they are singular."""
    matrix, right = equations
    found = inverse(matrix, chosen)
    return None if found is None else [sum(value * right[column] for value, column in zip(line, chosen, strict=True))
                                       for line in found]


def inverse(matrix: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[list[float]] | None:
    """Of the rows and columns `chosen`, by Gauss and Jordan, scaled (rows are thousands, pairs billions); None: singular."""
    scale = [matrix[column][column] ** -0.5 if matrix[column][column] > 0 else 0.0 for column in chosen]
    size = len(chosen)
    work = [[matrix[one][two] * scale[i] * scale[j] for j, two in enumerate(chosen)] + [float(i == j) for j in range(size)]
            for i, one in enumerate(chosen)]
    for i in range(size):                      # positive definite: the diagonal is the pivot
        if work[i][i] < 1e-9:
            return None
        work[i] = [value / work[i][i] for value in work[i]]
        for j in range(size):
            if j != i:
                work[j] = [value - work[j][i] * pivot for value, pivot in zip(work[j], work[i], strict=True)]
    return [[value * scale[i] * scale[j] for j, value in enumerate(line[size:])] for i, line in enumerate(work)]
