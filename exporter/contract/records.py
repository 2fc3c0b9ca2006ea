"""Records: frozen values with JSON in and out, for everything that one part writes and another reads.

A subclass of ``Record`` lists its fields as annotations, as a dataclass does. A field with a default may be absent from
the JSON. ``to_json`` and ``from_json`` follow the annotations, and know records, named tuples and
dataclasses inside each other. Keys that a record does not know are kept and written again. A field whose name ends with
``_`` has a key without it.

Standard library only, and no code is generated: twenty dataclasses would cost each command 10 ms of import.
"""

import contextlib
import dataclasses
import os
import stat
import types
import typing
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import cache, partial
from typing import ClassVar, Self, TypeAlias, TypeVar, dataclass_transform

from exporter.contract import run_files
from exporter.contract.errors import ExporterError

if typing.TYPE_CHECKING:
    JsonValue: TypeAlias = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
else:
    JsonValue = object  # read as it is
JsonObject: TypeAlias = Mapping[str, JsonValue]
T = TypeVar("T")
_Reader: TypeAlias = Callable[[object, str], object]

NOTHING: Mapping[typing.Any, typing.Never] = types.MappingProxyType({})  # default of fields that are mappings


_SCALARS = frozenset((type(None), bool, int, float, str))


class RecordError(ExporterError, ValueError):
    """JSON that is not the record it should be. The text names the place and what was expected there."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record:
    """A frozen value with named fields."""

    SCHEMA: ClassVar[int | None] = None  # version of the JSON, in its key "schema", for records that are whole files
    FIELDS: ClassVar[tuple[str, ...]] = ()
    KEYS: ClassVar[Mapping[str, str]] = NOTHING  # key of each field
    REQUIRED: ClassVar[frozenset[str]] = frozenset()  # fields without a default
    _known_keys: ClassVar[frozenset[str]] = frozenset()  # of its JSON
    unknown_keys: ClassVar[JsonObject] = NOTHING  # keys of the JSON without a field; set on the instance

    def __init_subclass__(cls) -> None:
        # of the class alone; from Python 3.14 on they are not in its namespace
        own = [name for name, kind in cls.__annotations__.items() if "ClassVar" not in str(kind)]
        inherited = [name for base in cls.__bases__ if issubclass(base, Record) for name in base.FIELDS]
        cls.FIELDS = tuple(dict.fromkeys((*inherited, *own)))
        cls.KEYS = {name: name.removesuffix("_") for name in cls.FIELDS}
        cls.REQUIRED = frozenset(name for name in cls.FIELDS if not hasattr(cls, name))
        cls._known_keys = frozenset(("schema", *cls.KEYS.values()))

    def __init__(self, **values: object) -> None:
        self._require_known(values)
        if not values.keys() >= self.REQUIRED:
            raise TypeError(f"{type(self).__name__} needs {min(self.REQUIRED - values.keys())}")
        self.__dict__.update(values)

    def _require_known(self, values: Mapping[str, object]) -> None:
        if not values.keys() <= self.KEYS.keys():
            raise TypeError(f"{type(self).__name__} has no field {min(values.keys() - self.KEYS.keys())}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and to_json(self) == to_json(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def replace(self, **changes: object) -> Self:
        """Return a copy with other values of the fields in ``changes``."""
        self._require_known(changes)
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.__dict__.update(changes)
        return new

    @classmethod
    def join(cls, *parts: "Record", **others: object) -> Self:
        """Return the record with the values of ``parts``, whose classes are bases of this one, and of ``others``."""
        values: dict[str, object] = {}
        for part in parts:
            if not issubclass(cls, type(part)):
                raise TypeError(f"{type(part).__name__} is no part of {cls.__name__}")
            values.update(part.__dict__)  # its other fields have the same default here
        values.pop("unknown_keys", None)
        return cls(**values | others)

    @classmethod
    def of(cls, whole: "Record") -> Self:
        """Return the part of ``whole`` that has the fields of this class, one of its bases."""
        return cls(**{name: getattr(whole, name) for name in cls.FIELDS})

    def to_json(self) -> dict[str, JsonValue]:
        """Return the record as a JSON object, the fields in order of declaration."""
        body: dict[str, JsonValue] = {"schema": self.SCHEMA} if self.SCHEMA else {}
        for name, key in self.KEYS.items():
            value = getattr(self, name)
            body[key] = value if type(value) in _SCALARS else to_json(value)
        body.update(self.unknown_keys)
        return body

    @classmethod
    def from_json(cls, value: object, place: str = "") -> Self:
        """Read the record from a JSON object. ``place`` is what error messages call it.

        Raises RecordError, also if a newer version has written it.
        """
        if not isinstance(value, Mapping):
            raise RecordError(f"{place or cls.__name__}: expected an object, not {_shown(value)}")
        written = value.get("schema", cls.SCHEMA)
        if cls.SCHEMA and (not isinstance(written, int) or written > cls.SCHEMA):
            raise RecordError(
                f"{place or cls.__name__} has schema {written}, and this gpujob reads up to {cls.SCHEMA}: "
                "a newer version wrote it, so use that version here"
            )
        readers = _readers(typing.cast(type, cls))
        try:
            known = {name: readers[name](value[key], key) for name, key in cls.KEYS.items() if key in value}
        except RecordError as error:
            raise RecordError(f"{place}.{error}" if place else str(error)) from None
        missing = cls.REQUIRED - known.keys()
        if missing:
            raise RecordError(f"{place or cls.__name__}: {min(missing)} is missing")
        new = object.__new__(cls)  # its fields are known and complete
        new.__dict__.update(known)
        if not value.keys() <= cls._known_keys:
            new.__dict__["unknown_keys"] = {key: value[key] for key in value if key not in cls._known_keys}
        return new

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self | None:
        """Read the record from a file; None without such a file. Raises RecordError, also if it has no JSON object."""
        body = run_files.read_json(path)
        if body is not None:
            return cls.from_json(body, os.path.basename(path))
        try:
            facts = os.stat(path)
        except (OSError, ValueError):  # the latter for a name that no file can have
            return None
        if stat.S_ISDIR(facts.st_mode):  # a user's, and the record is elsewhere
            return None
        raise RecordError(
            f"{path} is damaged or cannot be read: no JSON object in its {facts.st_size} bytes; "
            "restore it, or remove it to continue without it"
        )

    @classmethod
    def read_valid(cls, path: str | os.PathLike[str]) -> Self | None:
        """Read the record from a file; None also if it is damaged or another version wrote something else there."""
        try:
            return cls.read(path)
        except RecordError:
            return None


def to_json(value: object) -> JsonValue:
    """Return a record, named tuple, dataclass, mapping, sequence, set or scalar as a JSON value."""
    if type(value) in _SCALARS:
        return value  # type: ignore[return-value]
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, dict | types.MappingProxyType):  # quicker than `Mapping`
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: to_json(entry) for name, entry in zip(value._fields, value, strict=True)}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, AbstractSet):
        return [to_json(entry) for entry in sorted(value)]
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON")


def from_json(kind: type[T], value: object, place: str = "") -> T:
    """Read a value of type ``kind``, which may be a generic alias or a union, from JSON. Raises RecordError."""
    return typing.cast(T, _reader(typing.cast(object, kind))(value, place))


@cache
def _readers(cls: type, /) -> dict[str, _Reader]:
    """Readers of the fields of a record, named tuple or dataclass."""
    hints = typing.get_type_hints(cls)
    if issubclass(cls, Record):
        names: tuple[str, ...] = cls.FIELDS
    elif dataclasses.is_dataclass(cls):
        names = tuple(field.name for field in dataclasses.fields(cls) if field.init)
    else:
        names = cls._fields  # type: ignore[attr-defined]
    return {name: _reader(hints[name]) for name in names}


@cache
def _reader(kind: object) -> _Reader:
    """The reader of one type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_json
    if kind in (bool, int, float, str, type(None)):
        return _scalar(typing.cast(type, kind))
    if origin in (types.UnionType, typing.Union):
        others = [argument for argument in arguments if argument is not type(None)]
        read = _reader(others[0]) if len(others) == 1 else _one_of(others)
        return _optional(read, others[0]) if len(others) < len(arguments) else read
    if origin is typing.Literal:
        return _scalar(str)
    if origin in (tuple, list, frozenset):
        return _sequence(origin, arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_reader(arguments[1]), _KEYS.get(arguments[0], str))
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return _plain(kind)
    return lambda value, place: value  # any JSON value


