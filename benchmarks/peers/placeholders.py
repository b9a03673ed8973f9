"""Stand-ins for modules that an import asks for and nothing here ever calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _Anything(type):
    """Has every attribute; each is itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Placeholder(metaclass=_Anything):
    def __new__(cls, *args: object, **kwargs: object) -> Any:
        return cls


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  # a package, so that its submodules are looked for
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(*names: str) -> None:
    """From now on, let modules of these names, and whatever is below them, be imported."""
    sys.meta_path.insert(0, _Finder(frozenset(names)))
