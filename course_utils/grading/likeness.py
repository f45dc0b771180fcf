"""Whether an answer is the course's solution: two functions are alike when their bytecode is.

Comments, layout, names of local variables and the docstring leave no trace in what is compared, and it does not matter
where the function came from: typed, pasted, or made by ``exec``.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from types import CodeType, FunctionType
from typing import Any

__all__ = ["of_source", "of_value"]


def of_value(value: Any) -> str:
    """Digest of a function, or of the methods of a class; empty for anything else."""
    if isinstance(value, type):
        members = (member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
                   for member in vars(value).values())
        return _of_codes([member.__code__ for member in members if isinstance(member, FunctionType)])
    function = inspect.unwrap(value) if callable(value) else value
    return _of_codes([function.__code__]) if isinstance(function, FunctionType) else ""


def of_source(solution: str, stub: str) -> dict[str, set[str]]:
    """Digests of the functions and classes of a solution's cell, by name, except those that the stub gives already."""
    given = {ast.dump(node) for node in ast.parse(stub).body}
    written = {node.name: isinstance(node, ast.ClassDef) for node in ast.parse(solution).body
               if hasattr(node, "name") and ast.dump(node) not in given}
    found: dict[str, set[str]] = {name: set() for name in written}
    for tree in (ast.parse(solution), _without_docstrings(ast.parse(solution))):
        for code in _inner(compile(tree, "<solution>", "exec")):
            if code.co_name in written:
                found[code.co_name].add(_of_codes(_inner(code) if written[code.co_name] else [code]))
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.fix_missing_locations(tree)


def _inner(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _of_codes(codes: list[CodeType]) -> str:
    return hashlib.sha256(repr([_plain(code) for code in codes]).encode()).hexdigest()[:16] if codes else ""


def _plain(code: CodeType) -> tuple:
    """What a function does, without its name, its docstring and the names of its variables."""
    consts = code.co_consts
    if consts and isinstance(consts[0], str):  # the docstring, or a text that its place shows to be the same one
        consts = (None, *consts[1:])
    inner = [_plain(const) if isinstance(const, CodeType) else repr(const) for const in consts]
    return code.co_code.hex(), code.co_names, code.co_argcount, inner
