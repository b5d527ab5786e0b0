"""`DraftTree`: the shape of a static tree of drafted tokens, which one pass of the target verifies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from labkit import _check


@dataclass(frozen=True)
class DraftTree:
    """`parents[i]` is the parent of node i + 1; node 0 is the root, the last verified token, which is not drafted.

    Ancestors come first. All that is listed by node, but for `mask`, leaves the root out, as `parents` and the drafted
    tokens do. Trees with the same parents are equal, and what a tree computes it computes once.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        _check.require(isinstance(self.parents, Sequence), "parents", self.parents, "a tuple of integers")
        checked = (_check.integer(f"parents[{i}]", parent, 0, i) for i, parent in enumerate(self.parents))
        object.__setattr__(self, "parents", tuple(checked))

    @classmethod
    def chain(cls, n: int) -> DraftTree:
        """n tokens, each the child of the one before."""
        return cls(tuple(range(_check.integer("n", n, 0))))

    @classmethod
    def of_ranks(cls, paths: Sequence[tuple[int, ...]]) -> DraftTree:
        """From the path of each node, as Medusa (Cai et al., 2024) and EAGLE write their static trees: at each level
        the rank of the token among the draft's most likely, from 0; `[(0,), (1,), (0, 0)]` are the two most likely
        first tokens, and the most likely one after the first of them.

        Nodes are put in the order of their depth, then of their path. Errors: ValueError for a path twice, without
        the path that it continues, or without the likelier token beside it.
        """
        paths = [tuple(_check.integer("paths", rank, 0) for rank in path) for path in paths]
        ordered = sorted(paths, key=lambda path: (len(path), path))
        number: dict[tuple[int, ...], int] = {(): 0}
        for path in ordered:
            _check.require(path not in number, "paths", path, "each path once, and none that is empty")
            above, beside = path[:-1], (*path[:-1], path[-1] - 1)
            _check.require(above in number, "paths", path, f"{path} only with {above}, which it continues")
            _check.require(not path[-1] or beside in number, "paths", path, f"{path} only with {beside}, likelier")
            number[path] = len(number)
        return cls(tuple(number[path[:-1]] for path in ordered))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node, its steps from the root: 1 for the root's children."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths[1:])

    @property
    def depth(self) -> int:
        """Of the deepest node: the most drafted tokens that can be accepted. 0 for a tree of none."""
        return max(self.depths, default=0)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Nodes at each level, from the root's children down."""
        count = Counter(self.depths)
        return tuple(count[level] for level in range(1, self.depth + 1))

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents, 1):
            found[parent].append(node)
        return tuple(map(tuple, found))

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes below `node` (0: the root), the likeliest first."""
        return self._children[_check.integer("node", node, 0, len(self))]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Of each node, its place among its parent's children, from 0."""
        return tuple(self._children[parent].index(node) for node, parent in enumerate(self.parents, 1))

    @cached_property
    def mask(self) -> torch.Tensor:
        """`(n + 1, n + 1)`, bool, the root first: row i is True at i and at i's ancestors. As
        `Decoder.forward(tree_mask=)` takes it. One tensor for all callers: do not write to it."""
        mask = torch.eye(len(self) + 1, dtype=torch.bool)
        for node, parent in enumerate(self.parents, 1):
            mask[node] |= mask[parent]
        return mask

    def first(self, nodes: int) -> DraftTree:
        """The first `nodes` of them: a tree too, since a node's parent stands before it."""
        return DraftTree(self.parents[: _check.integer("nodes", nodes, 0, len(self))])

    def cut(self, depth: int) -> DraftTree:
        """The nodes at most `depth` steps from the root, in the same order; the tree itself where none is deeper."""
        if _check.integer("depth", depth, 0) >= self.depth:
            return self
        number = {0: 0}
        for node, at in enumerate(self.depths, 1):
            if at <= depth:
                number[node] = len(number)
        return DraftTree(tuple(number[self.parents[node - 1]] for node in number if node))
