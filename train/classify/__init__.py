"""The task `classify`: train a ViT with labels, from scratch or from any weights; linear probe and k-NN.

May import `vit`, `crossattn`, `datasets` and `train`.
"""
