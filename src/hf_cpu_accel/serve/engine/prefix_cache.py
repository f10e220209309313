"""The prefix cache: keys and values of earlier sequences in blocks, which are copied into sequences with the same prefix.

The blocks form a tree, as in the prefix caches of vLLM and SGLang (RadixAttention, Zheng et al. 2023, arXiv:2312.07104), so that a
common prefix is stored once. Keys and values depend on all tokens before them, so a block belongs to its path in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_cpu_accel.serve.engine.storage import Layout, Part

BLOCK = 32  # tokens


class Block:
    """The keys and values of `BLOCK` tokens that follow the tokens of the parent blocks."""

    __slots__ = ("children", "parent", "part", "tokens")

    def __init__(self, tokens: tuple[int, ...], parent: Block | None, part: Part) -> None:
        self.tokens, self.parent, self.part = tokens, parent, part
        self.children: dict[tuple[int, ...], Block] = {}


class PrefixCache:
    """Blocks of at most `limit` bytes in total; the least recently used blocks are removed first.

    Args:
        layout: layout of the keys and values of a token.
        limit: maximum size in bytes.
    """

    def __init__(self, layout: Layout, limit: int) -> None:
        self._layout, self._limit = layout, limit
        self._block_bytes = layout.token_bytes * BLOCK
        self._root = Block((), None, [])
        # From the least to the most recently used. A block is always before its parent, so the first block has no children.
        self._used: dict[Block, None] = {}

    @property
    def bytes(self) -> int:
        """Return the current size in bytes."""
        return len(self._used) * self._block_bytes

    def match(self, ids: Sequence[int]) -> list[Block]:
        """Return the blocks of the longest cached prefix of `ids`."""
        path, block = [], self._root
        for first in range(0, len(ids) - BLOCK + 1, BLOCK):
            child = block.children.get(tuple(ids[first : first + BLOCK]))
            if child is None:
                break
            path.append(child)
            block = child
        self._touch(path)
        return path

    def add(self, ids: Sequence[int], read: Callable[[int, int], Part]) -> None:
        """Add the complete blocks of `ids`, as far as they fit.

        Args:
            ids: the tokens of a sequence.
            read: returns the keys and values of the positions from its first argument to its second.
        """
        path = self.match(ids)
        for first in range(len(path) * BLOCK, len(ids) - BLOCK + 1, BLOCK):
            parent = path[-1] if path else self._root
            if not self._make_room(parent):
                return
            part = self._layout.empty(BLOCK)
            for target, values in zip(part, read(first, first + BLOCK), strict=True):
                target.copy_(values)
            block = Block(tuple(ids[first : first + BLOCK]), parent, part)
            parent.children[block.tokens] = block
            path.append(block)
            self._used[block] = None
            self._touch(path)

    def clear(self) -> None:
        """Remove all blocks."""
        self._root.children.clear()
        self._used.clear()

    def _touch(self, path: list[Block]) -> None:
        for block in reversed(path):
            del self._used[block]
            self._used[block] = None

    def _make_room(self, parent: Block) -> bool:
        """Remove blocks until one more fits below `parent`, which stays; return False if that is not possible."""
        while (len(self._used) + 1) * self._block_bytes > self._limit:
            oldest = next(iter(self._used), None)
            if oldest is None or oldest is parent:
                return False
            assert oldest.parent is not None
            del oldest.parent.children[oldest.tokens]
            del self._used[oldest]
        return True
