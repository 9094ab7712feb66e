# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""From tokens to vectors and back, in NumPy float64."""

import numpy as np


def embed(token_ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Row token_ids[i] of table [vocab_size, hidden_size] for each token: [num_tokens, hidden_size].

    Raises IndexError for an id past the table.
    """
    return table[token_ids]


def compute_logits(hidden: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The dot product of each hidden state with each row of the table: [num_tokens, vocab_size]."""
    return hidden @ table.T
