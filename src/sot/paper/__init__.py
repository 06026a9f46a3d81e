"""The paper's tables again, and the models it compares with, which importing this registers with timm."""

from sot.paper import peers as peers
