"""Cross-covariances of tokens."""

from sot.ops.cross_covariance.operator import cross_covariance as cross_covariance
from sot.ops.cross_covariance.operator import takes_packed as takes_packed
