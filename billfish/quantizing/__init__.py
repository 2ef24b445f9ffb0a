"""Whole checkpoints are quantized: above language models, as calibration runs them.

calibrate_checkpoint  a text through a model, layer by layer: statistics of its inputs
quantize_checkpoint   a checkpoint to one format, to a mix, or to an average of bits
rotate_checkpoint     a rotation of the residual stream, folded into the weights
rotation              its orthogonal matrix
sensitivity           what a format costs a model
bit_plan              a format for each matrix
tune_checkpoint       scales that are trained to predict a text as another model does
trained_matrix        scales of one matrix, as torch trains them
torch_decoder         a decoder in torch, which has gradients
"""
