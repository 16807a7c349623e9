"""What a function's signature and docstring promise a model: a JSON Schema, and its check.

Rules that hold for every `Signature`:

1. What the check accepts, the schema allows. Nothing is coerced; the check is stricter in one
   place: ``1.0`` is no integer.
2. Objects are closed at every depth: an unknown member is an error, never ignored.
3. A parameter that the model leaves out is not passed: the function's own default applies.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard, cast

import msgspec
import msgspec.inspect
from msgspec import Struct

from trio_agent.errors import ConfigError, ToolError
from trio_agent.protocol.limits import MAX_ERROR_MESSAGE_BYTES
from trio_agent.protocol.text import Json, check_json, cut_end
from trio_agent.tools.base import ToolContext

TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Names that every provider accepts."""

_PARAMETER_NAME: Final = re.compile(r"[a-zA-Z0-9_]{1,64}")
_MAX_PROBLEMS: Final = 6
_MAX_PROBLEM_BYTES: Final = 200


class Parameter(Struct, frozen=True, kw_only=True):
    """One argument that a model may send. ``shape`` is msgspec's description of ``hint``."""

    name: str
    hint: Any
    shape: msgspec.inspect.Type
    required: bool


class Signature(Struct, frozen=True, kw_only=True):
    """A function as a tool: its text for the model, its parameters and their schema.

    ``context`` is the parameter that takes the `ToolContext`, if there is one.
    """

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    schema: Mapping[str, Json]
    context: str | None

    def convert(self, arguments: Mapping[str, Json]) -> dict[str, Any]:
        """Return keyword arguments for the function; what was left out stays out.

        Raises:
            ToolError: It names everything that is wrong, with its path, what was
                expected and what came, and then what the tool takes.
        """
        converted: dict[str, Any] = {}
        problems: list[str] = []
        for parameter in self.parameters:
            if parameter.name not in arguments:
                if parameter.required:
                    problems.append(f"`{parameter.name}` is missing")
                continue
            value = arguments[parameter.name]
            try:
                converted[parameter.name] = msgspec.convert(
                    value, parameter.hint, str_keys=True
                )
            except Exception as exc:  # attrs validators may raise anything
                problems.append(_located(exc, parameter.name))
            else:
                problems.extend(_unknown(value, parameter.shape, f"{parameter.name}"))
        known = {parameter.name for parameter in self.parameters}
        problems.extend(f"`{name}` is no parameter" for name in arguments if name not in known)
        if problems:
            raise ToolError(self._complaint(problems))
        return converted

    def _complaint(self, problems: Sequence[str]) -> str:
        shown = [cut_end(problem, _MAX_PROBLEM_BYTES) for problem in problems[:_MAX_PROBLEMS]]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        text = f"{self.name} was not called, its arguments are invalid: {'; '.join(shown)}. "
        return cut_end(text + f"It takes {self.summary}", MAX_ERROR_MESSAGE_BYTES)

    @property
    def summary(self) -> str:
        """The parameters on one line, as an error shows them to a model."""
        if not self.parameters:
            return "no arguments"
        properties = self.schema["properties"]
        return ", ".join(
            f"{one.name}: {render_type(properties[one.name])}"
            + ("" if one.required else " (optional)")
            for one in self.parameters
        )


def read_signature(function: Callable[..., Any], *, name: str | None = None) -> Signature:
    """Read what *function* promises.

    Args:
        function: A plain or async function, or a bound method.
        name: The tool's name, if not the function's own.

    Raises:
        ConfigError: If no tool can be made of it; names the function, the
            parameter and the remedy.
    """
    name = _checked_name(function, name)
    _refuse_generators(function, name)
    summary, about = _read_docstring(function)
    context: str | None = None
    parameters: list[Parameter] = []
    defaults: dict[str, Json] = {}
    for parameter in _inspected(function, name).parameters.values():
        _refuse_kind(parameter, name)
        hint = _hint(function, parameter, name)
        if hint is ToolContext:
            if context is not None:
                raise _unusable(
                    name,
                    parameter.name,
                    f"{context!r} takes the ToolContext already",
                    "keep one",
                )
            context = parameter.name
            continue
        parameters.append(
            Parameter(
                name=parameter.name,
                hint=hint,
                shape=_shape(hint, parameter.name, name),
                required=parameter.default is parameter.empty,
            )
        )
        defaults.update(_default(parameter, hint, name))
    return Signature(
        name=name,
        description=summary,
        parameters=tuple(parameters),
        schema=_schema(parameters, defaults, about),
        context=context,
    )


# --- reading


def _checked_name(function: Callable[..., Any], name: str | None) -> str:
    own = getattr(function, "__name__", None)
    if name is None and (not isinstance(own, str) or own == "<lambda>"):
        raise ConfigError(
            f"{function!r} has no name that a model could call: write it as a def, "
            'or give one with @tool(name="...")'
        )
    name = cast("str", own) if name is None else name
    check_tool_name(name)
    return name


