"""What is known of the ways in which workers fail. Pure."""
