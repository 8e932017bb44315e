"""One file per family of checkpoints; each holds a `Layout` called `LAYOUT`."""
