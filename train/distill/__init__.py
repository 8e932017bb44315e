"""The task `distill`: train a ViT without labels, by self-distillation (DINO).

May import `vit`, `crossattn`, `datasets` and `train`.
"""
