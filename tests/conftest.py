"""Import order matters: minivllm must be imported before anything that imports triton."""

import pytest

import minivllm  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process per file, unless a test names its group: a notebook's cells share a kernel, a module its fixtures."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
