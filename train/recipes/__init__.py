"""Recipes by name: a YAML file each, whose `about` says what it reaches, how long it takes, and on what machine."""
