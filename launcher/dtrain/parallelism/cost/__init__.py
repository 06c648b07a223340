"""What one layout costs: memory on the fullest GPU, and time for a step."""
