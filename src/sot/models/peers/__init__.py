"""Architectures of the paper's comparison tables that timm lacks: importing this registers them with timm."""

from sot.models.peers import autoformer as autoformer
from sot.models.peers import conformer as conformer
from sot.models.peers import irpe as irpe
from sot.models.peers import ps_vit as ps_vit
from sot.models.peers import pvt as pvt
from sot.models.peers import t2t_vit as t2t_vit
