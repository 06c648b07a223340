"""The costs of a layout: memory of the fullest GPU, and the time of a step."""
