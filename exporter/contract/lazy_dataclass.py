"""``dataclass`` of the standard library, without most of its cost at import.

Before Python 3.13 that compiles up to seven methods of a class, which takes 1 ms. A process imports a hundred classes
and uses few. Here ``__init__`` is compiled when it is first called, and the other methods need no code of their own.
"""

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, slots: bool = False
    ) -> type | Callable[[type], type]:
        """Make a dataclass, as the decorator of the standard library does with these arguments."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, eq=eq, slots=slots)
        own = set(vars(cls))
        cls.__doc__ = cls.__doc__ or cls.__name__  # else the standard library describes the signature
        made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
        methods = {"__init__": _first_init(made, frozen), "__repr__": _repr}
        if eq:
            methods |= _comparison(tuple(field.name for field in dataclasses.fields(made) if field.compare), frozen)
        if frozen:
            methods |= {"__setattr__": _refuse, "__delattr__": _refuse, "__setstate__": _set_state}
        for name in methods.keys() - own:
            setattr(made, name, methods[name])
        return made


def _first_init(cls: type, frozen: bool) -> Callable[..., None]:
    def init(self: object, *values: object, **named: object) -> None:
        compiled = _init(cls, frozen)
        setattr(cls, "__init__", compiled)  # noqa: B010 - mypy refuses the assignment
        compiled(self, *values, **named)

    return init


def _init(cls: type, frozen: bool) -> Callable[..., None]:
    """Compile the ``__init__`` of a class."""
    known: dict[str, object] = {"SET": object.__setattr__, "UNSET": dataclasses.MISSING}
    parameters, lines = ["self"], list[str]()
    for field in dataclasses.fields(cls):
        name, value = field.name, field.name
        if field.default_factory is not dataclasses.MISSING:
            known[f"NEW_{name}"] = field.default_factory
            default = "UNSET"
            value = f"NEW_{name}() if {name} is UNSET else {name}" if field.init else f"NEW_{name}()"
        elif field.default is not dataclasses.MISSING:
            known[f"DEFAULT_{name}"] = field.default
            default = f"DEFAULT_{name}"
            value = name if field.init else default
        elif not field.init:
            continue
        else:
            default = ""
        if field.init:
            parameters.append(f"{name}={default}" if default else name)
        lines.append(f"SET(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines or ["pass"]), known)  # noqa: S102
    made: Callable[..., None] = known["__init__"]  # type: ignore[assignment]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    return made


def _comparison(names: tuple[str, ...], frozen: bool) -> dict[str, Callable[..., object] | None]:
    def values_of_few(record: object) -> tuple[object, ...]:
        return tuple(getattr(record, name) for name in names)

    values: Callable[[object], object] = attrgetter(*names) if len(names) > 1 else values_of_few

    def is_equal(self: object, other: object) -> bool:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    def hash_of(self: object) -> int:
        return hash(values(self))

    return {"__eq__": is_equal, "__hash__": hash_of if frozen else None}


def _repr(self: object) -> str:
    fields = dataclasses.fields(self)  # type: ignore[arg-type]
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in fields if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse(self: object, name: str, *_: object) -> None:
    raise dataclasses.FrozenInstanceError(f"{type(self).__name__} is frozen: {name} cannot be changed")


def _set_state(self: object, state: "Mapping[str, object] | tuple[None, Mapping[str, object]]") -> None:
    """Restore a pickled record, whose state is a pair if it has slots."""
    for name, value in (state[1] if isinstance(state, tuple) else state).items():
        object.__setattr__(self, name, value)
