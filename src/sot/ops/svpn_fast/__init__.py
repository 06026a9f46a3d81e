"""svPN by the largest singular values."""

from sot.ops.svpn_fast.operator import svpn_fast as svpn_fast
