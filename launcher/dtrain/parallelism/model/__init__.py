"""The shape of a model, from a name, a size, or a file."""
