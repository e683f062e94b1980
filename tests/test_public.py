"""The public surface: what `agentkv` exports is what it shows, and all of it is documented."""

from __future__ import annotations

import inspect
from types import ModuleType

import agentkv


def test_all_is_what_is_visible() -> None:
    visible = {
        name
        for name, value in vars(agentkv).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert visible | {"__version__"} == set(agentkv.__all__)
    assert list(agentkv.__all__) == sorted(agentkv.__all__)


def test_every_public_name_is_documented() -> None:
    for name in agentkv.__all__:
        value = getattr(agentkv, name)
        if not inspect.isclass(value):
            continue
        assert inspect.getdoc(value), name
        for attribute, member in vars(value).items():
            if attribute.startswith("_") or not (
                inspect.isfunction(member) or isinstance(member, property)
            ):
                continue
            assert inspect.getdoc(member), f"{name}.{attribute}"


def test_every_error_is_one_of_ours() -> None:
    for name in agentkv.__all__:
        value = getattr(agentkv, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            assert issubclass(value, agentkv.AgentKVError), name
