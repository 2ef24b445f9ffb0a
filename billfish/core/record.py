"""Frozen dataclasses that take a tenth of the time to define.

`dataclasses` compiles six functions for each frozen class, which takes more than a millisecond, and a language model
needs seventy such classes before its first token. Those of a record are closures over the names of its fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:
    from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
    from operator import attrgetter

    def record(cls=None, /, *, frozen, eq=True):
        """``dataclass(frozen=True)``, for classes that are not public: their signature is (*values, **named).

        ``fields``, ``replace``, ``asdict``, copies and pickles work. ``__post_init__`` and arguments of ``field`` other
        than defaults do not.
        """
        if cls is None:
            return lambda cls: record(cls, frozen=frozen, eq=eq)
        own = set(vars(cls))
        cls = dataclass(init=False, repr=False, eq=False)(cls)
        about = fields(cls)
        names = tuple(field.name for field in about)
        defaults = {field.name: field.default for field in about if field.default is not MISSING}
        factories = {field.name: field.default_factory for field in about if field.default_factory is not MISSING}

        def __init__(self, *values, **named):
            found = vars(self)
            found |= defaults | dict(zip(names, values, strict=False)) | named
            for name in factories.keys() - found.keys():
                found[name] = factories[name]()
            twice = not named.keys().isdisjoint(names[: len(values)])
            if twice or len(values) > len(names) or found.keys() != set(names):
                got = f"{len(values)} values and {', '.join(named) or 'no names'}"
                raise TypeError(f"{cls.__name__}({', '.join(names)}) got {got}")

        def __repr__(self):
            return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

        def __eq__(self, other):
            return of(self) == of(other) if type(other) is type(self) else NotImplemented

        def __hash__(self):
            return hash(of(self))

        def __setattr__(self, name, value):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")

        def __delattr__(self, name):
            raise FrozenInstanceError(f"cannot delete field {name!r}")

        functions = [__init__, __repr__, __setattr__, __delattr__]
        if eq:
            of = attrgetter(*names)
            functions += [__eq__, __hash__]
        for function in functions:
            if function.__name__ not in own:
                setattr(cls, function.__name__, function)
        return cls
