"""The Context: there inside a forward pass, gone after it, whatever happens, and never seen by another thread."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from minivllm.utils.context import forward_context, get_context, reset_context, set_context


def test_outside_of_a_forward_pass_there_is_none() -> None:
    assert get_context() is None


def test_it_is_there_inside_and_gone_after() -> None:
    with forward_context("step") as context:
        assert get_context() is context == "step"
    assert get_context() is None


def test_it_is_gone_after_an_exception() -> None:
    with pytest.raises(MemoryError), forward_context("step 1"):
        raise MemoryError
    assert get_context() is None


def test_the_next_step_sees_its_own() -> None:
    seen = []
    for step in ("step 1", "step 2"):
        with forward_context(step):
            seen.append(get_context())
    assert seen == ["step 1", "step 2"]


def test_the_outer_one_comes_back_after_an_inner_one() -> None:
    with forward_context("outer"):
        with pytest.raises(ValueError), forward_context("inner"):
            raise ValueError
        assert get_context() == "outer"


def test_another_thread_sees_nothing_of_it() -> None:
    with forward_context("mine"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(get_context).result() is None


def test_the_inherited_names_set_and_reset() -> None:
    token = set_context("first")
    inner = set_context("second")
    reset_context(inner)
    assert get_context() == "first"
    reset_context(token)
    assert get_context() is None
    set_context("left over")
    reset_context()
    assert get_context() is None
