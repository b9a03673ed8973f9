"""The ways in which models stretch their rotary frequencies to longer contexts: divisors, one for each.

A head's pair of dimensions ``(i, i + head_dim / 2)`` turns by ``theta ** (-2 i / head_dim)`` a position. A
divisor of 1 leaves that as it was trained, larger ones slow it down.
"""

from __future__ import annotations

import math

from pagedkv.errors import UsageError


def linear_freq_factors(head_dim: int, factor: float) -> tuple[float, ...]:
    """Return divisors that slow all frequencies down alike."""
    return (factor,) * (head_dim // 2)


def llama3_freq_factors(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context_length: int,
) -> tuple[float, ...]:
    """Return the divisors by which Llama 3.1 stretches its rotary frequencies.

    Wavelengths far shorter than the original context keep their frequency (1), far longer ones are slowed
    down by `factor`, and those between move smoothly from one to the other.
    """
    if low_freq_factor >= high_freq_factor:
        expected = f"less than high_freq_factor ({high_freq_factor})"
        raise UsageError(f"low_freq_factor: expected {expected}, got {low_freq_factor}")
    factors = []
    for dim in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (dim / head_dim)
        periods = original_context_length / wavelength  # turns within the original context
        smooth = (periods - low_freq_factor) / (high_freq_factor - low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


def yarn_freq_factors(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    original_context_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """Return the divisors of YaRN (Peng et al., 2023, "NTK-by-parts").

    Pairs that turn more than `beta_fast` times within the original context keep their frequency, those that
    turn less than `beta_slow` times are slowed down by `factor`, and those between follow a straight line
    over the pair's number. `truncate` rounds the ends of that line outwards to whole pairs.
    """
    if theta <= 1:
        raise UsageError(f"rope_theta: expected more than 1 for yarn, got {theta}")

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original_context_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step
    factors = []
    for pair in range(head_dim // 2):
        slowed = min(max((pair - first) / (last - first), 0.0), 1.0)
        factors.append(1 / (slowed / factor + 1 - slowed))
    return tuple(factors)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return what YaRN multiplies queries and keys with: attention gets sharper in a longer context."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
