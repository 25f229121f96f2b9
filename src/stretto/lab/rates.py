"""Link rates: their text form, and the token bucket that holds a link to one. Pure arithmetic.

How the sizes were chosen, measured on Linux 6.18 with 2 processors, TCP between two hosts. The sender's
large packets must fit the bucket whole, else the kernel cuts each and pays for every piece; and the bucket
must be small, since what it holds crosses an idle link at once (64 KiB make a message of 512 KiB 8 % too
fast at 100 Mbit/s). So packets are kept small (`gso_max_size`) and the bucket just holds one. Kernel time
for 128 MiB each way at once at 1 Gbit/s: 0.3 s so; 0.5 s with packets of 64 KiB that are cut; 0.7 s with
segmentation offload off; with that and frames of 1500 B, 4.4 s, and only a quarter of the rate.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stretto.errors import UsageError

# Jumbo frames, as training clusters use them: 99 % of the nominal rate is payload (1500 B: 95.6 %).
MTU_BYTES = 9000

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"^\s*(\d{1,12}(?:\.\d{1,12})?)\s*([a-zA-Z]+)\s*$")

# Two segments of a 9000 B link with the 320 B and a little that Linux keeps free for headers.
_GSO_MIN_BYTES = 2 * MTU_BYTES + 512
_GSO_MAX_BYTES = 65536  # Linux's own limit for legacy TCP packets
_BURST_S = 0.25e-3  # measured: enough that timers do not starve 1 Gbit/s (97 % without, 99 % with it)
# Longer than the sum of what a few senders can have in flight (4 MiB each by Linux's default), so that
# the switch queues and does not drop: the lab emulates a link that is slow, not one that loses packets.
QUEUE_BYTES = 64 << 20


def parse_rate(text: str) -> int | None:
    """Bits per second of a rate such as `100mbit` (kbit, mbit, gbit as in tc); None for `unlimited`.

    Raises UsageError for anything else, and for 0.
    """
    if text.strip().lower() == "unlimited":
        return None
    match = _RATE.match(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        hint = ""
        if match is not None and match[2].lower().endswith("bps"):
            hint = "; tc reads bps as bytes per second, which is why the lab takes bits only"
        raise UsageError(
            f"--rate {text!r}: expected a number and kbit, mbit or gbit (100mbit), or `unlimited`{hint}"
        )
    rate_bits_per_s = round(float(match[1]) * unit)
    if rate_bits_per_s < 1000:
        raise UsageError(f"--rate {text!r}: the slowest link is 1kbit; for no limit say `unlimited`")
    return rate_bits_per_s


@dataclass(frozen=True, slots=True)
class Bucket:
    """Settings of `tbf` and of the link's packets, for one rate."""

    rate_bits_per_s: int
    burst_bytes: int
    """What an idle link lets through at once."""
    gso_max_bytes: int
    """The largest packet that TCP may hand to the link; it fits the bucket."""

    @staticmethod
    def of(rate_bits_per_s: int) -> Bucket:
        """The bucket for a rate in bits per second."""
        timer_bytes = math.ceil(rate_bits_per_s * _BURST_S / 8)
        gso_bytes = min(max(timer_bytes, _GSO_MIN_BYTES), _GSO_MAX_BYTES)
        # tc keeps the bucket as a time in ticks of 64 ns; the margin covers its rounding.
        return Bucket(rate_bits_per_s, max(timer_bytes, gso_bytes + 512), gso_bytes)

    def tbf(self) -> str:
        """The words that `tc` takes after `tbf`."""
        return f"rate {self.rate_bits_per_s}bit burst {self.burst_bytes} limit {QUEUE_BYTES}"
