"""What the project is built and released with."""
