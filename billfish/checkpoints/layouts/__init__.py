"""One file for each checkpoint layout."""
