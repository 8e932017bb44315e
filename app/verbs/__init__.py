"""One module per verb of the `regard` command, each a plain function of the same name."""
