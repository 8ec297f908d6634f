"""References that are too long to share a file with their kernel."""
