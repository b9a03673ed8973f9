"""Conversions inside kernels that Triton lacks on some target: e4m3 without hardware, rounding, tanh."""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it rounds a float32 to an integer
E4M3_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)


@triton.jit
def round_half_even(x):
    """Round a float32 below 2^22 to an integer; ties go to the even one."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def tanh(x):
    """Tanh of a float32; exact at 0 and at both ends."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def e4m3_to_float16(byte):
    """Read e4m3 bytes with integer arithmetic, where the hardware has no such conversion (below sm_89)."""
    bits = byte.to(tl.uint16)
    magnitude = (bits & 0x7F) << 7  # the fields where float16 has them; the bias differs by 8
    number = ((bits & 0x80) << 8 | magnitude).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)


@triton.jit
def float32_to_e4m3(x):
    """Round a float32 to the nearest e4m3, ties to even, beyond ±448 to ±448; returns bytes."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), E4M3_MAX)
    normal = magnitude.to(tl.uint32, bitcast=True)
    normal = (normal + 0x7FFFF + ((normal >> 20) & 1)) >> 20  # a carry into the exponent is what it should be
    normal = normal - (120 << 3)  # the exponent's bias is 7 and not 127
    subnormal = (magnitude * 512.0 + ROUNDER).to(tl.uint32, bitcast=True) & 0xF  # steps of 2^-9
    byte = tl.where(magnitude < 0.015625, subnormal, normal)
    return (sign | tl.where(x != x, 0x7F, byte)).to(tl.uint8)


@triton.jit
def float32_to_bfloat16_bits(x):
    """Round a float32 to the nearest bfloat16, as bits; Triton's interpreter would cut them off."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Round a float32 to the dtype of an output."""
    if tl.bfloat16 == DTYPE and INTERPRET:
        return float32_to_bfloat16_bits(x).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)
