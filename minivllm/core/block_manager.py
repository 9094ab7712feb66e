# Generated from notebooks/03_block_manager.ipynb, 04_prefix_caching.ipynb, 10_gpu_performance.ipynb by tools/export.py;
# edit there.
"""Which physical block holds which tokens: plain bookkeeping, no tensors."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass

from minivllm.core.sequence import Sequence


def cdiv(n: int, d: int) -> int:
    """n / d rounded up: the blocks of d tokens that n tokens need (n ≥ 0, d ≥ 1)."""
    return -(-n // d)


def slot_of(position: int, block_table: array[int] | list[int], block_size: int) -> int:
    """Physical slot of the token at `position` (≥ 0): its block's first slot plus its place in the block.

    The block table is that of Kwon et al. 2023, section 4.2 (https://arxiv.org/abs/2309.06180).
    Raises IndexError when the table does not reach `position`.
    """
    return block_table[position // block_size] * block_size + position % block_size


class BlockManagerError(RuntimeError):
    """The bookkeeping was asked for something impossible, or contradicts itself."""


class NoFreeBlocksError(BlockManagerError):
    """The pool has fewer free blocks than the call needs; nothing was changed."""


class UnknownSequenceError(BlockManagerError):
    """The sequence holds no blocks: it was never allocated, or it has been freed."""


class AlreadyAllocatedError(BlockManagerError):
    """The sequence already has a block table."""


class BlockManager:
    """Owner of all block tables over a pool of `num_blocks` blocks of `block_size` tokens.

    A block is in one of three states:
      held    in one table or more (its reference count), findable or not; never evicted
      cached  in no table, full, and findable by its content; evicted when the pool needs it, the oldest first
      empty   in no table and not findable
    Free means cached or empty. Questions (`can_…`, `get_…`, `num_free_blocks`) change nothing. Without
    `enable_prefix_caching` no block ever becomes findable; forks share blocks all the same.

    Blocks, sharing and copy on write: Kwon et al. 2023 (https://arxiv.org/abs/2309.06180); the chain of hashes: vLLM's
    automatic prefix caching (https://github.com/vllm-project/vllm/blob/main/docs/design/prefix_caching.md).
    Raises ValueError for a pool of no blocks or blocks of no tokens.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token, got {num_blocks=}, {block_size=}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self._tables: dict[int, array[int]] = {}  # by seq_id
        # In the order of handing out. A linked list with an index: a block that is found comes out of the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._ref_counts = [0] * num_blocks  # in how many tables a block is
        self._cached: dict[int, CachedBlock] = {}  # findable blocks, by hash
        self._entries: list[CachedBlock | None] = [None] * num_blocks  # the same, by block; None: not findable
        self._prefixes: defaultdict[int, list[CachedBlock]] = defaultdict(list)  # by seq_id: its full blocks so far

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def block_table(self, seq: Sequence) -> array[int]:
        """Physical block of each logical block of `seq`, as int32: to read, not to change.

        Raises UnknownSequenceError.
        """
        table = self._tables.get(seq.seq_id)
        if table is None:
            raise UnknownSequenceError(
                f"sequence {seq.seq_id} holds no blocks: it was never allocated, or it has been freed"
            )
        return table

    def can_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether `allocate(seq, num_tokens)` would find enough blocks."""
        return self._num_blocks_to_take(self._find_prefix(seq, num_tokens), num_tokens) <= len(self._free)

    def _require(self, seq: Sequence, num_blocks: int) -> None:
        if num_blocks > len(self._free):
            raise NoFreeBlocksError(
                f"sequence {seq.seq_id} needs {num_blocks} block(s), {len(self._free)} of {self.num_blocks} are free: "
                "free a sequence first, or make the pool larger"
            )

    def _take(self) -> int:
        """The next free block, from now on held by one table. What it was cached for is not findable any more."""
        block_id, _ = self._free.popitem(last=False)
        self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def allocate(self, seq: Sequence, num_tokens: int) -> int:
        """Give a new sequence a table that covers positions [0, num_tokens).

        Returns the number of tokens at its start whose K and V are there already: full blocks, and at least one of
        `num_tokens` is always left to compute. Does not touch `seq`.
        Raises AlreadyAllocatedError, NoFreeBlocksError, and ValueError for num_tokens < 1.
        """
        if seq.seq_id in self._tables:
            raise AlreadyAllocatedError(f"sequence {seq.seq_id} has a table already: append to it, or free it first")
        if num_tokens < 1:
            raise ValueError(f"sequence {seq.seq_id}: cannot allocate for {num_tokens} tokens")
        found = self._find_prefix(seq, num_tokens)
        self._require(seq, self._num_blocks_to_take(found, num_tokens))
        table = array("i", [entry.block_id for entry in found])
        for block_id in table:  # hits first: once held, they cannot be evicted by what is taken next
            self._hold(block_id)
        table.extend([self._take() for _ in range(cdiv(num_tokens, self.block_size) - len(found))])
        self._tables[seq.seq_id] = table
        self._prefixes[seq.seq_id] = found
        self._count(seq, found)
        return len(found) * self.block_size

    def can_append(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether `append(seq, num_tokens)` would find enough blocks. Raises UnknownSequenceError."""
        table = self.block_table(seq)
        missing = max(0, cdiv(num_tokens, self.block_size) - len(table))
        return missing + len(self._shared_ahead(seq, table)) <= len(self._free)

    def append(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Make the table of a known sequence cover positions [0, num_tokens), ready to be written.

        Every block with a position from `seq.num_computed_tokens` on is the sequence's alone afterwards. Returns the
        block copies (source, destination) that this takes, to be made in order, before the step writes anything.
        Raises UnknownSequenceError and NoFreeBlocksError.
        """
        table = self.block_table(seq)
        shared = self._shared_ahead(seq, table)
        missing = max(0, cdiv(num_tokens, self.block_size) - len(table))
        if not missing and not shared:  # nearly always
            return []
        self._require(seq, missing + len(shared))
        copies = [(table[i], self._take()) for i in shared]
        for i, (source, destination) in zip(shared, copies, strict=True):
            self._release(source)
            table[i] = destination
        if shared:  # what is written again will be registered again
            del self._prefixes[seq.seq_id][shared[0] :]
        table.extend([self._take() for _ in range(missing)])
        return copies

    def free(self, seq: Sequence) -> None:
        """Take the table away. Blocks that nobody else holds become free, the last first: a prefix outlives its tail.

        Raises UnknownSequenceError (so also for a second free).
        """
        for block_id in reversed(self.block_table(seq)):
            self._release(block_id)
        del self._tables[seq.seq_id]
        self._prefixes.pop(seq.seq_id, None)

    def check_integrity(self) -> None:
        """Recount everything from the tables. Raises BlockManagerError that names the first thing that is off."""
        held = Counter(block_id for table in self._tables.values() for block_id in table)
        if len(held) + len(self._free) != self.num_blocks:
            raise BlockManagerError(f"{len(held)} blocks held + {len(self._free)} free are not {self.num_blocks}")
        for block_id, count in enumerate(self._ref_counts):
            if count != held[block_id] or (count == 0) != (block_id in self._free):
                where = f"in {held[block_id]} table(s), {'' if block_id in self._free else 'not '}free"
                raise BlockManagerError(f"block {block_id} is {where}, and its reference count is {count}")
        for seq_id, table in self._tables.items():
            if len(set(table)) != len(table):
                raise BlockManagerError(f"sequence {seq_id} has a block twice: {list(table)}")
        self._check_entries()

    def _hold(self, block_id: int) -> None:
        """One table more holds this block."""
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
        self._ref_counts[block_id] += 1

    def _release(self, block_id: int) -> None:
        """One table less holds this block; the last one gives it back."""
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            self._free[block_id] = None
            if self._entries[block_id] is None:  # nothing is lost with it: before all cached blocks
                self._free.move_to_end(block_id, last=False)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` a table that shares every block of `parent` with computed tokens in it. Nothing is copied now.

        Raises UnknownSequenceError, AlreadyAllocatedError, and ValueError when the computed tokens are not the same.
        """
        if child.seq_id in self._tables:
            raise AlreadyAllocatedError(f"sequence {child.seq_id} has a table already: it cannot become a fork")
        table, end = self.block_table(parent), parent.num_computed_tokens
        if child.num_computed_tokens != end or child.token_ids[:end] != parent.token_ids[:end]:
            raise ValueError(
                f"sequence {child.seq_id} cannot share the {end} computed tokens of sequence {parent.seq_id}: "
                "set the same tokens and the same num_computed_tokens first"
            )
        shared = table[: cdiv(end, self.block_size)]
        for block_id in shared:
            self._hold(block_id)
        self._tables[child.seq_id] = shared
        self._prefixes[child.seq_id] = self._prefixes[parent.seq_id][: end // self.block_size]

    def _shared_ahead(self, seq: Sequence, table: array[int]) -> list[int]:
        """Indices in the table of the blocks that `seq` will write to, but shares: with a table, or with the cache."""
        ahead = range(seq.num_computed_tokens // self.block_size, len(table))
        return [i for i in ahead if self._ref_counts[table[i]] > 1 or self._entries[table[i]] is not None]

    def _block_tokens(self, seq: Sequence, i: int) -> tuple[int, ...]:
        return tuple(seq.token_ids[i * self.block_size : (i + 1) * self.block_size])

    def _lookup(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
        """The findable block with these tokens after that prefix."""
        entry = self._cached.get(hash_block(parent.hash if parent else 0, token_ids))
        return entry if entry is not None and entry.holds(parent, token_ids) else None

    def _find_prefix(self, seq: Sequence, num_tokens: int) -> list[CachedBlock]:
        """The longest chain of findable blocks at the start of `seq` that leaves one of `num_tokens` to compute."""
        at_most = (min(num_tokens, seq.num_tokens) - 1) // self.block_size
        found: list[CachedBlock] = []
        parent = None
        for i in range(at_most if self._cached else 0):  # nothing is findable: nothing need be hashed
            parent = self._lookup(parent, self._block_tokens(seq, i))
            if parent is None:
                break
            found.append(parent)
        return found

    def get_num_cached_tokens(self, seq: Sequence) -> int:
        """Tokens at the start of `seq` whose K and V are in the cache: full blocks only, and never the last token."""
        return len(self._find_prefix(seq, seq.num_tokens)) * self.block_size

    def _num_blocks_to_take(self, found: list[CachedBlock], num_tokens: int) -> int:
        """Free blocks that an admission uses up: the new ones, and the hits that nobody holds now."""
        idle = sum(self._ref_counts[entry.block_id] == 0 for entry in found)
        return cdiv(num_tokens, self.block_size) - len(found) + idle

    def _count(self, seq: Sequence, found: list[CachedBlock]) -> None:
        if self.enable_prefix_caching and seq.num_preemptions == 0:  # what it computed itself before is no hit
            self.stats.queried_tokens += seq.num_tokens
            self.stats.hit_tokens += len(found) * self.block_size

    def _register_block(self, block_id: int, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock:
        """The entry under which these tokens are findable from now on: one that there was, or a new one."""
        known = self._lookup(parent, token_ids)
        if known is not None:
            return known
        entry = CachedBlock(block_id, parent, token_ids, hash_block(parent.hash if parent else 0, token_ids))
        if entry.hash in self._cached:
            self._forget(self._cached[entry.hash].block_id)
        self._cached[entry.hash] = self._entries[block_id] = entry
        return entry

    def _forget(self, block_id: int) -> None:
        """The block is not findable any more."""
        entry = self._entries[block_id]
        if entry is not None:
            del self._cached[entry.hash]
            self._entries[block_id] = None

    def register(self, seq: Sequence) -> None:
        """Make the full blocks inside [0, seq.num_computed_tokens) findable: to be called after the step wrote them.

        Raises UnknownSequenceError, and BlockManagerError for a new full block when more tokens are claimed than the
        sequence has or its table covers.
        """
        table, prefix = self.block_table(seq), self._prefixes[seq.seq_id]
        num_full = seq.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or num_full <= len(prefix):
            return
        if seq.num_computed_tokens > min(seq.num_tokens, len(table) * self.block_size):
            raise BlockManagerError(
                f"sequence {seq.seq_id} claims {seq.num_computed_tokens} computed tokens, "
                f"but has {seq.num_tokens} tokens and room for {len(table) * self.block_size}"
            )
        for i in range(len(prefix), num_full):
            parent = prefix[-1] if prefix else None
            prefix.append(self._register_block(table[i], parent, self._block_tokens(seq, i)))

    def _check_entries(self) -> None:
        for key, entry in self._cached.items():
            if entry.hash != key or self._entries[entry.block_id] is not entry:
                raise BlockManagerError(f"the cache leads to block {entry.block_id}, which holds something else")
        listed = sum(entry is not None for entry in self._entries)
        if listed != len(self._cached):
            raise BlockManagerError(f"{listed} blocks say that they are findable, {len(self._cached)} can be found")

    def is_ready(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether `append(seq, num_tokens)` has nothing to do: one block to write, there already, and private."""
        table, block = self._tables[seq.seq_id], seq.num_computed_tokens // self.block_size
        if num_tokens > len(table) * self.block_size or block != len(table) - 1:
            return False
        return self._ref_counts[table[block]] == 1 and self._entries[table[block]] is None


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked for and tokens found: counted once per sequence, when it is first admitted."""

    queried_tokens: int = 0
    hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked for that were found; 0.0 before the first query."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


def hash_block(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    """Name of a full block after the blocks before it; `parent_hash` is 0 for the first block of a prompt.

    Two contents may get the same name: compare before trusting it.
    """
    return hash((parent_hash, token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    """A full block whose K and V were written, and that others may find.

    `parent` is the entry of the block before it; None for the first block of a prompt. Entries are equal only to
    themselves, so the chain of parents says exactly which prefix the K and V were computed after.
    """

    block_id: int
    parent: CachedBlock | None
    token_ids: tuple[int, ...]
    hash: int

    def holds(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> bool:
        """Whether this block holds these tokens after that very prefix."""
        return self.parent is parent and self.token_ids == token_ids
