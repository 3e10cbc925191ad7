"""The prefix index: from token ids to the blocks that hold their KV.

A tree. A node stands for one full block of tokens after one exact history under one exact set of extras; the blocks
that hold its KV (twins, when two requests computed the same at once) hang on it. Nodes are found by a chained key,
but a key only narrows the search: a hit compares the parent's identity and the tokens, so that even a constant hash
gives right answers. Not here: reference counts, who owns a block, when it is evicted.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from cache_service.block import BlockId
from cache_service.events import BlockEvents
from cache_service.ledger import TOKEN_BYTES, Ledger, NoLedger, Record

HashFunction = Callable[[bytes], bytes]

KEY_BYTES = 32
# Changes when the bytes behind a key change, so that keys of two versions never meet.
_ROOT_PREFIX = b"octavo-kv-1"


def blake2b_key(message: bytes) -> bytes:
    """BLAKE2b-256 (RFC 7693): equal bytes give equal keys in every process and after every restart."""
    return blake2b(message, digest_size=KEY_BYTES).digest()


def pack_tokens(tokens: "array[int]") -> bytes:
    """Token ids as little-endian uint32, on every machine."""
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """What `pack_tokens` packed."""
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


class Extras(NamedTuple):
    """Everything besides the tokens that a block's KV depends on. None is unset, and differs from empty."""

    model: str = ""
    revision: str = ""
    kv_dtype: str = ""
    adapter: str | None = None
    tenant: str | None = None
    salt: str | None = None
    image_hashes: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """Tag, length, value of each set field: two different extras never give the same bytes."""
        parts = [_ROOT_PREFIX]
        for tag, text in enumerate(self[:6]):
            if text is not None:
                parts.append(_tagged(tag, text.encode()))
        parts.extend(_tagged(6, image_hash) for image_hash in self.image_hashes)
        return b"".join(parts)


_TENANT_TAG = 4


def tenant_of(encoded: bytes) -> str | None:
    """The tenant in encoded extras; bytes that are no extras have none."""
    position = len(_ROOT_PREFIX)
    while position < len(encoded):
        tag, length = encoded[position], int.from_bytes(encoded[position + 1 : position + 5], "little")
        position += 5 + length
        if tag == _TENANT_TAG:
            return encoded[position - length : position].decode()
    return None


def _tagged(tag: int, value: bytes) -> bytes:
    return bytes((tag,)) + len(value).to_bytes(4, "little") + value


class PrefixNode:
    """One block of tokens after one history. A root stands for extras alone: no tokens, no blocks."""

    __slots__ = ("blocks", "key", "next_of_key", "num_children", "num_hits", "parent", "serial", "tokens")

    def __init__(self, key: bytes, parent: "PrefixNode | None", tokens: bytes, serial: int) -> None:
        self.key = key
        self.serial = serial  # its name in the ledger, higher than its parent's; a root: 0
        self.parent = parent
        self.tokens = tokens  # packed token ids of the block; a root: the encoded extras
        self.blocks: list[BlockId] = []  # twins, oldest first
        self.num_children = 0
        self.num_hits = 0  # allocations that began with it
        self.next_of_key: PrefixNode | None = None  # another node with the same key

    def tenant(self) -> str | None:
        """Whose it is, by the extras of its root. O(depth)."""
        node = self
        while node.parent is not None:
            node = node.parent
        return tenant_of(node.tokens)


