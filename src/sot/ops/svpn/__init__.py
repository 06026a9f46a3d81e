"""Exact powers of singular values."""

from sot.ops.svpn.operator import svpn as svpn
