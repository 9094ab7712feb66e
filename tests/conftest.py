"""minivllm is imported before anything that imports triton: it tells Triton to interpret where there is no GPU."""

import minivllm  # noqa: F401
