"""What all rooms above share: errors, arrays, number formats, and quantized tensors."""