_unchanged: dict[_Reader, frozenset[type]] = {}  # types of the values that a reader returns as they are


def _scalar(kind: type) -> _Reader:
    is_number = kind in (int, float)
    accepted = (int, float) if is_number else kind  # other programs write 1.0 where we write 1
    most = run_files.MOST_NUMBER

    def read(value: object, place: str) -> object:
        # nearly always
        if type(value) is kind and (not is_number or -most < value < most):  # type: ignore[operator]
            return value
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise RecordError(f"{place}: expected {_name(kind)}, not {_shown(value)}")
        if is_number and not -most < value < most:  # type: ignore[operator]
            raise RecordError(f"{place}: {_shown(value)} is too large or not finite")
        if kind is int:
            if value % 1:  # type: ignore[operator]
                raise RecordError(f"{place}: expected {_name(kind)}, not {_shown(value)}")
            return int(value)  # type: ignore[call-overload]
        return value

    _unchanged[read] = frozenset((kind,))
    return read


def _optional(reader: _Reader, kind: object) -> _Reader:
    # {} is how version 0.1 wrote that there is no such record
    absent: tuple[object, ...] = (None, {}) if isinstance(kind, type) and issubclass(kind, Record) else (None,)

    def read(value: object, place: str) -> object:
        return None if value in absent else reader(value, place)

    if reader in _unchanged:
        _unchanged[read] = _unchanged[reader] | {type(None)}
    return read


