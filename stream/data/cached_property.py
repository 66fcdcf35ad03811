"""A property that is worked out once for each object, without a lock."""

import functools
from typing import Self, TypeVar, overload

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: TID251
    """A property that is worked out when it is first asked for, and then kept in the object.

    The one of Python 3.11 holds a lock while it works, which all objects of the class share: threads wait for each
    other, and a process that is forked off just then, such as a worker of a DataLoader, waits for ever. Here two
    threads may both work it out; one of the values is kept.
    """

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> Self | T:
        if instance is None:
            return self
        assert self.attrname is not None
        value: T = self.func(instance)
        instance.__dict__[self.attrname] = value
        return value
