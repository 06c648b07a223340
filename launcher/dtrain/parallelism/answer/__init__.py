"""What a plan says: in sentences for people, as JSON for programs."""
