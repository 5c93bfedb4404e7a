"""Reads Paddle's weight files without Paddle, and without running what is in them.

A `.pdparams` (or `.pdema`) is a pickle of a dict name -> NumPy array. A pickle may name any function of any module and
have it called, so this reader hands out inert stand-ins for the few globals that such a file needs and refuses every
other one by name. Not even NumPy's own unpickling code is reached: arrays are rebuilt here from shape, type and bytes.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rtdetr.weights.checkpoint import CheckpointError

Array = np.ndarray[Any, Any]

NAMES_KEY = "StructuredToParameterName@@"  # name -> Paddle's internal name; of no use to us
SLICES_KEY = "UnpackBigParamInfor@@"  # name -> {"OriginShape", "slices"}: arrays over 1 GiB are stored in pieces

# Bool, signed and unsigned integers, floats. Everything else (objects, strings, records) has no place among weights.
NUMBER_TYPES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"})


class ConvertError(CheckpointError):
    """A weight file that cannot be used; the message is one sentence for the person who gave it."""


class _StandIn:
    """What a pickle gets in place of a global: it can be called as the file needs it, and nothing else."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        raise ConvertError(f"calls `{self.name}` in a way that no Paddle weight file does")

    def __setstate__(self, state: Any) -> NoReturn:
        # Without this method the pickle instruction BUILD would set attributes of the stand-in itself.
        raise ConvertError(f"tries to change `{self.name}`")


class _Reconstruct(_StandIn):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> _StoredArray:
        if len(arguments) != 3 or not isinstance(arguments[0], _StandIn) or arguments[0].name != "numpy.ndarray":
            raise ConvertError("holds an array that is not a plain numpy.ndarray")
        return _StoredArray()


class _MakeDtype(_StandIn):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> _StoredDtype:
        code = arguments[0] if arguments else None
        if not isinstance(code, str) or code not in NUMBER_TYPES:
            kind = "object " if isinstance(code, str) and code.startswith("O") else ""
            raise ConvertError(f"holds an array of the {kind}dtype {code!r}; only numbers are read")
        return _StoredDtype(code)


class _Encode(_StandIn):
    """Protocol 2 has no bytes, so it stores them as text that is to be encoded."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> bytes:
        if len(arguments) != 2 or not isinstance(arguments[0], str) or arguments[1] != "latin1":
            raise ConvertError("calls `_codecs.encode` with something else than text and 'latin1'")
        return arguments[0].encode("latin1")


class _MakeTuple(_StandIn):
    """Some releases store a tensor as tuple((name, array))."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        if len(arguments) != 1 or not isinstance(arguments[0], tuple):
            return super().__call__(*arguments)
        return arguments[0]


class _StoredDtype:
    __slots__ = ("dtype",)

    def __init__(self, code: str) -> None:
        self.dtype: np.dtype[Any] = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        """state: (version, byte order, None for the parts of structured types, ...)."""
        if not isinstance(state, tuple) or len(state) < 5 or any(part is not None for part in state[2:5]):
            raise ConvertError("holds an array of a structured dtype; only numbers are read")
        if state[1] not in ("<", ">", "|", "="):
            raise ConvertError(f"names an unknown byte order {state[1]!r}")
        self.dtype = self.dtype.newbyteorder(state[1])


class _StoredArray:
    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: Array | None = None

    def __setstate__(self, state: Any) -> None:
        """state: (version, shape, dtype, is Fortran order, bytes)."""
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _StoredDtype):
            raise ConvertError("holds an array whose description is broken")
        shape, dtype, fortran, data = state[1], state[2].dtype, state[3], state[4]
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise ConvertError(f"holds an array of the impossible shape {shape!r}")
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
            got = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
            raise ConvertError(f"holds an array of shape {shape} and dtype {dtype} with {got} of data")
        array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
        self.array = array.astype(dtype.newbyteorder("="), order="C")  # also a copy: a buffer of bytes is read-only


_ARRAY, _RECONSTRUCT = _StandIn("numpy.ndarray"), _Reconstruct("numpy.core.multiarray._reconstruct")
_ENCODE, _TUPLE = _Encode("_codecs.encode"), _MakeTuple("builtins.tuple")
ALLOWED_GLOBALS: dict[tuple[str, str], _StandIn] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,  # written with NumPy 2
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _MakeDtype("numpy.dtype"),
    ("_codecs", "encode"): _ENCODE,
    ("builtins", "tuple"): _TUPLE,
    ("__builtin__", "tuple"): _TUPLE,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = ALLOWED_GLOBALS.get((module, name))
        if allowed is None:
            raise ConvertError(
                f"names the Python object `{module}.{name}`, which a weight file does not need and which could run"
                " code; nothing was run and nothing was read"
            )
        return allowed

    def persistent_load(self, pid: Any) -> NoReturn:
        raise ConvertError(f"refers to an object outside of the file ({pid!r})")


def read_pdparams(path: str | Path) -> dict[str, Array]:
    """Arrays of a Paddle weight file by their official names, in Paddle's layout, native byte order, writable.

    Raises ConvertError with one sentence if the file is missing, cut short, not a dict of arrays, or names a Python
    object other than those in ALLOWED_GLOBALS.
    """
    path = Path(path)
    if not path.is_file():
        raise ConvertError(f"{path}: no such weight file")
    try:
        with path.open("rb") as file:
            content = _Reader(file, encoding="latin1").load()
    except ConvertError as error:
        raise ConvertError(f"{path}: refused, the file {error}") from None
    except RecursionError as error:
        raise ConvertError(f"{path}: refused, the file is nested too deeply for a weight file") from error
    except Exception as error:  # a broken pickle may end in nearly any exception type; all of them mean the same here
        raise ConvertError(
            f"{path}: cut short or not a Paddle weight file ({type(error).__name__}: {error}); download it again or"
            " check the path"
        ) from error
    return _arrays(path, content)


def _arrays(path: Path, content: Any) -> dict[str, Array]:
    if not isinstance(content, dict):
        raise ConvertError(f"{path}: expected a dict of weights, got {_kind(content)}")
    slices = content.pop(SLICES_KEY, {})
    content.pop(NAMES_KEY, None)
    arrays: dict[str, Array] = {}
    for name, value in content.items():
        if isinstance(value, tuple) and len(value) == 2:
            value = value[1]
        if not isinstance(name, str) or not isinstance(value, _StoredArray) or value.array is None:
            raise ConvertError(
                f"{path}: entry {name!r} is {_kind(value)}, not an array; is this an optimiser file (.pdopt)?"
            )
        arrays[name] = value.array
    try:
        for name, parts in slices.items():
            pieces = [arrays.pop(piece).ravel() for piece in parts["slices"]]
            arrays[name] = np.concatenate(pieces).reshape(parts["OriginShape"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConvertError(f"{path}: the entry `{SLICES_KEY}` does not fit the arrays ({error!r})") from error
    return arrays


def _kind(value: Any) -> str:
    return {"_StoredArray": "an unfinished array", "_StoredDtype": "a dtype"}.get(
        type(value).__name__, type(value).__name__
    )