def check_tool_name(name: object) -> None:
    """Check that every provider accepts *name*; `ConfigError` if not."""
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise ConfigError(
            f"tool name {name!r}: 1 to 64 letters, digits, _ and - are allowed; "
            'give another with @tool(name="...")'
        )


def _refuse_generators(function: Callable[..., Any], name: str) -> None:
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(
            f"tool {name!r} is a generator: return the result, and report progress with "
            "`await ctx.report(...)`"
        )


def _inspected(function: Callable[..., Any], name: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError, NameError) as exc:
        raise ConfigError(f"tool {name!r}: its signature cannot be read: {exc}") from exc


def _refuse_kind(parameter: inspect.Parameter, tool: str) -> None:
    match parameter.kind:
        case inspect.Parameter.POSITIONAL_ONLY:
            problem, remedy = "is positional-only", "remove the `/`: models pass names"
        case inspect.Parameter.VAR_POSITIONAL:
            problem, remedy = "takes any number of values", "take one `list[...]` instead"
        case inspect.Parameter.VAR_KEYWORD:
            problem, remedy = "takes any names", "take one `dict[str, ...]` instead"
        case _ if not _PARAMETER_NAME.fullmatch(parameter.name):
            problem, remedy = "is not 1 to 64 ASCII letters, digits and _", "rename it"
        case _:
            return
    raise _unusable(tool, parameter.name, problem, remedy)


