"""A SIMD register as a numba type: eight numbers that are added, compared and stored as one, each its own matrix's.

LLVM splits a register that the processor does not have into those it has, so this runs anywhere, fastest from AVX on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

LANES = 8
FUSE = ("contract",)  # a·b + c may be rounded once


routine = numba.njit(nogil=True, error_model="numpy")  # a function that kernels call


def kernel(signature: Any) -> Callable[[Any], Any]:
    """Compile a function that Python calls, and keep the result on disk if there is a folder that can be written."""

    def compiled(function: Any) -> Any:
        try:
            return numba.njit(signature, nogil=True, error_model="numpy", cache=True)(function)
        except RuntimeError:  # no such folder
            return numba.njit(signature, nogil=True, error_model="numpy")(function)

    return compiled


class Lanes(types.Type):
    """`LANES` numbers of one kind, side by side."""

    def __init__(self, name: str, element: Any) -> None:
        super().__init__(name=f"{name}_x{LANES}")
        self.llvm = ir.VectorType(element, LANES)


DOUBLES = Lanes("double", ir.DoubleType())
FLOATS = Lanes("float", ir.FloatType())
FLAGS = Lanes("flag", ir.IntType(1))


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, lanes.llvm)


def _define(
    function: Any,
    emit: Callable[..., Any],
    arity: int = 2,
    result: Lanes | None = None,
    kinds: tuple[Lanes, ...] = (DOUBLES, FLOATS),
) -> None:
    class Signatures(ConcreteTemplate):
        cases = [signature(result or kind, *[kind] * arity) for kind in kinds]  # noqa: RUF012

    infer_global(function)(Signatures)
    for kind in kinds:
        lower_builtin(function, *[kind] * arity)(lambda context, builder, sig, args: emit(builder, *args))


_define(operator.add, lambda builder, x, y: builder.fadd(x, y, flags=FUSE))
_define(operator.sub, lambda builder, x, y: builder.fsub(x, y, flags=FUSE))
_define(operator.mul, lambda builder, x, y: builder.fmul(x, y, flags=FUSE))
_define(operator.truediv, lambda builder, x, y: builder.fdiv(x, y))
_define(operator.neg, lambda builder, x: builder.fneg(x), arity=1)
_define(operator.lt, lambda builder, x, y: builder.fcmp_ordered("<", x, y), result=FLAGS)
_define(operator.le, lambda builder, x, y: builder.fcmp_ordered("<=", x, y), result=FLAGS)
_define(operator.eq, lambda builder, x, y: builder.fcmp_ordered("==", x, y), result=FLAGS)
_define(operator.and_, lambda builder, x, y: builder.and_(x, y), kinds=(FLAGS,))


def _kind_of(array: Any) -> Lanes:
    if not (isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"):
        raise TypeError(f"registers are read from contiguous one-dimensional arrays, not from {array}")
    return {types.float64: DOUBLES, types.float32: FLOATS}[array.dtype]


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _kind_of(array_type).llvm.as_pointer())


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """`array[index : index + LANES]`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, sig.args[0], *args), align=sig.args[0].dtype.bitwidth // 8)

    return _kind_of(array)(array, types.intp), emit


@intrinsic
def load_halves(typing: Any, array: Any, index: Any) -> Any:
    """`LANES` numbers in half precision, whose bits an array of uint16 holds, as float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        halves = ir.VectorType(ir.HalfType(), LANES).as_pointer()
        return builder.fpext(builder.load(builder.bitcast(builder.gep(data, [args[1]]), halves), align=2), FLOATS.llvm)

    return FLOATS(array, types.intp), emit


@intrinsic
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index : index + LANES] = value`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        address = _address(context, builder, sig.args[0], *args[:2])
        builder.store(args[2], address, align=sig.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, _kind_of(array)), emit


@intrinsic
def zeros_like(typing: Any, array: Any) -> Any:
    """Zero in every lane, of the type that an array holds."""
    return _kind_of(array)(array), lambda context, builder, sig, args: ir.Constant(sig.return_type.llvm, None)


def _splat(builder: Any, kind: Lanes, number: Any) -> Any:
    nothing, index = ir.Constant(kind.llvm, ir.Undefined), ir.IntType(32)
    first = builder.insert_element(nothing, number, index(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(index, LANES), [0] * LANES))


@intrinsic
def fill(typing: Any, number: Any) -> Any:
    """The number in every lane, in float64."""
    return DOUBLES(types.float64), lambda context, builder, sig, args: _splat(builder, DOUBLES, args[0])


@intrinsic
def spread(typing: Any, array: Any, index: Any) -> Any:
    """`array[index]` in every lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return _splat(builder, sig.return_type, builder.load(builder.gep(data, [args[1]])))

    return _kind_of(array)(array, types.intp), emit


@intrinsic
def select(typing: Any, flags: Any, yes: Any, no: Any) -> Any:
    """Lane by lane: `yes` where the flag is set, `no` where not."""
    return yes(FLAGS, yes, yes), lambda context, builder, sig, args: builder.select(*args)


@intrinsic
def any_of(typing: Any, flags: Any) -> Any:
    """Whether the flag of any lane is set."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.IntType(LANES)(0))

    return types.boolean(FLAGS), emit


@intrinsic
def to_single(typing: Any, value: Any) -> Any:
    """Rounded to float32."""
    return FLOATS(DOUBLES), lambda context, builder, sig, args: builder.fptrunc(args[0], FLOATS.llvm)


@intrinsic
def to_double(typing: Any, value: Any) -> Any:
    """As float64."""
    return DOUBLES(FLOATS), lambda context, builder, sig, args: builder.fpext(args[0], DOUBLES.llvm)


def _call(builder: Any, name: str, *args: Any) -> Any:
    function = ir.FunctionType(DOUBLES.llvm, [DOUBLES.llvm] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.v{LANES}f64"), args)


@intrinsic
def root(typing: Any, value: Any) -> Any:
    """Square roots."""
    return DOUBLES(DOUBLES), lambda context, builder, sig, args: _call(builder, "sqrt", *args)


@intrinsic
def magnitude(typing: Any, value: Any) -> Any:
    """Absolute values."""
    return DOUBLES(DOUBLES), lambda context, builder, sig, args: _call(builder, "fabs", *args)


@intrinsic
def with_sign(typing: Any, value: Any, sign: Any) -> Any:
    """The magnitudes of `value` with the signs of `sign`."""
    return DOUBLES(DOUBLES, DOUBLES), lambda context, builder, sig, args: _call(builder, "copysign", *args)
