"""minivllm is imported before anything that imports triton: it tells Triton to interpret where there is no GPU.

The tools are scripts beside the package: tests import them by their names.
"""

import sys
from pathlib import Path

import minivllm  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
