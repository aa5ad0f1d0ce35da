"""Typed settings: a nested map becomes a tree of dataclasses, or an error that says what to write.

The dataclasses (config.py) say which keys exist; a field is declared with `setting(default, help)`.
Values are strict: an unknown key or a wrong type is an error that names the key, what was given,
what is expected and the nearest key.

pydantic judges the values: strict types, unions, bounds; 0.03 s to import. (jsonargparse, 0.07 s,
also reads command lines, but cannot say which of our keys another library's name stands for.)
"""

from __future__ import annotations

import difflib
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lean_trl.recipe import CommandLineText, SettingsError, to_yaml

T = TypeVar("T")

# Types with bounds; the description is what an error and --help call them.
Count = Annotated[int, Field(ge=1, description="int >= 1")]
Index = Annotated[int, Field(ge=0, description="int >= 0")]
Number = Annotated[float, Field(allow_inf_nan=False, description="number")]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, description="number >= 0")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, description="number > 0")]
Share = Annotated[float, Field(ge=0, le=1, description="number from 0 to 1")]
Fraction = Annotated[float, Field(ge=0, lt=1, description="number >= 0 and < 1")]


def setting(
    default: Any = None, help: str = "", *, per_method: Mapping[str, Any] | None = None
) -> Any:
    """A field of a settings dataclass with its one line of help.

    per_method: the default by method. Such a field is never None once it is part of a Config, whose
    `__post_init__` applies `method_defaults`.
    """
    return field(default=default, metadata={"help": help, "per_method": per_method})


@dataclass(frozen=True)
class Key:
    """One setting: where it lives and how it was declared."""

    path: str  # train.learning_rate
    annotation: Any
    default: Any
    help: str
    per_method: Mapping[str, Any] | None


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Every setting of a settings dataclass and of its sections, in the order of declaration."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        section = _section(hints[item.name])
        path = f"{prefix}{item.name}"
        if section is not None:
            yield from keys(section, f"{path}.")
        else:
            meta = item.metadata
            yield Key(path, hints[item.name], item.default, meta["help"], meta["per_method"])


def build(cls: type[T], tree: Mapping[str, Any], foreign: Mapping[str, str]) -> T:
    """The dataclass that a nested map describes.

    foreign: names of other libraries -> our key, or a sentence that says what to do instead.
    Raises SettingsError with one line for each problem.
    """
    problems: list[str] = []
    values = _validated(cls, tree, "", problems, lambda key: _suggestion(cls, key, foreign))
    if problems:
        raise SettingsError("\n".join(problems))
    return _constructed(cls, values)


def is_default(section: Any, name: str, method: str) -> bool:
    """Whether a resolved section's setting has the value that it has when nobody sets it."""
    item = next(item for item in fields(section) if item.name == name)
    by_method = item.metadata["per_method"]
    return getattr(section, name) == (by_method[method] if by_method else item.default)


def method_defaults(value: Any, method: str) -> Any:
    """A section with its per-method settings that are still None filled in; else the value."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    filled: dict[str, Any] = {}
    for item in fields(value):
        below = getattr(value, item.name)
        by_method = item.metadata.get("per_method")
        filled[item.name] = (
            by_method.get(method) if below is None and by_method else method_defaults(below, method)
        )
    return replace(value, **filled)


def _validated(
    cls: type,
    tree: Mapping[str, Any],
    prefix: str,
    problems: list[str],
    suggest: Callable[[str], str],
) -> dict:
    hints = typing.get_type_hints(cls, include_extras=True)
    values: dict[str, Any] = {}
    for name, given in tree.items():
        path = f"{prefix}{name}"
        if name not in hints:
            problems.append(f"{path}: unknown key; {suggest(path)}")
            continue
        section = _section(hints[name])
        if section is None:
            try:
                values[name] = _accepted(hints[name], given)
            except ValidationError:
                expected = describe(hints[name])
                problems.append(
                    f"{path}: got {_shown(given)}, expected {expected}{_hint(hints[name], given)}"
                )
            continue
        below = given.value() if isinstance(given, CommandLineText) else given
        if below is None:  # `train:` with nothing below it; for an optional section this means off
            values[name] = None if _optional(hints[name]) else {}
        elif isinstance(below, Mapping):
            values[name] = _validated(section, below, f"{path}.", problems, suggest)
        else:
            problems.append(f"{path}: got {_shown(given)}, expected a section, a map of keys")
    return values


def _accepted(annotation: Any, given: Any) -> Any:
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    if not isinstance(given, CommandLineText):
        return adapter.validate_python(_plain(given), strict=True)
    try:
        return adapter.validate_python(given.value(), strict=True)
    except (ValidationError, SettingsError):
        return adapter.validate_python(str(given), strict=True)


def _plain(value: Any) -> Any:
    """`--data.columns.prompt question` puts command line text inside a map."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value.value() if isinstance(value, CommandLineText) else value


