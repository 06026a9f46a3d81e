"""Architectures of the paper's comparison tables that timm lacks: importing this registers them with timm."""

from sot.paper.peers import autoformer as autoformer
from sot.paper.peers import conformer as conformer
from sot.paper.peers import irpe as irpe
from sot.paper.peers import ps_vit as ps_vit
from sot.paper.peers import pvt as pvt
from sot.paper.peers import t2t_vit as t2t_vit