def _hint(function: Callable[..., Any], parameter: inspect.Parameter, tool: str) -> Any:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        raise _unusable(
            tool,
            parameter.name,
            "has no annotation",
            "write its type; `self` means that the bound method, or a function, is the tool",
        )
    if isinstance(annotation, str) and annotation.rpartition(".")[2] == ToolContext.__name__:
        return ToolContext  # it may be imported for type checkers only
    holder = types.SimpleNamespace(__annotations__={parameter.name: annotation})
    scope: dict[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        hints = typing.get_type_hints(holder, globalns=scope, include_extras=True)
    except Exception as exc:
        raise _unusable(
            tool,
            parameter.name,
            f"its annotation {annotation!r} cannot be resolved ({exc})",
            "define or import the type at the top of the module",
        ) from exc
    return hints[parameter.name]


def _shape(hint: Any, parameter: str, tool: str) -> msgspec.inspect.Type:
    try:
        msgspec.json.schema(hint)
        return msgspec.inspect.type_info(hint)
    except (TypeError, ValueError) as exc:
        reason = str(exc).strip().splitlines()[-1]
        raise _unusable(
            tool,
            parameter,
            f"JSON has no form for its type ({reason})",
            "use str, int, float, bool, list, dict, Literal, an enum, a TypedDict, a dataclass "
            "or an attrs class",
        ) from exc


def _default(parameter: inspect.Parameter, hint: Any, tool: str) -> dict[str, Json]:
    """Return the default for the schema; nothing if it has no JSON form (a sentinel)."""
    if parameter.default is parameter.empty:
        return {}
    try:
        default = msgspec.to_builtins(parameter.default, str_keys=True)
        default = msgspec.json.decode(msgspec.json.encode(default))
        check_json(default, name="default")
    except (TypeError, ValueError, RecursionError):
        return {}
    try:
        msgspec.convert(default, hint, str_keys=True)
    except msgspec.ValidationError as exc:
        raise _unusable(
            tool,
            parameter.name,
            f"its default {parameter.default!r} is not of its type ({exc})",
            "widen the type, for example with `| None`",
        ) from exc
    return {parameter.name: default}


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    import docstring_parser  # noqa: PLC0415  # 20 ms that only programs with tools pay

    text = inspect.getdoc(function)
    if not text:
        return "", {}
    parsed = docstring_parser.parse(text)
    described = {
        one.arg_name: " ".join(one.description.split())
        for one in parsed.params
        if one.description
    }
    return (parsed.description or "").strip(), described


def _unusable(tool: str, parameter: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"tool {tool!r}, parameter {parameter!r}: {problem}; {remedy}")


# --- schemas


def _schema(
    parameters: Iterable[Parameter], defaults: Mapping[str, Json], about: Mapping[str, str]
) -> dict[str, Json]:
    struct = msgspec.defstruct(
        "arguments",
        [
            # Defaults go in by hand below: msgspec refuses some that Python allows.
            (one.name, one.hint)
            if one.required
            else (one.name, one.hint, msgspec.field(default_factory=lambda: None))
            for one in parameters
        ],
        kw_only=True,
    )
    whole = msgspec.json.schema(struct)
    definitions: dict[str, Json] = whole["$defs"]
    root: dict[str, Json] = definitions.pop(whole["$ref"].removeprefix("#/$defs/"))
    for schema in (root, *definitions.values()):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    properties: dict[str, dict[str, Json]] = root["properties"]
    for name, schema in properties.items():
        if name in about:
            schema.setdefault("description", about[name])
        if name in defaults:
            schema["default"] = defaults[name]
    shaped: dict[str, Json] = {
        "type": "object",
        "properties": properties,
        "required": root.get("required", []),
        "additionalProperties": False,
    }
    if definitions:
        shaped["$defs"] = definitions
    return shaped


def render_type(schema: Mapping[str, Json]) -> str:
    """Return a JSON Schema's type in a few words, for error messages."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(_literal(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(render_type(one) for one in schema["anyOf"])
    kind = schema.get("type", "any value")
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return f"array of ({render_type(schema['items'])})"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of ({render_type(schema['additionalProperties'])})"
    limits = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "from"), ("maximum", "to"), ("pattern", "matching"))
        if key in schema
    ]
    return " ".join((str(kind), *limits))


def _literal(value: Json) -> str:
    return msgspec.json.encode(value).decode()


# --- checking


def _located(error: Exception, name: str) -> str:
    """Return msgspec's words with its ``$`` replaced by the parameter's name."""
    text = str(error) or type(error).__name__
    if " - at `" not in text:
        return f"{text} - at `{name}`"
    head, _, path = text.rpartition(" - at `")
    return f"{head} - at `" + path.replace("$", name, 1)


def is_object(value: Json) -> TypeGuard[Mapping[str, Json]]:
    """Return whether *value* is a JSON object."""
    return isinstance(value, Mapping)


def _is_array(value: Json) -> TypeGuard[list[Json]]:
    return isinstance(value, list)


def _unknown(value: Json, shape: msgspec.inspect.Type, path: str) -> Iterable[str]:
    """Yield what msgspec lets pass: unknown members, numbers where a decimal is text."""
    match shape:
        case msgspec.inspect.Metadata(type=inner):
            yield from _unknown(value, inner, path)
        case msgspec.inspect.UnionType(types=members):
            yield from _unknown(value, _chosen(value, members), path)
        case msgspec.inspect.DecimalType() if isinstance(value, (int, float)):
            yield f"Expected a number as text, got `{type(value).__name__}` - at `{path}`"
        case (
            msgspec.inspect.StructType(array_like=False)
            | msgspec.inspect.DataclassType()
            | msgspec.inspect.TypedDictType()
        ) if is_object(value):
            fields = {field.encode_name: field.type for field in shape.fields}
            tag = shape.tag_field if isinstance(shape, msgspec.inspect.StructType) else None
            for name, member in value.items():
                if name in fields:
                    yield from _unknown(member, fields[name], f"{path}.{name}")
                elif name != tag:
                    yield f"`{path}.{name}` is no member; known: {', '.join(fields)}"
        case msgspec.inspect.DictType(value_type=inner) if is_object(value):
            for name, member in value.items():
                yield from _unknown(member, inner, f"{path}[{name!r}]")
        case msgspec.inspect.TupleType(item_types=inners) if _is_array(value):
            for index, (member, inner) in enumerate(zip(value, inners, strict=False)):
                yield from _unknown(member, inner, f"{path}[{index}]")
        case msgspec.inspect.CollectionType(item_type=inner) if _is_array(value):
            for index, member in enumerate(value):
                yield from _unknown(member, inner, f"{path}[{index}]")
        case _:
            pass


_NUMBERS: Final = frozenset({msgspec.inspect.IntType, msgspec.inspect.FloatType})
_OBJECTS: Final = (
    msgspec.inspect.StructType,
    msgspec.inspect.DataclassType,
    msgspec.inspect.TypedDictType,
    msgspec.inspect.DictType,
)


def _chosen(value: Json, members: Sequence[msgspec.inspect.Type]) -> msgspec.inspect.Type:
    """Return the member of a union that *value* was taken for, as far as it matters here."""
    plain = [one.type if isinstance(one, msgspec.inspect.Metadata) else one for one in members]
    if is_object(value):
        for one in plain:
            if isinstance(one, msgspec.inspect.StructType) and one.tag_field is not None:
                if value.get(one.tag_field) == one.tag:
                    return one
            elif isinstance(one, _OBJECTS):
                return one
    elif _is_array(value):
        for one in plain:
            if isinstance(one, (msgspec.inspect.CollectionType, msgspec.inspect.TupleType)):
                return one
    elif _NUMBERS.isdisjoint(map(type, plain)):
        for one in plain:
            if isinstance(one, msgspec.inspect.DecimalType):
                return one
    return msgspec.inspect.AnyType()
