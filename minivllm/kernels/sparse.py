# Generated from notebooks/09_engine.ipynb by tools/export.py; edit there.
"""Attention over pages on a CPU, without copying them: a block table is a sparse matrix."""

import functools
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class PageMatrix:
    """Which rows of the pool each (sequence, query head) may see, in compressed sparse rows (CSR).

    The pool of a layer is read as a matrix of num_blocks · block_size · num_kv_heads rows of head_dim numbers. Row
    (s, h) of the sparse matrix has a cell for each key of sequence s: where the KV head of query head h lies in it.

    bounds: int32 [num_seqs · num_heads + 1], cells of row r are bounds[r] to bounds[r + 1]; columns: int32
    [num_cells]; cells: int64 [num_cells], place of each cell in a [num_seqs · num_heads, longest] rectangle.
    The view is FlashInfer's (Ye et al. 2025, https://arxiv.org/abs/2501.01005), with cells in place of blocks.
    """

    bounds: Tensor
    columns: Tensor
    cells: Tensor
    longest: int


@functools.lru_cache(maxsize=1)  # tensors are compared by identity: one step's tables serve all of its layers
def page_matrix(block_tables: Tensor, context_lens: Tensor, block_size: int, heads: int, kv_heads: int) -> PageMatrix:
    """The sparse matrix of a step. block_tables int32 [num_seqs, max_blocks]; context_lens int32 [num_seqs]."""
    lens = context_lens.long()
    longest = max(1, int(lens.max()))
    positions = torch.arange(longest)
    slots = block_tables.long()[:, positions // block_size] * block_size + positions % block_size
    inside = (positions < lens[:, None])[:, None].expand(-1, heads, -1)  # [num_seqs, num_heads, longest]
    kv_head = torch.arange(heads) // (heads // kv_heads)
    rows = (slots[:, None] * kv_heads + kv_head[:, None])[inside]
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lens.repeat_interleave(heads).cumsum(0)])
    return PageMatrix(bounds.int(), rows.int(), inside.flatten().nonzero()[:, 0], longest)


@functools.cache
def make_first_sparse_tensor() -> None:
    """The first one of a process warns that such tensors are in beta. Our tests would say if something changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), check_invariants=False)


def scores(q: Tensor, keys: Tensor, matrix: PageMatrix) -> Tensor:
    """The dot product of each query with each of its keys: [num_cells].

    q [num_rows, head_dim]; keys [num_pool_rows, head_dim], of which only the matrix' columns are read.
    """
    make_first_sparse_tensor()
    zeros = torch.zeros(len(matrix.columns), dtype=q.dtype)
    shape = (len(q), len(keys))
    cells = torch.sparse_csr_tensor(matrix.bounds, matrix.columns, zeros, shape, check_invariants=False)
    return torch.sparse.sampled_addmm(cells, q, keys.T, beta=0.0).values()


def softmax(scores: Tensor, matrix: PageMatrix) -> Tensor:
    """Weights that sum to 1 in each row of the sparse matrix: [num_cells]."""
    rectangle = torch.full(((len(matrix.bounds) - 1) * matrix.longest,), float("-inf"), dtype=scores.dtype)
    rectangle.scatter_(0, matrix.cells, scores)
    return rectangle.view(-1, matrix.longest).softmax(dim=-1).view(-1).index_select(0, matrix.cells)


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """As `reference.paged_decode`, but K and V are read where they lie. Only float32 and float64 on a CPU.

    q [num_seqs, num_heads, head_dim] → the same shape.
    """
    heads, head_dim = q.shape[1:]
    matrix = page_matrix(block_tables, context_lens, k_cache.shape[1], heads, k_cache.shape[2])
    cells = scores((q * scale).view(-1, head_dim), k_cache.view(-1, head_dim), matrix)
    weights = softmax(cells, matrix)
    values, starts = v_cache.view(-1, head_dim), matrix.bounds[:-1]
    attended = F.embedding_bag(matrix.columns, values, starts, mode="sum", per_sample_weights=weights)
    return attended.view(q.shape)


@functools.lru_cache(maxsize=1)
def split_rows(
    block_tables: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int, int]]]:
    """Decoding sequences apart from chunks. Of the former: rows of q int64 [num_single], tables int32 [num_single,
    max_blocks], lengths int32 [num_single]; of the latter a list of (sequence, first row of q, last row + 1)."""
    lengths = cu_seqlens_q.diff()
    single = (lengths == 1).nonzero()[:, 0]
    chunks = [(s, int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])) for s in (lengths > 1).nonzero()[:, 0].tolist()]
    return cu_seqlens_q[:-1][single].long(), block_tables[single], context_lens[single], chunks


def read_pages(cache: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """As `reference.gather_pages`, whole blocks at a time, heads first: [num_kv_heads, num_tokens, head_dim]."""
    num_blocks = -(-num_tokens // cache.shape[1])
    pages = cache.index_select(0, block_table[:num_blocks])
    return pages.view(-1, *cache.shape[2:])[:num_tokens].transpose(0, 1)


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of a sequence's last tokens, [num_new, num_heads, head_dim].
    q [num_new, num_heads, head_dim]; k, v [num_kv_heads, context, head_dim]."""
    num_new, context = len(q), k.shape[1]
    mask = None if num_new == context else torch.ones(num_new, context, dtype=torch.bool).tril(context - num_new)
    heads_first = q.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(
        heads_first, k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    *,
    max_seqlen_q: int | None = None,
) -> Tensor:
    """As `reference.paged_prefill`: single tokens by `paged_decode`, a chunk's pages copied once for all its tokens.

    q [num_tokens, num_heads, head_dim] → the same shape.
    """
    out = torch.empty_like(q)
    rows, tables, lens, chunks = split_rows(block_tables, context_lens, cu_seqlens_q)
    if len(rows):
        out[rows] = paged_decode(q[rows], k_cache, v_cache, tables, lens, scale)
    for s, first, end in chunks:
        context_len = int(context_lens[s])
        k, v = (read_pages(cache, block_tables[s], context_len) for cache in (k_cache, v_cache))
        out[first:end] = attend_chunk(q[first:end], k, v, scale)
    return out


def can_run(q: Tensor) -> bool:
    """Whether PyTorch has these sparse products for q, of any shape: on a CPU, in 32 or 64 bits."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)
