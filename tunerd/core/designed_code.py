"""Codewords of plus and minus ones that overlap as little as possible: embeddings of tokens.

Codewords come in families of `n` that are orthogonal to each other; two of different families
have an inner product of at most `n / 2**(rank / 2)`, where `rank` is that of the sum of their
quadratic forms: 1/16 of their length for n = 256, where random signs reach 1/4.

Source:
    MacWilliams and Sloane, The Theory of Error-Correcting Codes, ch. 15: cosets of the first-order
    in the second-order Reed-Muller code, and Kerdock codes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_TRIES_PER_RANK = 2000

Signs = npt.NDArray[np.float32]


def codewords(n_words: int, n: int, rng: np.random.Generator) -> Signs:
    """`n_words` distinct codewords of length `n` (a power of two), in random order.

    Returns:
        Array of shape (n_words, n) of plus and minus ones.
    """
    m = n.bit_length() - 1
    n_families = -(-n_words // n)
    points = (np.arange(n)[:, None] >> np.arange(m)[None, :]) & 1
    parity = (points @ points.T) & 1
    families = [
        1 - 2 * (parity ^ _values(form, points)[None, :]) for form in _forms(n_families, m, rng)
    ]
    chosen = rng.permutation(n_families * n)[:n_words]
    return np.concatenate(families).astype(np.float32)[chosen]


def _values(form: npt.NDArray[np.int64], points: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = np.einsum("xi,ij,xj->x", points, form, points) & 1
    return values


def _forms(n_forms: int, m: int, rng: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    """Upper triangular forms; any two differ by a form of the highest rank that was found."""
    forms = [np.zeros((m, m), dtype=np.int64)]
    rank = m - m % 2
    tries = 0
    while len(forms) < n_forms:
        form = np.triu(rng.integers(0, 2, size=(m, m)), k=1)
        if all(_rank(form ^ other) >= rank for other in forms):
            forms.append(form)
            continue
        tries += 1
        if tries == _TRIES_PER_RANK:
            rank, tries = rank - 2, 0
    return forms


def _rank(form: npt.NDArray[np.int64]) -> int:
    """Rank over GF(2) of the alternating matrix of a form."""
    square = form ^ form.T
    rows = [int("".join(map(str, row)), 2) for row in square]
    rank = 0
    while rows:
        pivot = rows.pop()
        if pivot:
            rank += 1
            lowest = pivot & -pivot
            rows = [row ^ pivot if row & lowest else row for row in rows]
    return rank
