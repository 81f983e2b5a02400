"""Plain data: what crosses a process is JSON, never a pickle.

Records with rules (requests, sync infos) are written as JSON text, judged by the Rust core, and filled with what it
gives back. So there is one set of rules for both languages, and what a record holds is always its canonical form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, TypeAlias, TypeVar

from windlass.errors import WindlassInvalid

__all__ = ["Plain", "Record", "numbers", "text_of"]

#: A value of JSON.
Plain: TypeAlias = dict[str, Any]


def text_of(value: object, what: str) -> str:
    """The JSON text of plain data; ``what`` is its name in the error if it is something else.

    >>> text_of({"names": ("a",)}, "request")
    '{"names": ["a"]}'
    """
    try:
        return json.dumps(value, allow_nan=False, default=_spell)
    except (TypeError, ValueError, RecursionError) as e:
        raise WindlassInvalid(
            f"this {what} is not plain data: {e}; give strings, numbers, lists and dictionaries only",
            name="not_json",
        ) from e


def numbers(prefix: str, record: object, names: Sequence[str]) -> dict[str, float]:
    """Fields of a record as flat names and numbers, for loggers; what is not known is left out."""
    values = ((name, getattr(record, name)) for name in names)
    return {f"{prefix}{name}": value for name, value in values if value is not None}


R = TypeVar("R", bound="Record")


class Record:
    """A dataclass with a ``type`` in JSON whose rules are the core's. Its fields hold the canonical form."""

    #: The ``type`` in JSON.
    type_name: ClassVar[str]
    _what: ClassVar[str]
    _judge: ClassVar[Callable[[str], str | None]]
    _types: ClassVar[Mapping[str, type[Record]]]

    def __post_init__(self) -> None:
        self._fill(self._judged(self.to_dict()))

    @classmethod
    def _judged(cls, value: Mapping[str, Any] | str | bytes) -> Plain:
        """The canonical form of a dictionary or of JSON text."""
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError as e:
                raise WindlassInvalid(f"this {cls._what} is not JSON: {e}", name="not_json") from e
        text = value if isinstance(value, str) else text_of(value, cls._what)
        # Nothing if the text is the canonical form.
        canonical: Plain = json.loads(cls._judge(text) or text)
        return canonical

    def _fill(self, canonical: Plain) -> None:
        for field, value in canonical.items():
            if field != "type":
                # Frozen for everybody else.
                object.__setattr__(self, field, self._read(field, value))

    @staticmethod
    def _read(field: str, value: Any) -> Any:
        """A field from its plain form."""
        return value

    @staticmethod
    def _write(value: Any) -> Any:
        """A field in its plain form."""
        return value

    @classmethod
    def _parse(cls: type[R], value: Mapping[str, Any] | str | bytes) -> R:
        canonical = cls._judged(value)
        kind = cls._types[canonical["type"]]
        if not issubclass(kind, cls):
            raise WindlassInvalid(
                f"this {cls._what} is of type {kind.type_name!r}, where {cls.__name__} was expected: both sides must "
                "use the same strategy",
                name="unknown_type",
            )
        # It has been judged: no second time by the constructor.
        record = object.__new__(kind)
        record._fill(canonical)
        return record

    def again(self: R, **changed: Any) -> R:
        """The same with other values in some fields, which the caller vouches for: they are not checked. What is the same is
        written as text once, however often the record is sent."""
        record = object.__new__(type(self))
        kept = self.__dict__.get("_texts")
        if kept is None:
            kept = {}
            object.__setattr__(self, "_texts", kept)
        for field in fields(self):  # type: ignore[arg-type]
            object.__setattr__(record, field.name, changed.get(field.name, getattr(self, field.name)))
        object.__setattr__(record, "_texts", kept)
        object.__setattr__(record, "_changes", frozenset(changed))
        return record

    def to_dict(self) -> Plain:
        """The plain form, which JSON can carry."""
        values = {field.name: self._write(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        return {"type": self.type_name, **values}

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, object]) -> R:
        """Reads and checks the plain form of this class, or of any of its subclasses."""
        return cls._parse(data)

    def to_json(self) -> str:
        """The plain form as JSON text."""
        changes: frozenset[str] | None = self.__dict__.get("_changes")
        if changes is None:
            return text_of(self.to_dict(), self._what)
        texts: dict[str, str] = self.__dict__["_texts"]
        parts = [f'"type": {json.dumps(self.type_name)}']
        for field in fields(self):  # type: ignore[arg-type]
            name = field.name
            text = None if name in changes else texts.get(name)
            if text is None:
                text = text_of(self._write(getattr(self, name)), self._what)
                if name not in changes:
                    texts[name] = text
            parts.append(f'"{name}": {text}')
        return "{" + ", ".join(parts) + "}"

    @classmethod
    def from_json(cls: type[R], text: str | bytes) -> R:
        """Reads and checks JSON text."""
        return cls._parse(text)


def _spell(value: object) -> object:
    """Values that are not plain but have one spelling."""
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} has no JSON form")
