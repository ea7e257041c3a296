"""Small changes of a solution, one at a time: what a slip of the pen makes of it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
    ast.Lt: (ast.GtE,),
    ast.Gt: (ast.LtE,),
    ast.LtE: (ast.Gt,),
    ast.GtE: (ast.Lt,),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
NAMES = {
    **{
        "amax": "amin",
        "amin": "amax",
        "max": "min",
        "min": "max",
        "mean": "sum",
        "sum": "mean",
        "i2t": "t2i",
        "t2i": "i2t",
    },
    **{"argmax": "argmin", "argmin": "argmax", "ceil": "floor", "any": "all", "exp": "tanh"},
}


def mutants(source: str) -> Iterator[str]:
    """Every source that differs from this one in one operator, constant, name or sign; docstrings stay."""
    tree = ast.parse(source)
    for number, node in enumerate(ast.walk(tree)):
        for change in changes(node):
            changed = copy.deepcopy(tree)
            target = next(found for n, found in enumerate(ast.walk(changed)) if n == number)
            change(target)
            text = ast.unparse(ast.fix_missing_locations(changed))
            if text != ast.unparse(tree):
                yield text


def changes(node: ast.AST) -> Iterator:
    """What can be done to one node."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield exchange
    elif isinstance(node, ast.BinOp):
        for kind in SWAPS.get(type(node.op), ()):
            yield lambda n, kind=kind: setattr(n, "op", kind())
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for kind in SWAPS.get(type(node.ops[0]), ()):
            yield lambda n, kind=kind: setattr(n, "ops", [kind()])
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield lambda n: setattr(n, "value", n.value + 1)
        if node.value:
            yield lambda n: setattr(n, "value", 0)
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield lambda n: setattr(n, "attr", NAMES[n.attr])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield lambda n: setattr(n, "op", ast.UAdd())
    elif isinstance(node, ast.Call) and len(node.args) == 2 and all(isinstance(a, ast.Name) for a in node.args):
        yield lambda n: n.args.reverse()


def exchange(node: ast.BinOp) -> None:
    """Exchange the two sides of an operator."""
    node.left, node.right = node.right, node.left
