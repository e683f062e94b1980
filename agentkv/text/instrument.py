"""Where a chat template's syntax tree calls its environment to be charged.

The environment has two methods for it: `turn(literal_chars)` and `charge(value)`.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, nodes

__all__ = ["instrument", "literals_of"]


def instrument(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """Charge each turn of a loop, macro or block, and each value that a literal builds."""
    for kind in (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block):
        for node in tree.find_all(kind):
            body: list[nodes.Node] = getattr(node, "body")  # noqa: B009 - all four kinds have one
            size = sum(len(text) for part in body for text in literals_of(part))
            turn = nodes.EnvironmentAttribute("turn")
            call = nodes.Call(turn, [nodes.Const(size)], [], None, None)
            body.insert(0, nodes.ExprStmt(call))
    _wrap_builders(tree)
    tree.set_environment(environment)
    tree.set_lineno(1, override=False)
    return tree


def _wrap_builders(node: nodes.Node) -> None:
    for field, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, field, [_wrapped(item) for item in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _wrapped(value))


def _wrapped(item: Any) -> Any:  # Any: node fields are nodes and plain values
    if not isinstance(item, nodes.Node):
        return item
    _wrap_builders(item)
    builds = isinstance(item, (nodes.Concat, nodes.List, nodes.Dict)) or (
        isinstance(item, nodes.Tuple) and item.ctx == "load"
    )
    if not builds:
        return item
    return nodes.Call(nodes.EnvironmentAttribute("charge"), [item], [], None, None)


def literals_of(node: nodes.Node) -> list[str]:
    found = [data.data for data in node.find_all(nodes.TemplateData)]
    if isinstance(node, nodes.TemplateData):
        found.append(node.data)
    constants = [const.value for const in node.find_all(nodes.Const)]
    return found + [value for value in constants if isinstance(value, str)]