def _constructed(cls: type[T], values: Mapping[str, Any]) -> T:
    hints = typing.get_type_hints(cls)
    arguments = {}
    for item in fields(cls):  # type: ignore[arg-type]
        section = _section(hints[item.name])
        if section is None or values.get(item.name, {}) is None:
            if item.name in values:
                arguments[item.name] = values[item.name]
        elif item.name in values or not _optional(hints[item.name]):
            arguments[item.name] = _constructed(section, values.get(item.name, {}))
    return cls(**arguments)


def _section(annotation: Any) -> type | None:
    """The dataclass in `Section` or `Section | None`, else None."""
    return next(
        (kind for kind in (annotation, *typing.get_args(annotation)) if _is_section(kind)), None
    )


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _optional(annotation: Any) -> bool:
    return types.NoneType in typing.get_args(annotation)


_WORDS: dict[Any, str] = {
    int: "int",
    float: "number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
    Any: "anything",
}


def describe(annotation: Any) -> str:
    """An annotation in a user's words.

    >>> describe(Literal["linear", "cosine"] | None)
    'linear | cosine | null'
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        described = [
            m.description for m in arguments[1:] if isinstance(m, FieldInfo) and m.description
        ]
        return described[0] if described else describe(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(describe, arguments))
    if origin is list:
        return f"list of ({describe(arguments[0])})"
    if origin is dict:
        return f"map of {describe(arguments[0])} to {describe(arguments[1])}"
    return _WORDS[annotation]


def _shown(value: Any) -> str:
    if isinstance(value, CommandLineText):
        return repr(str(value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{reprlib.repr(value)} ({_WORDS.get(type(value), type(value).__name__)})"


def _hint(annotation: Any, given: Any) -> str:
    """What to do about a wrong value, where that is plain."""
    expected = describe(annotation).split(" | ")
    if isinstance(given, str):
        nearest = difflib.get_close_matches(given, expected, n=1)
        if nearest:
            return f"; did you mean {nearest[0]}?"
    elif "text" in expected and given is not None and not isinstance(given, (dict, list)):
        return "; quote it"
    return ""


def _suggestion(root: type, path: str, foreign: Mapping[str, str]) -> str:
    *sections, name = path.split(".")
    known = [key.path for key in keys(root)]
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    if elsewhere:
        return "did you mean " + " or ".join(elsewhere) + "?"
    if name in foreign:
        ours = foreign[name]
        a_key = any(path == ours or path.startswith(f"{ours}.") for path in known)
        return f"that setting is {ours} here" if a_key else ours
    above = "".join(f"{section}." for section in sections)
    below = [key.removeprefix(above) for key in known if key.startswith(above)]
    beside = {rest.partition(".")[0]: above + rest.partition(".")[0] for rest in below}
    anywhere = {key.rpartition(".")[2]: key for key in known}
    for names in (beside, anywhere):
        nearest = difflib.get_close_matches(name, names, n=1)
        if nearest:
            return f"did you mean {names[nearest[0]]}?"
    return f"known in {above[:-1] or 'a recipe'}: {', '.join(beside)}"


def help_text(root: type) -> str:
    """Every key with its type, its default and its line of help."""
    lines: list[str] = []
    section = None
    for key in keys(root):
        if section != (section := key.path.rpartition(".")[0]):
            lines.append(f"\n{section}:" if section else "")
        if key.per_method:
            by_default: dict[Any, list[str]] = {}
            for method, value in key.per_method.items():
                by_default.setdefault(value, []).append(method)
            default = ", ".join(
                f"{value} for {'/'.join(names)}" for value, names in by_default.items()
            )
        else:
            default = to_yaml({"x": key.default})[3:].strip()
        lines.append(
            f"  --{key.path}  <{describe(key.annotation)}>  [{default}]\n        {key.help}"
        )
    return "\n".join(lines) + "\n"
