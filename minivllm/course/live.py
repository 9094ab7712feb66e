"""A cell marked for export takes effect at once: what it defines becomes part of the package in memory.

So the engine that a chapter runs is made of the cells above it: change a method, run its cell, and everything that uses
it has the change. A class that is re-opened (`class Attn(Attn):`) is extended in place, so that objects which exist
already, and modules which imported it before, have the new methods too. Files are written by `tools/export.py` alone.
"""

import ast
import importlib
import re
import sys
from types import FunctionType, ModuleType
from typing import Any

from IPython import get_ipython
from IPython.core.interactiveshell import ExecutionResult

DIRECTIVE = re.compile(r"#\| export ([\w.]+)\s*\n")
# What every class has of its own, and what is not to be copied from its re-opening.
OWN = {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__", "__static_attributes__"}


def install() -> None:
    """Watch the cells of this notebook. Does nothing outside of one, and nothing the second time."""
    shell = get_ipython()
    if shell is not None and after_cell not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", after_cell)


def after_cell(result: ExecutionResult) -> None:
    """If the cell was marked for export and ran without an error, put its definitions into the package."""
    found = DIRECTIVE.match(result.info.raw_cell)
    if found and result.success:
        publish(result.info.raw_cell, found[1], get_ipython().user_ns)


def publish(source: str, module_name: str, namespace: dict[str, Any]) -> None:
    """Put every name that `source` defines at its top level from `namespace` into minivllm.<module_name>."""
    module = find_module(f"minivllm.{module_name}")
    for name in defined_names(source):
        new, old = namespace[name], vars(module).get(name)
        if isinstance(new, type) and isinstance(new.__base__, type) and new.__base__.__name__ == name:
            namespace[name] = new = extend(new.__base__, new)
        setattr(module, name, new)
        if old is not None and old is not new:
            replace_everywhere(name, old, new)


def defined_names(source: str) -> list[str]:
    """Classes, functions and constants at the top level of a cell; not what it imports."""
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return names


def find_module(name: str) -> ModuleType:
    """The module: imported where a file exists, made up (with its parents) where this chapter fills it first."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, last = name.rpartition(".")
        module = ModuleType(name)
        module.__path__ = []  # so that modules can be imported from inside it
        sys.modules[name] = module
        setattr(find_module(parent), last, module)
        return module


def extend(cls: type, reopened: type) -> type:
    """Copy what a re-opened class adds or replaces into the class itself, and return that."""
    for name, value in vars(reopened).items():
        if name in OWN:
            continue
        if name == "__annotations__":
            value = {**vars(cls).get(name, {}), **value}
        at_home(value, cls)
        setattr(cls, name, value)
    if reopened.__doc__:
        cls.__doc__ = reopened.__doc__
    return cls


def at_home(value: object, cls: type) -> None:
    """Let `super()` inside a method mean the parents of `cls`: it looks the class up in a cell of the function."""
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    else:
        parts = [getattr(value, "__func__", value)]
    for function in parts:
        if isinstance(function, FunctionType) and "__class__" in function.__code__.co_freevars:
            function.__closure__[function.__code__.co_freevars.index("__class__")].cell_contents = cls


def replace_everywhere(name: str, old: object, new: object) -> None:
    """Modules of the package that imported the old object get the new one."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("minivllm.") and vars(module).get(name) is old:
            setattr(module, name, new)
