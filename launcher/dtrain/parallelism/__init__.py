"""How to split a model over a cluster: memory, time, and the choice between layouts. Pure."""
