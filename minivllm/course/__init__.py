"""What the notebooks need and the engine does not: pictures, the map, exercise checks, the audit after each chapter.

Importing it in a notebook also makes exported cells take effect at once (see `live.py`).
"""

from minivllm.course import live
from minivllm.course.drawing import show
from minivllm.course.engine_map import show_map
from minivllm.course.exercises import check
from minivllm.course.stages import audit_after

__all__ = ["audit_after", "check", "show", "show_map"]

live.install()
