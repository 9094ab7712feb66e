"""Whether the random tests run at length: MINIVLLM_LONG_TESTS=1 asks for it, as after a change of the bookkeeping."""

import os

LONG = os.environ.get("MINIVLLM_LONG_TESTS") == "1"
