"""Which corpus of a blend a sample comes from: exact proportions at every point, found in constant time.

The corpora are leaves of a binary tree, built as Huffman codes are. At each node a share of the samples goes to one side, and
of the first i samples that are floor(i x share + 1/2), in whole numbers and so without rounding errors. Of the first i samples of
the whole, each corpus then has its weight times i, give or take less than two.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Union


@dataclass(frozen=True)
class Node:
    """Two sides among which samples are divided; a side that is a number is a corpus."""

    left: Union["Node", int]
    right: Union["Node", int]
    share: Fraction
    """Of the left side."""

    def count_left(self, number: int) -> int:
        """How many of the first `number` samples go to the left."""
        up, down = self.share.numerator, self.share.denominator
        return (2 * number * up + down) // (2 * down)


Tree = Node | int


def blend_tree(weights: Sequence[Fraction]) -> Tree:
    """The tree of corpora with these weights, each above 0."""
    heap: list[tuple[Fraction, int, Tree]] = [(weight, number, number) for number, weight in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (small, first, left), (large, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (small + large, first, Node(left, right, small / (small + large))))
    return heap[0][2]


def locate(tree: Tree, index: int) -> tuple[int, int]:
    """(corpus, number of its samples before this one) of sample `index` of the blend."""
    while isinstance(tree, Node):
        before = tree.count_left(index)
        if tree.count_left(index + 1) > before:
            tree, index = tree.left, before
        else:
            tree, index = tree.right, index - before
    return tree, index


def counts(tree: Tree, number: int) -> dict[int, int]:
    """How many of the first `number` samples of the blend come from each corpus."""
    if isinstance(tree, int):
        return {tree: number}
    left = tree.count_left(number)
    return counts(tree.left, left) | counts(tree.right, number - left)
