"""Augmentation: batches of pixels in, batches of pixels out, every random choice a function of (seed, epoch, sample).

`dice` draws, `geometry` crops, flips, shifts and erases, `colour` and `blur` change colours, `rand_augment` and
`three_augment` are the recipes of those names, `mix` is mixup and CutMix, `views` puts them together for a task. May
import `vit`.
"""
