"""minivllm: a small LLM engine with paged attention, built step by step in `notebooks/`.

    from minivllm import LLM, SamplingParams

The public names are loaded on first use, so that a package that is exported only as far as chapter 05 imports too.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path

import torch

__version__ = "0.1.0"

# The model that ships with the course: no download.
STORYTELLER = Path(__file__).parent / "assets" / "storyteller"

_HOME_OF = {
    "LLM": "minivllm.llm",
    "SamplingParams": "minivllm.sampling_params",
    "RequestOutput": "minivllm.outputs",
    "CompletionOutput": "minivllm.outputs",
}
__all__ = ["STORYTELLER", *_HOME_OF]


def _interpret_triton_without_cuda() -> None:
    """Make Triton kernels run in Triton's interpreter when there is no CUDA device.

    Triton reads TRITON_INTERPRET while it is imported (its own library functions are compiled or interpreted from
    then on), so the variable has to be there before the first `import triton`, in this process, by anyone.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        warnings.warn(
            "triton was imported before minivllm on a machine with no CUDA device, so its kernels cannot run here. "
            "Import minivllm first (transformers' model classes import triton too), or set TRITON_INTERPRET=1. "
            "Everything but the 'triton' attention backend works.",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    os.environ["TRITON_INTERPRET"] = "1"


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


_interpret_triton_without_cuda()
