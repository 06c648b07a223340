"""Numbers with their units, as a plan shows them. Pure."""

from __future__ import annotations


def seconds(value: float) -> str:
    """``4.8 ms``, ``604 ms``, ``1.52 s``, ``219 s``, ``43 min``, ``5.2 h``, ``12.3 days``."""
    if value < 0.9995:
        return f"{value * 1000:.1f} ms" if value < 0.00995 else f"{value * 1000:.0f} ms"
    if value < 999.5:
        return f"{value:.0f} s" if value >= 99.95 else f"{value:#.3g} s"
    for unit, size, most in (("min", 60, 120), ("h", 3600, 48)):
        if value < most * size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 86400:,.1f} days"


def gib(value: float) -> str:
    """``75.5 GiB``, ``1,748 GiB``."""
    return f"{value:,.0f} GiB" if value >= 1000 else f"{value:.1f} GiB"


def percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share < 0.1 else f"{share * 100:.0f} %"


def times(ratio: float) -> str:
    """``2.3 times``, ``21 times``."""
    return f"{ratio:.1f} times" if ratio < 9.95 else f"{ratio:,.0f} times"


def slower(ratio: float) -> str:
    """``12 % slower``, ``2.3 times as long``, ``as fast``."""
    return _compared(ratio, "long", "slower")


def faster(ratio: float) -> str:
    """``12 % faster``, ``2.3 times as fast``, ``as fast``."""
    return _compared(ratio, "fast", "faster")


def _compared(ratio: float, factor: str, share: str) -> str:
    if percent(abs(ratio - 1)) == "0.0 %":
        return "as fast"
    return f"{times(ratio)} as {factor}" if ratio >= 1.995 else f"{percent(ratio - 1)} {share}"


def tflops(value: float) -> str:
    """``412``, ``8.3``, ``0.04``."""
    return f"{value:,.0f}" if value >= 9.5 else f"{value:.2g}"


def amount(value: float) -> str:
    """``19,200``, ``300``, ``4.2``: three digits, as estimates have no more."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def large(count: float) -> str:
    """``100.4B``, ``4.2M``, ``768``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e4)):
        if count >= size:
            size = 1e3 if unit == "K" else size
            return f"{count / size:.1f}{unit}"
    return f"{count:g}"


def both(value: float) -> str:
    """``236 GB (220 GiB)``: vendors use GB, tools use GiB."""
    return f"{value * 2**30 / 1e9:,.0f} GB ({value:,.0f} GiB)"
