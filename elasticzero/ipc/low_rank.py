"""Finds two narrow matrices whose product is near a matrix, as PowerSGD does (Vogels, Karimireddy
and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019,
arXiv 1905.13727). Pure.

The left one has orthonormal columns near the strongest ones of the matrix, the right one its
products with them. They are found by subspace iteration that begins with the same numbers each
time, so that a node needs nothing of earlier matrices, and is done twice instead.
All nodes get the same bits of the same input: sums are NumPy's, whose order is its own, and not of
a library for linear algebra, whose results depend on the processor.
Shapes: N rows, M columns, R columns of a factor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Singles = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

AT_ONCE = 1 << 20
"""Elements that are computed with at a time."""
LEAST_LENGTH = 1e-9
"""Share of its length that a column has beside the ones before it, if it is not spanned by them."""


def factors_of(values_NM: Singles, rank: int) -> tuple[Singles, Singles]:
    """Returns orthonormal columns (N, R) near the strongest ones of a matrix, and its products
    (M, R) with them."""
    right_MR = _scattered(values_NM.shape[1], rank)
    for _ in range(2):
        left_NR = _orthonormal(_times(values_NM, right_MR))
        right_MR = _transposed_times(values_NM, left_NR)
    return left_NR.astype(np.float32), right_MR.astype(np.float32)


def _scattered(rows: int, columns: int) -> Doubles:
    """Returns numbers between -1 and 1 that look random, the same each time: of SplitMix64."""
    bits = np.arange(1, rows * columns + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return ((bits >> np.uint64(11)) / 2.0**52 - 1).reshape(rows, columns)


def _rows_at_once(values_NM: Singles) -> Iterator[slice]:
    """Yields slices of a matrix's rows, of so many elements that temporary ones need little
    memory."""
    count = max(1, AT_ONCE // max(1, values_NM.shape[1]))
    for start in range(0, len(values_NM), count):
        yield slice(start, start + count)


def _times(values_NM: Singles, right_MR: Doubles) -> Doubles:
    out_NR = np.empty((len(values_NM), right_MR.shape[1]))
    for rows in _rows_at_once(values_NM):
        for column, right_M in enumerate(np.ascontiguousarray(right_MR.T)):
            out_NR[rows, column] = (values_NM[rows] * right_M).sum(axis=1)
    return out_NR


def _transposed_times(values_NM: Singles, left_NR: Doubles) -> Doubles:
    out_MR = np.zeros((values_NM.shape[1], left_NR.shape[1]))
    for rows in _rows_at_once(values_NM):
        for column in range(left_NR.shape[1]):
            out_MR[:, column] += (values_NM[rows] * left_NR[rows, column, None]).sum(axis=0)
    return out_MR


def _orthonormal(columns_NR: Doubles) -> Doubles:
    """Returns columns that span the same, each of length 1 and orthogonal to the others; zeros in
    the place of one that the others span."""
    out_NR = columns_NR.copy()
    for number in range(out_NR.shape[1]):
        column_N = out_NR[:, number]
        before = np.sqrt((column_N * column_N).sum())
        for other in range(number):
            column_N -= (column_N * out_NR[:, other]).sum() * out_NR[:, other]
        length = np.sqrt((column_N * column_N).sum())
        column_N *= 1 / length if length > LEAST_LENGTH * before else 0.0
    return out_NR


def product_of(left_NR: Singles, right_MR: Singles) -> Singles:
    """Returns the product of two factors: a sum of products of their columns, rounded one by
    one."""
    out_NM = np.zeros((len(left_NR), len(right_MR)), np.float32)
    for rows in _rows_at_once(out_NM):
        for left_N, right_M in zip(left_NR[rows].T, right_MR.T, strict=True):
            out_NM[rows] += left_N[:, None] * np.ascontiguousarray(right_M)
    return out_NM
