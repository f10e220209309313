"""What earlier sequences began with: their keys and values in blocks, to be copied into those that begin alike.

A tree of blocks, as vLLM's and SGLang's (RadixAttention, Zheng et al. 2023, arXiv:2312.07104) prefix caches: what several
sequences begin with is held once. A key depends on all tokens before it, so a block belongs to the path to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_cpu_accel.serve.engine.storage import Layout, Part

BLOCK = 32  # tokens


class Block:
    """The keys and values of `BLOCK` tokens that follow those of the blocks above."""

    __slots__ = ("children", "parent", "part", "tokens")

    def __init__(self, tokens: tuple[int, ...], parent: Block | None, part: Part) -> None:
        self.tokens, self.parent, self.part = tokens, parent, part
        self.children: dict[tuple[int, ...], Block] = {}


class PrefixCache:
    """Blocks of at most `limit` bytes together; those that were not used for the longest time go first.

    Attributes:
        bytes: held at the moment.
    """

    def __init__(self, layout: Layout, limit: int) -> None:
        self._layout, self._limit = layout, limit
        self._block_bytes = layout.token_bytes * BLOCK
        self._root = Block((), None, [])
        # From the least to the most recently used. A block is always less recent than the one above it: the first has none below.
        self._used: dict[Block, None] = {}

    @property
    def bytes(self) -> int:
        return len(self._used) * self._block_bytes

    def match(self, ids: Sequence[int]) -> list[Block]:
        """The blocks that `ids` begins with."""
        path, block = [], self._root
        for first in range(0, len(ids) - BLOCK + 1, BLOCK):
            below = block.children.get(tuple(ids[first : first + BLOCK]))
            if below is None:
                break
            path.append(below)
            block = below
        self._touch(path)
        return path

    def add(self, ids: Sequence[int], read: Callable[[int, int], Part]) -> None:
        """Keep what whole blocks of `ids` there are.

        Args:
            read: gives the keys and values of the positions from one to another.
        """
        path = self.match(ids)
        for first in range(len(path) * BLOCK, len(ids) - BLOCK + 1, BLOCK):
            above = path[-1] if path else self._root
            if not self._make_room(above):
                return
            part = self._layout.empty(BLOCK)
            for kept, values in zip(part, read(first, first + BLOCK), strict=True):
                kept.copy_(values)
            block = Block(tuple(ids[first : first + BLOCK]), above, part)
            above.children[block.tokens] = block
            path.append(block)
            self._used[block] = None
            self._touch(path)

    def clear(self) -> None:
        self._root.children.clear()
        self._used.clear()

    def _touch(self, path: list[Block]) -> None:
        for block in reversed(path):
            del self._used[block]
            self._used[block] = None

    def _make_room(self, above: Block) -> bool:
        """Whether one more block fits, below `above`, which stays."""
        while (len(self._used) + 1) * self._block_bytes > self._limit:
            oldest = next(iter(self._used), None)
            if oldest is None or oldest is above:
                return False
            assert oldest.parent is not None
            del oldest.parent.children[oldest.tokens]
            del self._used[oldest]
        return True
