"""Recipes as text: YAML and `--section.key value` overrides to one nested map, and back to YAML.

PyYAML does the work (huggingface_hub brings it); YAML 1.2's scalars replace its YAML 1.1 ones.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


class SettingsError(ValueError):
    """What is wrong with the settings, one line for each problem."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: 1e-5 is a number, `no` is text. A key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise SettingsError(
                    f"{_place(key_node)}: a key must be text, got {key!r}: quote it"
                )
            if key in seen:
                raise SettingsError(f"{_place(key_node)}: key {key!r} is given twice: keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=True)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the texts that _Loader would read as something else."""


# PyYAML follows YAML 1.1, where 1e-5 is text, no is false, 010 is eight and 1:30 is ninety.
_SCALARS = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", "~nN\0"),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, (_pattern, _first) in _SCALARS.items():
        _class.add_implicit_resolver(
            _tag, re.compile(rf"(?:{_pattern})\Z"), ["" if c == "\0" else c for c in _first]
        )
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node), 10)
)


def _write_text(dumper: yaml.Dumper, text: str) -> yaml.Node:
    # PyYAML writes U+0085 and its like as a line break, except between double quotes.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def _place(node: yaml.Node) -> str:
    return f"{node.start_mark.name}, line {node.start_mark.line + 1}"


def parse_yaml(text: str, name: str = "<text>") -> Any:
    """The value that a YAML text stands for.

    >>> parse_yaml("{a: 1e-5, b: no, c: [1, true, null]}")
    {'a': 1e-05, 'b': 'no', 'c': [1, True, None]}
    """
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_data()
    except SettingsError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"{name} is not valid YAML: {error}") from error


def to_yaml(tree: Mapping[str, Any]) -> str:
    """YAML that parse_yaml reads back to an equal tree."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The nested map in a YAML file; an empty file is an empty map."""
    path = Path(path)
    if not path.is_file():
        raise SettingsError(f"recipe {str(path)!r} is not a file: give the path of a YAML recipe")
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise SettingsError(f"recipe {str(path)!r} is not UTF-8 text: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingsError(
            f"recipe {str(path)!r} must be a map of sections, got {reprlib.repr(tree)}"
        )
    return tree


class CommandLineText(str):
    """A value from the command line, which its key's type reads: 12345 is a fine revision."""

    def value(self) -> Any:
        """What YAML makes of it; unquoted text stays as it is, even where YAML sees a comment."""
        parsed = parse_yaml(self, "the command line")
        return str(self) if isinstance(parsed, str) and self[:1] not in ("'", '"') else parsed


def with_overrides(tree: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The tree with `--section.key value` or `--section.key=value` applied in order.

    A bare `--section.key` means true. A value replaces what was there.
    """
    result = _copied(tree)
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if not argument.startswith("--"):
            raise SettingsError(
                f"argument {argument!r} is not --section.key value; the recipe comes first"
            )
        key, equals, value = argument[2:].partition("=")
        if not equals:
            value = pending.pop(0) if pending and not pending[0].startswith("--") else "true"
        _put(result, key, CommandLineText(value))
    return result


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _copied(value) if isinstance(value, Mapping) else value
        for name, value in tree.items()
    }


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if tree.get(section) is None or isinstance(tree[section], CommandLineText):
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise SettingsError(f"--{key}: {section} is {reprlib.repr(tree)}, not a section")
    tree[name] = value
