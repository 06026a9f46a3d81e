"""Square roots of covariances."""

from sot.ops.matrix_root.operator import matrix_root as matrix_root
from sot.ops.matrix_root.operator import root_of_product as root_of_product
