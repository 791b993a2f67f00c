"""Format numbers for readers."""

_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def in_units(number: int) -> str:
    """Format bytes with three digits and a binary unit."""
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_BYTES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {_BYTES[unit]}"


def in_flops(number: float) -> str:
    """Format FLOPs with three digits and a decimal unit."""
    return _decimal(number, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def in_seconds(seconds: float) -> str:
    """Format a time with three digits."""
    return _decimal(seconds * 1e9, ("ns", "µs", "ms", "s"))


def in_tokens(number: int) -> str:
    """Format multiples of 1,024 like `64k` for 65,536, and other numbers in full."""
    return f"{number // 1024}k" if number and number % 1024 == 0 else f"{number:,}"


def span(numbers: list[int]) -> str:
    """Format more than two consecutive numbers as `0 to 4`, otherwise list all of them."""
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _decimal(number: float, units: tuple[str, ...]) -> str:
    unit = 0
    while number >= 999.5 and unit < len(units) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:,.0f} {units[unit]}" if number >= 999.5 else f"{number:.3g} {units[unit]}"
