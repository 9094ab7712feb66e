"""Exported cells take effect in the package in memory, as `tools/export.py` would write them."""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from minivllm.course.live import defined_names, extend, publish


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> dict:
    """A notebook's names; modules made during the test are taken away again."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return {}


def run(source: str, module: str, namespace: dict) -> None:
    exec(source, namespace)
    publish(source, module, namespace)


def test_a_new_module_can_be_imported(namespace: dict) -> None:
    run("import math\nLIMIT: int = 3\ndef double(x): return 2 * x", "made_up.part", namespace)
    from minivllm.made_up.part import LIMIT, double

    assert double(LIMIT) == 6
    assert not hasattr(sys.modules["minivllm.made_up.part"], "math")


def test_a_re_opened_class_is_extended_in_place(namespace: dict) -> None:
    run("class Box:\n    def one(self): return 1", "made_up.box", namespace)
    box = namespace["Box"]()
    run("class Box(Box):\n    def two(self): return self.one() + 1", "made_up.box", namespace)
    assert box.two() == 2, "an object that existed before has the new method"
    assert type(namespace["Box"]()) is type(box)


def test_super_in_a_re_opened_class_means_the_parents() -> None:
    class Parent:
        def name(self) -> str:
            return "parent"

    class Child(Parent):
        def name(self) -> str:
            return "first"

    original = Child

    class Child(Child):
        def name(self) -> str:
            return super().name() + "'s child"

    extend(original, Child)
    assert original().name() == "parent's child"


def test_a_dataclass_gets_the_new_fields() -> None:
    @dataclass(frozen=True)
    class Point:
        x: int

    original = Point

    @dataclass(frozen=True)
    class Point(Point):
        y: int = 0

    extend(original, Point)
    assert original(1, 2) == original(x=1, y=2) != original(1)


def test_modules_that_imported_the_old_object_get_the_new_one(namespace: dict) -> None:
    run("def answer(): return 1", "made_up.source", namespace)
    user = ModuleType("minivllm.made_up.user")
    user.answer, user.other = namespace["answer"], lambda: 5
    sys.modules[user.__name__] = user
    run("def answer(): return 42", "made_up.source", namespace)
    assert user.answer() == 42 and user.other() == 5


def test_imports_are_not_definitions() -> None:
    source = "import os\nfrom math import pi\nA = 1\nB: int = 2\ndef f(): pass\nclass C: pass"
    assert defined_names(source) == ["A", "B", "f", "C"]
