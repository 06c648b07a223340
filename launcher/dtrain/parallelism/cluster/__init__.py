"""GPUs and wires, and how much of their figures training reaches."""
