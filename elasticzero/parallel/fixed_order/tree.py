"""Adds the values of slices by one fixed binary tree. Pure.

The tree over S slices: its leaves are the slices, and a node of level l covers the slices
`[k * 2**l, (k + 1) * 2**l)`, cut at S. The value of a node is that of its left child plus that of
its right child. A run of slices is covered by its largest nodes, of which there are at most
2 * log2(S); whoever has their values for all slices can finish the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from elasticzero.spans import Span

T = TypeVar("T")


def are_siblings(left: Span, right: Span, slices: int) -> bool:
    """Returns whether two nodes, one after the other, are the children of one node.

    Args:
        left: The slices of the first node.
        right: The slices of the second node.
        slices: Number of leaves of the tree.
    """
    width = len(left)
    return (
        width.bit_count() == 1
        and left.start % (2 * width) == 0
        and right.start == left.stop
        and right.stop == min(left.start + 2 * width, slices)
    )


class PartialSums(Generic[T]):
    """Holds the largest nodes that the values given so far make up, from left to right."""

    def __init__(self, slices: int, add: Callable[[T, T], T]) -> None:
        """Begins without a value.

        Args:
            slices: Number of leaves of the tree.
            add: Returns a left child's value plus a right child's; it may reuse the memory of both.
        """
        self.slices = slices
        self.nodes: list[tuple[Span, T]] = []
        self._add = add

    def put(self, node: Span, value: T) -> None:
        """Takes the value of the node that comes next, a slice or a larger one."""
        self.nodes.append((node, value))
        while len(self.nodes) > 1:
            (left, ours), (right, theirs) = self.nodes[-2:]
            if not are_siblings(left, right, self.slices):
                return
            self.nodes[-2:] = [(Span(left.start, right.stop), self._add(ours, theirs))]

    def total(self) -> T:
        """Returns the value of the whole tree; raises `ValueError` if slices are missing."""
        if [node for node, _ in self.nodes] != [Span(0, self.slices)]:
            covered = [(node.start, node.stop) for node, _ in self.nodes]
            raise ValueError(f"the slices {covered} are not the whole tree of {self.slices}")
        return self.nodes[0][1]


def largest_nodes(run: Span, slices: int) -> list[Span]:
    """Returns the largest nodes that cover a run of slices, from left to right."""
    sums: PartialSums[None] = PartialSums(slices, lambda left, right: None)
    for index in range(run.start, run.stop):
        sums.put(Span(index, index + 1), None)
    return [node for node, _ in sums.nodes]
