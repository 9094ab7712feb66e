"""One module per chapter: the checks of its exercises."""