def _one_of(kinds: list[object]) -> _Reader:
    def read(value: object, place: str) -> object:
        for kind in kinds:
            try:
                return _reader(kind)(value, place)
            except RecordError:
                continue
        raise RecordError(f"{place}: expected {' or '.join(map(_name, kinds))}, not {_shown(value)}")

    return read


def _sequence(origin: type, arguments: tuple[object, ...]) -> _Reader:
    fixed = origin is tuple and arguments[-1:] != (...,)
    readers = [_reader(argument) for argument in arguments if argument is not ...]

    def read(value: object, place: str) -> object:
        if not isinstance(value, list | tuple):
            raise RecordError(f"{place}: expected a list, not {_shown(value)}")
        if fixed and len(value) != len(readers):
            raise RecordError(f"{place}: expected {len(readers)} values, not {len(value)}")
        each = readers if fixed else readers * len(value)
        with contextlib.suppress(RecordError):  # thousands of places are made only if one is needed
            return origin(reader(entry, "") for reader, entry in zip(each, value, strict=True))
        return origin(reader(entry, f"{place}[{i}]") for i, (reader, entry) in enumerate(zip(each, value, strict=True)))

    return read


_KEYS: Mapping[object, Callable[[str], object]] = {
    int: int,
    int | None: lambda key: None if key == "null" else int(key),
}  # how keys that are not texts are read


def _mapping(reader: _Reader, read_key: Callable[[str], object]) -> _Reader:
    def read(value: object, place: str) -> object:
        if not isinstance(value, Mapping):
            raise RecordError(f"{place}: expected an object, not {_shown(value)}")
        try:
            return {read_key(key): reader(entry, f"{place}.{key}") for key, entry in value.items()}
        except ValueError as error:
            raise error if isinstance(error, RecordError) else RecordError(f"{place}: {error}") from None

    return read


def _plain(kind: type) -> _Reader:
    """Reader of a named tuple or dataclass, which is written as an object or as the list of its fields.

    Only our own files have lists. Their numbers may be infinite, as in the saved state of an estimator, or NaN.
    """
    left: dict[tuple[type, ...], tuple[tuple[int, _Reader], ...]] = {}  # what is yet to be read in lists of such types
    # of thousands of rows `_make` and the call of the class are the larger part
    make: Callable[[list[object]], object] = (
        partial(tuple.__new__, kind) if issubclass(kind, tuple) else lambda entries: kind(*entries)
    )

    def read(value: object, place: str) -> object:
        if isinstance(value, list | tuple):
            shape = tuple(map(type, value))
            unread = left.get(shape)
            if unread is None:
                unread = left[shape] = _unread(_readers(kind), shape, place)
            entries = list(value)
            try:
                for i, reader in unread:
                    entries[i] = reader(entries[i], "")
            except RecordError:  # as below
                value = dict(zip(_readers(kind), value, strict=True))
            else:
                return make(entries)
        readers = _readers(kind)
        if not isinstance(value, Mapping):
            raise RecordError(f"{place}: expected an object, not {_shown(value)}")
        try:
            fields = {name: reader(value[name], "") for name, reader in readers.items() if name in value}
        except RecordError:  # once more, for its place
            fields = {name: reader(value[name], f"{place}.{name}") for name, reader in readers.items() if name in value}
        try:
            return kind(**fields)
        except TypeError as error:
            raise RecordError(f"{place}: {error}") from None

    return read


def _unread(readers: Mapping[str, _Reader], shape: tuple[type, ...], place: str) -> tuple[tuple[int, _Reader], ...]:
    """Which values of a list of these types are not yet as they will be, with their readers. Raises RecordError."""
    if len(shape) != len(readers):
        raise RecordError(f"{place}: expected {len(readers)} values, not {len(shape)}")
    pairs = enumerate(zip(readers.values(), shape, strict=True))
    return tuple((i, reader) for i, (reader, kind) in pairs if kind not in _unchanged.get(reader, ()))


def _name(kind: object) -> str:
    return {float: "a number", int: "a whole number", str: "a text", bool: "true or false", type(None): "null"}.get(
        typing.cast(type, kind), getattr(kind, "__name__", str(kind))
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
