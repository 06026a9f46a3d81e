"""Architectures of the paper's comparison tables that timm lacks: importing this registers them with timm."""
