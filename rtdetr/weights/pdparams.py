"""Reads Paddle's weight files without Paddle, and without running their code.

A `.pdparams` (or `.pdema`) is a pickle of a dict name -> NumPy array. A pickle may call any function of any module, and
Python's unpickler reserves whatever memory an instruction claims. So the few instructions that a dict of arrays needs
are interpreted here: its globals become inert placeholders, all others are refused by name, and arrays are rebuilt from
shape, type and bytes. Neither pickle's nor NumPy's reader is used.
"""

from __future__ import annotations

import math
import mmap
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import numpy as np

from rtdetr.weights.checkpoint import CheckpointError, why_no_weight_file

Array = np.ndarray[Any, Any]

NAMES_KEY = "StructuredToParameterName@@"  # name -> Paddle's internal name; ignored

# Bool, signed and unsigned integers, floats. Weights have no other types (objects, strings, records).
NUMBER_TYPES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"})
MAX_DIMENSIONS = 32
MAX_INSTRUCTIONS = 1_000_000  # an array takes up to 40: the largest model needs 50,000


class ConvertError(CheckpointError):
    """A weight file cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class _Placeholder:
    """Replaces a global in a file: `call` does what the file needs of it, and nothing else."""

    name: str
    call: Callable[[tuple[Any, ...]], Any]  # of the arguments


def _ndarray(arguments: tuple[Any, ...]) -> NoReturn:
    raise ConvertError("calls `numpy.ndarray` in a way that no Paddle weight file does")


def _reconstruct(arguments: tuple[Any, ...]) -> _StoredArray:
    if len(arguments) != 3 or arguments[0] is not _ARRAY:
        raise ConvertError("holds an array that is not a plain numpy.ndarray")
    return _StoredArray()


def _dtype(arguments: tuple[Any, ...]) -> _StoredDtype:
    code = arguments[0] if arguments else None
    if not isinstance(code, str) or code not in NUMBER_TYPES:
        shown = _shown(code) if isinstance(code, str) else _kind(code)
        kind = "object " if shown.startswith("O") else ""
        raise ConvertError(f"holds an array of the {kind}dtype '{shown}'; only numbers are read")
    return _StoredDtype(np.dtype(code))


def _encode(arguments: tuple[Any, ...]) -> bytes:
    """Protocol 2 has no bytes; it stores them as text that has to be encoded."""
    if len(arguments) != 2 or not isinstance(arguments[0], str) or arguments[1] != "latin1":
        raise ConvertError("calls `_codecs.encode` with something else than text and 'latin1'")
    return arguments[0].encode("latin1")


def _tuple(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Some releases store a tensor as tuple((name, array))."""
    if len(arguments) != 1 or not isinstance(arguments[0], tuple):
        raise ConvertError("calls `builtins.tuple` in a way that no Paddle weight file does")
    return arguments[0]


@dataclass
class _StoredDtype:
    dtype: np.dtype[Any]

    def set_state(self, state: Any) -> None:
        """state: (version, byte order, None for the parts of structured types, ...)."""
        if not isinstance(state, tuple) or len(state) < 5 or any(part is not None for part in state[2:5]):
            raise ConvertError("holds an array of a structured dtype; only numbers are read")
        if state[1] not in ("<", ">", "|", "="):
            raise ConvertError("names an unknown byte order")
        self.dtype = self.dtype.newbyteorder(state[1])


@dataclass
class _StoredArray:
    array: Array | None = None

    def set_state(self, state: Any) -> None:
        """state: (version, shape, dtype, is Fortran order, bytes)."""
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _StoredDtype):
            raise ConvertError("holds an array whose description is broken")
        shape, dtype, fortran, data = state[1], state[2].dtype, state[3], state[4]
        if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
            raise ConvertError("holds an array of an impossible shape")
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
            got = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
            raise ConvertError(f"holds an array of shape {shape} and dtype {dtype} with {got} of data")
        array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
        self.array = array.astype(dtype.newbyteorder("="), order="C")  # also a copy: a buffer of bytes is read-only


_ARRAY = _Placeholder("numpy.ndarray", _ndarray)
_RECONSTRUCT = _Placeholder("numpy.core.multiarray._reconstruct", _reconstruct)
_TUPLE = _Placeholder("builtins.tuple", _tuple)
ALLOWED_GLOBALS: dict[tuple[str, str], _Placeholder] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,  # written with NumPy 2
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _Placeholder("numpy.dtype", _dtype),
    ("_codecs", "encode"): _Placeholder("_codecs.encode", _encode),
    ("builtins", "tuple"): _TUPLE,
    ("__builtin__", "tuple"): _TUPLE,
}


CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
INTEGERS, FLOATS = ("BININT", "BININT1", "BININT2", "LONG1"), ("BINFLOAT",)
TEXTS, BYTES = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
WITH_VALUE = frozenset(INTEGERS + FLOATS + TEXTS + BYTES)
TUPLE_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _PickleReader:
    """Interprets the pickle instructions that build dicts of arrays. One reader reads one file."""

    def __init__(self, file: mmap.mmap) -> None:
        self.file = file
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # stacks below the marks
        self.memo: dict[int, Any] = {}
        self.spare = 2 * len(file)  # remaining bytes that may be allocated, for encoded text and arrays

    def load(self) -> Any:
        """The object in the file. Raises ConvertError without the file's name, ValueError, LookupError or TypeError."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(cast(IO[bytes], self.file))):
            if count > MAX_INSTRUCTIONS:
                raise ConvertError("has more instructions than the weights of any model")
            self._carry_out(opcode.name, argument)
        return self.stack.pop()

    def _carry_out(self, name: str, argument: Any) -> None:
        if name in WITH_VALUE:
            self.stack.append(argument)
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            self.stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            self.outer.append(self.stack)
            self.stack = []
        elif name in TUPLE_SIZES:
            self.stack.append(tuple(self._pop(TUPLE_SIZES[name])))
        elif name == "TUPLE":
            items = tuple(self._pop_mark())  # which changes self.stack
            self.stack.append(items)
        elif name in ("SETITEM", "SETITEMS"):
            self._set_items(self._pop(2) if name == "SETITEM" else self._pop_mark())
        elif name in ("APPEND", "APPENDS"):
            self._extend(self._pop(1) if name == "APPEND" else self._pop_mark())
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.stack.append(_placeholder(*(argument.split(" ", 1) if name == "GLOBAL" else self._pop(2))))
        elif name == "REDUCE":
            self._call()
        elif name == "BUILD":
            self._build()
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name == "BINPERSID":
            raise ConvertError("refers to an object outside of the file")
        elif name not in ("PROTO", "FRAME", "STOP"):  # frames only allow buffered reading
            raise ConvertError(f"uses the pickle instruction {name}, which a weight file does not need")

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("stack is empty")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def _set_items(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        # Other keys would be hashed, and hashing a deeply nested tuple crashes the process.
        if not isinstance(target, dict) or len(items) % 2 or not all(isinstance(key, str) for key in keys):
            raise ConvertError("fills a dict with something else than named entries")
        target.update(zip(keys, items[1::2]))

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ConvertError("appends to something else than a list")
        self.stack[-1].extend(items)

    def _call(self) -> None:
        function, arguments = self._pop(2)
        if not isinstance(function, _Placeholder) or not isinstance(arguments, tuple):
            raise ConvertError("calls something else than the makers of arrays")
        made = function.call(arguments)
        self._spend(len(made) if isinstance(made, bytes) else 0)
        self.stack.append(made)

    def _build(self) -> None:
        state = self._pop(1)[0]
        target = self.stack[-1]
        if not isinstance(target, (_StoredArray, _StoredDtype)):
            what = f"`{target.name}`" if isinstance(target, _Placeholder) else f"a {_kind(target)}"
            raise ConvertError(f"tries to change {what}")
        if isinstance(target, _StoredArray) and isinstance(state, tuple) and isinstance(state[-1], bytes):
            self._spend(len(state[-1]))
        target.set_state(state)

    def _spend(self, size: int) -> None:
        self.spare -= size
        if self.spare < 0:  # the file reuses the same bytes many times
            raise ConvertError("describes more numbers than it holds")


def _placeholder(module: Any, name: Any) -> _Placeholder:
    allowed = ALLOWED_GLOBALS.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
    if allowed is None:
        raise ConvertError(
            f"names the Python object `{_shown(module)}.{_shown(name)}`, which a weight file does not need and which"
            " could run code; nothing was run and nothing was read"
        )
    return allowed


def read_pdparams(path: str | Path) -> dict[str, Array]:
    """Reads a Paddle weight file: arrays by official name, in Paddle's layout, native byte order, writable.

    Raises ConvertError with one sentence if the file is missing, truncated, not a dict of arrays, or names a Python
    object other than those in ALLOWED_GLOBALS.
    """
    path = Path(path)
    if reason := why_no_weight_file(path):
        raise ConvertError(f"{path}: {reason}")
    try:
        # A mapped file never reads or allocates beyond its end, whatever length an instruction claims.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            content = _PickleReader(mapped).load()
    except ConvertError as error:
        raise ConvertError(f"{path}: refused, the file {error}") from None
    except (ValueError, LookupError, TypeError) as error:  # ValueError: what pickletools raises
        raise ConvertError(
            f"{path}: cut short or not a Paddle weight file; download it again or check the path"
        ) from error
    except OSError as error:
        raise ConvertError(f"{path}: cannot be read ({error.strerror})") from error
    return _arrays(path, content)


def _arrays(path: Path, content: Any) -> dict[str, Array]:
    if not isinstance(content, dict):
        raise ConvertError(f"{path}: expected a dict of weights, got {_kind(content)}")
    content.pop(NAMES_KEY, None)
    arrays: dict[str, Array] = {}
    for name, value in content.items():
        if isinstance(value, tuple) and len(value) == 2:
            value = value[1]
        if not isinstance(value, _StoredArray) or value.array is None:
            raise ConvertError(
                f"{path}: entry '{_shown(name)}' is {_kind(value)}, not an array; is this an optimiser file (.pdopt)?"
            )
        arrays[name] = value.array
    return arrays


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _shown(text: Any) -> str:
    """Text from a file, safe for a message: short, on one line, in printable characters."""
    return ascii(text[:100])[1:-1] if isinstance(text, str) else _kind(text)


def _kind(value: Any) -> str:
    return {"_StoredArray": "an unfinished array", "_StoredDtype": "a dtype"}.get(
        type(value).__name__, type(value).__name__
    )