class PrefixIndex:
    """Finds cached blocks by content. O(1) per block looked up, attached or forgotten."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hash_function: HashFunction = blake2b_key,
        ledger: Ledger | None = None,
    ) -> None:
        self.events = BlockEvents()
        self.node_of: list[PrefixNode | None] = [None] * num_blocks  # block id -> its node, if findable
        self._ledger = ledger or NoLedger()
        self._last_serial = 0
        self._block_bytes = block_size * TOKEN_BYTES
        self._hash = hash_function
        self._roots: dict[bytes, PrefixNode] = {}  # encoded extras -> root
        self._nodes: dict[bytes, PrefixNode] = {}  # key -> first node of that key

    def match(self, extras: bytes, tokens: bytes, max_blocks: int) -> list[PrefixNode]:
        """The longest chain of nodes with blocks that starts `tokens` (packed), at most `max_blocks` long."""
        chain: list[PrefixNode] = []
        node = self._roots.get(extras)
        if node is None:
            return chain
        width, key_of, first_of = self._block_bytes, self._hash, self._nodes.get
        for start in range(0, max_blocks * width, width):
            packed = tokens[start : start + width]
            child = first_of(key_of(node.key + packed))
            # As _find, without a call for each block.
            while child is not None and (child.parent is not node or child.tokens != packed):
                child = child.next_of_key
            if child is None or not child.blocks:
                break
            chain.append(child)
            node = child
        return chain

    def attach(self, block: BlockId, parent: PrefixNode | None, extras: bytes, tokens: bytes) -> PrefixNode:
        """Make a block findable under `parent` (None: the root of `extras`); returns its node, new or a twin's."""
        if parent is None:
            parent = self._roots.get(extras) or self._add_root(extras)
        key = self._hash(parent.key + tokens)
        node = self._find(key, parent, tokens) or self._add_child(key, parent, tokens, self._last_serial + 1)
        if not node.blocks:
            self.events.stored(key, parent.key, tokens)
        node.blocks.append(block)
        self.node_of[block] = node
        self._ledger.write(block, Record(node.serial, parent.serial, tokens, b"" if parent.serial else extras))
        return node

    def child_of(self, parent: PrefixNode | None, extras: bytes, tokens: bytes) -> PrefixNode | None:
        """The node of this block of tokens under `parent` (None: the root of `extras`), if there is one."""
        parent = parent or self._roots.get(extras)
        return self._find(self._hash(parent.key + tokens), parent, tokens) if parent is not None else None

    def forget(self, block: BlockId) -> None:
        """The block's content is about to go: drop it, and every node that holds nothing any more."""
        node = self.node_of[block]
        if node is None:
            raise KeyError(f"block {block} is not findable")
        self._ledger.strike(block)
        self.node_of[block] = None
        node.blocks.remove(block)
        if not node.blocks:
            self.events.removed(node.key)
        while node is not None and not node.blocks and not node.num_children:
            node = self._remove(node)

    def _find(self, key: bytes, parent: PrefixNode, tokens: bytes) -> PrefixNode | None:
        node = self._nodes.get(key)
        while node is not None and (node.parent is not parent or node.tokens != tokens):
            node = node.next_of_key
        return node

    def _add_root(self, extras: bytes) -> PrefixNode:
        root = self._roots[extras] = PrefixNode(self._hash(extras), None, extras, 0)
        return root

    def _add_child(self, key: bytes, parent: PrefixNode, tokens: bytes, serial: int) -> PrefixNode:
        node = PrefixNode(key, parent, tokens, serial)
        self._last_serial = max(self._last_serial, serial)
        node.next_of_key = self._nodes.get(key)
        self._nodes[key] = node
        parent.num_children += 1
        return node

    def _remove(self, node: PrefixNode) -> PrefixNode | None:
        """Take a node out; returns its parent, which may now be empty too."""
        if node.parent is None:
            del self._roots[node.tokens]
            return None
        self._unchain(node)
        node.parent.num_children -= 1
        return node.parent

    def _unchain(self, node: PrefixNode) -> None:
        first = self._nodes[node.key]
        if first is node:
            if node.next_of_key is None:
                del self._nodes[node.key]
            else:
                self._nodes[node.key] = node.next_of_key
            return
        while first.next_of_key is not node:
            assert first.next_of_key is not None, "a node is in the chain of its key"
            first = first.next_of_key
        first.next_of_key = node.next_of_key

    # -------------------------------------------------------------------------------------------------- restoring

    def restore(self, records: Mapping[BlockId, Record]) -> list[BlockId]:
        """Make findable what whole records prove, in an empty index; strike out the rest.

        A record proves its block if every record up to its root is there: of a block whose history is gone nobody can
        say any more what it holds.

        Returns:
            Findable blocks in the order in which they should be evicted.
        """
        nodes: dict[int, PrefixNode] = {}
        for block, record in sorted(records.items(), key=lambda item: (item[1].node, item[0])):
            # A parent was named before its children, so it comes first here.
            node = nodes.get(record.node) or self._restore_node(record, nodes)
            self._last_serial = max(self._last_serial, record.node, record.parent)
            if node is None or not _is_proven(record, node):
                self._ledger.strike(block)
                continue
            nodes[record.node] = node
            node.blocks.append(block)
            self.node_of[block] = node
        return _eviction_order(nodes)

    def _restore_node(self, record: Record, nodes: Mapping[int, PrefixNode]) -> PrefixNode | None:
        if not 0 <= record.parent < record.node or (record.parent and record.extras):
            return None
        if record.parent:
            parent = nodes.get(record.parent)
        else:
            parent = self._roots.get(record.extras) or self._add_root(record.extras)
        if parent is None:
            return None
        key = self._hash(parent.key + record.tokens)
        if self._find(key, parent, record.tokens) is not None:  # another name for the same: one of them is wrong
            return None
        return self._add_child(key, parent, record.tokens, record.node)

    # ------------------------------------------------------------------------------------------------- self-check

    def nodes(self) -> Iterable[PrefixNode]:
        """Every node except the roots. For the self-check and tests."""
        for first in list(self._nodes.values()):
            node: PrefixNode | None = first
            while node is not None:
                yield node
                node = node.next_of_key

    def findable(self) -> list[PrefixNode]:
        """Nodes with blocks, each behind its parent. O(blocks)."""
        return sorted((node for node in self.nodes() if node.blocks), key=lambda node: node.serial)

    def violations(self) -> list[str]:
        """What is wrong with the tree; empty when it is sound."""
        found: list[str] = []
        num_children: dict[int, int] = {}
        reachable = {id(root): root for root in self._roots.values()}
        for node in self.nodes():
            reachable[id(node)] = node
            num_children[id(node.parent)] = num_children.get(id(node.parent), 0) + 1
        for node in reachable.values():
            found.extend(self._node_violations(node, num_children.get(id(node), 0), reachable))
        hanging = sum(len(node.blocks) for node in reachable.values())
        findable = sum(node is not None for node in self.node_of)
        if hanging != findable:
            found.append(f"{hanging} blocks hang on nodes, {findable} say that they do")
        return found

    def _node_violations(self, node: PrefixNode, num_children: int, reachable: dict[int, PrefixNode]) -> Iterable[str]:
        if node.num_children != num_children:
            yield f"a node counts {node.num_children} children and has {num_children}"
        if not node.blocks and not num_children:
            yield "a node without blocks and children was kept"
        if node.parent is not None and id(node.parent) not in reachable:
            yield "a node's parent is not in the tree"
        expected = node.tokens if node.parent is None else node.parent.key + node.tokens
        if node.key != self._hash(expected):
            yield "a node's key is not the hash of its history"
        for block in node.blocks:
            if self.node_of[block] is not node:
                yield f"block {block} hangs on a node that it does not name"


def _is_proven(record: Record, node: PrefixNode) -> bool:
    """Whether a twin's record says what its node is."""
    assert node.parent is not None, "records are of blocks, and a root has none"
    extras = b"" if record.parent else node.parent.tokens
    return (record.parent, record.tokens, record.extras) == (node.parent.serial, node.tokens, extras)


def _eviction_order(nodes: Mapping[int, PrefixNode]) -> list[BlockId]:
    """Blocks of the chain that grew least recently first, within a chain from its tail to its head."""
    newest = {serial: serial for serial in nodes}  # serial -> highest serial below it
    depth: dict[int, int] = {}
    for serial in sorted(nodes, reverse=True):
        parent = nodes[serial].parent
        if parent is not None and parent.serial in newest:
            newest[parent.serial] = max(newest[parent.serial], newest[serial])
    for serial in sorted(nodes):
        parent = nodes[serial].parent
        depth[serial] = depth.get(parent.serial, 0) + 1 if parent is not None else 0
    order = sorted(nodes, key=lambda serial: (newest[serial], -depth[serial]))
    return [block for serial in order for block in nodes[serial].blocks]
