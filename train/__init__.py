"""Training with Lightning: one module per task, recipes, and a loop that can be killed at any time.

`regard.train.answer` trains image question answering, `regard.train.evaluate` scores it, `regard.train.recipe` reads
recipes, `regard.train.loop.fit` trains any `RegardModule`. May import `vit`, `crossattn`, `datasets`.
"""
