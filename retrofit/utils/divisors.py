"""Divisors of a layer's number of channels."""


def largest_divisor(channels: int, most: int) -> int:
    """Return the largest divisor of `channels` that is at most `most`."""
    return next(n for n in range(min(channels, most), 0, -1) if channels % n == 0)
