"""What a model writes beside text: thoughts and calls of functions, in the syntax of its own chat template."""
