"""GPUs and links, and the share of their nominal speed that training reaches."""
